"""`sagegen tune --verify`: the finals once more in a fresh process, beside what was decided the first time.

Winners are those of the registry, or of the journal's last finals where it has none; they meet the runner-up and the
default config of those finals again, by their full calls. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sagegen.build import Built
from sagegen.entry import Tier
from sagegen.errors import ArgumentError
from sagegen.measuring.verdict import PROTOCOL, Verdict, compare
from sagegen.problem import Problem, TunedLength
from sagegen.rules import broken_rules, default_config
from sagegen.space import Config, parse_config
from sagegen.tuning.distances import CaseDistances, find_distances
from sagegen.tuning.events import FinalsStarted, Listener, ignore
from sagegen.tuning.examine import Examiner, Lanes
from sagegen.tuning.finals import Bout, Match, run_match
from sagegen.tuning.journal import Record, comparable_records
from sagegen.tuning.occupancy import look_for_others
from sagegen.tuning.request import Request, Tools, make_target
from sagegen.tuning.variants import BuildAhead, Renderer

#: Speeds that differ by less are the same: two tuning runs are held to as much.
TOLERANCE = 0.02
_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Comparison:
    """The winner beside one config that it had beaten.

    Attributes:
        recorded: how many times faster the winner's full call was, of the last finals; None where those did not meet.
        again: the same now, with its interval.
    """

    config: str
    recorded: float | None
    again: Verdict

    @property
    def disagreement(self) -> str:
        """Why this does not agree, or an empty string."""
        again = self.again
        if again.is_slower and again.ratio < 1 - TOLERANCE:
            return f"{self.config} is {1 / again.ratio:.3f}x as fast as the winner"
        if self.recorded is None or again.low / (1 + TOLERANCE) <= self.recorded <= again.high * (1 + TOLERANCE):
            return ""
        return f"{self.recorded:.3f}x over {self.config} then, {again.ratio:.3f}x now"


@dataclass(frozen=True, slots=True)
class Repetition:
    """What the finals of one problem at one length say when they are repeated.

    Attributes:
        tier: `fine` or `coarse` where a bucket has both; else None.
        comparisons: with the configs that ran along.
        failures: why configs did not run.
    """

    problem: str
    tokens: int
    tier: Tier | None
    winner: str
    comparisons: tuple[Comparison, ...]
    failures: tuple[str, ...] = ()

    @property
    def disagreements(self) -> tuple[str, ...]:
        """Empty where the finals agree with what was decided."""
        return (*self.failures, *(c.disagreement for c in self.comparisons if c.disagreement))

    def as_values(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "agrees": not self.disagreements, "disagreements": list(self.disagreements)}


@dataclass(frozen=True, slots=True)
class _Case:
    """What is to be repeated: the winner, and by config how many times slower others were, None where unknown."""

    problem: Problem
    length: TunedLength
    tier: Tier | None
    winner: Config
    others: Mapping[Config, float | None]


def repeat_finals(request: Request, tools: Tools, listen: Listener = ignore) -> list[Repetition]:
    """Run the finals of the request's problems and lengths again, in worker processes that did nothing before.

    Raises:
        ArgumentError: neither registry nor journal has a winner for any of them.
        GpuBusyError: as `tune`.
        BuildError, WorkerError, GpuLostError: the machinery failed.
    """
    renderer = Renderer()
    cases = list(_cases(request, tools, renderer))
    if not cases:
        raise ArgumentError(
            f"neither registry nor journal has a measured winner for what is asked of {request.gpu.name}",
            f"tune first: sagegen tune --gpu {request.gpu.name}",
        )
    look_for_others(tools.devices, request.force, listen)
    builder = BuildAhead(
        request.gpu.arch, tools.store, tools.toolkit, jobs=tools.jobs, timeout_s=request.build_timeout_s
    )
    lanes = Lanes([Examiner(worker, request.lengths) for worker in tools.workers])
    try:
        built = _build(cases, renderer, builder)
        matches = [_make_match(request, case, built) for case in cases]
        bouts: dict[int, Bout] = {}
        numbered = _announced([(i, match) for i, match in enumerate(matches) if match is not None], listen)
        for (index, _), bout in lanes.map(lambda examiner, item: run_match(examiner, item[1]), numbered):
            bouts[index] = bout
    finally:
        builder.close()
        lanes.close()
    return [_judge(case, bouts.get(index)) for index, case in enumerate(cases)]


def _cases(request: Request, tools: Tools, renderer: Renderer) -> Iterator[_Case]:
    records = comparable_records(tools.journal.records, request.gpu.name, PROTOCOL, renderer.text_sha256)
    for problem in request.problems:
        default = default_config(make_target(request, problem, tools.toolkit))
        own = find_distances(record for record in records if record.problem == problem.name)
        for length in request.lengths:
            found = [case for case in own if case.tokens == length.tokens]
            for tier, winner in _winners(request, problem, length, found).items():
                if broken_rules(winner, make_target(request, problem, tools.toolkit)):
                    continue  # an older release allowed more
                others = _recorded(found, winner, records)
                others.setdefault(default, None)
                others.pop(winner, None)
                yield _Case(problem, length, tier, winner, others)


def _winners(
    request: Request, problem: Problem, length: TunedLength, found: Sequence[CaseDistances]
) -> dict[Tier | None, Config]:
    held, fine = (by.get((problem, length)) for by in (request.incumbents, request.fine_incumbents))
    if held is not None and fine is not None and held != fine:
        return {"coarse": held, "fine": fine}
    if held is not None:
        return {None: held}
    return {case.tier: parse_config(case.distances[0].config) for case in found}


def _recorded(found: Sequence[CaseDistances], winner: Config, records: Iterable[Record]) -> dict[Config, float | None]:
    """Who ran against a winner in the finals that it won, and how many times slower; see `_Case.others`."""
    for case in found:
        if case.distances[0].config == winner.name:
            others = [d for d in case.distances[1:] if d.role in ("runner-up", "default") and d.phase == "final"]
            return {parse_config(d.config): d.behind for d in others if d.interval is not None}
    return {}


def _build(cases: Sequence[_Case], renderer: Renderer, builder: BuildAhead) -> dict[tuple[Problem, Config], Built]:
    wanted = dict.fromkeys((case.problem, config) for case in cases for config in (case.winner, *case.others))
    variants = {pair: renderer.variant(*pair) for pair in wanted}
    results = builder.submit(list(variants.values())).result()
    return {pair: built for pair, variant in variants.items() if isinstance(built := results[variant.name], Built)}


def _make_match(request: Request, case: _Case, built: Mapping[tuple[Problem, Config], Built]) -> Match | None:
    """None where the winner does not compile, or nothing that it could be held against."""
    configs = [config for config in (case.winner, *case.others) if (case.problem, config) in built]
    if case.winner not in configs:
        return None
    cubins = {config: built[case.problem, config].cubin for config in configs}
    held = case.winner  # a match names a default and an incumbent for who decides it, and nobody does here
    return Match(case.problem, case.length, cubins, held, held, _ROUNDS, request.seed, peers=False)


def _announced(matches: Sequence[tuple[int, Match]], listen: Listener) -> Iterator[tuple[int, Match]]:
    for count, (index, match) in enumerate(matches):
        configs = tuple(config.name for config in match.cubins)
        listen(FinalsStarted(match.problem.name, match.length.tokens, configs, count, len(matches)))
        yield index, match


def _judge(case: _Case, bout: Bout | None) -> Repetition:
    names = (case.problem.name, case.length.tokens, case.tier, case.winner.name)
    if bout is None:
        return Repetition(*names, (), ("the winner does not compile",))
    failures = tuple(f"{config.name}: {outcome}: {reason}" for config, outcome, reason in bout.failures)
    if case.winner not in bout.call_us:
        return Repetition(*names, (), failures or ("the winner did not run",))
    winner_us = bout.call_us[case.winner]
    comparisons = tuple(
        Comparison(config.name, recorded, compare(bout.call_us[config], winner_us))
        for config, recorded in case.others.items()
        if config in bout.call_us
    )
    return Repetition(*names, comparisons, failures)
