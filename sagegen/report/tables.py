"""The numbers behind the charts, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sagegen.entry import ACCURACY_KINDS
from sagegen.measuring.floors import find_floor, rounding_of
from sagegen.report.cases import Attempt, Case, ProblemFacts
from sagegen.report.figure import Figure, format_number, format_tokens
from sagegen.report.importance import Influence
from sagegen.report.limits import find_roofs
from sagegen.report.races import Race
from sagegen.report.search_charts import improvements
from sagegen.report.standings import Row
from sagegen.space import parse_config

#: Rows of attempts on a page; what is beyond is counted.
MOST_ROWS = 1500

#: What a cell holds: text, a number with its origin, a count, nothing.
Cell = str | Figure | int | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells below headings.

    Attributes:
        caption: what it is.
        numeric: index of the first column of numbers, which are aligned to the right.
        note: a line below it.
    """

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: int = 1
    note: str = ""


def ratio_text(ratio: float | None, interval: tuple[float, float] | None = None) -> str:
    """`1.25×`, with the interval where there is one."""
    if ratio is None:
        return "–"
    return f"{ratio:.3f}×" + (f" ({interval[0]:.3f}–{interval[1]:.3f})" if interval else "")


def standings_table(case: Case, rows: Sequence[Row]) -> Table:
    """Who is how fast."""
    cells = tuple(
        (
            row.who,
            row.kernel,
            row.call,
            row.kernel.rate(case.operations) if row.kernel else None,
            row.call.rate(case.operations) if row.call else None,
            ratio_text(row.behind, row.interval),
            row.basis,
            row.config or "–",
        )
        for row in rows
    )
    headings = ("who", "kernel µs", "call µs", "kernel TOPS", "call TOPS", "winner is faster by", "from", "config")
    return Table(f"Winner beside the others at {format_tokens(case.tokens)}", headings, cells)


def progress_table(case: Case) -> Table:
    rows = tuple((attempt.number, time, attempt.name) for attempt, time in improvements(case))
    return Table("Attempts that were faster than all before", ("attempt", "call µs", "config"), rows, 0)


def parameters_table(influences: Sequence[Influence]) -> Table:
    """Of every varied parameter its importance and the times of its values."""
    rows = tuple(
        (i.param.name, str(group.value), f"{i.share:.1%}", len(group.times), group.best, group.median, i.param.doc)
        for i in influences
        for group in i.groups
    )
    headings = ("parameter", "value", "importance", "attempts", "best µs", "median µs", "what the parameter does")
    return Table("Full calls by parameter", headings, rows, 2)


def lengths_table(facts: ProblemFacts) -> Table:
    rows = tuple(
        (
            format_tokens(case.tokens),
            case.best_kernel and case.best_kernel.rate(case.operations),
            case.best_call and case.best_call.rate(case.operations),
            ratio_text(case.speed_vs_default),
            ratio_text(case.speed_vs_sdpa),
        )
        for case in facts.cases
    )
    return Table("Winners by length", ("keys", "kernel TOPS", "call TOPS", "over default", "over SDPA"), rows)


def accuracy_table(facts: ProblemFacts) -> Table:
    """Cosines of the winners by kind of inputs, with the gate's floors."""
    found = [(case, *case.winner_accuracy) for case in facts.cases]
    found = [(case, figures, where) for case, figures, where in found if figures]
    kinds = [kind for kind in ACCURACY_KINDS if any(kind in figures for _, figures, _ in found)]
    rows = tuple(
        (kind, f"{gate_floor(facts, kind)}", *(_cosine(figures.get(kind)) for _, figures, _ in found)) for kind in kinds
    )
    headings = ("inputs", "floor", *(f"{format_tokens(case.tokens)}, {where}" for case, _, where in found), "")
    return Table("Cosines of the winners against FP64", headings, tuple((*row, "") for row in rows))


def gate_floor(facts: ProblemFacts, kind: str) -> float:
    """The cosine that the accuracy gate asks of the winner at the longest length."""
    winner = next((case.winner for case in reversed(facts.cases) if case.winner), None)
    rounding = rounding_of(parse_config(winner), facts.problem.precision) if winner else facts.problem.precision
    return find_floor(kind, rounding).cosine


