"""Which config to try next: asks over the enumerated configs of one problem, told every outcome.

The valid list is the space: an ask is always a distinct, valid, unseen config. Optuna proposes; what it proposes
outside the list is told back as infeasible, never as failed, because TPE does not learn from failed trials.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sagegen.entry import is_fine
from sagegen.rules import Target, broken_rules
from sagegen.space import Config, neighbours
from sagegen.tuning.gains import Gains
from sagegen.tuning.journal import Record
from sagegen.tuning.proposer import Proposer
from sagegen.tuning.ranking import count_differences
from sagegen.tuning.strategy import Strategy

_PROPOSALS = 6  # of Optuna for one ask, before the last one is moved to the nearest unseen config


class Searcher:
    """Asks and tells over one problem's configs.

    Args:
        target: GPU and problem; its rules say how far an invalid proposal is off.
        configs: every valid config, of one family after another in its space's order.
        first: tried before anything else, in this order: the default, the incumbent, promising starts.
        strategy: who proposes, and when neighbours of the best are tried instead; None: as Strategy() says.
        seed: makes the sequence of asks repeatable, given the same outcomes.
        patience: attempts without a gain after which the search is over; after half of them it tries neighbours of the
            best. None: it goes on.
    """

    def __init__(
        self,
        target: Target,
        configs: Sequence[Config],
        *,
        first: Sequence[Config] = (),
        strategy: Strategy | None = None,
        seed: int = 0,
        patience: int | None = None,
    ) -> None:
        self.target = target
        self.records: dict[Config, Record] = {}
        self.objectives: dict[Config, float] = {}
        self.elsewhere: dict[Config, float] = {}
        self.gains = Gains()
        self._baseline: Record | None = None
        self._reference = first[0] if first else None
        self._waiting: dict[Config, Record] = {}
        self._patience = patience
        self._unseen = dict.fromkeys([*first, *configs])
        self._space = frozenset(self._unseen)
        self._in_flight: set[Config] = set()
        self._first = deque(dict.fromkeys(first))
        self._random = random.Random(seed)
        self._strategy = strategy = strategy or Strategy()
        by_family = group_by_family(self._unseen)
        self._families = tuple(by_family)
        self._turns = 0
        self._asks = 0
        sampler = strategy.sampler
        self._proposers: dict[str, Proposer] = {}
        if sampler == "tpe" or sampler == "gp":
            self._proposers = {family: Proposer(own, seed, sampler) for family, own in by_family.items()}

    @property
    def exhausted(self) -> bool:
        return not self._unseen

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to ask, or patience is."""
        return self.exhausted or (self._lacks_gain(1.0) and not any(config in self._unseen for config in self._first))

    @property
    def size(self) -> int:
        """Configs in the space."""
        return len(self._space)

    def offers(self, config: Config) -> bool:
        """Whether `config` is in the space, tried or not."""
        return config in self._space

    def unseen(self) -> list[Config]:
        """Configs not yet asked or told, in the space's order after the starts."""
        return list(self._unseen)

    @property
    def attempts(self) -> int:
        """Configs told so far, failures included."""
        return len(self.records) + len(self.elsewhere)

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
        self._in_flight.add(config)
        if self._proposers:
            self._proposers[config.family].start(config)

    def tell(self, config: Config, record: Record) -> None:
        """Take the outcome of `config`, asked or known from a journal.

        Outcomes that come before that of the default, which others are held against, wait for it if it was asked.
        """
        self._unseen.pop(config, None)
        self._in_flight.discard(config)
        self._waiting[config] = record
        if self._reference in self._in_flight:
            return
        waiting, self._waiting = self._waiting, {}
        self._baseline = self._baseline or self._choose_baseline(waiting)
        for told, own in waiting.items():
            self._learn(told, own)

    def tell_elsewhere(self, config: Config, value: float | None) -> None:
        """Take the objective of a config that another machine measured, None for a failure; it is not asked again."""
        self._unseen.pop(config, None)
        self.elsewhere[config] = math.inf if value is None else value
        self.gains.see(self.attempts, {"elsewhere": self.elsewhere[config]})
        if self._proposers:
            self._proposers[config.family].finish(config, value)

    def _choose_baseline(self, told: Mapping[Config, Record]) -> Record | None:
        """The default's record, or the first success where there is none."""
        successes = [record for record in told.values() if record.outcome == "ok"]
        default = told.get(self._reference) if self._reference else None
        return default if default and default.outcome == "ok" else next(iter(successes), None)

    def _learn(self, config: Config, record: Record) -> None:
        self.records[config] = record
        value = objective(record, self._baseline)
        if value is not None:
            self.objectives[config] = value
            self.gains.see(self.attempts, self._merits(config, record, value))
        if self._proposers:
            self._proposers[config.family].finish(config, value)

    def _merits(self, config: Config, record: Record, value: float) -> dict[str, float]:
        """What a success is judged by: over all lengths, at each, and among the fine ones."""
        merits = {"all": value, **{str(samples.tokens): samples.median_call_us for samples in record.samples}}
        if is_fine(record.figures, self.target.problem.precision):
            merits |= {f"fine {name}": merit for name, merit in merits.items()}
        return merits

    def _lacks_gain(self, share: float) -> bool:
        """Whether that share of the patience brought no gain."""
        return self._patience is not None and self.gains.since(self.attempts) >= share * self._patience

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
        if self._wants_neighbour(progress) and (near := next(self._neighbours_of_best(), None)):
            return near
        return self._propose(self._next_family()) if self._proposers else self._draw(self._next_family())

    def _wants_neighbour(self, progress: float) -> bool:
        own = self._strategy
        if own.sampler == "random":
            return False
        self._asks += 1
        has_drawn = self.attempts >= own.random_starts
        in_turn = has_drawn and (own.sampler == "neighbour" or self._asks % (1 + own.neighbours) != 0)
        return in_turn or progress >= own.polish_from or self._lacks_gain(0.5)

    def _next_family(self) -> str:
        """The family of the best config so far, and now and then each of the others; all in turn until one is best."""
        unseen = {config.family for config in self._unseen}
        families = [family for family in self._families if family in unseen]
        self._turns += 1
        best = self._best_elsewhere() or self.best(count=1)
        if not best or best[0].family not in families:
            return families[self._turns % len(families)]
        others = [family for family in families if family != best[0].family]
        if others and self._turns % self._strategy.explore_every == 0:
            return others[self._turns // self._strategy.explore_every % len(others)]
        return best[0].family

    def _draw(self, family: str) -> Config:
        return self._random.choice([config for config in self._unseen if config.family == family])

    def _neighbours_of_best(self) -> Iterator[Config]:
        """Unseen one-knob neighbours of the best configs overall and of the best at each length; fine ones too.

        Of one best after another, so that no length waits until all neighbours of another's are tried.
        """
        lengths = sorted({t.tokens for record in self.records.values() for t in record.samples})
        tops = [*self.best(count=self._strategy.tops), *self.best(count=self._strategy.tops, fine=True)]
        tops += self._best_elsewhere()
        tops += [config for tokens in lengths for fine in (False, True) for config in self.best(tokens, fine=fine)]
        distinct = list(dict.fromkeys(tops))
        turn = self._asks % max(1, len(distinct))
        for config in distinct[turn:] + distinct[:turn]:
            near = [config for config in neighbours(config) if config in self._unseen]
            self._random.shuffle(near)
            yield from near

    def _best_elsewhere(self) -> list[Config]:
        """The best config of other machines, if it is better than all of this one's."""
        best = min(self.elsewhere, key=lambda config: self.elsewhere[config], default=None)
        own = min(self.objectives.values(), default=math.inf)
        return [best] if best is not None and self.elsewhere[best] < own else []

    def _propose(self, family: str) -> Config:
        """Optuna's next proposal, or the unseen config that shares most values with it; at first one drawn at random.

        A product of values is seldom a valid config, so draws from the list tell Optuna more than its own first ones.
        """
        proposer = self._proposers[family]
        if self.attempts < self._strategy.random_starts:
            return self._draw(family)
        for _ in range(_PROPOSALS):
            config = proposer.propose()
            if config in self._unseen:
                return config
            violation = self._violation(config)
            if not violation and config not in self.records:
                break  # valid, but not of this search
            proposer.dismiss(violation, self.objectives.get(config))
        candidates = [unseen for unseen in self._unseen if unseen.family == family]
        self._random.shuffle(candidates)  # or the first in the space's order would stand in for all that are as near
        return min(candidates, key=lambda unseen: count_differences(unseen, config))

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


def group_by_family(configs: Iterable[Config]) -> dict[str, list[Config]]:
    """`configs` by family; families and each one's configs in the order given."""
    groups: dict[str, list[Config]] = {}
    for config in configs:
        groups.setdefault(config.family, []).append(config)
    return groups
