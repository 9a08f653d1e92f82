"""A number of the page together with how it is known, so that a prediction cannot lose its mark on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

#: How a number is known: timed on the GPU that is named, or computed by the model of it.
Origin = Literal["measured", "predicted"]

#: Microseconds that a kernel can have taken: a nanosecond to eleven days. Others are of files that no run wrote.
_LEAST_US, _MOST_US = 1e-3, 1e12


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and its origin. Templates and charts take no bare times: how one is shown follows its origin."""

    value: float
    origin: Origin

    @property
    def is_predicted(self) -> bool:
        return self.origin == "predicted"

    @property
    def mark(self) -> str:
        """What stands before a prediction wherever it is printed."""
        return "~" if self.is_predicted else ""

    def text(self, unit: str = "") -> str:
        """Three to four digits with the mark, e.g. `~1,062 µs`."""
        return f"{self.mark}{format_number(self.value)}{unit and ' ' + unit}"

    def scaled(self, factor: float) -> Figure:
        return Figure(self.value * factor, self.origin)

    def rate(self, operations: float) -> Figure:
        """1e12 operations a second, if it is a time in microseconds in which so many are done."""
        return Figure(operations / self.value / 1e6, self.origin)


def is_time(us: float) -> bool:
    """Whether a kernel can have taken so many microseconds; axes cannot hold all that a float can be."""
    return _LEAST_US <= us <= _MOST_US


def format_number(value: float) -> str:
    """Four digits or all before the point, thousands with commas: 0.5123, 51.23, 1,062."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def format_tokens(tokens: int) -> str:
    """A length as people say it: `16K`, `1,000`."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
