"""What times say: medians with their spread, and when one kernel counts as faster than another.

Free of torch, so that a tuner's parent process, which times nothing itself, starts fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Bumped whenever the way of measuring changes; times of different numbers are not compared.
PROTOCOL = 1

_RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Summary:
    """Median and spread of times: the 20th and the 80th percentile."""

    median_us: float
    p20_us: float
    p80_us: float


def summarize(times: Sequence[float]) -> Summary:
    """Median and percentiles, linear between neighbours. `times` must not be empty."""
    p20, median, p80 = np.percentile(np.asarray(times, dtype=np.float64), (20, 50, 80)).tolist()
    return Summary(median, p20, p80)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many times faster a candidate is than its baseline, with the interval that holds it with 95 % confidence."""

    ratio: float
    low: float
    high: float

    @property
    def is_faster(self) -> bool:
        return self.low > 1

    @property
    def is_slower(self) -> bool:
        return self.high < 1


def compare(baseline: Sequence[float], candidate: Sequence[float], seed: int = 0) -> Verdict:
    """Speed of `candidate` over `baseline` from paired times: the median of baseline / candidate per round.

    The interval is a percentile bootstrap over rounds: rounds, not times, are drawn again, which keeps the pairs.

    Raises:
        ValueError: the two do not have the same number of times, or none.
    """
    if len(baseline) != len(candidate) or not baseline:
        raise ValueError(f"paired times needed, got {len(baseline)} and {len(candidate)}")
    ratios = np.asarray(baseline, dtype=np.float64) / np.asarray(candidate, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), (2.5, 97.5)).tolist()
    return Verdict(float(np.median(ratios)), low, high)
