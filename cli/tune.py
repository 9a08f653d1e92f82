"""`sagegen tune`: search the best configs for a GPU and write its registry."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sagegen.cli.keeping import keep_result
from sagegen.cli.repeat import repeat_and_report
from sagegen.cli.replay import run_replay
from sagegen.cli.tuning_options import TuneOptions, tune_options, was_given
from sagegen.errors import GpuMismatchError
from sagegen.tuning.strategy import DEFAULT_SAMPLER, Strategy

if TYPE_CHECKING:
    from sagegen.entry import Entry, MeasuredTime, PredictedTime
    from sagegen.env import Env
    from sagegen.gpu import DetectedGpu, Gpu
    from sagegen.registry import Saved
    from sagegen.toolkit import Toolkit
    from sagegen.tuning.events import Listener
    from sagegen.tuning.journal import Outcome
    from sagegen.tuning.request import Request, Result

_WIDTH = 240


@click.command("tune")
@tune_options
def command(asked: TuneOptions) -> None:
    """Search the best configs for a GPU and write its registry.

    With that GPU in the machine, candidates are measured: accuracy first, then speed, the best ones against each other
    and against torch SDPA. With no GPU at all they are compiled and ranked by a model of the GPU, winners pass the
    accuracy gate in the emulator, and the entries say `predicted`. Ctrl+C keeps the best so far; where it measured, the
    same command goes on from the journal, elsewhere it compiles nothing twice.

    \b
    Example:
      sagegen tune --gpu l20
      sagegen tune --gpu h200 --head-dim 128 --causal --budget 6m
      sagegen tune --gpu h200 --effort quick --head-dim 64 --tokens 8192,16384
      sagegen tune --gpu h200 --storage postgresql+psycopg://tuner@db/sagegen --budget 1h
      sagegen tune --gpu rtx4090 --offline -o tuned/rtx4090.yaml
      sagegen tune --gpu h200 --verify
      sagegen tune --replay docs/gpu-runs/2026-11-30c-h200-bf16-journal.jsonl.gz --sampler tpe
    """
    from sagegen.cli.watch import Watcher
    from sagegen.env import read_env
    from sagegen.gpu import find_gpu
    from sagegen.probing.result import measured_gpu
    from sagegen.toolkit import find_toolkit
    from sagegen.tuning.proposer import check_sampler

    if asked.replay:
        run_replay(asked)
        return
    check_sampler(asked.sampler or DEFAULT_SAMPLER)
    gpu = measured_gpu(find_gpu(asked.gpu_name), asked.probe_file)
    devices = _choose_devices(gpu, asked)
    env = read_env()
    path = asked.output or env.tuned_dir / f"{gpu.name}.yaml"
    _require_writable(path, gpu)
    toolkit = find_toolkit(env)
    request = _make_request(gpu, asked, toolkit, env, measures=bool(devices))
    with Watcher() as watch:
        if devices:
            result = _measure(request, devices, asked, toolkit, env, watch)
        else:
            result = _rank(request, toolkit, env, asked.jobs, watch)
    result, saved = keep_result(path, gpu.name, result, has_journal=bool(devices))
    _report(result, saved, path, gpu, asked.as_json, has_journal=bool(devices))


def _choose_devices(gpu: Gpu, asked: TuneOptions) -> list[DetectedGpu]:
    """The GPUs that measure; [] when nothing is measured, which is announced unless it was asked for."""
    if asked.offline:
        for name in ("devices", "storage", "verify"):
            if was_given(name):
                raise click.UsageError(
                    f"--{name} is for GPUs that measure, and --offline measures nothing: leave one out"
                )
        return []
    devices = find_devices(gpu, asked.devices)
    if asked.verify and not devices:
        raise click.UsageError(f"--verify repeats finals on {gpu.name}, which this machine has not")
    if asked.storage is not None and not devices:
        raise click.UsageError(
            f"--storage shares what is measured on {gpu.name}, which this machine has not: leave it out to tune offline"
        )
    if not devices:
        click.echo(f"No GPU in this machine: tuning {gpu.name} offline, which measures nothing.", err=True)
    return devices


def _make_request(gpu: Gpu, asked: TuneOptions, toolkit: Toolkit, env: Env, measures: bool) -> Request:
    from sagegen.tuning.incumbents import find_fine_incumbents, find_incumbents
    from sagegen.tuning.request import Request
    from sagegen.tuning.starts import find_starts

    problems, is_cold = asked.problems, asked.incumbent is not None
    return Request(
        gpu,
        problems,
        budget_s=asked.run_budget_s(measures),
        trials=asked.trials,
        strategy=Strategy(sampler=asked.sampler or DEFAULT_SAMPLER),
        seed=asked.seed,
        incumbents=find_incumbents(gpu, problems, asked.incumbent, toolkit, env),
        fine_incumbents={} if is_cold else find_fine_incumbents(gpu, problems, toolkit, env),
        starts={} if is_cold else find_starts(gpu, problems, toolkit, env),
        plants=asked.plants,
        lengths=asked.lengths,
        effort=asked.effort,
        patience=asked.patience or asked.effort.patience,
        force=asked.force,
    )


def _require_writable(path: Path, gpu: Gpu) -> None:
    """Raise RegistryError before a long run when its result could not be written to `path`."""
    from sagegen.env import is_writable
    from sagegen.errors import RegistryError
    from sagegen.registry import read_entries

    read_entries(path, gpu.name)
    if not is_writable(path.parent):
        raise RegistryError(f"{path.parent} cannot be written", "name another file with -o")


def find_devices(gpu: Gpu, count: int | None) -> list[DetectedGpu]:
    """`count` GPUs of this machine that are `gpu`, None: all; [] when it has none at all and one would do.

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
    if count is not None and count > max(1, len(matching)):
        raise GpuMismatchError(
            f"--devices {count}, but this machine has {len(matching)} of {gpu.name}",
            f"give --devices {len(matching)}" if matching else "leave out --devices to tune offline",
        )
    return matching[:count]


def _measure(
    request: Request, devices: list[DetectedGpu], asked: TuneOptions, toolkit: Toolkit, env: Env, listen: Listener
) -> Result:
    from sagegen.measuring.worker import Worker
    from sagegen.store import open_store
    from sagegen.tuning.journal import Journal, set_aside
    from sagegen.tuning.request import Tools
    from sagegen.tuning.sharing import open_storage
    from sagegen.tuning.tune import tune

    storage = open_storage(asked.storage) if asked.storage is not None else None
    path = asked.journal_path or env.cache_dir / "journals" / f"{request.gpu.name}.jsonl"
    if not asked.resume:
        set_aside(path, datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S"))
    # launches must not wait for a core while compilers run
    jobs = asked.jobs or max(1, len(os.sched_getaffinity(0)) - 2)
    workers = [Worker(device.index) for device in devices]
    with Journal(path) as journal:
        tools = Tools(workers, devices, journal, open_store(env), toolkit, jobs, storage)
        if asked.verify:
            repeat_and_report(request, tools, listen, asked.as_json)
        return tune(request, tools, listen)


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
        if saved.outdone:
            click.echo(f"{len(saved.outdone)} predicted entries were not written: better predictions are there already")
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
        "outdone": len(saved.outdone),
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
