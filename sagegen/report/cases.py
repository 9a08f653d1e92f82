"""What a report tells of each problem and length: attempts, standings, registry entries and predictions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sagegen.entry import Entry, is_fine
from sagegen.gpu import Gpu
from sagegen.problem import Problem, Shape, parse_problem
from sagegen.report.failures import Failure, group_failures
from sagegen.report.figure import Figure
from sagegen.space import Config, parse_config
from sagegen.tuning.distances import CaseDistances, Distance, find_distances
from sagegen.tuning.journal import Record
from sagegen.tuning.model import Measured, predict

_SHAPE = re.compile(r"b(\d{1,7}) h(\d{1,7})/(\d{1,7}) q(\d{1,8}) kv(\d{1,8})")


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
    """

    entry: Entry
    shape: Shape | None

    @property
    def call(self) -> Figure | None:
        figures = self.entry.figures
        return self._figure(figures.full_us, figures.predicted_full_us)

    @property
    def kernel(self) -> Figure | None:
        figures = self.entry.figures
        return self._figure(figures.kernel_us, figures.predicted_us)

    @property
    def sdpa(self) -> Figure | None:
        """Time of torch SDPA's call, by the ratio to this entry's that the same rounds gave; only where measured."""
        ratio, call = self.entry.figures.speed_vs_sdpa, self.call
        return call.scaled(ratio) if ratio and call and not call.is_predicted else None

    def _figure(self, measured: float | None, predicted: float | None) -> Figure | None:
        """What was measured, if the entry is of a measurement; a predicted entry has no other kind of time."""
        if self.entry.measured:
            return None if measured is None else Figure(measured, "measured")
        guess = predicted if predicted is not None else measured
        return None if guess is None else Figure(guess, "predicted")


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


def collect(records: Sequence[Record], entries: Sequence[Entry], gpu: Gpu) -> list[ProblemFacts]:
    """The problems of one GPU: those of the journals, or of the registry where there is no journal.

    Args:
        records: sound ones (`sources.keep_sound`), of any GPU.
        entries: of `gpu`'s registry.
        gpu: with a probe's rates, if there is a probe; the model takes them.
    """
    own = [record for record in records if record.gpu == gpu.name]
    distances = find_distances(own)
    names = dict.fromkeys(record.problem for record in own) or dict.fromkeys(entry.problem for entry in entries)
    return [
        _collect_problem(
            parse_problem(name),
            [record for record in own if record.problem == name],
            [distance for distance in distances if distance.problem == name],
            [Tuned(entry, _parse_shape(entry.provenance.shape)) for entry in entries if entry.problem == name],
            gpu,
        )
        for name in names
    ]


def _collect_problem(
    problem: Problem, records: Sequence[Record], standings: Sequence[CaseDistances], tuned: Sequence[Tuned], gpu: Gpu
) -> ProblemFacts:
    shapes = {
        samples.tokens: Shape(samples.batch, samples.heads_q, samples.heads_kv, samples.tokens, samples.tokens)
        for record in records
        for samples in record.samples
    }
    shapes.update({each.shape.kv_len: each.shape for each in tuned if each.shape and each.shape.kv_len not in shapes})
    attempts = tuple(_attempts(problem, records, shapes, gpu))
    cases = tuple(
        Case(
            gpu,
            problem,
            shapes[tokens],
            attempts,
            tuple(standing for standing in standings if standing.tokens == tokens),
            _final_calls(records, tokens),
            tuple(each for each in tuned if each.shape == shapes[tokens]),
        )
        for tokens in sorted(shapes)
    )
    return ProblemFacts(gpu, problem, attempts, cases, tuple(tuned), tuple(group_failures(records)))


def _final_calls(records: Sequence[Record], tokens: int) -> dict[str, Figure]:
    finals = ((r.config, s) for r in records if r.phase == "final" for s in r.samples if s.tokens == tokens)
    return {config: Figure(samples.median_call_us, "measured") for config, samples in finals}


def _attempts(problem: Problem, records: Sequence[Record], shapes: Mapping[int, Shape], gpu: Gpu) -> Iterator[Attempt]:
    tried = [record for record in records if record.phase in ("build", "screen")]
    for number, record in enumerate(tried, start=1):
        config = parse_config(record.config)
        yield Attempt(
            number,
            record,
            config,
            {samples.tokens: Figure(samples.median_call_us, "measured") for samples in record.samples},
            {samples.tokens: Figure(samples.median_us, "measured") for samples in record.samples},
            predict_calls(config, problem, record, shapes, gpu) if record.samples else {},
            is_fine(record.figures, problem.precision),
        )


def predict_calls(
    config: Config, problem: Problem, record: Record, shapes: Mapping[int, Shape], gpu: Gpu
) -> dict[int, Figure]:
    """The model's times of full calls by tokens, in microseconds, from what ptxas said of the kernel."""
    used = record.resources.get("attention", {})
    spilled = used.get("spill_store_bytes", 0) + used.get("spill_load_bytes", 0)
    measured = Measured(used["registers"], spilled) if 0 < used.get("registers", 0) <= 255 else None
    times = {tokens: predict(config, problem, shape, gpu, measured).call_us for tokens, shape in shapes.items()}
    return {tokens: Figure(us, "predicted") for tokens, us in times.items() if 0 < us < math.inf}


def _parse_shape(text: str) -> Shape | None:
    """The shape that an entry's provenance spells, `b1 h32/32 q4096 kv4096`; None if it says something else."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        return None
    batch, heads_q, heads_kv, q_len, kv_len = map(int, match.groups())
    is_call = min(batch, heads_q, heads_kv, q_len, kv_len) > 0 and heads_q % max(heads_kv, 1) == 0
    return Shape(batch, heads_q, heads_kv, q_len, kv_len) if is_call and kv_len <= 1 << 24 else None
