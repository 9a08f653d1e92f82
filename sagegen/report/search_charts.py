"""Charts of a search: best so far, time against each parameter, importance, failures."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from sagegen.report.cases import Attempt, Case, ProblemFacts
from sagegen.report.drawing import WIDTH, Chart, Key
from sagegen.report.figure import Figure, format_number
from sagegen.report.importance import Group, Influence
from sagegen.report.scale import Scale, linear_scale, log_scale
from sagegen.tuning.journal import Outcome

_LEFT, _RIGHT = 46, 330
_ROW = 15
_STRIP_LEFT, _STRIP_RIGHT = 90, WIDTH - 30
_MOST_POINTS = 400


def tick_names(scale: Scale) -> list[str]:
    return [f"{tick:,.6g}" for tick in scale.ticks]


def draw_progress(case: Case) -> Chart | None:
    """Every attempt's full call and the best so far, over attempts; None where nothing was timed."""
    timed = case.timed
    if not timed:
        return None
    best = list(itertools.accumulate((a.call[case.tokens].value for a in timed), min))
    failed = [a for a in case.attempts if a.record.outcome != "ok"]
    chart = Chart(
        "Best so far",
        f"Time of the full call of {len(timed)} attempts in the order of the search. The first took "
        f"{format_number(best[0])} µs, the fastest {format_number(best[-1])} µs at attempt "
        f"{next(a.number for a, b in zip(timed, best, strict=True) if b == best[-1])}.",
        236,
    )
    y = log_scale([a.call[case.tokens].value for a in timed], 196, 28)
    x = linear_scale([case.attempts[-1].number], _LEFT, _RIGHT)
    chart.y_axis(y, _LEFT, _RIGHT, "full call, µs (log)", tick_names(y))
    chart.x_axis(x, 28, 196, "attempt", tick_names(x))
    chart.points([(x.place(a.number), y.place(a.call[case.tokens].value)) for a in timed], "dot", "other")
    chart.points([(x.place(a.number), 196) for a in failed], "cross", "bad")
    steps = [(x.place(timed[0].number), y.place(best[0]))]
    for attempt, value in zip(timed[1:], best[1:], strict=True):
        if y.place(value) != steps[-1][1]:
            steps += [(x.place(attempt.number), steps[-1][1]), (x.place(attempt.number), y.place(value))]
    chart.line([*steps, (x.place(case.attempts[-1].number), steps[-1][1])], "best")
    chart.keys = [Key("line", "best", "best so far"), Key("dot", "other", "an attempt")]
    if failed:
        chart.keys.append(Key("cross", "bad", f"failed ({len(failed)}), on the axis"))
    if (winner := case.attempt_of(case.winner)) is not None:
        place = (x.place(winner.number), y.place(winner.call[case.tokens].value))
        chart.points([place], "diamond", "win", f"winner: {winner.name}")
        chart.keys.append(Key("diamond", "win", "the winner, by its screen"))
    return chart


def improvements(case: Case) -> list[tuple[Attempt, Figure]]:
    """The attempts that were faster than all before."""
    found: list[tuple[Attempt, Figure]] = []
    for attempt in case.timed:
        time = attempt.call[case.tokens]
        if not found or time.value < found[-1][1].value:
            found.append((attempt, time))
    return found


