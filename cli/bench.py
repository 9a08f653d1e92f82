"""`sagegen bench`: tuned kernels beside torch SDPA, in the same rounds."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sagegen.cli.around import run_around
from sagegen.cli.options import FiniteRange, gpu_option, make_problem, mask_options
from sagegen.cli.race import Ask, run_races
from sagegen.problem import DTYPES, HEAD_DIMS, TUNED_HEAD_DIMS

if TYPE_CHECKING:
    from sagegen.env import Env
    from sagegen.gpu import DetectedGpu, Gpu
    from sagegen.measuring.comparison import Comparison
    from sagegen.measuring.subjects import Subject
    from sagegen.measuring.worker import Worker
    from sagegen.problem import Problem, Shape

_TIMEOUT_S = 600.0
_WIDTH = 240
_TOKENS = (1024, 2048, 4096, 8192, 16384)
_MASKS = {"causal": (True,), "full": (False,), "both": (False, True)}


class Lengths(click.ParamType[tuple[int, ...]]):
    """Token counts, separated by commas."""

    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        words = [word.strip() for word in str(value).split(",")]
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            self.fail(f"{value!r} is no list of token counts; write 1024,4096", param, ctx)
        return tuple(dict.fromkeys(map(int, words)))


# fmt: off
@click.command("bench")
@gpu_option
@click.option("--head-dim", "head_dims", type=click.Choice([str(d) for d in HEAD_DIMS]), multiple=True,
              help="Channels per head; may be repeated. [64 and 128; with --around 128]")
@click.option("--dtype", type=click.Choice(DTYPES), default="bf16", show_default=True, help="Input dtype.")
@mask_options(full_note="; the default with --around", both_note="; the default without --around")
@click.option("--tokens", type=Lengths(),
              help=f"Lengths, separated by commas. [{','.join(map(str, _TOKENS))}; with --peers those with goals; "
              "with --around 16384]")
@click.option("--batch", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--heads", type=click.IntRange(min=1), default=32, show_default=True, help="Query heads.")
@click.option("--heads-kv", type=click.IntRange(min=1), help="Heads of K and V. [as --heads]")
@click.option("--config", "config_names", metavar="NAME", multiple=True,
              help="Time this config, or `default`, not the registry's. With --peers it may be repeated, and follow a "
              "problem's name: d64_bf16_full_int8_NAME is for that problem alone.")
@click.option("--peers", "with_peers", is_flag=True,
              help="Race against cuDNN's FP8 attention too, sustained and in bursts, and hold rows to their goals.")
@click.option("--around", "around_name", metavar="NAME",
              help="Race this config, or `default`, against every other value of each of its parameters, kernel alone, "
              "as --peers times; a problem's name before it chooses that problem.")
@click.option("--rounds", type=click.IntRange(min=2),
              help="Each times everyone once, in an order of its own. [40; with --peers 3, with --around 5, sustained]")
@click.option("--sustained", "sustained_s", type=FiniteRange(min=0), metavar="SECONDS",
              help="A sample is so many seconds back to back instead of one launch with cold L2. "
              "[with --peers and --around 0.3]")
@click.option("--burst-rounds", type=click.IntRange(min=0), default=2, show_default=True,
              help="With --peers and --around: rounds of bursts, three launches each.")
@click.option("--idle", "idle_s", type=FiniteRange(min=0), default=0.5, show_default=True, metavar="SECONDS",
              help="With --peers and --around: rest before each burst.")
@click.option("--min-cosine", type=FiniteRange(max=1), default=0.999, show_default=True,
              help="Without --peers and --around: time the kernel that answers calls with this min_cosine.")
@click.option("--markdown", type=click.Path(dir_okay=False, path_type=Path), help="Also write Markdown tables here.")
@click.option("--json", "json_to", is_flag=False, flag_value="-", metavar="[FILE]",
              help="Print JSON instead of a table, or write it to a file beside the table.")
def command(
    gpu_name: str,
    head_dims: tuple[str, ...],
    dtype: str,
    mask: str | None,
    tokens: tuple[int, ...] | None,
    batch: int,
    heads: int,
    heads_kv: int | None,
    config_names: tuple[str, ...],
    with_peers: bool,
    around_name: str | None,
    rounds: int | None,
    sustained_s: float | None,
    burst_rounds: int,
    idle_s: float,
    min_cosine: float,
    markdown: Path | None,
    json_to: str | None,
) -> None:
    """Time tuned kernels against torch SDPA's flash and cuDNN backends on this GPU.

    `kernel` is the attention kernel alone, as papers quote it; `call` has the quantizers too, as a model pays for it.
    Everyone runs in the same rounds, in random order, so that the ratios hold though clocks drift. With --peers the
    registry's fastest kernels of both tiers of accuracy race, by default at the shapes that have goals. With --around
    a table says what each parameter of a config is worth.

    \b
    Example:
      sagegen bench --gpu h200
      sagegen bench --gpu h200 --peers --json race.json --markdown race.md
      sagegen bench --gpu h200 --around default --head-dim 128 --causal --markdown around.md
      sagegen bench --gpu h200 --head-dim 128 --causal --tokens 4096,16384 --markdown bench.md
    """
    from sagegen.gpu import find_gpu
    from sagegen.measuring.race import Pace
    from sagegen.measuring.subjects import require_gpu
    from sagegen.problem import Shape

    if len(config_names) > 1 and not with_peers:
        raise click.UsageError("several --config need --peers")
    if around_name and (with_peers or config_names):
        raise click.UsageError("--around races one config and its variations: leave out --peers and --config")
    gpu = find_gpu(gpu_name)
    device = require_gpu(gpu, "bench times kernels")
    if with_peers or around_name:
        pace = Pace(rounds or (5 if around_name else 3), 0.3 if sustained_s is None else sustained_s, burst_rounds,
                    idle_s)
        masks = _MASKS[mask or ("full" if around_name else "both")]
        configs = (around_name,) if around_name else config_names
        ask = Ask(head_dims, masks, tokens or (), dtype, batch, heads, heads_kv or heads, configs, pace, json_to,
                  markdown)
        (run_around if around_name else run_races)(gpu, device, ask, _describe_machine)
        return
    masks = _MASKS[mask or "both"]
    problems = [make_problem(d, dtype, causal) for d in head_dims or map(str, TUNED_HEAD_DIMS) for causal in masks]
    shapes = [Shape(batch, heads, heads_kv or heads, length, length) for length in tokens or _TOKENS]
    work = [(problem, shape) for problem in problems for shape in shapes]
    config_name = config_names[0] if config_names else None
    _compare(gpu, device, work, config_name, min_cosine, rounds or 40, sustained_s or 0.0, markdown, json_to)
# fmt: on


def _compare(
    gpu: Gpu,
    device: DetectedGpu,
    work: list[tuple[Problem, Shape]],
    config_name: str | None,
    min_cosine: float,
    rounds: int,
    sustained_s: float,
    markdown: Path | None,
    json_to: str | None,
) -> None:
    """Time the kernel of each problem and shape beside torch SDPA, and print a table."""
    from sagegen.env import read_env
    from sagegen.measuring.comparison import host_text, to_markdown
    from sagegen.measuring.jobs import Host
    from sagegen.measuring.worker import Worker

    env = read_env()
    rows: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="sagegen-") as folder, Worker(device.index) as worker:
        machine = _describe_machine(device, worker)
        host = host_text(worker.run(Host(work[0][0].name), _TIMEOUT_S))
        for problem, shape in work:
            subject = _find_subject(gpu, problem, shape, config_name, min_cosine, env, Path(folder))
            rows.append(_measure(worker, subject, shape, rounds, sustained_s))
            click.echo(_to_line(rows[-1]), err=True)
    facts = {"rounds": rounds, "sustained_s": sustained_s, "host": host}
    text = json.dumps({"machine": machine, **facts, "comparisons": [row.as_values() for row in rows]})
    if json_to == "-":
        click.echo(text)
    else:
        _print_table(rows)
        click.echo(host)
    if markdown:
        markdown.write_text(to_markdown(rows, machine, rounds, sustained_s, host))
    if json_to not in (None, "-"):
        Path(str(json_to)).write_text(text + "\n")
    for file in (markdown, json_to):
        if file not in (None, "-"):
            click.echo(f"Written to {file}", err=True)
    if any(row.failure for row in rows):
        raise SystemExit(1)


def _find_subject(
    gpu: Gpu, problem: Problem, shape: Shape, config_name: str | None, min_cosine: float, env: Env, folder: Path
) -> Subject:
    from sagegen.measuring.subjects import build_subjects, subject_for
    from sagegen.space import parse_config

    if config_name is None:
        return subject_for(gpu, problem, shape.kv_len, env, folder, min_cosine)
    return build_subjects(gpu, [problem], None if config_name == "default" else parse_config(config_name), env)[0]


def _measure(worker: Worker, subject: Subject, shape: Shape, rounds: int, sustained_s: float) -> Comparison:
    from sagegen.measuring.comparison import make_comparison
    from sagegen.measuring.jobs import Finals

    job = Finals((subject.candidate,), shape, rounds=rounds, sustained_s=sustained_s, peers=True)
    reply = worker.run(job, _TIMEOUT_S)
    return make_comparison(subject.problem, shape, subject.config.name, subject.origin, reply)


def _describe_machine(device: DetectedGpu, worker: Worker) -> dict[str, object]:
    """What a figure depends on beside the kernel."""
    from sagegen.measuring.jobs import Ping
    from sagegen.measuring.telemetry import read_state

    state = read_state(device.index)
    return {
        "GPU": device.product,
        "driver": device.driver,
        "torch": worker.run(Ping(), _TIMEOUT_S).data.get("torch"),
        "power limit W": state.power_limit_w,
    }


def _to_line(row: Comparison) -> str:
    from sagegen.measuring.comparison import HEADINGS, make_cells

    problem, tokens, *cells = make_cells(row)
    if row.failure:
        return f"{problem} {tokens} tokens: {row.failure}"
    return f"{problem} {tokens} tokens: " + ", ".join(
        f"{heading} {cell}" for heading, cell in zip(HEADINGS[2:], cells, strict=True)
    )


def _print_table(rows: list[Comparison]) -> None:
    from rich.console import Console
    from rich.table import Table

    from sagegen.measuring.comparison import HEADINGS, make_cells

    table = Table(*HEADINGS[:2], box=None, header_style="bold")
    for heading in HEADINGS[2:]:
        table.add_column(heading, justify="right")
    table.add_column("config")
    table.add_column("origin")
    for row in rows:
        table.add_row(*make_cells(row), row.config, row.origin)
    # wider than a terminal: a line per shape can be searched, and a config's name copied
    Console(width=max(Console().width, _WIDTH)).print(table)
