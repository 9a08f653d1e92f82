"""`sagegen tune`: search the best configs for a GPU and write its registry."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sagegen.cli.options import json_option, make_problem, mask_options, precision_option
from sagegen.cli.values import Choices, Duration, RegistryFile
from sagegen.errors import GpuMismatchError
from sagegen.interrupts import deferred_interrupts
from sagegen.problem import DTYPES, HEAD_DIMS, TUNED_LENGTHS, Problem
from sagegen.tuning.plant import PLANTS
from sagegen.tuning.search import SAMPLERS

if TYPE_CHECKING:
    from sagegen.entry import Entry, MeasuredTime, PredictedTime
    from sagegen.env import Env
    from sagegen.gpu import DetectedGpu, Gpu
    from sagegen.registry import Saved
    from sagegen.toolkit import Toolkit
    from sagegen.tuning.events import Listener
    from sagegen.tuning.journal import Outcome
    from sagegen.tuning.request import Request, Result

_MEASURED_BUDGET_S = 600.0
_OFFLINE_BUDGET_S = 360.0
_WIDTH = 240
_TOKENS = tuple(str(length.tokens) for length in TUNED_LENGTHS)


# fmt: off
@click.command("tune")
@click.option("--gpu", "gpu_name", default="l20", show_default=True, metavar="NAME", help="GPU to tune for.")
@click.option("--head-dim", "head_dims", type=Choices(tuple(map(str, HEAD_DIMS))), default="64,128", show_default=True,
              help="Head dims, separated by commas.")
@click.option("--dtype", "dtypes", type=Choices(DTYPES), default="bf16", show_default=True, help="Input dtypes.")
@mask_options(both_note="; the default")
@precision_option
@click.option("--tokens", type=Choices(_TOKENS), default=",".join(_TOKENS), show_default=True,
              help="Lengths to tune at, each with the bucket around it, separated by commas.")
@click.option("--budget", "budget_s", type=Duration(),
              help="Time for everything: 90s, 6m, 1h30m. [10m; offline 6m; none with --trials]")
@click.option("--trials", type=click.IntRange(min=1), help="Configs tried per problem.")
@click.option("--offline", is_flag=True, help="Compile and rank for a GPU that is absent; measures nothing.")
@click.option("--resume/--fresh", default=True, show_default=True, help="Go on from the journal, or set it aside.")
@click.option("--journal", "journal_path", type=click.Path(dir_okay=False, path_type=Path),
              help="Journal of measurements. [<cache folder>/journals/<gpu>.jsonl]")
@click.option("--incumbent", metavar="NAME", help="Config to beat: a name, `default` or `worst`. [the registry's]")
@click.option("--sampler", type=click.Choice(SAMPLERS), default="tpe", show_default=True,
              help="How configs are chosen; the others are baselines.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sampler and of the order of finals.")
@click.option("--devices", "device_count", type=click.IntRange(min=1), default=1, show_default=True,
              help="GPUs of this machine that measure side by side.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compilers at a time. [all cores; two fewer while measuring]")
@click.option("-o", "--output", type=RegistryFile(), metavar="FILE",
              help="Registry file to write. [<tuned folder>/<gpu>.yaml]")
@click.option("--probe", "probe_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="What `sagegen probe -o FILE` measured on that GPU: the model prefers it to the table of GPUs.")
@click.option("--plant", "plants", type=click.Choice(PLANTS), multiple=True, hidden=True,
              help="Self-test: add a candidate that crashes, hangs or does not compile.")
@json_option
def command(
    gpu_name: str,
    head_dims: tuple[str, ...],
    dtypes: tuple[str, ...],
    mask: str | None,
    precision: str,
    tokens: tuple[str, ...],
    budget_s: float | None,
    trials: int | None,
    offline: bool,
    resume: bool,
    journal_path: Path | None,
    incumbent: str | None,
    sampler: str,
    seed: int,
    device_count: int,
    jobs: int | None,
    output: Path | None,
    probe_file: Path | None,
    plants: tuple[str, ...],
    as_json: bool,
) -> None:
    """Search the best configs for a GPU and write its registry.

    With that GPU in the machine, candidates are measured: accuracy first, then speed, the best ones against each other
    and against torch SDPA. With no GPU at all they are compiled and ranked by a model of the GPU, winners pass the
    accuracy gate in the emulator, and the entries say `predicted`. Ctrl+C keeps the best so far; where it measured, the
    same command goes on from the journal, elsewhere it compiles nothing twice.

    \b
    Example:
      sagegen tune --gpu l20
      sagegen tune --gpu h200 --head-dim 128 --causal --budget 6m
      sagegen tune --gpu h200 --head-dim 64 --tokens 8192,16384 --budget 8m
      sagegen tune --gpu rtx4090 --offline -o tuned/rtx4090.yaml
      sagegen tune --gpu rtx4090 --offline --precision int4
    """
    from sagegen.cli.watch import Watcher
    from sagegen.env import read_env
    from sagegen.gpu import find_gpu
    from sagegen.probing.result import measured_gpu
    from sagegen.registry import Saved, save_entries
    from sagegen.toolkit import find_toolkit
    from sagegen.tuning.incumbents import find_fine_incumbents, find_incumbents
    from sagegen.tuning.request import Request

    gpu = measured_gpu(find_gpu(gpu_name), probe_file)
    if offline and device_count > 1:
        raise click.UsageError("--devices counts GPUs that measure, and --offline measures nothing: leave one out")
    devices = [] if offline else find_devices(gpu, device_count)
    if not devices and not offline:
        click.echo(f"No GPU in this machine: tuning {gpu.name} offline, which measures nothing.", err=True)
    env = read_env()
    path = output or env.tuned_dir / f"{gpu.name}.yaml"
    _require_writable(path, gpu)
    toolkit = find_toolkit(env)
    problems = _make_problems(head_dims, dtypes, mask, precision)
    request = Request(
        gpu,
        problems,
        budget_s=budget_s or (None if trials else _MEASURED_BUDGET_S if devices else _OFFLINE_BUDGET_S),
        trials=trials,
        sampler=next(name for name in SAMPLERS if name == sampler),
        seed=seed,
        incumbents=find_incumbents(gpu, problems, incumbent, toolkit, env),
        fine_incumbents={} if incumbent else find_fine_incumbents(gpu, problems, toolkit, env),
        plants=tuple(name for name in PLANTS if name in plants),
        lengths=tuple(t for t in TUNED_LENGTHS if str(t.tokens) in tokens),
    )
    with Watcher() as watch:
        if devices:
            journal = journal_path or env.cache_dir / "journals" / f"{gpu.name}.jsonl"
            result = _measure(request, devices, journal, resume, toolkit, env, jobs, watch)
        else:
            result = _rank(request, toolkit, env, jobs, watch)
    cubins = {digest: file.read_bytes() for digest, file in result.cubins.items()}
    with deferred_interrupts():  # what was found must not be lost while it is written
        saved = save_entries(path, gpu.name, result.entries, cubins) if result.entries else Saved((), ())
    _report(result, saved, path, gpu, as_json, has_journal=bool(devices))
# fmt: on


def _make_problems(
    head_dims: tuple[str, ...], dtypes: tuple[str, ...], mask: str | None, precision: str
) -> tuple[Problem, ...]:
    masks = {"causal": (True,), "full": (False,), "both": (False, True)}[mask or "both"]
    return tuple(
        make_problem(head_dim, dtype, causal, precision)
        for head_dim in head_dims
        for dtype in dtypes
        for causal in masks
    )


def _require_writable(path: Path, gpu: Gpu) -> None:
    """Raise RegistryError before a long run when its result could not be written to `path`."""
    from sagegen.env import is_writable
    from sagegen.errors import RegistryError
    from sagegen.registry import read_entries

    read_entries(path, gpu.name)
    if not is_writable(path.parent):
        raise RegistryError(f"{path.parent} cannot be written", "name another file with -o")


def find_devices(gpu: Gpu, count: int) -> list[DetectedGpu]:
    """`count` GPUs of this machine that are `gpu`; [] when it has none at all and one would do.

    Raises:
        GpuMismatchError: it has others only, or fewer.
    """
    from sagegen.gpu import detect_gpus

    present = detect_gpus()
    matching = [device for device in present if device.gpu == gpu]
    if present and not matching:
        found = present[0]
        name = found.gpu.name if found.gpu else found.product
        also = f"--gpu {name}" if found.gpu else "the name of a GPU that `sagegen gpus` lists"
        raise GpuMismatchError(
            f"--gpu {gpu.name}, but this machine has {found.product} ({name})",
            f"measure it with {also}, or add --offline to compile and rank for {gpu.name} without measuring",
        )
    if count > max(1, len(matching)):
        raise GpuMismatchError(
            f"--devices {count}, but this machine has {len(matching)} of {gpu.name}",
            f"give --devices {len(matching)}" if matching else "leave out --devices to tune offline",
        )
    return matching[:count]


def _measure(
    request: Request,
    devices: list[DetectedGpu],
    journal_path: Path,
    resume: bool,
    toolkit: Toolkit,
    env: Env,
    jobs: int | None,
    listen: Listener,
) -> Result:
    from sagegen.measuring.worker import Worker
    from sagegen.store import open_store
    from sagegen.tuning.journal import Journal, set_aside
    from sagegen.tuning.request import Tools
    from sagegen.tuning.tune import tune

    if not resume:
        set_aside(journal_path, datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S"))
    # launches must not wait for a core while compilers run
    jobs = jobs or max(1, len(os.sched_getaffinity(0)) - 2)
    workers = [Worker(device.index) for device in devices]
    with Journal(journal_path) as journal:
        return tune(request, Tools(workers, devices, journal, open_store(env), toolkit, jobs), listen)


def _rank(request: Request, toolkit: Toolkit, env: Env, jobs: int | None, listen: Listener) -> Result:
    from sagegen.store import open_store
    from sagegen.tuning.gatekeeper import make_gate
    from sagegen.tuning.offline import tune_offline

    gate = make_gate(request.gpu, env)
    return tune_offline(request, open_store(env), toolkit, listen, jobs=jobs, gate=gate)


def _report(result: Result, saved: Saved, path: Path, gpu: Gpu, as_json: bool, has_journal: bool) -> None:
    """Print what was found and where it is, then end the process as the run deserves."""
    outcomes = Counter(record.outcome for record in result.records)
    if as_json:
        click.echo(json.dumps(_to_json(result, saved, path, gpu, outcomes)))
    else:
        _print_table(result.entries)
        click.echo(f"{len(result.records)} configs: {', '.join(f'{n} {outcome}' for outcome, n in outcomes.items())}")
        if saved.refused:
            click.echo(f"{len(saved.refused)} predicted entries were not written: measured ones are there already")
        click.echo(f"{len(saved.written)} entries written to {path}")
    if isinstance(result.cause, KeyboardInterrupt):
        rest = "; the same command goes on from the journal" if has_journal else ""
        click.echo(f"Interrupted: the best so far is kept{rest}.", err=True)
        raise SystemExit(130)  # what shells report for Ctrl+C
    if result.cause is not None:
        raise result.cause
    if not result.entries:
        click.echo("Error: no config finished anywhere; nothing was written", err=True)
        raise SystemExit(1)


def _to_json(result: Result, saved: Saved, path: Path, gpu: Gpu, outcomes: Counter[Outcome]) -> dict[str, Any]:
    import msgspec

    return {
        "gpu": gpu.name,
        "path": str(path),
        "interrupted": isinstance(result.cause, KeyboardInterrupt),
        "outcomes": dict(outcomes),
        "written": len(saved.written),
        "refused": len(saved.refused),
        "entries": [msgspec.to_builtins(entry) for entry in result.entries],
    }


def _print_table(entries: tuple[Entry, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("problem", "keys", "answer", box=None, header_style="bold")
    for title in ("us", "TOPS", "full us", "kernel vs default", "vs SDPA", "cosine", "registers"):
        table.add_column(title, justify="right")
    table.add_column("config")
    for entry in entries:
        figures, used = entry.figures, entry.resources
        times = "{:.1f}" if entry.measured else "{:.0f}"
        table.add_row(
            entry.problem,
            entry.lengths.name,
            entry.answer if entry.measured else "predicted",
            _text(entry.kernel_time, times),
            _text(figures.tops, "{:.0f}"),
            _text(entry.call_time, times),
            _text(figures.speed_vs_default, "{:.3f}x"),
            _text(figures.speed_vs_sdpa, "{:.3f}x"),
            _text(entry.min_cosine, "~{:.5f}" if entry.provenance.accuracy_from else "{:.5f}"),
            _text(used.registers if used else None, "{}"),
            entry.config or "-",
        )
    # wider than a terminal: a line per entry can be searched, and a config's name copied
    Console(width=max(Console().width, _WIDTH)).print(table)


def _text(value: float | MeasuredTime | PredictedTime | None, form: str) -> str:
    return "-" if value is None else form.format(value)
