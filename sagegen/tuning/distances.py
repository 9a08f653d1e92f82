"""How far others are from a journal's winners: the runner-up, the default config, and the worst valid one.

A journal names no winner, but it has all that decided it: finals, whose times are paired by round, confirmations, and
screens for whom the finals left out.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sagegen.entry import Tier, is_fine
from sagegen.gpu import find_gpu
from sagegen.measuring.verdict import Verdict, compare
from sagegen.problem import Shape, parse_problem
from sagegen.rules import Target, default_config
from sagegen.tuning.journal import Phase, Record, Samples, attempts

Role = Literal["winner", "runner-up", "default", "worst"]


@dataclass(frozen=True, slots=True)
class Distance:
    """One config beside the winner of its case.

    Attributes:
        kernel_us: median of the attention kernel, in microseconds.
        tops: 1e12 operations per second by that time.
        behind: the speed of the winner's full call over its own: 1.25 is a winner that is a quarter faster.
        interval: holds `behind` with 95 % confidence; None where the two were not timed in the same rounds.
        phase: where the time is from, `final` or `screen`.
    """

    role: Role
    config: str
    kernel_us: float
    tops: float
    behind: float
    interval: tuple[float, float] | None
    phase: Phase


@dataclass(frozen=True, slots=True)
class CaseDistances:
    """The winner of one problem at one length, first, and who is how far behind.

    Attributes:
        tokens: the length that was measured.
        tier: `fine` for the fastest fine config where the fastest of all, `coarse`, is not fine; else None.
    """

    gpu: str
    problem: str
    tokens: int
    tier: Tier | None
    distances: tuple[Distance, ...]

    def as_values(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Case:
    """What a journal has of one problem at one length: times in microseconds by config.

    Attributes:
        screens: of every config that was measured itself and passed the gate.
        finals: of the last finals, paired by round; empty when there were none.
        confirmations: after these, challenger first.
        fine: configs that are fine.
    """

    default: str
    screens: Mapping[str, Samples]
    finals: Mapping[str, Samples]
    confirmations: Sequence[Mapping[str, Samples]]
    fine: frozenset[str]


def find_distances(records: Iterable[Record]) -> list[CaseDistances]:
    """The cases of a journal, in the order of its problems, by length; two where a fine winner is another.

    The winner is who the last finals and their confirmation left in front; by the screens where there were no finals,
    or where a screen of someone else was faster.
    """
    found = []
    known = list(records)
    for gpu, problem in dict.fromkeys((record.gpu, record.problem) for record in known):
        own = [record for record in known if (record.gpu, record.problem) == (gpu, problem)]
        own = [record for record in own if record.protocol == own[-1].protocol]
        for tokens, case in _cases(own):
            found += [_measure(gpu, problem, tokens, tier, case, among) for tier, among in _tiers(case)]
    return found


def _cases(records: Sequence[Record]) -> Iterator[tuple[int, _Case]]:
    """By length, what the records of one problem say."""
    screened = [r for r in attempts(records).values() if r.outcome == "ok" and not r.shared_from]
    precision = parse_problem(records[0].problem).precision
    fine = frozenset(record.config for record in screened if is_fine(record.figures, precision))
    default = _default_of(records)
    for tokens in sorted({samples.tokens for record in screened for samples in record.samples}):
        screens = {r.config: s for r in screened for s in r.samples if s.tokens == tokens}
        bouts = list(_bouts(records, tokens))
        last = max((i for i, (phase, _) in enumerate(bouts) if phase == "final"), default=None)
        finals = bouts[last][1] if last is not None else {}
        confirmations = [times for _, times in bouts[last + 1 :]] if last is not None else []
        yield tokens, _Case(default, screens, finals, confirmations, fine)


def _default_of(records: Sequence[Record]) -> str:
    """Today's default config if it was measured, else the first one that was tried: runs begin with the default."""
    target = Target(find_gpu(records[0].gpu), parse_problem(records[0].problem))
    today = default_config(target).name
    return today if any(record.config == today for record in records) else records[0].config


