"""`sagegen verify`: the accuracy gate of every tuned kernel of a GPU, there or in the emulator."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sagegen.cli.options import json_option, tune_command

if TYPE_CHECKING:
    from sagegen.gpu import Gpu
    from sagegen.measuring.inputs import Inputs
    from sagegen.measuring.jobs import Reply
    from sagegen.measuring.subjects import Subject
    from sagegen.problem import Problem

#: A gate takes seconds; the first one of a process starts CUDA and computes the references.
_TIMEOUT_S = 300.0
_WIDTH = 240
#: What --emulator stands for when no GPU is named.
_EMULATED_GPU = "l20"


@click.command("verify")
@click.option(
    "--gpu", "gpu_name", metavar="NAME", help=f"GPU, as `sagegen gpus` names it. [with --emulator: {_EMULATED_GPU}]"
)
@click.option("--problem", "problem_names", metavar="NAME", multiple=True, help="Only this problem; may be repeated.")
@click.option("--config", "config_name", metavar="NAME", help="Build and verify this config, or `default`, instead.")
@click.option("--emulator", is_flag=True, help="Run the kernels on the CPU, on small inputs: needs g++ and no GPU.")
@click.option("--banks", is_flag=True, help="With --emulator: count shared-memory bank conflicts by source line.")
@click.option(
    "--captured",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Also run a model's own inputs: safetensors with <name>.q, .k, .v as [batch, heads, tokens, dim].",
)
@json_option
def command(
    gpu_name: str | None,
    problem_names: tuple[str, ...],
    config_name: str | None,
    emulator: bool,
    banks: bool,
    captured: Path | None,
    as_json: bool,
) -> None:
    """Check tuned kernels against exact attention in FP64 on this GPU, or in the emulator.

    Runs the tuner's whole accuracy gate: normal inputs, offsets and outliers in channels of Q and K, constant and
    offset V, 16K keys, tails, GQA, large logits, NaN and Inf, with guard zones around all that a kernel writes. A
    kernel that fails is exit code 1.

    --emulator runs the gate at small sizes on the CPU, as the named GPU would compute it, and finds races, deadlocks,
    missing waits and accesses outside a kernel's memory, with their source line.

    \b
    Example:
      sagegen verify --gpu h200
      sagegen verify --gpu h200 --config default --problem d128_bf16_causal_int8 --captured my_model.safetensors
      sagegen verify --emulator --gpu l20 --config default --problem d64_bf16_full_int8 --banks
    """
    from sagegen.errors import RegistryError
    from sagegen.gpu import find_gpu
    from sagegen.problem import parse_problem

    if banks and not emulator:
        raise click.UsageError("--banks counts in the emulator: add --emulator")
    if gpu_name is None and not emulator:
        raise click.UsageError("Missing option '--gpu'; or add --emulator to verify without a GPU")
    gpu = find_gpu(gpu_name or _EMULATED_GPU)
    problems = [parse_problem(name) for name in problem_names]
    own = _load_captured(captured, problems or _all_problems()) if captured else {}
    rows = []
    for row in (
        _emulate(gpu, problems, config_name, own, banks) if emulator else _measure(gpu, problems, config_name, captured)
    ):
        rows.append(row)
        click.echo(_to_line(row), err=True)
    if not rows:
        raise RegistryError(
            f"nothing is tuned for {' and '.join([gpu.name, *(problem.name for problem in problems)])}",
            f"add --config default, or: {tune_command(gpu.name, problems)}",
        )
    failed = sum(row["outcome"] != "ok" for row in rows)
    missed = _problems_without(own, rows) if captured else []
    if as_json:
        facts = {"gpu": gpu.name, "emulator": emulator, "failed": failed, "without_captured": missed}
        click.echo(json.dumps({**facts, "kernels": rows}))
    else:
        _print_table(rows)
        for row in rows:
            _print_banks(row)
        where = " in the emulator, on small inputs" if emulator else ""
        kinds = "every input kind of the gate" if missed else "every input kind"
        click.echo(f"{len(rows) - failed} of {len(rows)} kernels pass {kinds}{where}.")
    if missed:
        click.echo(f"Warning: nothing in {captured} fits {', '.join(missed)}: it was not run there.", err=True)
    if failed:
        raise SystemExit(1)


def _load_captured(path: Path, problems: list[Problem]) -> dict[str, Inputs]:
    """A model's own inputs, read before anything runs.

    Raises:
        ArgumentError: the file is of another form, or fits none of the problems.
    """
    from sagegen.errors import ArgumentError
    from sagegen.measuring.inputs import fitting_names, load_captured

    captured = load_captured(path)
    if not any(fitting_names(captured, problem) for problem in problems):
        dims = ", ".join(sorted({str(inputs.q.shape[-1]) for inputs in captured.values()}))
        raise ArgumentError(
            f"nothing in {path}, of head dim {dims}, fits {', '.join(problem.name for problem in problems)}",
            "name a problem of that head dim with --problem, in bf16 for values beyond fp16's, or leave out --captured",
        )
    return captured


def _problems_without(captured: Mapping[str, Inputs], rows: list[dict[str, Any]]) -> list[str]:
    """Names of the verified problems that none of the captured inputs fits."""
    from sagegen.measuring.inputs import fitting_names
    from sagegen.problem import parse_problem

    names = dict.fromkeys(row["problem"] for row in rows)
    return [name for name in names if not fitting_names(captured, parse_problem(name))]


def _measure(
    gpu: Gpu, problems: list[Problem], config_name: str | None, captured: Path | None
) -> Iterator[dict[str, Any]]:
    """One row per kernel, as they are done on the GPU of this machine."""
    from sagegen.measuring.jobs import Gate
    from sagegen.measuring.subjects import require_gpu
    from sagegen.measuring.worker import Worker

    device = require_gpu(gpu, "verify runs kernels")
    with tempfile.TemporaryDirectory(prefix="sagegen-") as folder, Worker(device.index) as worker:
        for subject in _find_subjects(gpu, problems, config_name, Path(folder)):
            job = Gate(subject.candidate, captured=str(captured.absolute()) if captured else "")
            yield _to_row(subject, worker.run(job, _TIMEOUT_S))


def _find_subjects(gpu: Gpu, problems: list[Problem], config_name: str | None, folder: Path) -> list[Subject]:
    from sagegen.env import read_env
    from sagegen.measuring.subjects import build_subjects, tuned_subjects
    from sagegen.space import parse_config

    problems = problems or _all_problems()
    if config_name is None:
        return tuned_subjects(gpu, problems, read_env(), folder)
    config = None if config_name == "default" else parse_config(config_name)
    return build_subjects(gpu, problems, config, read_env())


def _all_problems() -> list[Problem]:
    from sagegen.problem import DTYPES, TUNED_HEAD_DIMS, Problem

    return [
        Problem(head_dim, dtype, is_causal)
        for head_dim in TUNED_HEAD_DIMS
        for dtype in DTYPES
        for is_causal in (False, True)
    ]


def _emulate(
    gpu: Gpu, problems: list[Problem], config_name: str | None, own: Mapping[str, Inputs], banks: bool
) -> Iterator[dict[str, Any]]:
    """One row per kernel, as they are done in the emulator; with `banks` one that passed has its bank conflicts."""
    from sagegen.env import read_env
    from sagegen.measuring.emulated import count_banks, gate_emulated, small_cases
    from sagegen.measuring.inputs import fitting_names
    from sagegen.measuring.subjects import emulated_subjects
    from sagegen.space import parse_config

    env, cases = read_env(), small_cases()
    config = None if config_name in (None, "default") else parse_config(str(config_name))
    fitting: dict[Problem, list[str]] = {}
    for subject in emulated_subjects(gpu, problems or _all_problems(), config, config_name == "default", env):
        problem = subject.problem
        if problem not in fitting:  # truths of a model's inputs take a while: once per problem
            names = fitting_names(own, problem)
            fitting[problem] = [f"captured:{name}" for name in names]
            for kind, name in zip(fitting[problem], names, strict=True):
                cases.add_captured(problem, kind, own[name])
        verdict = gate_emulated(problem, subject.config, gpu, cases, env, captured=fitting[problem])
        row: dict[str, Any] = {
            "problem": problem.name, "config": subject.config.name, "origin": subject.origin,
            "outcome": verdict.outcome, "reason": verdict.reason, "figures": verdict.figures,
            "seconds": verdict.seconds,
        }  # fmt: skip
        if banks and verdict.outcome == "ok":
            uses = count_banks(problem, subject.config, gpu, cases, env)
            row["banks"] = [{**asdict(use), "conflict_share": use.conflict_share} for use in uses]
        yield row


def _to_row(subject: Subject, reply: Reply) -> dict[str, Any]:
    return {
        "problem": subject.problem.name,
        "config": subject.config.name,
        "origin": subject.origin,
        "outcome": reply.outcome,
        "reason": reply.reason,
        "figures": reply.data.get("figures", {}),
        "seconds": reply.data.get("seconds"),
    }


def _to_line(row: dict[str, Any]) -> str:
    name = f"{row['problem']} {row['config']}"
    return f"ok    {name}" if row["outcome"] == "ok" else f"FAIL  {name}: {row['outcome']}: {row['reason']}"


def _print_table(rows: list[dict[str, Any]]) -> None:
    """One line per kernel and input kind."""
    from rich.console import Console
    from rich.table import Table

    table = Table("problem", "inputs", box=None, header_style="bold")
    for title in ("cosine", "relative L1", "relative L2", "max error", "scale ratio"):
        table.add_column(title, justify="right")
    table.add_column("config")
    table.add_column("origin")
    for row in rows:
        for kind, figures in row["figures"].items():
            table.add_row(
                row["problem"],
                kind,
                f"{figures['cosine']:.5f}",
                f"{figures['relative_l1']:.4f}",
                f"{figures['relative_l2']:.4f}",
                f"{figures['max_error']:.3g}",
                f"{figures['scale_ratio']:.4f}",
                row["config"],
                row["origin"],
            )
    # wider than a terminal: a line per kind can be searched
    Console(width=max(Console().width, _WIDTH)).print(table)


def _print_banks(row: dict[str, Any]) -> None:
    """One line per line of the kernel that touches shared memory, in the order of the text."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if "banks" not in row:
        return
    table = Table("kernel", box=None, header_style="bold")
    table.add_column("line", justify="right")
    table.add_column("function")
    table.add_column("bytes", justify="right")
    for title in ("accesses", "wavefronts", "ideal", "conflicts"):
        table.add_column(title, justify="right")
    table.add_column("text")
    for use in row["banks"]:
        direction = "store" if use["is_write"] else "load"
        table.add_row(
            use["kernel"], str(use["line"]), use["function"], f"{direction} {use['bytes']}", str(use["accesses"]),
            str(use["wavefronts"]), str(use["ideal"]), f"{use['conflict_share']:.0%}", escape(use["text"]),
        )  # fmt: skip
    click.echo(f"Shared memory of {row['problem']} {row['config']} on normal inputs, by line:")
    Console(width=max(Console().width, _WIDTH)).print(table)
