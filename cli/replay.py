"""`sagegen tune --replay`: recorded journals searched again, sampler beside sampler."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from sagegen.cli.tuning_options import TuneOptions, was_given
from sagegen.errors import ArgumentError
from sagegen.tuning.strategy import DEFAULT_SAMPLER, SAMPLERS, Sampler, Strategy

if TYPE_CHECKING:
    from sagegen.problem import Problem
    from sagegen.tuning.replay import Excess, Landscape, Replayed

_WIDTH = 200
_Course = Mapping[Sampler, list["Replayed"]]


def run_replay(asked: TuneOptions) -> None:
    """Search every recorded problem that the options leave, once per seed and sampler, and print how it went."""
    from sagegen.tuning.replay import DEFAULT_TRIALS, read_landscapes, replay_searches

    samplers = [asked.sampler] if asked.sampler else _present_samplers()
    landscapes = [found for path in asked.replay for found in read_landscapes(path) if _is_wanted(asked, found.problem)]
    if not landscapes:
        raise click.UsageError("the journals have nothing of these head dims, dtypes and masks")
    seeds = range(asked.seed, asked.seed + asked.seeds)
    courses: list[tuple[Landscape, _Course]] = []
    for landscape in landscapes:
        course = {
            own: replay_searches(landscape, Strategy(own, starts=asked.starts), seeds, asked.trials or DEFAULT_TRIALS)
            for own in samplers
        }
        courses.append((landscape, course))
        click.echo(f"{landscape.journal} {landscape.problem.name}: {asked.seeds} searches by each sampler", err=True)
    if asked.as_json:
        click.echo(json.dumps(_to_json(courses, asked)))
    else:
        _print(courses, samplers)


def _present_samplers() -> list[Sampler]:
    """All samplers that this installation has what it takes for; says which it lacks."""
    from sagegen.tuning.proposer import check_sampler

    present: list[Sampler] = []
    for sampler in SAMPLERS:
        try:
            check_sampler(sampler)
        except ArgumentError as error:
            click.echo(f"Left out: {error.message}; {error.remedy}", err=True)
        else:
            present.append(sampler)
    return present


def _is_wanted(asked: TuneOptions, problem: Problem) -> bool:
    """Whether the options that were given name this problem; those that were not leave all."""
    wanted = {
        "head_dims": str(problem.head_dim) in asked.head_dims,
        "dtypes": problem.dtype in asked.dtypes,
        "mask": asked.mask in (problem.mask, "both"),
        "precision": problem.precision == asked.precision,
    }
    return all(holds for name, holds in wanted.items() if was_given(name))


def _pooled(courses: Iterable[tuple[Landscape, _Course]], sampler: Sampler) -> list[Replayed]:
    return [replayed for _, course in courses for replayed in course[sampler]]


def _excess(courses: Iterable[tuple[Landscape, _Course]], sampler: Sampler) -> Excess:
    """Trials until every length is near that `sampler` needs more than the default, problem by problem."""
    from sagegen.tuning.replay import excess

    own, default = (
        [fmean(replayed.everywhere for replayed in course[name]) for _, course in courses]
        for name in (sampler, DEFAULT_SAMPLER)
    )
    return excess(own, default)


def _to_json(courses: list[tuple[Landscape, _Course]], asked: TuneOptions) -> dict[str, Any]:
    from sagegen.tuning.replay import DEFAULT_TRIALS, NEAR, spread

    def describe(found: list[Replayed]) -> dict[str, Any]:
        return {
            "everywhere": asdict(spread([own.everywhere for own in found])),
            "overall": asdict(spread([own.overall for own in found])),
        }

    samplers = list(courses[0][1])
    problems = [
        {
            "journal": landscape.journal,
            "gpu": landscape.target.gpu.name,
            "problem": landscape.problem.name,
            "tokens": landscape.tokens,
            "configs": len(landscape.records),
            "samplers": {sampler: describe(course[sampler]) for sampler in samplers},
        }
        for landscape, course in courses
    ]
    everything = {sampler: describe(_pooled(courses, sampler)) for sampler in samplers}
    if DEFAULT_SAMPLER in samplers:
        for sampler in samplers:
            everything[sampler]["excess"] = asdict(_excess(courses, sampler))
    return {
        "within": NEAR,
        "trials": asked.trials or DEFAULT_TRIALS,
        "seed": asked.seed,
        "seeds": asked.seeds,
        "starts": asked.starts,
        "problems": problems,
        "all": everything,
    }


def _print(courses: list[tuple[Landscape, _Course]], samplers: list[Sampler]) -> None:
    from rich.console import Console
    from rich.table import Table

    from sagegen.tuning.replay import spread

    table = Table("journal", "problem", box=None, header_style="bold")
    table.title = "trials until every length is within 2 % of the best recorded: median (quartiles)"
    table.title_justify = "left"
    for heading in ("configs", *samplers):
        table.add_column(heading, justify="right")
    for landscape, course in courses:
        spreads = [spread([own.everywhere for own in course[sampler]]) for sampler in samplers]
        cells = [f"{own.median:g} ({own.low:g}-{own.high:g})" for own in spreads]
        table.add_row(landscape.journal, landscape.problem.name, str(len(landscape.records)), *cells)
    everywhere = [spread([own.everywhere for own in _pooled(courses, sampler)]) for sampler in samplers]
    overall = [spread([own.overall for own in _pooled(courses, sampler)]) for sampler in samplers]
    table.add_section()
    for name, spreads in (("every length", everywhere), ("mean of the lengths", overall)):
        table.add_row("all", f"{name}: median", "", *(f"{own.median:g}" for own in spreads))
        table.add_row("all", f"{name}: mean", "", *(f"{own.mean:.1f}" for own in spreads))
        table.add_row("all", f"{name}: nine in ten", "", *(f"{own.most:g}" for own in spreads))
    if DEFAULT_SAMPLER in samplers and len(samplers) > 1:
        excesses = [_excess(courses, sampler) for sampler in samplers]
        cells = [f"{own.mean:+.1f} ({own.low:+.1f} to {own.high:+.1f})" for own in excesses]
        table.add_row("all", f"every length: more than {DEFAULT_SAMPLER}, 95 %", "", *cells)
    # wider than a terminal: a line per problem can be searched
    Console(width=max(Console().width, _WIDTH)).print(table)
