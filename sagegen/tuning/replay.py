"""Recorded journals, searched again without a GPU: how many trials a sampler needs to come near the best recorded.

The space of such a search is what was recorded. Those configs were chosen by a search that was after good ones, so
draws at random do better here than in the space that a tuning run has.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sagegen.errors import ArgumentError, SagegenError
from sagegen.gpu import find_gpu
from sagegen.problem import TUNED_LENGTHS, Problem, parse_problem
from sagegen.rules import Target, default_config
from sagegen.space import Config, parse_config
from sagegen.tuning.examine import tuned_shape
from sagegen.tuning.journal import Record, attempts, read_journal
from sagegen.tuning.ranking import promising_configs
from sagegen.tuning.search import Searcher, objective
from sagegen.tuning.strategy import Strategy

#: How near to the best recorded time a config must be.
NEAR = 0.02
#: Trials after which a replayed search takes its budget for spent.
DEFAULT_TRIALS = 40
_RESAMPLES = 4000
_BATCH = 4  # configs asked before the first of them is told, as a tuning run does to keep the compiler busy


@dataclass(frozen=True, slots=True)
class Landscape:
    """What a journal recorded of one problem.

    Attributes:
        journal: name of its file.
        records: by config, in the order tried; the last attempt of each.
        tokens: lengths at which all that succeeded were measured, at least one.
    """

    journal: str
    target: Target
    records: Mapping[Config, Record]
    tokens: tuple[int, ...]

    @property
    def problem(self) -> Problem:
        return self.target.problem

    @property
    def reference(self) -> Config:
        """The default config if it succeeded, else the first that did: times are held against its."""
        home = default_config(self.target)
        return home if home in self.successes else next(iter(self.successes))

    @property
    def successes(self) -> dict[Config, Record]:
        return {config: record for config, record in self.records.items() if record.outcome == "ok"}


@dataclass(frozen=True, slots=True)
class Replayed:
    """One search of a landscape, to its end.

    Attributes:
        overall: trials until the geometric mean over the lengths was within NEAR of the best recorded.
        everywhere: trials until each length had a config within NEAR of the best recorded there: each has an entry of
            its own in the registry.
    """

    overall: int
    everywhere: int


def read_landscapes(path: Path) -> list[Landscape]:
    """One landscape per problem that a journal, packed or not, has successes of.

    Configs and problems that today's space does not know are left out.

    Raises:
        ArgumentError: there is no such file, or nothing in it succeeded.
        UnknownNameError: the journal is of a GPU that the table does not know.
    """
    if not path.exists():
        raise ArgumentError(f"there is no journal {path}", "name one, as docs/gpu-runs has them")
    recorded: dict[tuple[str, str], dict[Config, Record]] = {}
    for (problem, config), record in attempts(read_journal(path)).items():
        if (known := _parse(problem, config)) is not None:
            recorded.setdefault((record.gpu, problem), {})[known] = record
    found = []
    for (gpu, problem), records in recorded.items():
        measured = [{s.tokens for s in record.samples} for record in records.values() if record.outcome == "ok"]
        tokens = tuple(sorted(set.intersection(*measured))) if measured else ()
        if tokens:
            found.append(Landscape(path.name, Target(find_gpu(gpu), parse_problem(problem)), records, tokens))
    if not found:
        raise ArgumentError(f"nothing that journal {path} records succeeded", "name a journal of a run that measured")
    return found


def _parse(problem: str, config: str) -> Config | None:
    try:
        parse_problem(problem)
        return parse_config(config)
    except SagegenError:
        return None


def replay_searches(
    landscape: Landscape, strategy: Strategy, seeds: Iterable[int], trials: int = DEFAULT_TRIALS
) -> list[Replayed]:
    """Search a landscape once per seed.

    Args:
        trials: that the search takes for its budget; it goes on after them, as at a budget's end, until both are near.
    """
    shapes = [tuned_shape(length) for length in TUNED_LENGTHS if length.tokens in landscape.tokens]
    configs = list(landscape.records)
    starts = promising_configs(configs, landscape.target, shapes, strategy.starts)
    first = [landscape.reference, *starts]
    found = []
    for seed in seeds:
        searcher = Searcher(landscape.target, configs, first=first, strategy=strategy, seed=seed)
        found.append(_count_trials(landscape, rehearse(searcher, landscape.records.__getitem__, trials, _BATCH)))
    return found


def rehearse(
    searcher: Searcher, run: Callable[[Config], Record], trials: int, batch: int = 1
) -> Iterator[tuple[Config, Record]]:
    """Ask and tell until the space is exhausted: every config with its outcome, as it is told.

    Args:
        run: answers an attempt.
        trials: the budget; past it the search goes on as at its end.
        batch: configs asked at once.
    """
    told = 0
    while not searcher.exhausted:
        for config in searcher.ask(batch, min(1.0, told / trials)):
            record = run(config)
            searcher.tell(config, record)
            told += 1
            yield config, record


def _count_trials(landscape: Landscape, tried: Iterable[tuple[Config, Record]]) -> Replayed:
    """Trials until near; a config whose outcome another one shares is none, once either was tried."""
    successes = landscape.successes
    baseline = successes[landscape.reference]
    scores = {config: objective(record, baseline) or math.inf for config, record in successes.items()}
    goal = (1 + NEAR) * min(scores.values())
    left = {t: (1 + NEAR) * min(_call_us(r, t) for r in successes.values()) for t in landscape.tokens}
    overall = 0
    distinct: set[str] = set()
    for config, record in tried:
        distinct.add(record.shared_from or record.config)
        if config in successes:
            overall = overall or (len(distinct) if scores[config] <= goal else 0)
            left = {tokens: us for tokens, us in left.items() if _call_us(record, tokens) > us}
        if overall and not left:
            break
    return Replayed(overall, len(distinct))


def _call_us(record: Record, tokens: int) -> float:
    us = record.median_call_us(tokens)
    return math.inf if us is None else us


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some counts: the median, the quartiles, the mean, and what nine in ten do not exceed."""

    median: float
    low: float
    high: float
    mean: float
    most: float


def spread(counts: Sequence[int]) -> Spread:
    """Of at least one count."""
    ordered = sorted(counts)
    low, median, high = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    most = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]
    return Spread(median, low, high, statistics.fmean(ordered), most)


@dataclass(frozen=True, slots=True)
class Excess:
    """How many trials one sampler needs more than another, with the interval that holds it with 95 % confidence."""

    mean: float
    low: float
    high: float


def excess(counts: Sequence[float], others: Sequence[float], seed: int = 0) -> Excess:
    """Mean of `counts` less `others`, paired by problem; the interval is a percentile bootstrap over problems."""
    differences = [one - other for one, other in zip(counts, others, strict=True)]
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(differences, k=len(differences))) for _ in range(_RESAMPLES))
    return Excess(statistics.fmean(differences), means[round(0.025 * _RESAMPLES)], means[round(0.975 * _RESAMPLES) - 1])
