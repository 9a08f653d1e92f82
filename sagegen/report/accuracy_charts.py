"""Charts of accuracy: error against time with the front, and the winners' errors by kind of inputs beside the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sagegen.entry import ACCURACY_KINDS, FINE_COSINES
from sagegen.measuring.floors import find_floor, rounding_of
from sagegen.report.cases import Attempt, Case, ProblemFacts
from sagegen.report.drawing import WIDTH, Chart, Key, Shape
from sagegen.report.scale import Scale, log_scale
from sagegen.report.search_charts import tick_names
from sagegen.report.tables import gate_floor

_LEFT, _RIGHT = 50, 330
_TOP, _BOTTOM = 28, 196
#: Cosines are compared at four decimals (`entry.reaches`).
_HALF_DECIMAL = 5e-5
#: Errors below are drawn there: rounding of the output alone is larger.
_LEAST = 1e-7
_ROW = 17
_NAMES_END = 104

#: By whether an attempt is fine: its mark.
_TIERS: Mapping[bool, tuple[Shape, str, str]] = {
    True: ("dot", "other", "fine"),
    False: ("triangle", "coarse", "coarse"),
}
#: By where figures were taken: their mark.
_PLACES: Mapping[str, tuple[Shape, str, str]] = {
    "the GPU": ("dot", "other", "winner of a length"),
    "emulator": ("ring", "emulated", "winner, in the emulator on small inputs"),
}


def pareto_front(attempts: Sequence[Attempt], tokens: int) -> list[Attempt]:
    """Attempts that no other beats in both time and accuracy, fastest first."""
    front: list[Attempt] = []
    known = [attempt for attempt in attempts if attempt.error is not None]
    for attempt in sorted(known, key=lambda a: (a.call[tokens].value, a.error)):
        if not front or (attempt.error or 0) < (front[-1].error or 0):
            front.append(attempt)
    return front


def draw_pareto(case: Case) -> Chart | None:
    """Error on normal inputs against time, with the front and the floors of the gate; None where neither is known."""
    known = [attempt for attempt in case.timed if attempt.error is not None]
    if not known:
        return None
    precision, front = case.problem.precision, pareto_front(known, case.tokens)
    floors = {
        "gate": find_floor("normal", rounding_of(known[0].config, precision)).cosine,
        "fine": FINE_COSINES[precision]["normal"],
    }
    chart = Chart(
        "Time and accuracy",
        f"1 - cosine against FP64 on normal inputs over the time of the full call, {len(known)} attempts. "
        f"{len(front)} are on the front: "
        + ", ".join(f"{a.call[case.tokens].text('µs')} with {a.error:.2g}" for a in front[:4])
        + f". The gate asks for a cosine of {floors['gate']}, the fine tier for {floors['fine']}.",
        236,
        "Cosines count at four decimals. Fine also asks for relative L1 and channel offsets, so a triangle may lie "
        "below the fine line.",
    )
    limits = {name: 1 - floor + _HALF_DECIMAL for name, floor in floors.items()}
    x = log_scale([a.call[case.tokens].value for a in known], _LEFT, _RIGHT)
    y = log_scale([*(a.error or _LEAST for a in known), *limits.values()], _BOTTOM, _TOP, margin=0.08)
    chart.y_axis(y, _LEFT, _RIGHT, "1 - cosine (log), lower is better", [_power(tick) for tick in y.ticks])
    chart.x_axis(x, _TOP, _BOTTOM, "full call, µs (log)", tick_names(x))
    for name, limit in limits.items():
        at = y.place(limit)
        chart.line([(_LEFT, at), (_RIGHT, at)], "floor")
        chart.text(_RIGHT, at - 4 if name == "gate" else at + 12, f"{name}: cosine {floors[name]}", "floor-name", "end")
    _mark_attempts(chart, case, known, front, x, y)
    return chart


def _mark_attempts(
    chart: Chart, case: Case, known: Sequence[Attempt], front: Sequence[Attempt], x: Scale, y: Scale
) -> None:
    def spot(attempt: Attempt) -> tuple[float, float]:
        return x.place(attempt.call[case.tokens].value), y.place(attempt.error or _LEAST)

    for is_fine, (shape, kind, text) in _TIERS.items():
        own = [attempt for attempt in known if attempt.is_fine == is_fine]
        chart.points([spot(attempt) for attempt in own], shape, kind)
        if own:
            chart.keys.append(Key(shape, kind, text))
    chart.line(_stairs([spot(attempt) for attempt in front]), "front")
    chart.keys.append(Key("line", "front", "front"))
    winner = case.attempt_of(case.winner)
    if winner is not None and winner.error is not None:
        chart.points([spot(winner)], "diamond", "win", f"winner: {winner.name}")
        chart.keys.append(Key("diamond", "win", "winner"))


def _stairs(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The front of `places`, which go right and down: what is faster and less accurate reaches to the next."""
    found = [places[0]]
    for x, y in places[1:]:
        found += [(x, found[-1][1]), (x, y)]
    return found


def _power(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")


def draw_accuracy(facts: ProblemFacts) -> Chart | None:
    """1 - cosine of every length's winner by kind of inputs, with the gate's floors; None where nothing is known."""
    found = [(figures, where) for case in facts.cases for figures, where in [case.winner_accuracy] if figures]
    kinds = [kind for kind in ACCURACY_KINDS if any(kind in figures for figures, _ in found)]
    if not kinds:
        return None
    floors = {kind: 1 - gate_floor(facts, kind) + _HALF_DECIMAL for kind in kinds}
    errors = [
        (row, where, max(1 - figures[kind]["cosine"], _LEAST))
        for row, kind in enumerate(kinds)
        for figures, where in found
        if kind in figures
    ]
    worst = {kind: max(error for row, _, error in errors if kinds[row] == kind) for kind in kinds}
    chart = Chart(
        "Accuracy beside the gate",
        "1 - cosine of the winners against FP64, worst of all lengths: "
        + ", ".join(f"{kind} {error:.1e} where {floors[kind]:.1e} is allowed" for kind, error in worst.items())
        + ".",
        len(kinds) * _ROW + 50,
    )
    x = log_scale([*floors.values(), *(error for _, _, error in errors)], _NAMES_END, WIDTH - 12)
    chart.x_axis(x, 8, len(kinds) * _ROW + 14, "1 - cosine (log), less is better", [_power(tick) for tick in x.ticks])
    for row, kind in enumerate(kinds):
        chart.text(_NAMES_END - 7, 22 + row * _ROW, kind, "tick", "end")
        at = x.place(floors[kind])
        chart.line([(at, 12 + row * _ROW), (at, 25 + row * _ROW)], "tickmark")
    for where, (shape, mark, text) in _PLACES.items():
        places = [(x.place(error), 18.5 + row * _ROW) for row, own, error in errors if own == where]
        chart.points(places, shape, mark)
        if places:
            chart.keys.append(Key(shape, mark, text))
    chart.keys.append(Key("line", "tickmark", "the gate allows up to here"))
    return chart
