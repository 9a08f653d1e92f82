"""`sagegen bench --around`: each parameter's measured effect around one config, a race per problem and length."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sagegen.cli.options import make_problem
from sagegen.cli.race import START_S, Ask, command_line, print_table

if TYPE_CHECKING:
    from sagegen.env import Env
    from sagegen.gpu import DetectedGpu, Gpu
    from sagegen.measuring.around import Around, Field
    from sagegen.measuring.contenders import Named
    from sagegen.measuring.goals import Leg
    from sagegen.measuring.race import Pace
    from sagegen.measuring.worker import Worker

#: Where the command line names none; races of 15 configs are long, so it is one.
_HEAD_DIM, _TOKENS = "128", 16384


def choose_around_legs(ask: Ask, named: Named) -> list[Leg]:
    """The kernel alone at every length asked for, of the problems asked for or of the one that `named` says."""
    from sagegen.measuring.goals import Leg
    from sagegen.problem import Shape

    asked = [make_problem(d, ask.dtype, causal) for d in ask.head_dims or (_HEAD_DIM,) for causal in ask.masks]
    problems = [named.problem] if named.problem else asked
    lengths = ask.tokens or (_TOKENS,)
    return [
        Leg(problem, Shape(ask.batch, ask.heads, ask.heads_kv, length, length), ("kernel",))
        for problem in problems
        for length in lengths
    ]


def run_around(gpu: Gpu, device: DetectedGpu, ask: Ask, describe: Callable[[DetectedGpu, Worker], Any]) -> None:
    """Race around the one config of `ask`, then print; files are written after each race.

    Args:
        describe: what a figure depends on beside the kernel.
    """
    from sagegen.env import read_env
    from sagegen.measuring.around import race_around
    from sagegen.measuring.contenders import parse_named
    from sagegen.measuring.race import estimate_seconds
    from sagegen.measuring.worker import Worker

    named = parse_named(ask.configs[0])
    legs = choose_around_legs(ask, named)
    fields = _gather(gpu, legs, named, read_env())
    with Worker(device.index) as worker:
        machine = describe(device, worker)
        seconds = estimate_seconds([(leg, own.contenders) for leg, own in fields], ask.pace, peers=()) + START_S
        configs = sum(len(own.contenders) for _, own in fields)
        click.echo(f"{len(legs)} races, {configs} kernels in all, about {seconds:.0f} s of the GPU", err=True)
        done: list[Around] = []
        for around in race_around(worker, fields, ask.pace):
            done.append(around)
            _write(done, machine, ask)
    _print(done, machine, ask)
    if any(row.variation is None and row.rival is None for around in done for row in around.rows()):
        raise SystemExit(1)


def _gather(gpu: Gpu, legs: Sequence[Leg], named: Named, env: Env) -> list[tuple[Leg, Field]]:
    """A leg's field, built once per problem."""
    from sagegen.measuring.around import gather_field

    click.echo("compiling the config and its variations", err=True)
    problems = dict.fromkeys(leg.problem for leg in legs)
    fields = {problem: gather_field(gpu, problem, named.config, env) for problem in problems}
    return [(leg, fields[leg.problem]) for leg in legs]


def _write(done: Sequence[Around], machine: Any, ask: Ask) -> None:
    from sagegen.measuring.around_report import around_markdown

    if ask.json_to not in (None, "-"):
        Path(str(ask.json_to)).write_text(_to_json(done, machine, ask.pace) + "\n")
    if ask.markdown:
        ask.markdown.write_text(around_markdown(done, machine, ask.pace, command_line()))


def _to_json(done: Sequence[Around], machine: Any, pace: Pace) -> str:
    rows = [around.as_values() for around in done]
    return json.dumps({"machine": machine, "command": command_line(), "pace": asdict(pace), "around": rows})


def _print(done: Sequence[Around], machine: Any, ask: Ask) -> None:
    from sagegen.measuring.around_report import AROUND_HEADINGS, around_rows

    if ask.json_to == "-":
        click.echo(_to_json(done, machine, ask.pace))
        return
    for around in done:
        title = f"{around.standing.leg.work}, kernel alone, around {around.field.winner.name}"
        print_table(title, AROUND_HEADINGS, around_rows(around))
        if around.standing.failure:
            click.echo(around.standing.failure)
    for file in (ask.json_to, ask.markdown):
        if file:
            click.echo(f"Written to {file}", err=True)
