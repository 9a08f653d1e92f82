"""What the page holds: its parts, each with its charts and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from sagegen.gpu import Gpu, find_gpu
from sagegen.probing.result import measured_gpu, parse_result
from sagegen.report import accuracy_charts, result_charts, search_charts, tables
from sagegen.report.cases import Case, ProblemFacts
from sagegen.report.collection import collect
from sagegen.report.drawing import Chart
from sagegen.report.importance import find_agreement, find_influences, main_family
from sagegen.report.races import Race, draw_race
from sagegen.report.sources import Inputs
from sagegen.report.standings import make_rows
from sagegen.report.tables import Table

_PRECISIONS = {"int8": "INT8", "int4": "INT4"}


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart with the table of its numbers."""

    chart: Chart
    table: Table | None = None
    is_tall: bool = False


@dataclass(frozen=True, slots=True)
class CasePart:
    """A length's part of the page."""

    case: Case
    key: str
    panels: tuple[Panel, ...]
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class ProblemPart:
    """A problem's part of the page. `name` has the GPU's, too, where there are several."""

    facts: ProblemFacts
    name: str
    title: str
    panels: tuple[Panel, ...]
    outcomes: Panel | None
    races: tuple[Panel, ...]
    failures: Table
    entries: Table
    attempts: Table
    cases: tuple[CasePart, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """All of it.

    Attributes:
        origin: `measured` if every problem was, `predicted` if none was, else `mixed`.
        basis: which limits and rates the model and the rooflines took, by GPU.
        model_errors: what predicted entries say of how far off the model may be.
    """

    title: str
    origin: str
    gpus: tuple[Gpu, ...]
    products: tuple[str, ...]
    problems: tuple[ProblemPart, ...]
    inputs: Inputs
    basis: tuple[str, ...]
    model_errors: tuple[str, ...]
    command: str


def make_page(inputs: Inputs, probe: Path | None, command: str) -> Page:
    """Lay out the page.

    Args:
        probe: file of `sagegen probe`, for the GPU that it names.
        command: what made the page, for its last line.

    Raises:
        ProbeError: the probe's file is malformed, or of a GPU that the inputs do not have.
    """
    gpus = _with_probe([find_gpu(name) for name in inputs.gpus], probe)
    facts = [each for gpu in gpus for each in collect(inputs.records, inputs.entries.get(gpu.name, ()), gpu)]
    parts = [_make_problem(each, inputs.races, has_others=len(gpus) > 1) for each in facts]
    if parts and parts[0].cases:
        opened = (*parts[0].cases[:-1], replace(parts[0].cases[-1], is_open=True))
        parts[0] = replace(parts[0], cases=opened)
    measured = {each.is_measured for each in facts}
    origin = "mixed" if len(measured) > 1 else "measured" if measured == {True} else "predicted"
    names = ", ".join(gpu.products[0] for gpu in gpus)
    return Page(
        f"Attention kernels for {names}{', predicted' if origin == 'predicted' else ''}",
        origin,
        tuple(gpus),
        tuple(dict.fromkeys(_machines(inputs))),
        tuple(parts),
        inputs,
        tuple(_describe_basis(gpu, probe) for gpu in gpus),
        describe_errors(msgspec.to_builtins(tuned.entry.provenance) for each in facts for tuned in each.tuned),
        command,
    )


def _with_probe(gpus: Sequence[Gpu], probe: Path | None) -> list[Gpu]:
    """The GPUs, of which the probe's own has its rates; ProbeError where that is none of them."""
    if probe is None:
        return list(gpus)
    probed = parse_result(probe.read_text(encoding="utf-8"), str(probe)).gpu
    known = any(gpu.name == probed for gpu in gpus)
    return [measured_gpu(gpu, probe) if gpu.name == probed or not known else gpu for gpu in gpus]


def _machines(inputs: Inputs) -> Iterator[str]:
    for record in inputs.records:
        if record.product:
            nvcc = record.nvcc.split(" ")[0]
            yield f"{record.product}, driver {record.driver or '?'}, nvcc {nvcc or '?'}"


def describe_errors(provenances: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """What predicted entries' provenance says of the model's error, each once; registries of old say nothing."""
    found = (
        f"Nine of ten of the model's times were within {each['model_error']:.0%} of what "
        f"{each.get('model_checked_on') or 'another GPU'} measured; on other GPUs its error is not known."
        for each in provenances
        if each["kind"] == "predicted" and each.get("model_error") is not None
    )
    return tuple(sorted(set(found)))


def _describe_basis(gpu: Gpu, probe: Path | None) -> str:
    if gpu.measured.matrix or gpu.measured.units:
        return f"{gpu.name}: rates measured by sagegen probe ({probe.name if probe else ''})"
    return f"{gpu.name}: no probe was named, so rates are those of the table of GPUs ({gpu.source}), not measured here"


def _make_problem(facts: ProblemFacts, races: Sequence[Race], has_others: bool) -> ProblemPart:
    drawn = (
        (result_charts.draw_lengths(facts), tables.lengths_table(facts)),
        (result_charts.draw_roofline(facts), tables.limits_table(facts)),
        (accuracy_charts.draw_accuracy(facts), tables.accuracy_table(facts)),
    )
    problem, outcomes = facts.problem, search_charts.draw_outcomes(facts)
    title = f"Head dim {problem.head_dim}, {problem.dtype}, {problem.mask}, {_PRECISIONS[problem.precision]}"
    return ProblemPart(
        facts,
        f"{facts.gpu.name} {problem.name}" if has_others else problem.name,
        title + (", ragged" if problem.is_ragged else ""),
        tuple(_panels(drawn)),
        Panel(outcomes) if outcomes else None,
        tuple(
            Panel(draw_race(race), tables.race_table(race))
            for race in races
            if (race.gpu, race.problem) == (facts.gpu.name, facts.problem.name)
        ),
        tables.failures_table(facts),
        tables.entries_table(facts),
        tables.attempts_table(facts),
        tuple(_make_case(case, facts) for case in facts.cases),
    )


def _make_case(case: Case, facts: ProblemFacts) -> CasePart:
    family = main_family(case.timed)
    own = [attempt for attempt in case.timed if attempt.config.family == family]
    influences = find_influences(own, case.tokens)
    rows = make_rows(case)
    agreement = find_agreement(
        {a.name: a.predicted[case.tokens].value for a in case.timed if case.tokens in a.predicted},
        {a.name: a.call[case.tokens].value for a in case.timed},
    )
    drawn: tuple[tuple[Chart | None, Table | None], ...] = (
        (result_charts.draw_standings(rows), tables.standings_table(case, rows)),
        (search_charts.draw_progress(case), tables.progress_table(case)),
        (accuracy_charts.draw_pareto(case), None),
        (result_charts.draw_agreement(case, agreement), None),
    )
    parameters = search_charts.draw_parameters(case, influences, own)
    tall = [Panel(parameters, tables.parameters_table(influences), True)] if parameters else []
    panels = [*_panels(drawn), *tall]
    return CasePart(case, f"{facts.key}-{case.tokens}", tuple(panels))


def _panels(drawn: Iterable[tuple[Chart | None, Table | None]]) -> Iterator[Panel]:
    return (Panel(chart, table) for chart, table in drawn if chart is not None)
