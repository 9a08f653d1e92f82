"""One attempt on one GPU: the accuracy gate, then a short screen at every tuned length, with one second chance.

A worker that hangs or dies may have been damaged by an earlier candidate, so the suspect is run once more, alone, in a
fresh process, before the failure is held against it. A fresh process first runs a candidate that is proven: that warms
it up, and shows whether the GPU still works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from sagegen.errors import GpuLostError, WorkerError
from sagegen.measuring.jobs import Candidate, Gate, Job, Ping, Reply, Screen
from sagegen.measuring.telemetry import Conditions, find_loss
from sagegen.problem import Problem, Shape, TunedLength
from sagegen.tuning.effort import EFFORTS
from sagegen.tuning.journal import Outcome, Samples
from sagegen.tuning.variants import Variant

#: Batch x tokens of every screened shape: as many query tiles at 1K tokens as at 16K, so no length starves the GPU.
_TOKENS_PER_HEAD = 16384
_HEADS = 32

_PING_TIMEOUT_S = 120.0  # CUDA starts
_FIRST_TIMEOUT_S = 180.0  # of a step that a process does for the first time: CUDA starts, references are computed
_SHORTEST_TIMEOUT_S = 10.0
_SLACK = 8  # a step may take that many times the slowest seen
_SCREEN_US = 40_000.0  # of timed kernel launches per length
#: Of a worker that somebody else killed, or the system for want of memory: no candidate does that by itself.
_KILLED = "killed by SIGKILL"

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Runner(Protocol):
    """What examining needs of `worker.Worker`; tests put a fake in its place."""

    gpu_index: int

    @property
    def pid(self) -> int | None: ...

    def run(self, job: Job, timeout_s: float) -> Reply: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of examining a variant; `figures` of the gate are kept even when it is what failed.

    Attributes:
        first_failure: as in `journal.Record`.
    """

    outcome: Outcome
    reason: str = ""
    samples: tuple[Samples, ...] = ()
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    first_failure: str = ""