def _bouts(records: Sequence[Record], tokens: int) -> Iterator[tuple[Phase, dict[str, Samples]]]:
    """Finals and confirmations at a length, in order: who ran in the same rounds lies side by side in the journal."""

    def key(record: Record) -> tuple[Phase, int, int]:
        return record.phase, record.samples[0].tokens, len(record.samples[0].times_us)

    timed = (r for r in records if r.phase in ("final", "confirm") and r.outcome == "ok" and r.samples)
    for (phase, length, _), group in itertools.groupby(timed, key):
        if length != tokens:
            continue
        bout: dict[str, Samples] = {}
        for record in group:
            if record.config in bout:  # another bout of the same case, with nothing in between
                yield phase, bout
                bout = {}
            bout[record.config] = record.samples[0]
        yield phase, bout


def _tiers(case: _Case) -> Iterator[tuple[Tier | None, frozenset[str]]]:
    """Whose winners a bucket has: of all, and of the fine ones where the winner of all is not fine."""
    everyone = frozenset(case.screens) | frozenset(case.finals)
    if not everyone:
        return
    fine = everyone & case.fine
    if not fine or _winner(case, everyone) in fine:
        yield None, everyone
        return
    yield "coarse", everyone
    yield "fine", fine


def _winner(case: _Case, among: frozenset[str]) -> str:
    fastest = _fastest(case, among)
    if fastest is None:
        raise ValueError("a case has at least one config")
    for bout in case.confirmations:
        challenger, *holders = bout
        if challenger == fastest and holders and holders[0] in among:
            lost = compare(bout[holders[0]].calls, bout[challenger].calls).ratio <= 1
            return holders[0] if lost else fastest
    return fastest


def _fastest(case: _Case, among: frozenset[str]) -> str | None:
    """By the finals, unless a config that was not in them had a faster screen than their fastest."""
    screens = {config: case.screens[config].median_call_us for config in among if config in case.screens}
    finals = {config: case.finals[config].median_call_us for config in among if config in case.finals}
    by_screen, by_final = (min(times, key=lambda c: times[c], default=None) for times in (screens, finals))
    if by_screen is None or by_final is None:
        return by_final or by_screen
    is_missing = by_screen not in finals and screens[by_screen] < screens.get(by_final, 0.0)
    return by_screen if is_missing else by_final


def _measure(
    gpu: str, problem: str, tokens: int, tier: Tier | None, case: _Case, among: frozenset[str]
) -> CaseDistances:
    winner = _winner(case, among)
    roles: dict[Role, str | None] = {
        "winner": winner,
        "runner-up": _fastest(case, among - {winner}),
        "default": case.default,
        "worst": max(
            (c for c in case.screens if c in among), key=lambda c: case.screens[c].median_call_us, default=None
        ),
    }
    distances = tuple(
        _distance(role, problem, case, config, winner)
        for role, config in roles.items()
        if config is not None and (config in case.finals or config in case.screens)
    )
    return CaseDistances(gpu, problem, tokens, tier, distances)


def _of(case: _Case, config: str) -> tuple[Samples, Phase]:
    """A config's best-founded samples."""
    return (case.finals[config], "final") if config in case.finals else (case.screens[config], "screen")


def _distance(role: Role, problem: str, case: _Case, config: str, winner: str) -> Distance:
    samples, phase = _of(case, config)
    interval = None
    if config == winner:
        behind = 1.0
    elif phase == "final" and winner in case.finals:
        verdict: Verdict = compare(samples.calls, case.finals[winner].calls)
        behind, interval = verdict.ratio, (verdict.low, verdict.high)
    else:
        base = case.screens.get(winner, case.finals.get(winner, samples))
        behind = case.screens.get(config, samples).median_call_us / base.median_call_us
    shape = Shape(samples.batch, samples.heads_q, samples.heads_kv, samples.tokens, samples.tokens)
    us = statistics.median(samples.times_us)
    return Distance(role, config, us, shape.flops(parse_problem(problem)) / us / 1e6, behind, interval, phase)
