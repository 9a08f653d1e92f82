"""How well the model predicts what a journal has measured: by problem, family and length.

A config counts by what it is, not by the text that it rendered to when it was measured: templates have changed since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sagegen.errors import UnknownNameError
from sagegen.gpu import Gpu
from sagegen.problem import Problem, Shape, parse_problem
from sagegen.space import Config, parse_config
from sagegen.tuning.journal import Record, Samples, attempts
from sagegen.tuning.model import Measured, predict

#: What the model is held to: Spearman's rank correlation over a case's configs, and what the best of its five
#: favourites may lose against the best measured one.
LEAST_SPEARMAN = 0.8
MOST_LOSS = 0.05
FAVOURITES = 5
#: A case of fewer configs says little: it is shown and not judged.
LEAST_CONFIGS = 20


@dataclass(frozen=True, slots=True)
class Pair:
    """One config at one length: median times that were measured and times that the model expects, in microseconds."""

    problem: Problem
    config: Config
    tokens: int
    measured_kernel_us: float
    measured_call_us: float
    predicted_kernel_us: float
    predicted_call_us: float


@dataclass(frozen=True, slots=True)
class Score:
    """How the predicted times of a case agree with the measured ones.

    Attributes:
        spearman: rank correlation; equal times share their mean rank. 0 where all predictions are equal.
        loss: of the best measured among the model's favourites, relative to the best measured of all.
        ratio: predicted over measured, median.
        error: |predicted - measured| / measured, which nine of ten configs are not above.
    """

    spearman: float
    loss: float
    ratio: float
    error: float

    @property
    def meets(self) -> bool:
        """Whether ranks and favourites are as good as the model is held to."""
        return self.spearman >= LEAST_SPEARMAN and self.loss <= MOST_LOSS


@dataclass(frozen=True, slots=True)
class Case:
    """One problem, family and length of a journal; `kernel` is the attention kernel alone, `call` the full call."""

    problem: str
    family: str
    tokens: int
    configs: int
    kernel: Score
    call: Score

    @property
    def is_judged(self) -> bool:
        return self.configs >= LEAST_CONFIGS

    def as_values(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "is_judged": self.is_judged}


@dataclass(frozen=True, slots=True)
class Validation:
    """A journal beside the model.

    Attributes:
        pairs: every config that was measured, at each of its lengths.
        cases: these by problem, family and length.
        unreadable: names of measured configs that this sagegen cannot read.
    """

    pairs: tuple[Pair, ...]
    cases: tuple[Case, ...]
    unreadable: tuple[str, ...]


def validate(records: Iterable[Record], gpu: Gpu) -> Validation:
    """The model beside what a journal's screens on `gpu` measured; finals are of few configs and left out.

    Args:
        gpu: with the rates of a probe, the model uses those. Records of another GPU are left out.
    """
    pairs: list[Pair] = []
    unreadable: list[str] = []
    for record in attempts(record for record in records if record.gpu == gpu.name).values():
        if record.outcome != "ok" or record.shared_from or not record.samples:
            continue
        try:
            problem, config = parse_problem(record.problem), parse_config(record.config)
        except UnknownNameError:
            unreadable.append(record.config)
            continue
        compiled = _compiled(record.resources)
        pairs += [_pair(problem, config, samples, gpu, compiled) for samples in record.samples]
    return Validation(tuple(pairs), _cases(pairs), tuple(unreadable))


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Rank correlation of two rows of figures, at least two; equal ones share their mean rank."""
    ranks = [_ranks(np.asarray(values, dtype=np.float64)) for values in (x, y)]
    if any(np.ptp(row) == 0 for row in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def score(predicted: Sequence[float], measured: Sequence[float]) -> Score:
    """The agreement of one case's times, in the same order; at least one."""
    expected, found = np.asarray(predicted, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    favourites = np.argsort(expected, kind="stable")[:FAVOURITES]
    errors = np.abs(expected / found - 1)
    return Score(
        spearman=spearman(predicted, measured) if len(predicted) > 1 else 0.0,
        loss=float(found[favourites].min() / found.min() - 1),
        ratio=float(np.median(expected / found)),
        error=float(np.percentile(errors, 90)),
    )


def call_error(pairs: Iterable[Pair]) -> float:
    """The relative error of full calls that nine of ten pairs are not above."""
    return float(np.percentile([abs(p.predicted_call_us / p.measured_call_us - 1) for p in pairs], 90))


def _ranks(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    mean_ranks: np.ndarray[Any, np.dtype[np.float64]] = np.cumsum(sizes) - (sizes - 1) / 2
    return mean_ranks[group]


def _compiled(resources: Mapping[str, Mapping[str, int]]) -> Measured | None:
    used = resources.get("attention")
    if used is None:
        return None
    return Measured(used["registers"], used["spill_store_bytes"] + used["spill_load_bytes"])


def _pair(problem: Problem, config: Config, samples: Samples, gpu: Gpu, compiled: Measured | None) -> Pair:
    shape = Shape(samples.batch, samples.heads_q, samples.heads_kv, samples.tokens, samples.tokens)
    expected = predict(config, problem, shape, gpu, compiled)
    call_us = expected.call_us if samples.call_us else expected.kernel_us
    return Pair(problem, config, samples.tokens, samples.median_us, samples.median_call_us, expected.kernel_us, call_us)


def _cases(pairs: Iterable[Pair]) -> tuple[Case, ...]:
    groups: dict[tuple[str, str, int], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.problem.name, pair.config.family, pair.tokens), []).append(pair)
    return tuple(
        Case(
            problem,
            family,
            tokens,
            len(group),
            score([p.predicted_kernel_us for p in group], [p.measured_kernel_us for p in group]),
            score([p.predicted_call_us for p in group], [p.measured_call_us for p in group]),
        )
        for (problem, family, tokens), group in sorted(groups.items())
    )
