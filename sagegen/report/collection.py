"""From the records and entries of a GPU to what the page tells of its problems, with the model's times beside."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from sagegen.entry import Entry, is_fine
from sagegen.gpu import Gpu
from sagegen.problem import Problem, Shape, parse_problem
from sagegen.report.cases import Attempt, Case, ProblemFacts, Tuned
from sagegen.report.failures import group_failures
from sagegen.report.figure import Figure, is_time
from sagegen.report.sources import MOST_TOKENS
from sagegen.space import Config, parse_config
from sagegen.tuning.distances import CaseDistances, find_distances
from sagegen.tuning.journal import Record
from sagegen.tuning.model import Measured, predict

_SHAPE = re.compile(r"b(\d{1,7}) h(\d{1,7})/(\d{1,7}) q(\d{1,8}) kv(\d{1,8})")


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
            [_make_tuned(entry, gpu) for entry in entries if entry.problem == name],
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
            _predict_calls(config, problem, _used(record), shapes, gpu) if record.samples else {},
            is_fine(record.figures, problem.precision),
        )


def _used(record: Record) -> Measured | None:
    """What ptxas said of the attention kernel, where that can be."""
    used = record.resources.get("attention", {})
    spilled = used.get("spill_store_bytes", 0) + used.get("spill_load_bytes", 0)
    return Measured(used["registers"], spilled) if 0 < used.get("registers", 0) <= 255 else None


def _make_tuned(entry: Entry, gpu: Gpu) -> Tuned:
    shape, used = _parse_shape(entry.provenance.shape), entry.resources
    if shape is None or entry.config is None or not entry.measured:
        return Tuned(entry, shape)
    measured = Measured(used.registers, used.spill_bytes) if used and 0 < used.registers <= 255 else None
    config, problem = parse_config(entry.config), parse_problem(entry.problem)
    return Tuned(entry, shape, _predict_calls(config, problem, measured, {shape.kv_len: shape}, gpu).get(shape.kv_len))


def _predict_calls(
    config: Config, problem: Problem, used: Measured | None, shapes: Mapping[int, Shape], gpu: Gpu
) -> dict[int, Figure]:
    """The model's times of full calls by tokens, in microseconds, from what ptxas said of the kernel."""
    times = {tokens: predict(config, problem, shape, gpu, used).call_us for tokens, shape in shapes.items()}
    return {tokens: Figure(us, "predicted") for tokens, us in times.items() if is_time(us)}


def _parse_shape(text: str) -> Shape | None:
    """The shape that an entry's provenance spells, `b1 h32/32 q4096 kv4096`; None if it says something else."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        return None
    batch, heads_q, heads_kv, q_len, kv_len = map(int, match.groups())
    is_call = min(batch, heads_q, heads_kv, q_len, kv_len) > 0 and heads_q % max(heads_kv, 1) == 0
    return Shape(batch, heads_q, heads_kv, q_len, kv_len) if is_call and max(q_len, kv_len) <= MOST_TOKENS else None
