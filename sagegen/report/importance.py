"""Which parameters a time depends on, by the attempts that were timed; and how well the model orders them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sagegen.report.cases import Attempt
from sagegen.report.figure import Figure
from sagegen.space import Param, Value


@dataclass(frozen=True, slots=True)
class Group:
    """The attempts with one value of a parameter: their measured full calls in microseconds."""

    value: Value
    times: tuple[float, ...]

    @property
    def median(self) -> Figure:
        return Figure(statistics.median(self.times), "measured")

    @property
    def best(self) -> Figure:
        return Figure(min(self.times), "measured")


@dataclass(frozen=True, slots=True)
class Influence:
    """A parameter that was varied.

    Attributes:
        groups: by its values, in the space's order; those that were timed.
        share: of the variance of log time, how much lies between the groups (eta squared), 0..1. Parameters that the
            search varied together share it, so shares may add up to more than 1; it says nothing of causes.
    """

    param: Param
    groups: tuple[Group, ...]
    share: float


def main_family(attempts: Sequence[Attempt]) -> str:
    """The family with most attempts: parameters of different families do not compare."""
    counts = Counter(attempt.config.family for attempt in attempts)
    return counts.most_common(1)[0][0] if counts else ""


def find_influences(attempts: Sequence[Attempt], tokens: int) -> list[Influence]:
    """Of attempts of one family that were timed at that length, the varied parameters, most influential first."""
    if len(attempts) < 2:
        return []
    times = np.log([attempt.call[tokens].value for attempt in attempts])
    found = []
    for param in attempts[0].config.params:
        values = [getattr(attempt.config, param.name) for attempt in attempts]
        if len(set(values)) > 1:
            groups = tuple(
                Group(
                    value, tuple(a.call[tokens].value for a, own in zip(attempts, values, strict=True) if own == value)
                )
                for value in param.values
                if value in values
            )
            found.append(Influence(param, groups, _share_between(times, values)))
    return sorted(found, key=lambda influence: -influence.share)


def _share_between(times: np.ndarray, values: Sequence[Value]) -> float:
    """Eta squared: the sum of squares between groups over the whole one."""
    whole = float(((times - times.mean()) ** 2).sum())
    if whole == 0:
        return 0.0
    between = 0.0
    for value in set(values):
        own = times[[other == value for other in values]]
        between += len(own) * float(own.mean() - times.mean()) ** 2
    return between / whole


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the model's order compares with what was measured.

    Attributes:
        spearman: rank correlation; None of fewer than 3, or where all ranks are equal.
        top: how many of the model's favourites `behind` looks at.
        behind: the fastest measured time among these over the fastest of all; 1 is a hit.
        median_ratio: of predicted over measured.
    """

    spearman: float | None
    top: int
    behind: float
    median_ratio: float


def find_agreement(predicted: Mapping[str, float], measured: Mapping[str, float], top: int = 5) -> Agreement | None:
    """Compare times by config, those that both have; None where there are none."""
    names = [name for name in predicted if name in measured]
    if not names:
        return None
    guesses, times = ([source[name] for name in names] for source in (predicted, measured))
    favourites = sorted(names, key=lambda name: predicted[name])[:top]
    return Agreement(
        _rank_correlation(guesses, times),
        len(favourites),
        min(measured[name] for name in favourites) / min(times),
        statistics.median(guess / time for guess, time in zip(guesses, times, strict=True)),
    )


def _rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rho: Pearson's of the ranks, equal values at their mean rank."""
    if len(first) < 3:
        return None
    ranks = [_mean_ranks(values) for values in (first, second)]
    if any(np.ptp(own) == 0 for own in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _mean_ranks(values: Sequence[float]) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]
