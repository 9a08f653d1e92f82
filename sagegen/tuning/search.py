"""Which config to try next: asks over the enumerated configs of one problem, told every outcome.

The valid list is the space: an ask is always a distinct, valid, unseen config. Optuna proposes; what it proposes
outside the list is told back as infeasible, never as failed, because TPE does not learn from failed trials.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, get_args

from sagegen.entry import is_fine
from sagegen.problem import Problem, Shape
from sagegen.rules import Target, broken_rules, default_config
from sagegen.space import Config, neighbours
from sagegen.tuning.journal import Record
from sagegen.tuning.model import predict
from sagegen.tuning.proposer import Proposer

Sampler = Literal["tpe", "random", "neighbour"]
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)

#: Share of the budget after which the neighbours of the best configs are tried before anything else.
POLISH_FROM = 2 / 3
_TOP = 3  # configs whose neighbours are tried, besides the best at each length
_PROPOSALS = 6  # of Optuna for one ask, before the last one is moved to the nearest unseen config
_RANDOM_STARTS = 15  # of the neighbour sampler
_EXPLORE_EVERY = 5  # proposals; one of so many is for a family that is not the best


class Searcher:
    """Asks and tells over one problem's configs.

    Args:
        target: GPU and problem; its rules say how far an invalid proposal is off.
        configs: every valid config, of one family after another in its space's order.
        first: tried before anything else, in this order: the default, the incumbent, promising starts.
        sampler: `tpe`, or the baselines `random` and `neighbour`.
        seed: makes the sequence of asks repeatable, given the same outcomes.
    """

    def __init__(
        self,
        target: Target,
        configs: Sequence[Config],
        *,
        first: Sequence[Config] = (),
        sampler: Sampler = "tpe",
        seed: int = 0,
    ) -> None:
        self.target = target
        self.records: dict[Config, Record] = {}
        self.objectives: dict[Config, float] = {}
        self._baseline: Record | None = None
        self._baseline_config = first[0] if first else configs[0] if configs else None
        self._unseen = dict.fromkeys([*first, *configs])
        self._first = deque(dict.fromkeys(first))
        self._random = random.Random(seed)
        self._sampler = sampler
        by_family = group_by_family(self._unseen)
        self._size = len(self._unseen)
        self._families = tuple(by_family)
        self._turns = 0
        tpe = by_family if sampler == "tpe" else {}
        self._proposers = {family: Proposer(own, seed) for family, own in tpe.items()}

    @property
    def exhausted(self) -> bool:
        return not self._unseen

    @property
    def size(self) -> int:
        """Configs in the space."""
        return self._size

    def unseen(self) -> list[Config]:
        """Configs not yet asked or told, in the space's order after the starts."""
        return list(self._unseen)

    @property
    def attempts(self) -> int:
        """Configs told so far, failures included."""
        return len(self.records)

    def ask(self, count: int, progress: float = 0.0) -> list[Config]:
        """Up to `count` configs that were never asked or told; fewer when the space runs out.

        Args:
            progress: share of the budget that is spent, 0 to 1.
        """
        asked: list[Config] = []
        while self._unseen and len(asked) < count:
            config = self._next(progress)
            self.take(config)
            asked.append(config)
        return asked

    def take(self, config: Config) -> None:
        """Count `config` as asked, so that it is not asked again."""
        self._unseen.pop(config, None)
        if self._proposers:
            self._proposers[config.family].start(config)

    def tell(self, config: Config, record: Record) -> None:
        """Take the outcome of `config`, asked or known from a journal."""
        self._unseen.pop(config, None)
        self.records[config] = record
        if record.outcome == "ok" and self._baseline is None:
            self._baseline = record
        value = objective(record, self._baseline)
        if value is not None:
            self.objectives[config] = value
        if self._proposers:
            self._proposers[config.family].finish(config, value)

    def best(self, tokens: int | None = None, count: int = 1, *, fine: bool = False) -> list[Config]:
        """The best measured configs: of all or of the fine ones, over all lengths or by the time at `tokens`."""
        precision = self.target.problem.precision
        wanted = [c for c in self.objectives if not fine or is_fine(self.records[c].figures, precision)]
        if tokens is None:
            return sorted(wanted, key=lambda config: self.objectives[config])[:count]
        timed = {c: us for c in wanted if (us := self.records[c].median_call_us(tokens)) is not None}
        return sorted(timed, key=lambda config: timed[config])[:count]

    def _next(self, progress: float) -> Config:
        while self._first:
            config = self._first.popleft()
            if config in self._unseen:
                return config
        if self._sampler == "random":
            return self._draw(self._next_family())
        polishing = progress >= POLISH_FROM or (self._sampler == "neighbour" and self.attempts >= _RANDOM_STARTS)
        if polishing and (near := next(self._neighbours_of_best(), None)):
            return near
        return self._propose(self._next_family()) if self._proposers else self._draw(self._next_family())

    def _next_family(self) -> str:
        """The family of the best config so far, and now and then each of the others; all in turn until one is best."""
        unseen = {config.family for config in self._unseen}
        families = [family for family in self._families if family in unseen]
        self._turns += 1
        best = self.best(count=1)
        if not best or best[0].family not in families:
            return families[self._turns % len(families)]
        others = [family for family in families if family != best[0].family]
        if others and self._turns % _EXPLORE_EVERY == 0:
            return others[self._turns // _EXPLORE_EVERY % len(others)]
        return best[0].family

    def _draw(self, family: str) -> Config:
        return self._random.choice([config for config in self._unseen if config.family == family])

    def _neighbours_of_best(self) -> Iterator[Config]:
        """Unseen one-knob neighbours of the best configs overall, then of the best at each length; fine ones too."""
        lengths = sorted({t.tokens for record in self.records.values() for t in record.samples})
        tops = [*self.best(count=_TOP), *self.best(count=_TOP, fine=True)]
        tops += [config for tokens in lengths for fine in (False, True) for config in self.best(tokens, fine=fine)]
        for config in dict.fromkeys(tops):
            yield from (near for near in neighbours(config) if near in self._unseen)

    def _propose(self, family: str) -> Config:
        """Optuna's next valid, unseen proposal; when it keeps missing, the unseen config nearest to its last one."""
        proposer = self._proposers[family]
        for _ in range(_PROPOSALS):
            config = proposer.propose()
            if config in self._unseen:
                return config
            proposer.dismiss(self._violation(config), self.objectives.get(config))
        return min(self._unseen, key=lambda unseen: distance(unseen, config))

    def _violation(self, config: Config) -> float:
        """How far a proposal is outside the rules; margins count in bytes, registers or flags, hence the logarithm."""
        return sum(math.log1p(broken.margin) for broken in broken_rules(config, self.target))


def objective(record: Record, baseline: Record | None) -> float | None:
    """Geometric mean, over the lengths, of a full call's time relative to the baseline's; None for a failure.

    Args:
        baseline: the default config's record, or the first that succeeded.
    """
    if record.outcome != "ok" or baseline is None:
        return None
    ratios = [t.median_call_us / us for t in record.samples if (us := baseline.median_call_us(t.tokens))]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def promising_configs(configs: Sequence[Config], target: Target, shapes: Sequence[Shape], count: int) -> list[Config]:
    """The configs that the model ranks best; of those that it cannot tell apart one, as long as there are others.

    That one is the nearest to the default: what the model does not see is not changed without a reason.
    """
    alike: dict[float, list[Config]] = {}
    for config in configs:
        alike.setdefault(round(_predicted_cost(config, target, shapes), 9), []).append(config)
    home = default_config(target)
    groups = [sorted(alike[cost], key=lambda config: distance(config, home)) for cost in sorted(alike)]
    rows = itertools.zip_longest(*groups)  # the first of every group, then the second, ...
    return list(itertools.islice((config for row in rows for config in row if config is not None), count))


def rank_configs(configs: Sequence[Config], target: Target, shapes: Sequence[Shape]) -> list[Config]:
    """`configs` by the model's geometric mean time over `shapes`, fastest first; equals keep their order."""
    return sorted(configs, key=lambda config: _predicted_cost(config, target, shapes))


def _predicted_cost(config: Config, target: Target, shapes: Sequence[Shape]) -> float:
    """Logarithm of the geometric mean of the predicted times of calls, times the number of shapes."""
    return sum(math.log(predict(config, target.problem, shape, target.gpu).call_us) for shape in shapes)


def simulate(searcher: Searcher, run: Callable[[Problem, Config], Record], trials: int, batch: int = 1) -> list[float]:
    """Search without a GPU: the best objective after each attempt (inf until one succeeds).

    Args:
        run: answers an attempt, e.g. `journal.replay`.
        batch: configs asked at once, as a tuning run does to keep the compiler busy.
    """
    curve: list[float] = []
    while len(curve) < trials and not searcher.exhausted:
        for config in searcher.ask(min(batch, trials - len(curve)), len(curve) / trials):
            searcher.tell(config, run(searcher.target.problem, config))
            curve.append(min(searcher.objectives.values(), default=math.inf))
    return curve


def group_by_family(configs: Iterable[Config]) -> dict[str, list[Config]]:
    """`configs` by family; families and each one's configs in the order given."""
    groups: dict[str, list[Config]] = {}
    for config in configs:
        groups.setdefault(config.family, []).append(config)
    return groups


def distance(a: Config, b: Config) -> float:
    """Sum over the parameters of how far apart the values' positions are, each scaled to 0..1; inf between families."""
    if a.family != b.family:
        return math.inf
    return sum(abs(x - y) for x, y in zip(_point(a), _point(b), strict=True))


@functools.cache
def _point(config: Config) -> tuple[float, ...]:
    """Positions of a config's values in their lists, scaled to 0..1."""
    return tuple(
        param.values.index(getattr(config, param.name)) / max(1, len(param.values) - 1) for param in config.params
    )