def draw_parameters(case: Case, influences: Sequence[Influence], attempts: Sequence[Attempt]) -> Chart | None:
    """Of every varied parameter its importance as a bar, then a row per value with a mark per attempt at its time."""
    if not influences:
        return None
    rows = sum(len(influence.groups) for influence in influences)
    top = 34
    bottom = top + rows * _ROW + len(influences) * (_ROW + 9)
    times = [attempt.call[case.tokens].value for attempt in attempts]
    shares = ", ".join(f"{influence.param.name} {influence.share:.0%}" for influence in influences[:5])
    chart = Chart(
        "Time against each parameter, and its importance",
        f"Full calls of {len(times)} attempts of the {attempts[0].config.family} family by the value of each of "
        f"{len(influences)} parameters. The fastest took {format_number(min(times))} µs, the slowest "
        f"{format_number(max(times))} µs. Share of the variance of log time between a parameter's values: {shares}.",
        bottom + 36,
    )
    x = log_scale(times, _STRIP_LEFT, _STRIP_RIGHT, most=4)
    chart.x_axis(x, top, bottom, "full call, µs (log)", tick_names(x))
    for tick, name in zip(x.ticks, tick_names(x), strict=True):
        chart.text(x.place(tick), top - 8, name, "tick", "middle")
    at, left_out = float(top), 0
    for influence in influences:
        _draw_share(chart, influence, at)
        at += _ROW + 5
        for group in influence.groups:
            left_out += _draw_strip(chart, group, x, at)
            at += _ROW
        at += 4
    chart.keys = [
        Key("bar", "bar", "importance"), Key("dot", "other", "an attempt"), Key("line", "median", "median of a row")
    ]  # fmt: skip
    chart.note = (
        "Importance is eta squared: the share of the variance of log time that lies between a parameter's values. What "
        "the search varied together counts for each, so shares may add up to more than 100 %. On the right: attempts "
        f"of a row.{f' {left_out} points are thinned out.' if left_out else ''}"
    )
    return chart


def _draw_share(chart: Chart, influence: Influence, at: float) -> None:
    """The head of a parameter's rows: its name, and its importance as a bar on an axis of its own from 0 to 100 %."""
    room = _STRIP_RIGHT - _STRIP_LEFT - 36
    chart.text(2, at + 14, influence.param.name, "group")
    chart.box(_STRIP_LEFT, at + 6, max(influence.share * room, 1.0), 8, "bar")
    chart.text(_STRIP_LEFT + influence.share * room + 5, at + 14, f"{influence.share:.0%}", "value")


def _draw_strip(chart: Chart, group: Group, x: Scale, at: float) -> int:
    """The attempts of a value, side by side where they would hide each other; how many were thinned out."""
    shown = group.times[:: math.ceil(len(group.times) / _MOST_POINTS)]
    spread = [(us, at + 7 + 2.5 * (place % 3 - 1)) for place, us in enumerate(sorted(shown))]
    chart.points([(x.place(us), y) for us, y in spread], "dot", "other")
    middle = x.place(group.median.value)
    chart.line([(middle, at + 1), (middle, at + 14)], "median")
    chart.text(_STRIP_LEFT - 8, at + 11, str(group.value), "tick", "end")
    chart.text(WIDTH - 2, at + 11, f"{len(group.times)}", "tick", "end")
    return len(group.times) - len(shown)


def count_outcomes(attempts: Sequence[Attempt]) -> list[tuple[Outcome, int]]:
    """How attempts ended, most frequent first."""
    return Counter(attempt.record.outcome for attempt in attempts).most_common()


def draw_outcomes(facts: ProblemFacts) -> Chart | None:
    """Bars of how attempts ended; None without attempts."""
    counts = count_outcomes(facts.attempts)
    if not counts:
        return None
    chart = Chart(
        "How attempts ended",
        "Attempts by outcome: " + ", ".join(f"{outcome} {count}" for outcome, count in counts) + ".",
        len(counts) * 22 + 50,
    )
    left, bottom = 78, len(counts) * 22 + 14
    x = linear_scale([max(count for _, count in counts)], left, WIDTH - 44)
    chart.x_axis(x, 10, bottom, "attempts", tick_names(x))
    for row, (outcome, count) in enumerate(counts):
        y = 14 + row * 22
        width = x.place(count) - left
        chart.box(left, y, max(width, 1.0), 14, "good" if outcome == "ok" else "fault")
        chart.text(left - 7, y + 11, outcome, "tick", "end")
        chart.text(left + width + 5, y + 11, str(count), "value")
    return chart
