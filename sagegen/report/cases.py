"""What a report tells of each problem and length: attempts, standings, registry entries and predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sagegen.entry import Entry, MeasuredTime, PredictedTime
from sagegen.gpu import Gpu
from sagegen.problem import Problem, Shape
from sagegen.report.failures import Failure
from sagegen.report.figure import Figure, is_time
from sagegen.space import Config
from sagegen.tuning.distances import CaseDistances, Distance
from sagegen.tuning.journal import Record


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a config of a problem, in the order of the journal.

    Attributes:
        number: from 1, of the problem.
        call, kernel: measured medians by tokens, in microseconds; empty unless the outcome is `ok`.
        predicted: the model's times of full calls, by tokens.
    """

    number: int
    record: Record
    config: Config
    call: Mapping[int, Figure]
    kernel: Mapping[int, Figure]
    predicted: Mapping[int, Figure]
    is_fine: bool

    @property
    def name(self) -> str:
        return self.record.config

    @property
    def error(self) -> float | None:
        """1 - cosine against FP64 on normal inputs; None where it was not measured."""
        figures = self.record.figures.get("normal")
        return None if figures is None else max(1 - figures["cosine"], 1e-9)


@dataclass(frozen=True, slots=True)
class Tuned:
    """A registry entry, with times that know whether they were measured.

    Attributes:
        shape: that its figures are of; None where the entry does not say so in sagegen's words.
        guess: the model's time of the full call, for an entry that was measured.
    """

    entry: Entry
    shape: Shape | None
    guess: Figure | None = None

    @property
    def call(self) -> Figure | None:
        return _figure(self.entry.call_time)

    @property
    def kernel(self) -> Figure | None:
        return _figure(self.entry.kernel_time)

    @property
    def sdpa(self) -> Figure | None:
        """Time of torch SDPA's call, by the ratio to this entry's that the same rounds gave; only where measured."""
        ratio, call = self.entry.figures.speed_vs_sdpa, self.call
        is_known = ratio and call and not call.is_predicted and is_time(call.value * ratio)
        return call.scaled(ratio) if ratio and call and is_known else None


def _figure(time: MeasuredTime | PredictedTime | None) -> Figure | None:
    if time is None or not is_time(time.us):
        return None
    return Figure(time.us, "predicted" if isinstance(time, PredictedTime) else "measured")


@dataclass(frozen=True, slots=True)
class Case:
    """One problem at one length.

    Attributes:
        attempts: of the problem, all of them, failures too.
        standings: winners with who is behind them, one or two tiers; () without a journal.
        final_calls: full calls of the finals at this length, by config.
        tuned: registry entries that were tuned at this shape.
    """

    gpu: Gpu
    problem: Problem
    shape: Shape
    attempts: tuple[Attempt, ...]
    standings: tuple[CaseDistances, ...]
    final_calls: Mapping[str, Figure]
    tuned: tuple[Tuned, ...]

    @property
    def tokens(self) -> int:
        return self.shape.kv_len

    @property
    def operations(self) -> float:
        return self.shape.flops(self.problem)

    @property
    def timed(self) -> list[Attempt]:
        """The attempts that were timed at this length."""
        return [attempt for attempt in self.attempts if self.tokens in attempt.call]

    @property
    def winner(self) -> str | None:
        """Config of the fastest tier: by the journal, else by the registry."""
        if self.standings:
            return self.standings[0].distances[0].config
        return self.tuned[0].entry.config if self.tuned else None

    def attempt_of(self, config: str | None) -> Attempt | None:
        """The last attempt at a config that was timed at this length."""
        return next((attempt for attempt in reversed(self.timed) if attempt.name == config), None)

    def call_of(self, distance: Distance) -> Figure | None:
        """Measured full call of who is listed in a standing, from the phase that its other times are from."""
        if distance.phase == "final":
            return self.final_calls.get(distance.config)
        attempt = self.attempt_of(distance.config)
        return attempt.call[self.tokens] if attempt else None

    @property
    def best_call(self) -> Figure | None:
        """Full call of the winner."""
        if self.standings:
            return self.call_of(self.standings[0].distances[0])
        return self.tuned[0].call if self.tuned else None

    @property
    def best_kernel(self) -> Figure | None:
        """Attention kernel of the winner, by its finals where it had some."""
        if self.standings:
            return Figure(self.standings[0].distances[0].kernel_us, "measured")
        return self.tuned[0].kernel if self.tuned else None

    @property
    def speed_vs_default(self) -> float | None:
        """Of the winner's full call over the default config's; a registry only compares their kernels."""
        for standing in self.standings[:1]:
            return next((d.behind for d in standing.distances if d.role == "default"), None)
        return None

    @property
    def sdpa(self) -> Figure | None:
        """Full call of torch's fastest backend, where a registry has it."""
        return next((tuned.sdpa for tuned in self.tuned if tuned.sdpa is not None), None)

    @property
    def speed_vs_sdpa(self) -> float | None:
        """Of the winner's full call, as its registry entry has it from rounds that both ran in."""
        own = (tuned.entry.figures.speed_vs_sdpa for tuned in self.tuned if tuned.entry.config == self.winner)
        return next((ratio for ratio in own if ratio), None)

    @property
    def guess(self) -> Figure | None:
        """The model's time of the winner's full call, where that was measured."""
        attempt = self.attempt_of(self.winner)
        if attempt is not None:
            return attempt.predicted.get(self.tokens)
        return self.tuned[0].guess if self.tuned and not self.standings else None

    @property
    def winner_accuracy(self) -> tuple[Mapping[str, Mapping[str, float]], str]:
        """The winner's figures by kind of inputs, and where they were taken: `the GPU`, `emulator`, or "" of none."""
        attempt = self.attempt_of(self.winner)
        if attempt is not None and attempt.record.figures:
            return attempt.record.figures, "the GPU"
        for tuned in self.tuned:
            if tuned.entry.config == self.winner and tuned.entry.accuracy:
                return tuned.entry.known_figures, tuned.entry.provenance.accuracy_from or "the GPU"
        return {}, ""


@dataclass(frozen=True, slots=True)
class ProblemFacts:
    """A problem on a GPU: attempts, a case per length, all registry entries, and what failed in any phase."""

    gpu: Gpu
    problem: Problem
    attempts: tuple[Attempt, ...]
    cases: tuple[Case, ...]
    tuned: tuple[Tuned, ...]
    failures: tuple[Failure, ...]

    @property
    def key(self) -> str:
        """For anchors."""
        return f"{self.gpu.name}-{self.problem.name}"

    @property
    def is_measured(self) -> bool:
        """Whether anything of it was timed on the GPU."""
        return any(case.best_call is not None and not case.best_call.is_predicted for case in self.cases)
