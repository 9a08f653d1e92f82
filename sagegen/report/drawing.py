"""A chart as marks in the units of its view box. `templates/parts.html.j2` writes them, `style.css` colours them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sagegen.report.scale import Scale

#: Of every chart: drawn at about this many CSS pixels, so that text stays readable on a phone.
WIDTH = 340
_TICK = 4

Anchor = Literal["start", "middle", "end"]
Shape = Literal["dot", "square", "diamond", "cross", "triangle", "ring"]


#: Drawn from the place of a mark; a dot is a line of no length with a round end.
_OUTLINES: Mapping[str, str] = {
    "dot": "h0",
    "square": "h0",
    "ring": "m0-3.5a3.5 3.5 0 1 0 .1 0z",
    "diamond": "m0-6l5 6l-5 6l-5-6z",
    "triangle": "m0-4.5l4.5 8h-9z",
    "cross": "m-3-3l6 6m0-6l-6 6",
}


@dataclass(frozen=True, slots=True)
class Stroke:
    """One path: lines, areas, or many points of one kind."""

    d: str
    kind: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text; `y` is its base line."""

    x: float
    y: float
    text: str
    kind: str = ""
    anchor: Anchor = "start"


@dataclass(frozen=True, slots=True)
class Key:
    """A line of the legend below a chart: a mark's shape and kind, and what it means."""

    shape: Shape | Literal["line", "bar"]
    kind: str
    text: str

    @property
    def css(self) -> str:
        return self.kind if self.shape in ("line", "bar") else f"{self.shape} {self.kind}"

    @property
    def d(self) -> str:
        """Its mark, in a box of 18 by 12."""
        return {"line": "M1 6h16", "bar": "M1 2h16v8h-16z"}.get(self.shape) or f"M9 6{_OUTLINES[self.shape]}"


@dataclass(slots=True)
class Chart:
    """A chart being drawn.

    Attributes:
        title: its heading.
        summary: what it shows, in words: what a screen reader says of the picture.
        note: a line below it.
    """

    title: str
    summary: str
    height: float
    note: str = ""
    strokes: list[Stroke] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)

    @property
    def width(self) -> int:
        return WIDTH

    def line(self, points: Iterable[tuple[float, float]], kind: str, title: str = "") -> None:
        self.strokes.append(Stroke("M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in points), kind, title))

    def box(self, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> None:
        d = f"M{_short(x)} {_short(y)}h{_short(width)}v{_short(height)}h{_short(-width)}z"
        self.strokes.append(Stroke(d, kind, title))

    def points(self, places: Sequence[tuple[float, float]], shape: Shape, kind: str, title: str = "") -> None:
        """Many marks as one path, each place once: marks that would lie on each other within half a unit are one."""
        seen = dict.fromkeys((round(2 * x) / 2, round(2 * y) / 2) for x, y in places)
        if seen:
            d = "".join(f"M{_short(x)} {_short(y)}{_OUTLINES[shape]}" for x, y in seen)
            self.strokes.append(Stroke(d, f"{shape} {kind}", title))

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: Anchor = "start") -> None:
        self.labels.append(Label(round(x, 1), round(y, 1), text, kind, anchor))

    def x_axis(self, scale: Scale, top: float, bottom: float, name: str, names: Sequence[str]) -> None:
        """Grid lines, ticks and name of a horizontal axis that lies at `bottom`."""
        for tick, text in zip(scale.ticks, names, strict=True):
            x = scale.place(tick)
            self.line([(x, top), (x, bottom + _TICK)], "grid")
            self.text(x, bottom + 16, text, "tick", "middle")
        self.text((scale.start + scale.end) / 2, bottom + 31, name, "axis", "middle")

    def y_axis(self, scale: Scale, left: float, right: float, name: str, names: Sequence[str]) -> None:
        """Grid lines, ticks and name of a vertical axis that lies at `left`; the name stands above it."""
        for tick, text in zip(scale.ticks, names, strict=True):
            y = scale.place(tick)
            self.line([(left - _TICK, y), (right, y)], "grid")
            self.text(left - 7, y + 4, text, "tick", "end")
        self.text(2, min(scale.start, scale.end) - 10, name, "axis")


def _short(value: float) -> str:
    """One decimal, without what says nothing."""
    return f"{value:.1f}".removesuffix(".0")
