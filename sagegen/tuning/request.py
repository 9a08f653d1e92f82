"""What a tuning run is asked, what it works with, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sagegen.entry import Entry
from sagegen.gpu import DetectedGpu, Gpu
from sagegen.problem import TUNED_LENGTHS, Problem, TunedLength
from sagegen.rules import Target, all_searched_configs, default_config
from sagegen.space import Config
from sagegen.store import Store
from sagegen.toolkit import Toolkit
from sagegen.tuning.effort import EFFORTS, Effort
from sagegen.tuning.examine import Runner, tuned_shape
from sagegen.tuning.journal import Journal, Record
from sagegen.tuning.plant import Plant
from sagegen.tuning.ranking import promising_configs
from sagegen.tuning.search import Searcher
from sagegen.tuning.strategy import Strategy

if TYPE_CHECKING:
    from optuna.storages import BaseStorage


@dataclass(frozen=True, slots=True)
class Request:
    """What to tune.

    Attributes:
        budget_s: wall time of the whole run; None: until `trials` are done or the space is exhausted.
        trials: configs tried per problem, those of earlier runs included; None: as many as the budget allows.
        incumbents: by problem and length, the config to beat; the default config where there is none.
        fine_incumbents: likewise, for the fine tier where that is another.
        starts: by problem, what won elsewhere and is tried before the model's favourites, see `starts`.
        plants: faults to plant, see `plant`.
        lengths: measured at each; a bucket of the registry goes with each.
        build_timeout_s: for each compiler, less where the budget is short.
        effort: launches of a screen, finalists and rounds of finals.
        patience: attempts at a problem without a gain after which its search ends; None: it goes on.
        force: measure although others use the GPU.
    """

    gpu: Gpu
    problems: tuple[Problem, ...]
    budget_s: float | None = 600.0
    trials: int | None = None
    strategy: Strategy = field(default_factory=Strategy)
    seed: int = 0
    incumbents: Mapping[tuple[Problem, TunedLength], Config] = field(default_factory=dict)
    fine_incumbents: Mapping[tuple[Problem, TunedLength], Config] = field(default_factory=dict)
    starts: Mapping[Problem, Sequence[Config]] = field(default_factory=dict)
    plants: tuple[Plant, ...] = ()
    lengths: tuple[TunedLength, ...] = TUNED_LENGTHS
    build_timeout_s: float = 60.0
    effort: Effort = EFFORTS["full"]
    patience: int | None = None
    force: bool = False

    def incumbents_of(self, problem: Problem) -> list[Config]:
        """All configs that are to beat at the run's lengths, of both tiers."""
        both = (*self.incumbents.items(), *self.fine_incumbents.items())
        cases = [(problem, length) for length in self.lengths]
        return list(dict.fromkeys(config for case, config in both if case in cases))


@dataclass(frozen=True, slots=True)
class Tools:
    """What to tune with.

    Attributes:
        workers, devices: one pair per GPU.
        jobs: compilers at a time; None: one per core.
        storage: of Optuna, through which machines share their searches; None: nobody shares.
    """

    workers: Sequence[Runner]
    devices: Sequence[DetectedGpu]
    journal: Journal
    store: Store
    toolkit: Toolkit
    jobs: int | None = None
    storage: BaseStorage | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a run found.

    Attributes:
        entries: for the registry, at most one per problem, bucket and tier.
        cubins: of the entries, by sha256.
        records: of every attempt that counts, earlier runs included.
        cause: what ended the run early: KeyboardInterrupt or an error of the machinery; None when it ran to its end.
    """

    entries: tuple[Entry, ...]
    cubins: Mapping[str, Path]
    records: tuple[Record, ...] = ()
    cause: BaseException | None = None


def make_target(request: Request, problem: Problem, toolkit: Toolkit) -> Target:
    return Target(request.gpu, problem, toolkit.version)


def make_searchers(request: Request, toolkit: Toolkit) -> dict[Problem, Searcher]:
    """A searcher per problem; it asks first for the default, the incumbents, what won elsewhere, the model's choice."""
    shapes = [tuned_shape(length) for length in request.lengths]
    searchers = {}
    for problem in request.problems:
        target = make_target(request, problem, toolkit)
        configs = all_searched_configs(target)
        won = [*request.incumbents_of(problem), *request.starts.get(problem, ())]
        favourites = promising_configs(configs, target, shapes, request.strategy.starts)
        searchers[problem] = Searcher(
            target,
            configs,
            first=[default_config(target), *won, *favourites],
            strategy=request.strategy,
            seed=request.seed,
            patience=request.patience,
        )
    return searchers
