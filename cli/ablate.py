"""`sagegen ablate`: the papers' tables of accuracy, from the reference numerics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sagegen.ablation.tables import TABLE_NAMES
from sagegen.cli.options import json_option

if TYPE_CHECKING:
    from sagegen.ablation.study import Outcome
    from sagegen.ablation.tables import Table

_TOKENS, _CAPTURED_TOKENS = 512, 1024
#: Fewer do not fill a tile of any recipe: with one key every recipe is exact, and no order of rows means anything.
_ORDERED_TOKENS = 64
_WIDTH = 200


# fmt: off
@click.command("ablate")
@click.option("--table", "table_names", type=click.Choice(TABLE_NAMES), multiple=True,
              help="Only this table; may be repeated.")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N",
              help=f"Queries and keys; the first of captured ones. [{_TOKENS}; with --tensors {_CAPTURED_TOKENS}]")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Draws of synthetic inputs.")
@click.option("--tensors", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A model's own inputs instead: safetensors with <name>.q, .k, .v as [batch, heads, tokens, dim].")
@click.option("--causal", "is_causal", is_flag=True, help="Causal mask.")
@click.option("--device", default="cpu", show_default=True, help="Torch device to compute on, as cuda.")
@click.option("--figure", type=click.Path(dir_okay=False, path_type=Path),
              help="Also draw the tables as bars into this file, .png, .svg or .pdf; needs matplotlib.")
@json_option
def command(
    table_names: tuple[str, ...],
    tokens: int | None,
    seeds: int,
    tensors: Path | None,
    is_causal: bool,
    device: str,
    figure: Path | None,
    as_json: bool,
) -> None:
    """Compare the papers' techniques and number types by accuracy, each switched alone.

    Emulates quantized attention in FP32 and compares it with exact attention in FP64, on synthetic inputs with the
    outliers that each technique is for, or on a model's own. The spread is over seeds, or over layers. `worst case` is
    the least cosine of a seed or layer, `worst head` that of a head. The tables `accumulator` and `shapes` always take
    synthetic inputs. Rows of synthetic inputs that do not stand in the papers' order are exit code 1, from 64
    tokens on.

    \b
    Example:
      sagegen ablate
      sagegen ablate --table smoothing --table rotation --seeds 5 --figure ablation.png
      sagegen ablate --tensors my_model.safetensors --causal --json > ablation.json
    """
    from sagegen.ablation.report import require_matplotlib, save_figure
    from sagegen.ablation.study import Study, cut_tokens
    from sagegen.ablation.tables import make_table
    from sagegen.measuring.inputs import load_captured

    if figure:
        require_matplotlib()
    _check_device(device)
    tokens = tokens or (_CAPTURED_TOKENS if tensors else _TOKENS)
    captured = cut_tokens(load_captured(tensors), tokens) if tensors else None
    study = Study(seeds, captured=captured, is_causal=is_causal, device=device)
    outcomes = []
    for name in dict.fromkeys(table_names or TABLE_NAMES):
        click.echo(f"table {name}", err=True)
        outcomes.append(study.run(_ordered(make_table(name, tokens), tokens)))
        if not as_json:
            _print_table(outcomes[-1])
    if as_json:
        facts = {"tokens": tokens, "seeds": seeds, "tensors": tensors and str(tensors), "causal": is_causal}
        click.echo(json.dumps({**facts, "device": device, "tables": [_to_values(outcome) for outcome in outcomes]}))
    if figure:
        save_figure(outcomes, figure)
        click.echo(f"Written to {figure}", err=True)
    if any(outcome.broken for outcome in outcomes):
        raise SystemExit(1)
# fmt: on


def _ordered(table: Table, tokens: int) -> Table:
    """`table`, without its orders where so few tokens decide them by chance."""
    return replace(table, orders=()) if table.takes_tensors and tokens < _ORDERED_TOKENS else table


def _check_device(device: str) -> None:
    import torch

    from sagegen.errors import ArgumentError

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"device {device} cannot be used: {error}", "leave out --device for the CPU") from error


def _to_values(outcome: Outcome) -> dict[str, object]:
    return {
        "name": outcome.table.name,
        "title": outcome.table.title,
        "ranked_by": outcome.table.ranked_by,
        "broken": list(outcome.broken),
        "rows": [result.as_values() for result in outcome.results],
    }


def _print_table(outcome: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table as TextTable

    from sagegen.ablation.report import make_cells, make_headings

    headings = make_headings(outcome.table)
    table = TextTable(*headings[:2], box=None, header_style="bold", title=outcome.table.title, title_justify="left")
    for heading in headings[2:]:
        table.add_column(heading, justify="right")
    for result in outcome.results:
        table.add_row(*make_cells(outcome.table, result))
    # wider than a terminal: digits must not be cut
    Console(width=max(Console().width, _WIDTH)).print(table)
    for pair in outcome.broken:
        click.echo(f"Not in the papers' order: {pair}")
    click.echo()
