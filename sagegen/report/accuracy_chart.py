"""The chart of the winners' accuracy beside what the gate asks, by kind of inputs."""

from __future__ import annotations

from sagegen.entry import ACCURACY_KINDS
from sagegen.report.cases import ProblemFacts
from sagegen.report.drawing import WIDTH, Chart, Key
from sagegen.report.scale import log_scale
from sagegen.report.tables import gate_floor

_ROW = 17
_LEFT = 104
#: Errors below are drawn there: rounding of the output alone is larger.
_LEAST = 1e-7
#: Cosines are compared at four decimals (`entry.reaches`).
_HALF_DECIMAL = 5e-5


def draw_accuracy(facts: ProblemFacts) -> Chart | None:
    """1 - cosine of every length's winner by kind of inputs, with the gate's floors; None where nothing is known."""
    found = [case.winner_accuracy for case in facts.cases]
    found = [(figures, where) for figures, where in found if figures]
    kinds = [kind for kind in ACCURACY_KINDS if any(kind in figures for figures, _ in found)]
    if not kinds:
        return None
    floors = {kind: 1 - gate_floor(facts, kind) + _HALF_DECIMAL for kind in kinds}
    worst = {kind: min(figures[kind]["cosine"] for figures, _ in found if kind in figures) for kind in kinds}
    chart = Chart(
        "Accuracy beside the gate",
        "1 - cosine of the winners against FP64, worst of all lengths: "
        + ", ".join(f"{kind} {1 - cosine:.1e} where {floors[kind]:.1e} is allowed" for kind, cosine in worst.items())
        + ".",
        len(kinds) * _ROW + 50,
    )
    bottom = len(kinds) * _ROW + 14
    errors = {(kind, where): [max(1 - figures[kind]["cosine"], _LEAST) for figures, own in found
                              if own == where and kind in figures]
              for kind in kinds for _, where in found}  # fmt: skip
    x = log_scale([*floors.values(), *(error for own in errors.values() for error in own)], _LEFT, WIDTH - 12)
    chart.x_axis(x, 8, bottom, "1 - cosine (log), less is better", [f"{t:.0e}".replace("e-0", "e-") for t in x.ticks])
    for row, kind in enumerate(kinds):
        y = 10 + row * _ROW
        chart.text(_LEFT - 7, y + 12, kind, "tick", "end")
        at = x.place(floors[kind])
        chart.line([(at, y + 2), (at, y + 15)], "tickmark")
    for where, shape, kind_of_mark in (("the GPU", "dot", "other"), ("emulator", "ring", "emulated")):
        places = [
            (x.place(error), 10 + kinds.index(kind) * _ROW + 8.5)
            for (kind, own), found_errors in errors.items()
            if own == where
            for error in found_errors
        ]
        chart.points(places, shape, kind_of_mark)  # type: ignore[arg-type]
        if places:
            text = "winner of a length" if where == "the GPU" else "winner, in the emulator on small inputs"
            chart.keys.append(Key(shape, kind_of_mark, text))  # type: ignore[arg-type]
    chart.keys.append(Key("line", "tickmark", "the gate allows up to here"))
    return chart
