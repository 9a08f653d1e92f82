"""`sagegen model`: how well the model of a GPU predicts what a journal has measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sagegen.cli.options import json_option

if TYPE_CHECKING:
    from sagegen.tuning.validation import Case, Score, Validation

_WIDTH = 140


# fmt: off
@click.command("model")
@click.argument("journals", nargs=-1, required=True, metavar="JOURNAL...",
                type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--gpu", "gpu_name", default="h200", show_default=True, metavar="NAME",
              help="GPU whose records are compared.")
@click.option("--problem", "problem_name", metavar="NAME", help="Only this problem.")
@click.option("--probe", "probe_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="What `sagegen probe -o FILE` measured on that GPU: the model prefers it to the table of GPUs.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Also draw predicted against measured into this file, .svg or .png; needs matplotlib.")
@json_option
def command(
    journals: tuple[Path, ...],
    gpu_name: str,
    problem_name: str | None,
    probe_file: Path | None,
    plot_file: Path | None,
    as_json: bool,
) -> None:
    """Hold the model of a GPU to what journals have measured there, packed (.jsonl.gz) or not.

    Per problem, length and family: Spearman's rank correlation of predicted and measured times, what the best of the
    model's five favourites loses against the best measured config, predicted over measured time (median), and the error
    that nine of ten configs are not above. `kernel` is the attention kernel alone, `call` the full call. `ok` marks
    cases with a correlation of at least 0.8 and a loss of at most 5 % in both; `few` those of fewer than 20 configs.

    \b
    Example:
      sagegen model docs/gpu-runs/2026-11-30c-h200-bf16-journal.jsonl.gz
      sagegen model docs/gpu-runs/2026-11-30*journal.jsonl.gz --plot model.svg
    """
    from sagegen.gpu import find_gpu
    from sagegen.probing.result import measured_gpu
    from sagegen.tuning.journal import read_journal
    from sagegen.tuning.validation import validate

    gpu = measured_gpu(find_gpu(gpu_name), probe_file)
    results = [
        validate((r for r in read_journal(path) if problem_name in (None, r.problem)), gpu) for path in journals
    ]
    if plot_file is not None:
        _draw(results, plot_file)
    if as_json:
        rows = [
            {"journal": str(path), "unreadable": len(result.unreadable), "cases": [c.as_values() for c in result.cases]}
            for path, result in zip(journals, results, strict=True)
        ]
        click.echo(json.dumps({"gpu": gpu.name, "journals": rows}))
        return
    for path, result in zip(journals, results, strict=True):
        _print_journal(path, result, gpu.name)
# fmt: on


def _draw(results: Sequence[Validation], path: Path) -> None:
    from sagegen.errors import ArgumentError
    from sagegen.tuning.validation_plot import save_plot

    pairs = [pair for result in results for pair in result.pairs]
    if not pairs:
        raise ArgumentError("nothing was measured that could be drawn", "name other journals, or leave out --plot")
    save_plot(pairs, path)
    click.echo(f"{len(pairs)} points drawn into {path}", err=True)


def _print_journal(path: Path, result: Validation, gpu_name: str) -> None:
    from rich.console import Console
    from rich.table import Table

    click.echo(f"{path}:")
    if not result.cases:
        click.echo(f"no config of {gpu_name} was measured{' for what was asked' if result.unreadable else ''}")
        return
    table = Table("problem", box=None, header_style="bold")
    for title in ("tokens", "family", "configs", "kernel rank", "loss", "ratio", "error"):
        table.add_column(title, justify="right")
    for title in ("call rank", "loss", "ratio", "error", ""):
        table.add_column(title, justify="right")
    for case in result.cases:
        start = (case.problem, str(case.tokens), case.family, str(case.configs))
        table.add_row(*start, *_cells(case.kernel), *_cells(case.call), _mark(case))
    Console(width=max(Console().width, _WIDTH)).print(table)
    judged = [case for case in result.cases if case.is_judged]
    good = sum(case.kernel.meets and case.call.meets for case in judged)
    click.echo(f"{good} of {len(judged)} judged cases are ok; {len(result.unreadable)} measured configs not readable")


def _cells(score: Score) -> tuple[str, str, str, str]:
    return f"{score.spearman:.3f}", f"{score.loss:.1%}", f"{score.ratio:.2f}", f"{score.error:.1%}"


def _mark(case: Case) -> str:
    if not case.is_judged:
        return "few"
    return "ok" if case.kernel.meets and case.call.meets else ""