def _cosine(figures: Mapping[str, float] | None) -> str | None:
    return f"{figures['cosine']:.5f}" if figures else None


def limits_table(facts: ProblemFacts) -> Table:
    """The limits of the winner at the longest length."""
    winner = facts.cases[-1].winner if facts.cases else None
    roofs = find_roofs(facts.gpu, facts.problem, parse_config(winner)) if winner else []
    rows = tuple(
        (roof.name, f"{format_number(roof.tops)} {'TB/s' if roof.is_slope else 'TOPS'}", f"by the {roof.basis}")
        for roof in roofs
    )
    return Table("Limits of the GPU for the winner's kernel", ("what", "limit", "from"), rows, 1)


def race_table(race: Race) -> Table:
    rows = tuple((racer.who, racer.rate, racer.config or "–") for racer in race.racers)
    return Table(f"Race: {race.work}", ("who", "TOPS, sustained", "config"), rows)


def failures_table(facts: ProblemFacts) -> Table:
    rows = tuple((f.outcome, ", ".join(f.phases), f.count, f.reason, f.config) for f in facts.failures)
    note = "Reasons that differ in numbers alone are one row, with the first of them." if rows else ""
    return Table("Failures", ("outcome", "phase", "count", "reason", "config, the first"), rows, 5, note)


def attempts_table(facts: ProblemFacts) -> Table:
    """Every attempt: what was measured and what the model says, side by side."""
    lengths = [case.tokens for case in facts.cases]
    timed = [column for n in lengths for column in (f"{format_tokens(n)} µs", f"~{format_tokens(n)} µs, predicted")]
    headings = ("attempt", "outcome", "registers", "spilled bytes", "cosine", "relative L1", *timed, "config")
    shown = facts.attempts[:MOST_ROWS]
    rest = len(facts.attempts) - len(shown)
    return Table(
        "All attempts: full calls in µs, measured and as the model predicts them",
        headings,
        tuple(_attempt_row(attempt, lengths) for attempt in shown),
        0,
        f"{rest} further attempts are left out of this table, not of the charts." if rest else "",
    )


def _attempt_row(attempt: Attempt, lengths: Sequence[int]) -> tuple[Cell, ...]:
    used = attempt.record.resources.get("attention", {})
    normal = attempt.record.figures.get("normal", {})
    times = [cell for tokens in lengths for cell in (attempt.call.get(tokens), attempt.predicted.get(tokens))]
    return (
        attempt.number,
        attempt.record.outcome,
        used.get("registers"),
        used.get("spill_store_bytes", 0) + used.get("spill_load_bytes", 0) if used else None,
        f"{normal['cosine']:.5f}" if "cosine" in normal else None,
        f"{normal['relative_l1']:.4f}" if "relative_l1" in normal else None,
        *times,
        attempt.name,
    )


def entries_table(facts: ProblemFacts) -> Table:
    """Registry entries of the problem; their accuracy too, which may be the emulator's."""
    headings = (
        "keys", "answer", "kernel µs", "call µs", "kernel over default", "call over SDPA", "cosine", "cosine from",
        "provenance", "config",
    )  # fmt: skip
    rows = tuple(
        (
            tuned.entry.lengths.name.removeprefix("kv"),
            tuned.entry.answer + (f", {tuned.entry.tier}" if tuned.entry.tier else ""),
            tuned.kernel,
            tuned.call,
            ratio_text(tuned.entry.figures.speed_vs_default),
            ratio_text(tuned.entry.figures.speed_vs_sdpa),
            "–" if tuned.entry.min_cosine is None else f"{tuned.entry.min_cosine:.5f}",
            tuned.entry.provenance.accuracy_from or ("the GPU" if tuned.entry.measured else "–"),
            f"{tuned.entry.provenance.kind}, {tuned.entry.provenance.date}",
            tuned.entry.config or "–",
        )
        for tuned in facts.tuned
    )
    return Table("Registry entries", headings, rows, 2)
