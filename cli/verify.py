"""`sagegen verify`: the accuracy gate of every tuned kernel of a GPU."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sagegen.cli.options import gpu_option, json_option

if TYPE_CHECKING:
    from sagegen.gpu import Gpu
    from sagegen.measuring.jobs import Reply
    from sagegen.measuring.subjects import Subject
    from sagegen.problem import Problem

#: A gate takes seconds; the first one of a process starts CUDA and computes the references.
_TIMEOUT_S = 300.0
_WIDTH = 240


@click.command("verify")
@gpu_option
@click.option("--problem", "problem_names", metavar="NAME", multiple=True, help="Only this problem; may be repeated.")
@click.option("--config", "config_name", metavar="NAME", help="Build and verify this config, or `default`, instead.")
@click.option(
    "--captured",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Also run a model's own inputs: safetensors with <name>.q, .k, .v as [batch, heads, tokens, dim].",
)
@json_option
def command(
    gpu_name: str, problem_names: tuple[str, ...], config_name: str | None, captured: Path | None, as_json: bool
) -> None:
    """Check tuned kernels against exact attention in FP64 on this GPU.

    Runs the tuner's whole accuracy gate: normal inputs, offsets and outliers in channels of Q and K, constant and
    offset V, 16K keys, tails, GQA, large logits, NaN and Inf, with guard zones around all that a kernel writes. A
    kernel that fails is exit code 1.

    \b
    Example:
      sagegen verify --gpu h200
      sagegen verify --gpu h200 --config default --problem d128_bf16_causal_int8 --captured my_model.safetensors
    """
    from sagegen.errors import RegistryError
    from sagegen.gpu import find_gpu
    from sagegen.measuring.inputs import load_captured
    from sagegen.measuring.jobs import Gate
    from sagegen.measuring.subjects import require_gpu
    from sagegen.measuring.worker import Worker
    from sagegen.problem import parse_problem

    gpu = find_gpu(gpu_name)
    problems = [parse_problem(name) for name in problem_names]
    if captured:
        load_captured(captured)  # a file of another form is told before anything runs
    device = require_gpu(gpu, "verify runs kernels")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sagegen-") as folder, Worker(device.index) as worker:
        for subject in _find_subjects(gpu, problems, config_name, Path(folder)):
            job = Gate(subject.candidate, captured=str(captured.absolute()) if captured else "")
            rows.append(_to_row(subject, worker.run(job, _TIMEOUT_S)))
            click.echo(_to_line(rows[-1]), err=True)
    if not rows:
        raise RegistryError(
            f"nothing is tuned for {gpu.name}{' and these problems' if problems else ''}",
            f"add --config default, or: sagegen tune --gpu {gpu.name}",
        )
    failed = sum(row["outcome"] != "ok" for row in rows)
    if as_json:
        click.echo(json.dumps({"gpu": gpu.name, "failed": failed, "kernels": rows}))
    else:
        _print_table(rows)
        click.echo(f"{len(rows) - failed} of {len(rows)} kernels pass every input kind.")
    if failed:
        raise SystemExit(1)


def _find_subjects(gpu: Gpu, problems: list[Problem], config_name: str | None, folder: Path) -> list[Subject]:
    from sagegen.env import read_env
    from sagegen.measuring.subjects import build_subjects, tuned_subjects
    from sagegen.problem import DTYPES, HEAD_DIMS, Problem
    from sagegen.space import parse_config

    problems = problems or [
        Problem(head_dim, dtype, is_causal) for head_dim in HEAD_DIMS for dtype in DTYPES for is_causal in (False, True)
    ]
    if config_name is None:
        return tuned_subjects(gpu, problems, read_env(), folder)
    config = None if config_name == "default" else parse_config(config_name)
    return build_subjects(gpu, problems, config, read_env())


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
