"""The ledger of a tuning run: who has been asked, what came of it, and what need not be tried again.

It stands between the searchers, which speak of configs, and the journal, which keeps records: equal text is built once,
equal machine code is timed once, and what an earlier run recorded is not repeated. All of that within a problem: the
same code of another problem would be other work. Other machines that share the search are asked and told here too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone

from sagegen.build import Built
from sagegen.entry import is_fine
from sagegen.measuring.jobs import Part
from sagegen.problem import Problem, TunedLength, parse_problem
from sagegen.space import Config, parse_config
from sagegen.tuning.examine import Attempt
from sagegen.tuning.journal import Journal, Outcome, Phase, Record, attempts, comparable_records
from sagegen.tuning.search import Searcher
from sagegen.tuning.sharing import Elsewhere, SharedStudies
from sagegen.tuning.variants import Renderer, Variant

#: A problem of which so many configs were tried and none works is given up.
HOPELESS_AFTER = 24


@dataclass(frozen=True, slots=True)
class Facts:
    """What all records of a run have in common; fields as in `journal.Record`."""

    gpu: str
    protocol: int
    product: str = ""
    driver: str = ""
    nvcc: str = ""


class Ledger:
    """Asks, outcomes and duplicates of one run.

    Args:
        trials: most configs per problem that are tried on their own account, earlier runs included; None: no limit.
        shared: the searches that other machines take part in; None: nobody does.
    """

    def __init__(
        self,
        journal: Journal,
        renderer: Renderer,
        facts: Facts,
        trials: int | None = None,
        shared: SharedStudies | None = None,
    ) -> None:
        self.searchers: Mapping[Problem, Searcher] = {}
        self.counts: Counter[Outcome] = Counter()
        self.records: dict[tuple[Problem, Config], Record] = {}
        self._journal = journal
        self._renderer = renderer
        self._facts = facts
        self._trials = trials
        self._shared = shared
        self._untold: list[tuple[Problem, Config]] = []
        self._held: frozenset[tuple[Problem, Config]] = frozenset()
        self._asked: Counter[Problem] = Counter()
        self._by_text: dict[tuple[Problem, str], Record | None] = {}
        self._by_code: dict[tuple[Problem, str], Record] = {}
        self._twins: defaultdict[tuple[Problem, str], list[Variant]] = defaultdict(list)
        self._turns: Iterator[Problem] = iter(())

    def open(
        self,
        searchers: Mapping[Problem, Searcher],
        lengths: Sequence[TunedLength],
        held: Collection[tuple[Problem, Config]] = (),
    ) -> int:
        """Search with `searchers`, one per problem; takes over the journal's comparable records and says how many.

        Args:
            lengths: that the run measures at; a success that was not measured at all of them has to be repeated.
            held: configs that others are held against, so that every machine measures them itself.
        """
        self.searchers = searchers
        self._held = frozenset(held)
        if self._shared:
            self._shared.open(searchers)
        wanted = {length.tokens for length in lengths}
        self._turns = itertools.cycle(searchers)
        comparable = comparable_records(
            self._journal.records, self._facts.gpu, self._facts.protocol, self._renderer.text_sha256
        )
        for (problem_name, config_name), record in attempts(comparable).items():
            problem, config = parse_problem(problem_name), parse_config(config_name)
            samples = tuple(s for s in record.samples if s.tokens in wanted)
            if problem in searchers and (record.outcome != "ok" or {s.tokens for s in samples} == wanted):
                record = replace(record, samples=samples)
                self._asked[problem] += not record.shared_from
                self._know(self._renderer.variant(problem, config), record)
        self._tell_others()
        return len(self.records)

    def hear(self) -> list[Elsewhere]:
        """What other machines found since the last time that this one's search may learn from: of the same texts."""
        heard = []
        for found in self._shared.news() if self._shared else ():
            searcher = self.searchers[found.problem]
            is_alike = found.text_sha256 == self._renderer.text_sha256(found.problem.name, found.config.name)
            if is_alike and searcher.offers(found.config) and (found.problem, found.config) not in self.records:
                searcher.tell_elsewhere(found.config, found.value)
                heard.append(found)
        return heard

    def close(self) -> None:
        """Leave to other machines what this one does not get to."""
        if self._shared:
            self._tell_others()
            self._shared.release()

    def ask(self, count: int, progress: float) -> list[Variant]:
        """Up to `count` variants to build and examine, the problems in turn; fewer when all are done.

        A config whose text was tried before takes that outcome and is not among them.
        """
        batch: list[Variant] = []
        while len(batch) < count and (problem := self._next_problem()) is not None:
            for config in self.searchers[problem].ask(1, progress):
                variant = self._renderer.variant(problem, config)
                key = (problem, variant.blank_sha256)
                if key not in self._by_text:
                    if not self._claim(variant):
                        continue
                    self._by_text[key] = None
                    self._asked[problem] += 1
                    batch.append(variant)
                elif (record := self._by_text[key]) is not None:
                    self._share(variant, record)
                else:
                    self._twins[key].append(variant)
        return batch

    def share_of_trials(self) -> float:
        """Share of the trials that are asked, of the problem that lags most; 0 without a limit."""
        if not self._trials:
            return 0.0
        return min(1.0, min(self._asked[problem] for problem in self.searchers) / self._trials)

    def with_equal_code(self, variant: Variant, built: Built) -> Record | None:
        """An earlier success whose kernels are the same machine code, and so whose call takes as long."""
        return self._by_code.get((variant.problem, built.code_sha256))

    def enter(
        self,
        variant: Variant,
        phase: Phase,
        attempt: Attempt,
        built: Built | None = None,
        shared_from: str = "",
    ) -> Record:
        """Record what came of a variant, and of those with the same text."""
        record = Record(
            problem=variant.problem.name,
            config=variant.config.name,
            phase=phase,
            outcome=attempt.outcome,
            gpu=self._facts.gpu,
            protocol=self._facts.protocol,
            text_sha256=variant.source.sha256,
            reason=attempt.reason,
            product=self._facts.product,
            driver=self._facts.driver,
            nvcc=built.nvcc if built else self._facts.nvcc,
            cubin_sha256=built.cubin_sha256 if built else "",
            code_sha256=built.code_sha256 if built else "",
            samples=attempt.samples,
            figures={kind: dict(values) for kind, values in attempt.figures.items()},
            resources={role: asdict(used) for role, used in built.resources.items()} if built else {},
            shared_from=shared_from,
            date=_now(),
            seconds=round(attempt.seconds, 3),
            first_failure=attempt.first_failure,
        )
        self._journal.append(record)
        if phase in ("build", "screen"):
            self._know(variant, record)
            for twin in self._twins.pop((variant.problem, variant.blank_sha256), []):
                self._share(twin, record)
            self._tell_others()
        return record

    def best(
        self, problem: Problem, tokens: int, count: int, *, fine: bool = False, part: Part = "call"
    ) -> list[Config]:
        """The fastest configs at a length by their screens, all or the fine ones; of equal ones the one measured."""
        searcher = self.searchers.get(problem)
        if searcher is None:  # the run ended before its search began
            return []
        ranked = searcher.best(tokens, count=len(searcher.objectives), fine=fine)
        if part == "kernel":
            ranked.sort(key=lambda config: self.records[problem, config].median_us(tokens) or math.inf)
        return [c for c in ranked if not self.records[problem, c].shared_from][:count]

    def is_fine(self, problem: Problem, config: Config) -> bool:
        return is_fine(self.records[problem, config].figures, problem.precision)

    def works(self, problem: Problem, config: Config) -> bool:
        record = self.records.get((problem, config))
        return record is not None and record.outcome == "ok"

    def failures(self, problem: Problem) -> list[Record]:
        """Records of a problem's configs that did not succeed, in the order they came."""
        return [r for (other, _), r in self.records.items() if other == problem and r.outcome != "ok"]

    def _next_problem(self) -> Problem | None:
        for problem in itertools.islice(self._turns, len(self.searchers)):
            searcher = self.searchers[problem]
            within = self._trials is None or self._asked[problem] < self._trials
            hopeless = self._asked[problem] >= HOPELESS_AFTER and not searcher.objectives
            if within and not searcher.is_over and not hopeless:
                return problem
        return None

    def _claim(self, variant: Variant) -> bool:
        """Whether no other machine has that config."""
        if not self._shared:
            return True
        problem, config = variant.problem, variant.config
        return self._shared.claim(problem, config, variant.source.sha256, always=(problem, config) in self._held)

    def _tell_others(self) -> None:
        """Tell other machines what is known by now: an objective is not before the default's outcome is."""
        if not self._shared:
            return
        untold, self._untold = self._untold, []
        for problem, config in untold:
            record, value = self.records[problem, config], self.searchers[problem].objectives.get(config)
            if record.outcome == "ok" and value is None:
                self._untold.append((problem, config))
            else:
                self._shared.finish(problem, config, record, value)

    def _share(self, variant: Variant, record: Record) -> None:
        """Enter `record`'s outcome for a variant with the same text."""
        shared = replace(
            record,
            config=variant.config.name,
            text_sha256=variant.source.sha256,
            shared_from=record.shared_from or record.config,
            date=_now(),
            seconds=0.0,
        )
        self._journal.append(shared)
        self._know(variant, shared)

    def _know(self, variant: Variant, record: Record) -> None:
        problem, config = variant.problem, variant.config
        self.records[problem, config] = record
        self.counts[record.outcome] += 1
        key = (problem, variant.blank_sha256)
        self._by_text[key] = self._by_text.get(key) or record
        if record.outcome == "ok":
            self._by_code.setdefault((problem, record.code_sha256), record)
        self.searchers[problem].tell(config, record)
        if not record.shared_from:
            self._untold.append((problem, config))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