def tuned_shape(length: TunedLength) -> Shape:
    """The shape that a tuned length is measured at."""
    return Shape(max(1, _TOKENS_PER_HEAD // length.tokens), _HEADS, _HEADS, length.tokens, length.tokens)


def screen_launches(default_us: float | None, launches: tuple[int, int] = EFFORTS["full"].launches) -> int:
    """Timed launches of a screen, from the default config's kernel time where that is known.

    Args:
        launches: fewest and most.
    """
    fewest, most = launches
    return most if default_us is None else max(fewest, min(most, round(_SCREEN_US / default_us)))


@dataclass(slots=True)
class _Limits:
    """Timeouts that follow the slowest step seen, so that a hang costs seconds where steps take milliseconds."""

    _slowest: dict[tuple[str, bool], float] = field(default_factory=dict)

    def timeout_s(self, step: str, is_first: bool) -> float:
        slowest = self._slowest.get((step, is_first))
        return _FIRST_TIMEOUT_S if slowest is None else max(_SHORTEST_TIMEOUT_S, _SLACK * slowest)

    def saw(self, step: str, is_first: bool, seconds: float) -> None:
        self._slowest[step, is_first] = max(seconds, self._slowest.get((step, is_first), 0.0))


class Examiner:
    """Examines variants on one worker, one at a time.

    Args:
        worker: for one GPU.
        lengths: screened, in this order.
    """

    def __init__(self, worker: Runner, lengths: Sequence[TunedLength]) -> None:
        self.worker = worker
        self.stopped = threading.Event()
        self._lengths = lengths
        self._limits = _Limits()
        self._done: set[tuple[int | None, str, str]] = set()
        self._proven: dict[Problem, Candidate] = {}
        self._guests: tuple[int | None, set[str]] = (None, set())  # names of candidates that a process has run

    def examine(
        self, variant: Variant, cubin: Path, launches: Mapping[int, int], shared: tuple[Samples, ...] = ()
    ) -> Attempt:
        """Gate and screen a built variant.

        Args:
            launches: timed launches by tuned length.
            shared: times of a config with equal machine code, taken instead of screening.
        """
        start = time.monotonic()
        attempt = self._attempt(variant, cubin, launches, shared)
        if is_fatal(attempt) and not self.stopped.is_set():
            was_alone = self._was_alone(variant) and _KILLED not in attempt.reason
            self.renew(variant.problem)
            if not was_alone:
                first = f"{attempt.outcome}: {attempt.reason}"
                attempt = self._attempt(variant, cubin, launches, shared)
                if is_fatal(attempt):
                    self.renew(variant.problem)
                else:
                    attempt = replace(attempt, first_failure=first)
        if attempt.outcome == "ok":
            self._proven.setdefault(variant.problem, _candidate(variant, cubin))
        return replace(attempt, seconds=time.monotonic() - start)

    def renew(self, problem: Problem) -> None:
        """Kill the worker with all that it started, start another, and see whether the GPU still works in it.

        Raises:
            GpuLostError: it does not.
        """
        self.worker.close()
        try:
            reply = self.run(Ping(), _PING_TIMEOUT_S)
            proven = self._proven.get(problem)
            if reply.outcome == "ok" and proven is not None:
                reply = self._step("gate", problem, Gate(proven))
        except WorkerError as error:
            if self.stopped.is_set():
                raise
            reply = Reply("crash", error.message)
        if is_fatal(reply):
            index = self.worker.gpu_index
            said = find_loss(index)
            raise GpuLostError(
                f"GPU {index} does not answer any more, not even to a fresh process: {reply.outcome}: {reply.reason}"
                + (f" ({said})" if said else ""),
                "look at it with nvidia-smi, reset it or restart the machine; the same command then goes on",
            )

    def run(self, job: Job, timeout_s: float) -> Reply:
        """One job; a fault of the worker's own code gets a second try in a fresh process.

        Raises:
            WorkerError: it failed twice.
        """
        try:
            return self.worker.run(job, timeout_s)
        except WorkerError:
            self.worker.close()
            if self.stopped.is_set():
                raise
            return self.worker.run(job, timeout_s)

    def _attempt(
        self, variant: Variant, cubin: Path, launches: Mapping[int, int], shared: tuple[Samples, ...]
    ) -> Attempt:
        candidate = _candidate(variant, cubin)
        gate = self._step("gate", variant.problem, Gate(candidate))
        figures = _finite(gate.data.get("figures", {}))
        if gate.outcome != "ok":
            return Attempt(gate.outcome, gate.reason, figures=figures)
        if shared:
            return Attempt("ok", samples=shared, figures=figures)
        samples = []
        for length in self._lengths:
            shape = tuned_shape(length)
            job = Screen(candidate, shape, launches=launches[length.tokens])
            screen = self._step(f"screen{length.tokens}", variant.problem, job)
            if screen.outcome != "ok":
                return Attempt(screen.outcome, f"at {length.tokens} tokens: {screen.reason}", figures=figures)
            samples.append(make_samples(shape, screen.data))
        return Attempt("ok", samples=tuple(samples), figures=figures)

    def _step(self, step: str, problem: Problem, job: Job) -> Reply:
        is_first = self.worker.pid is None or (self.worker.pid, step, problem.name) not in self._done
        start = time.monotonic()
        reply = self.run(job, self._limits.timeout_s(step, is_first))
        if isinstance(job, Gate):
            self._note_guest(job.candidate)
        if reply.outcome in ("ok", "accuracy"):
            self._limits.saw(step, is_first, time.monotonic() - start)
            self._done.add((self.worker.pid, step, problem.name))
        return reply

    def _note_guest(self, candidate: Candidate) -> None:
        """Remember whom this process has run."""
        pid, names = self._guests
        if pid != self.worker.pid and self.worker.pid is not None:
            pid, names = self.worker.pid, set()
        self._guests = (pid, names | {candidate.name})

    def _was_alone(self, variant: Variant) -> bool:
        """Whether the process has run nobody but `variant` and proven candidates."""
        return self._guests[1] - {candidate.name for candidate in self._proven.values()} <= {variant.name}


def is_fatal(outcome: Attempt | Reply) -> bool:
    """Whether it cost the worker its life."""
    return outcome.outcome in ("crash", "timeout")


def _candidate(variant: Variant, cubin: Path) -> Candidate:
    return Candidate(str(cubin), variant.problem.name, variant.config.name)


def _finite(figures: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict[str, float]]:
    """Figures without those that are NaN or Inf, which come through JSON as null."""
    return {
        kind: {name: value for name, value in values.items() if value is not None} for kind, values in figures.items()
    }


def make_samples(shape: Shape, data: Mapping[str, Any]) -> Samples:
    """What a worker measured at a shape: `kernel_us`, `call_us`, and `warm_us` and `conditions` if they are there."""
    conditions = data.get("conditions")
    return Samples(
        shape.kv_len,
        shape.batch,
        shape.heads_q,
        shape.heads_kv,
        tuple(data["kernel_us"]),
        tuple(data["call_us"]),
        tuple(data.get("warm_us", ())),
        None if conditions is None else msgspec.convert(conditions, Conditions),
    )


class Lanes:
    """One thread per GPU, each with its examiner: a worker dies with the thread that started it.

    Args:
        examiners: one per GPU, at least one.
    """

    def __init__(self, examiners: Sequence[Examiner]) -> None:
        self.examiners = tuple(examiners)
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="sagegen-lane") for _ in examiners]

    def each(self, work: Callable[[Examiner], Answer]) -> list[Future[Answer]]:
        """`work` once on every lane."""
        return [thread.submit(work, examiner) for thread, examiner in zip(self._threads, self.examiners, strict=True)]

    def map(self, work: Callable[[Examiner, Item], Answer], items: Iterable[Item]) -> Iterator[tuple[Item, Answer]]:
        """`work` of every item on whichever lane is free, as they finish; the next item is taken when a lane is."""
        waiting = iter(items)
        free = list(range(len(self.examiners)))
        running: dict[Future[Answer], tuple[int, Item]] = {}
        while True:
            while free and (item := next(waiting, None)) is not None:
                lane = free.pop()
                running[self._threads[lane].submit(work, self.examiners[lane], item)] = (lane, item)
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                lane, item = running.pop(future)
                free.append(lane)
                yield item, future.result()

    def close(self) -> None:
        """Kill every worker, whatever it is doing, and end the threads; what they were doing is lost."""
        for examiner in self.examiners:
            examiner.stopped.set()
            examiner.worker.close()
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        for examiner in self.examiners:
            examiner.worker.close()  # one may have been started in between
