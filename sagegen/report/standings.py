"""Who is how fast at a length: the winners, those behind them, what is registered, torch SDPA and the model's guess."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sagegen.report.cases import Case, Tuned
from sagegen.report.figure import Figure
from sagegen.tuning.distances import Role

_WORDS: Mapping[Role, str] = {
    "winner": "winner",
    "runner-up": "runner-up",
    "default": "default config",
    "worst": "slowest valid",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a length's table.

    Attributes:
        who: in words.
        kind: how it is drawn.
        config: "" of a peer.
        kernel, call: attention kernel, and full call with the quantizers, in microseconds.
        behind: how many times faster the winner's full call is, with its 95 % interval where rounds were shared.
        basis: where the times are from.
    """

    who: str
    kind: str
    config: str
    kernel: Figure | None
    call: Figure | None
    behind: float | None
    interval: tuple[float, float] | None
    basis: str


def make_rows(case: Case) -> list[Row]:
    """The rows of a length: measured ones from fast to slow, then what is only predicted."""
    rows = [*_journal_rows(case), *_registry_rows(case)]
    if case.sdpa is not None:
        ratio = case.speed_vs_sdpa
        rows.append(
            Row("torch SDPA, fastest backend", "peer", "", None, case.sdpa, ratio, None, "finals of the registry")
        )
    rows.sort(key=lambda row: (row.call is None or row.call.is_predicted, row.call.value if row.call else 0.0))
    if case.guess is not None:
        by_model = "predicted by the model"
        rows.append(Row("winner, predicted", "win", case.winner or "", None, case.guess, None, None, by_model))
    return rows


def _journal_rows(case: Case) -> Iterator[Row]:
    seen = set()
    wins = {standing.distances[0].config: standing for standing in case.standings}
    for standing in case.standings:
        for distance in standing.distances:
            if distance.config in seen:
                continue
            seen.add(distance.config)
            # who is second of all may be the first of the fine ones
            role = "winner" if distance.config in wins else distance.role
            tier = wins.get(distance.config, standing).tier if role != "default" else None
            yield Row(
                _WORDS[role] + (f", {tier}" if tier else ""),
                {"winner": "win", "default": "default"}.get(role, "also"),
                distance.config,
                Figure(distance.kernel_us, "measured"),
                case.call_of(distance),
                distance.behind if standing is case.standings[0] else None,
                distance.interval if standing is case.standings[0] else None,
                {"final": "finals", "screen": "screen"}.get(distance.phase, distance.phase),
            )


def _registry_rows(case: Case) -> Iterator[Row]:
    """Entries whose config the journal does not rank; all of them without a journal."""
    ranked = {distance.config for standing in case.standings for distance in standing.distances}
    for tuned in case.tuned:
        if tuned.entry.config is not None and tuned.entry.config not in ranked:
            yield _registry_row(case, tuned)


def _registry_row(case: Case, tuned: Tuned) -> Row:
    entry = tuned.entry
    tier = f", {entry.tier}" if entry.tier else ""
    who = f"registered{tier}" if case.standings else f"winner{tier}"
    basis = f"{entry.provenance.kind}, {entry.provenance.date}"
    return Row(
        who, "also" if case.standings else "win", entry.config or "", tuned.kernel, tuned.call, None, None, basis
    )
