"""`sagegen bench --peers`: which shapes race, the races one after another, and their tables."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sagegen.cli.options import make_problem

if TYPE_CHECKING:
    from sagegen.gpu import DetectedGpu, Gpu
    from sagegen.measuring.goals import Leg
    from sagegen.measuring.race import Pace, Standing
    from sagegen.measuring.worker import Worker

_WIDTH = 400
#: Starting the worker, importing torch, cuDNN's plans: a guess that `--peers` adds to its estimate.
START_S = 20.0


@dataclass(frozen=True, slots=True)
class Ask:
    """What the command line asks for; empty `tokens` are the goals' rows, empty `head_dims` are TUNED_HEAD_DIMS.

    Attributes:
        configs: as `contenders.parse_named` reads them; none: the registry's. With `--around` it is one.
        json_to, markdown: files to write, `-` is stdout.
    """

    head_dims: tuple[str, ...]
    masks: tuple[bool, ...]
    tokens: tuple[int, ...]
    dtype: str
    batch: int
    heads: int
    heads_kv: int
    configs: tuple[str, ...]
    pace: Pace
    json_to: str | None
    markdown: Path | None


def choose_legs(ask: Ask) -> list[Leg]:
    """The goals' shapes, those of some head dims and masks, or, where lengths are given, kernel and call at these."""
    from sagegen.measuring.goals import Leg, goal_legs
    from sagegen.problem import TUNED_HEAD_DIMS, Shape

    problems = [make_problem(d, ask.dtype, c) for d in ask.head_dims or map(str, TUNED_HEAD_DIMS) for c in ask.masks]
    if not ask.tokens:
        legs = goal_legs(problems[0].dtype, ask.batch, ask.heads, ask.heads_kv)
        return [leg for leg in legs if leg.problem in problems]
    shapes = [Shape(ask.batch, ask.heads, ask.heads_kv, length, length) for length in ask.tokens]
    return [Leg(problem, shape, ("kernel", "call")) for problem in problems for shape in shapes]


def run_races(gpu: Gpu, device: DetectedGpu, ask: Ask, describe: Callable[[DetectedGpu, Worker], Any]) -> None:
    """Race at every shape, then print; files are written after each race, so that a run cut short leaves its rows.

    Args:
        describe: what a figure depends on beside the kernel.
    """
    from sagegen.env import read_env
    from sagegen.measuring.contenders import gather_contenders, parse_named
    from sagegen.measuring.race import estimate_seconds, hold_races
    from sagegen.measuring.worker import Worker

    legs = choose_legs(ask)
    if not legs:
        raise click.UsageError("none of the rows with goals is of this head dim and mask; add --tokens")
    named = [parse_named(name) for name in ask.configs]
    standings: list[Standing] = []
    with tempfile.TemporaryDirectory(prefix="sagegen-") as folder, Worker(device.index) as worker:
        cases = [(leg.problem, leg.shape.kv_len) for leg in legs]
        contenders = gather_contenders(gpu, cases, named, read_env(), Path(folder))
        field = [(leg, contenders[leg.problem, leg.shape.kv_len]) for leg in legs]
        seconds = estimate_seconds(field, ask.pace) + START_S
        click.echo(f"{len(legs)} races, about {seconds:.0f} s of the GPU", err=True)
        machine = describe(device, worker)
        for standing in hold_races(worker, field, ask.pace):
            standings.append(standing)
            _write(standings, machine, ask)
            click.echo(_progress(standing), err=True)
    _print(standings, machine, ask)
    if any(standing.failure for standing in standings):
        raise SystemExit(1)


def _progress(standing: Standing) -> str:
    from sagegen.measuring.race_report import LABELS

    if standing.failure:
        return f"{standing.leg.work}: {standing.failure}"
    rates = ((LABELS.get(name, name), standing.tops(name)) for name in standing.sustained_us)
    return f"{standing.leg.work}: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates if rate)


def _write(standings: Sequence[Standing], machine: Any, ask: Ask) -> None:
    from sagegen.measuring.race_report import to_markdown

    if ask.json_to not in (None, "-"):
        Path(str(ask.json_to)).write_text(_to_json(standings, machine, ask.pace) + "\n")
    if ask.markdown:
        ask.markdown.write_text(to_markdown(standings, machine, ask.pace, command_line()))


def _to_json(standings: Sequence[Standing], machine: Any, pace: Pace) -> str:
    rows = [standing.as_values() for standing in standings]
    return json.dumps({"machine": machine, "command": command_line(), "pace": asdict(pace), "races": rows})


def command_line() -> str:
    return shlex.join(["sagegen", *sys.argv[1:]])


def _print(standings: Sequence[Standing], machine: Any, ask: Ask) -> None:
    from sagegen.measuring.race_report import RIVAL_HEADINGS, SCORE_HEADINGS, remarks, rival_rows, score_rows

    if ask.json_to == "-":
        click.echo(_to_json(standings, machine, ask.pace))
        return
    print_table("sustained, our fastest of each tier against what is asked", SCORE_HEADINGS, score_rows(standings))
    print_table("everyone", RIVAL_HEADINGS, rival_rows(standings))
    for remark in remarks(standings):
        click.echo(remark)
    for file in (ask.json_to, ask.markdown):
        if file:
            click.echo(f"Written to {file}", err=True)


def print_table(title: str, headings: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # wider than a terminal: a line per row can be searched, and a config's name copied
    Console(width=max(Console().width, _WIDTH)).print(table)
