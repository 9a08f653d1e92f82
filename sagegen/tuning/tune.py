"""Tuning on a GPU that is present: search while the compiler works ahead, then finals, then registry entries.

The parent process creates no CUDA context; everything that can hang or crash happens in workers. Each attempt is in the
journal before the next begins, so a run that is killed resumes, and one that is interrupted keeps its best so far.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from sagegen.build import BuildFailure, Built
from sagegen.errors import BuildError, GpuMismatchError, SagegenError, WorkerError
from sagegen.gpu import Gpu
from sagegen.interrupts import deferred_interrupts
from sagegen.measuring.jobs import Ping, Reply
from sagegen.measuring.verdict import PROTOCOL
from sagegen.problem import Problem
from sagegen.rules import default_config
from sagegen.space import Config
from sagegen.tuning.entries import Place
from sagegen.tuning.events import Attempted, Heard, Listener, Preparing, Started, Warned, ignore
from sagegen.tuning.examine import Attempt, Examiner, Lanes, screen_launches
from sagegen.tuning.journal import Phase
from sagegen.tuning.judge import Judge
from sagegen.tuning.ledger import Facts, Ledger
from sagegen.tuning.occupancy import look_for_others
from sagegen.tuning.pipeline import Pipeline
from sagegen.tuning.plant import plant_variant
from sagegen.tuning.request import Request, Result, Tools, make_searchers, make_target
from sagegen.tuning.sharing import SharedStudies
from sagegen.tuning.variants import BuildAhead, Renderer, Variant

__all__ = ["Request", "Result", "Tools", "tune"]

_SEARCH_SHARE = 0.7  # of the budget; the rest is for finals and confirmation
_BATCH_PER_PROBLEM = 2
_BATCH_PER_GPU = 8  # where there are as many compilers: on H200 machines one took as long as some eight screens
_PING_TIMEOUT_S = 120.0
_LEAST_BUILD_TIMEOUT_S = 30.0

_Item = tuple[Variant, Built]


def tune(request: Request, tools: Tools, listen: Listener = ignore) -> Result:
    """Search, judge and decide; writes the journal but no registry.

    On Ctrl+C the result holds the best so far and its `cause` is the KeyboardInterrupt.

    Raises:
        BuildError: nothing compiled; the message carries the compiler's first error.
        WorkerError: nothing could be measured, or the worker cannot be started.
        GpuBusyError: others use the GPU, and the request does not say that it may be measured on all the same.
        GpuLostError, JournalError: the GPU is gone, or the disk is full, and there is no best so far to keep.
        GpuMismatchError: the worker sees another GPU than the request names.
    """
    run = _Run(request, tools, listen)
    cause: BaseException | None = None
    try:
        run.begin()
        run.search()
        run.fail_if_nothing_works()
        run.judge.run_finals(run.deadline(1.0))
    except (KeyboardInterrupt, SagegenError) as error:
        cause = error
    except BaseException:
        run.close()
        raise
    result = Result((), {})
    try:
        with deferred_interrupts():  # what was found must not be lost by a signal that comes now
            run.close()
            entries, cubins = run.judge.entries()
            result = Result(entries, cubins, tuple(run.ledger.records.values()))
    except KeyboardInterrupt as error:
        cause = cause or error
    if not result.entries and isinstance(cause, SagegenError):
        raise cause
    return replace(result, cause=cause)


class _Run:
    """One tuning run."""

    def __init__(self, request: Request, tools: Tools, listen: Listener) -> None:
        self.start = time.monotonic()
        self.request = request
        self.tools = tools
        self.listen = listen
        self.renderer = Renderer()
        self.builder = BuildAhead(
            request.gpu.arch, tools.store, tools.toolkit, jobs=tools.jobs, timeout_s=_build_timeout_s(request)
        )
        self.lanes = Lanes([Examiner(worker, request.lengths) for worker in tools.workers])
        device = tools.devices[0]
        facts = Facts(request.gpu.name, PROTOCOL, device.product, device.driver, tools.toolkit.build)
        self.ledger = Ledger(tools.journal, self.renderer, facts, request.trials, _share(request, tools))
        self.examining: set[tuple[Problem, str]] = set()
        self.defaults = {p: default_config(make_target(request, p, tools.toolkit)) for p in request.problems}
        place = Place(request.gpu, device.driver)
        self.judge = Judge(
            request, self.defaults, self.ledger, self.renderer, self.builder, self.lanes, tools.store, place, listen
        )

    def close(self) -> None:
        """Stop the compilers, kill the workers, leave to other machines what is not done."""
        self.builder.close()
        self.lanes.close()
        self.ledger.close()

    def deadline(self, share: float) -> float | None:
        """When that share of the budget is spent, on the monotonic clock; None without a budget."""
        return None if self.request.budget_s is None else self.start + share * self.request.budget_s

    def begin(self) -> None:
        """Compile the defaults and start the workers while the space is enumerated; resume from the journal."""
        look_for_others(self.tools.devices, self.request.force, self.listen)
        self.listen(Preparing(self.request.gpu.name))
        self.builder.submit([self.renderer.variant(*pair) for pair in self.defaults.items()])
        pings = self.lanes.each(lambda examiner: examiner.run(Ping(), _PING_TIMEOUT_S))
        searchers = make_searchers(self.request, self.tools.toolkit)
        known = self.ledger.open(searchers, self.request.lengths, self._held_configs())
        configs = sum(searcher.size for searcher in searchers.values())
        names = tuple(problem.name for problem in self.request.problems)
        self.listen(Started(self.request.gpu.name, names, configs, known, offline=False))
        for ping in pings:
            _check_gpu(ping.result(), self.request.gpu)

    def search(self) -> None:
        """Examine what is built until budget, trials or space run out; one batch is always being compiled."""
        followers: list[_Item] = []
        self._examine(self._leaders(followers))
        self._examine(self._in_time(followers))

    def fail_if_nothing_works(self) -> None:
        """Raise the first failure's reason if no problem has a config that works; warn of problems that have none."""
        searchers = self.ledger.searchers
        barren = [problem for problem, searcher in searchers.items() if not searcher.objectives]
        for problem in barren:
            failures = self.ledger.failures(problem)
            first = f"; the first: {failures[0].outcome}: {failures[0].reason}" if failures else ""
            message = f"{problem.name}: none of {len(failures)} configs tried works{first}"
            if len(barren) < len(searchers):
                self.listen(Warned(message))
            elif failures and failures[0].phase == "build":
                raise BuildError(message, "check the toolkit with: sagegen doctor")
            else:
                raise WorkerError(message, "give a larger --budget, or check the machine with: sagegen doctor")

    def _batches(self) -> Iterator[list[Variant]]:
        """Batches to build; the first has the defaults, unless a journal knows them, the second the planted faults."""
        compilers = self.tools.jobs or len(os.sched_getaffinity(0))
        gpus = len(self.tools.workers)
        size = max(_BATCH_PER_PROBLEM * len(self.request.problems), 2 * gpus, min(compilers, _BATCH_PER_GPU * gpus))
        yield self._ask(len(self.request.problems))
        if planted := self._plant():
            yield planted
        while not self._is_late() and (batch := self._ask(size)):
            yield batch

    def _ask(self, count: int) -> list[Variant]:
        """Up to `count` variants to build, chosen with what other machines found by now."""
        for found in self.ledger.hear():
            objectives = self.ledger.searchers[found.problem].objectives
            if found.value is not None and found.value < min(objectives.values(), default=math.inf):
                self.listen(Heard(found.problem.name, found.config.name, 1 / found.value, found.machine))
        return self.ledger.ask(count, self._progress())

    def _plant(self) -> list[Variant]:
        """The planted faults, each in a config of the first problem that would otherwise come late."""
        problem, searcher = next(iter(self.ledger.searchers.items()))
        planted = []
        for plant, config in zip(self.request.plants, searcher.unseen()[::-1], strict=False):
            searcher.take(config)
            planted.append(plant_variant(self.renderer.variant(problem, config), plant))
        return planted

    def _leaders(self, followers: list[_Item]) -> Iterator[_Item]:
        """What is to be examined as soon as a GPU is free; failed builds are recorded instead.

        Of equal code one goes first; those that came while it was on a GPU go to `followers`, and come when it is done.
        """
        pipeline = Pipeline(self.builder)
        for results in pipeline.run(self._batches(), lambda: self.deadline(_SEARCH_SHARE)):
            for variant, built in results:
                if isinstance(built, BuildFailure):
                    self._enter(variant, "build", Attempt(built.outcome, built.reason))
                elif reason := self._spill_reason(variant, built):
                    self._enter(variant, "build", Attempt("constraint", reason), built)
                elif (variant.problem, built.code_sha256) in self.examining:
                    followers.append((variant, built))
                else:
                    self.examining.add((variant.problem, built.code_sha256))
                    yield from self._in_time([(variant, built)])
            waiting, followers[:] = followers[:], []
            for variant, built in waiting:
                if (variant.problem, built.code_sha256) in self.examining:
                    followers.append((variant, built))
                else:
                    yield from self._in_time([(variant, built)])

    def _examine(self, items: Iterable[_Item]) -> None:
        """Examine and record `items`, each on whichever GPU is free."""
        for (variant, built), (attempt, shared_from) in self.lanes.map(self._examine_one, items):
            self.examining.discard((variant.problem, built.code_sha256))
            self._enter(variant, "screen", attempt, built, shared_from)

    def _examine_one(self, examiner: Examiner, item: _Item) -> tuple[Attempt, str]:
        variant, built = item
        twin = self.ledger.with_equal_code(variant, built)
        default = self.ledger.records.get((variant.problem, self.defaults[variant.problem]))
        launches = {
            length.tokens: screen_launches(
                default.median_us(length.tokens) if default else None, self.request.effort.launches
            )
            for length in self.request.lengths
        }
        attempt = examiner.examine(variant, built.cubin, launches, twin.samples if twin else ())
        return attempt, twin.config if twin else ""

    def _in_time(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """`items` while the search has time left; defaults, without which nothing counts, and plants in any case."""
        return (item for item in items if not self._is_late() or self._must_run(item[0]) or item[0].planted)

    def _must_run(self, variant: Variant) -> bool:
        return variant.config == self.defaults[variant.problem]

    def _spill_reason(self, variant: Variant, built: Built) -> str:
        """Why a variant is not measured, since no kernel that spills is to ship; or an empty string."""
        spilled = sum(used.spill_store_bytes + used.spill_load_bytes for used in built.resources.values())
        if not spilled or variant.planted or self._is_held(variant):
            return ""
        return f"spills {spilled} bytes per thread"

    def _is_held(self, variant: Variant) -> bool:
        """Whether others are held against this config, so that it is measured however bad it looks."""
        return (variant.problem, variant.config) in self._held_configs()

    def _held_configs(self) -> set[tuple[Problem, Config]]:
        incumbents = {(problem, c) for problem in self.request.problems for c in self.request.incumbents_of(problem)}
        return incumbents | set(self.defaults.items())

    def _enter(
        self, variant: Variant, phase: Phase, attempt: Attempt, built: Built | None = None, shared_from: str = ""
    ) -> None:
        record = self.ledger.enter(variant, phase, attempt, built, shared_from)
        searcher = self.ledger.searchers[variant.problem]
        best = next(iter(searcher.best()), None)
        left = self.deadline(1.0)
        self.listen(
            Attempted(
                record,
                best.name if best else None,
                1 / searcher.objectives[best] if best else None,
                dict(self.ledger.counts),
                self._progress(),
                None if left is None else max(0.0, left - time.monotonic()),
            )
        )

    def _progress(self) -> float:
        """Share of the search that is done: of its time or of its trials, whichever is further."""
        end = self.deadline(_SEARCH_SHARE)
        by_time = 0.0 if end is None else (time.monotonic() - self.start) / max(end - self.start, 1e-9)
        return min(1.0, max(by_time, self.ledger.share_of_trials()))

    def _is_late(self) -> bool:
        end = self.deadline(_SEARCH_SHARE)
        return end is not None and time.monotonic() >= end


def _build_timeout_s(request: Request) -> float:
    """For each compiler: none may take more than half of a short run, nor less than an honest one needs."""
    limit = request.build_timeout_s
    return limit if request.budget_s is None else min(limit, max(_LEAST_BUILD_TIMEOUT_S, request.budget_s / 2))


def _share(request: Request, tools: Tools) -> SharedStudies | None:
    """The run's part in searches that machines share; a journal is in one run's hands, so it names the machine."""
    if tools.storage is None:
        return None
    machine = f"{platform.node()}:{tools.journal.path.resolve()}"
    return SharedStudies(tools.storage, request.gpu.name, PROTOCOL, machine)


def _check_gpu(reply: Reply, gpu: Gpu) -> None:
    """The worker must see the GPU that the request names: CUDA may count devices in another order than NVML."""
    if reply.outcome != "ok":
        raise WorkerError(f"the worker cannot use its GPU: {reply.reason}", "check the machine with: sagegen doctor")
    seen = (reply.data["compute_capability"], reply.data["sms"])
    if seen != (gpu.compute_capability, gpu.sms):
        raise GpuMismatchError(
            f"the worker runs on {reply.data['product']} (sm_{seen[0]}, {seen[1]} SMs), which is not {gpu.name}",
            "check CUDA_VISIBLE_DEVICES, or name that GPU with --gpu",
        )
