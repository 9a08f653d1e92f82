"""From values to places on an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LOG_STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis: values from `low` to `high` lie between the places `start` and `end`.

    Attributes:
        is_log: equal ratios take equal room; `low` and `high` are then positive.
        ticks: values that are labelled.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Where a value lies, to one decimal; beyond the ends it lies on them."""
        low, high, at = (math.log(v) if self.is_log else v for v in (self.low, self.high, max(value, 1e-300)))
        share = min(max((at - low) / (high - low), 0.0), 1.0)
        return round(self.start + share * (self.end - self.start), 1)


def linear_scale(values: Sequence[float], start: float, end: float, ticks: int = 5, *, from_zero: bool = True) -> Scale:
    """An axis that holds all values, with round ends; from 0 unless told otherwise."""
    low, high = (0.0 if from_zero else min(values)), max(values)
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / ticks
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next(s for s in _STEPS if s * size >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Scale(first * step, last * step, start, end, False, tuple(i * step for i in range(first, last + 1)))


def log_scale(values: Sequence[float], start: float, end: float, most: int = 5, margin: float = 0.04) -> Scale:
    """A logarithmic axis that holds all values, which are positive, with room around them and at most `most` ticks."""
    room = max(math.log(max(values) / min(values)), 0.05) * margin
    low, high = min(values) * math.exp(-room), max(values) * math.exp(room)
    return Scale(low, high, start, end, True, _log_ticks(low, high, most))


def _log_ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Round values between: powers of ten where there are many, else parts of decades, else equal steps."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in (_LOG_STEPS, (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        found = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
        if 3 <= len(found) <= most:
            return tuple(found)
    powers = [10.0**d for d in decades if low <= 10.0**d <= high]
    if len(powers) > most:
        return tuple(powers[:: math.ceil(len(powers) / most)])
    inner = linear_scale((low, high), 0, 1, most, from_zero=False).ticks
    return tuple(tick for tick in inner if low <= tick <= high)
