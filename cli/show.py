"""`sagegen show`: the tuned registry, one problem's entries in full, a journal's winners, or the search space."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from sagegen.cli.difference import show_difference
from sagegen.cli.options import json_option, make_problem, problem_options, tune_command

if TYPE_CHECKING:
    from sagegen.entry import Entry, MeasuredTime, PredictedTime
    from sagegen.problem import Problem
    from sagegen.tuning.distances import CaseDistances, Distance

_WIDTH = 240


class _Row(NamedTuple):
    """One entry as shown: `layer` is `user`, `shipped`, a folder or a package; `stale` None: no text was recorded."""

    gpu: str
    layer: str
    entry: Entry
    stale: bool | None


@click.command("show")
@click.option("--gpu", "gpu_name", metavar="NAME", help="Only this GPU's registry; else all that exist.")
@click.option("--problem", "problem_name", metavar="NAME", help="Print this problem's entries in full.")
@click.option(
    "--journal",
    "journal_path",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Show how far others are from the winners of this journal; it may be packed (.jsonl.gz).",
)
@click.option(
    "--diff",
    "diff_paths",
    nargs=2,
    metavar="OLD NEW",
    type=click.Path(exists=True, path_type=Path),
    help="Show what changed between two registries: files, folders, or bundles in any form.",
)
@click.option("--space", "show_space", is_flag=True, help="Show the parameters of the search space instead.")
@problem_options
@json_option
def command(
    gpu_name: str | None,
    problem_name: str | None,
    journal_path: Path | None,
    diff_paths: tuple[Path, Path] | None,
    show_space: bool,
    head_dim: str,
    dtype: str,
    is_causal: bool,
    precision: str,
    as_json: bool,
) -> None:
    """Show the tuned registry, one problem's entries, a journal's winners, what changed, or the search space.

    An entry is stale when its config renders another source today than the one its kernel was built from: the kernel
    goes on serving, its figures are of the old source.

    With --journal, per problem and length: the winner of the last finals, the runner-up, the default config, and the
    slowest valid config that was measured; `winner` is how many times faster the winner is, with a 95 % interval where
    both ran in the same rounds. `screen` marks times that are of no finals.

    With --diff, per problem and range of lengths: what was added or removed, is faster or slower by 1 % or more, is
    more or less accurate, is measured where it was predicted, or is another kernel. `speed` is the old time of a full
    call by the new one, of two measured or (`~`) two predicted times of the same shape; others are not compared.

    --head-dim, --dtype, --causal and --precision say for which problem --space counts the configs that tuning tries.

    \b
    Example:
      sagegen show --gpu l20
      sagegen show --gpu l20 --problem d128_bf16_causal_int8
      sagegen show --journal docs/gpu-runs/2026-11-30-h200-bf16-journal.jsonl.gz
      sagegen show --diff h200-old.tar.zst tuned/h200.yaml
      sagegen show --space --gpu l20 --head-dim 64
    """
    from sagegen.gpu import GPUS, find_gpu
    from sagegen.problem import parse_problem

    if show_space:
        _show_space(gpu_name, make_problem(head_dim, dtype, is_causal, precision), as_json)
        return
    problems = [] if problem_name is None else [parse_problem(problem_name)]
    if diff_paths is not None:
        show_difference(*diff_paths, gpu_name, problem_name, as_json)
        return
    if journal_path is not None:
        _show_journal(journal_path, gpu_name, problem_name, as_json)
        return
    names = list(GPUS) if gpu_name is None else [find_gpu(gpu_name).name]
    rows, errors = _read_rows(names)
    rows = [row for row in rows if problem_name in (None, row.entry.problem)]
    if as_json:
        click.echo(json.dumps({"entries": [_to_json(row) for row in rows], "errors": errors}))
    elif problem_name is not None:
        _print_details(rows)
    else:
        _print_table(rows)
    if not rows and not errors and not as_json:
        what = f"{gpu_name or 'any GPU'}{f' and {problem_name}' if problem_name else ''}"
        click.echo(f"Nothing is tuned for {what}; to tune: {tune_command(gpu_name or 'NAME', problems)}")
    for error in errors:
        click.echo(f"Error: {error}", err=True)
    if errors:
        raise SystemExit(2)


def _read_rows(names: Iterable[str]) -> tuple[list[_Row], list[str]]:
    """Entries of all layers, and what is wrong with the files that could not be read."""
    from sagegen.env import read_env
    from sagegen.errors import RegistryError
    from sagegen.registry import load_layers
    from sagegen.registry_stale import find_staleness

    env = read_env()
    errors: list[RegistryError] = []
    rows = []
    for name in names:
        for layer in load_layers(name, env, errors.append):
            rows += [_Row(name, layer.label, entry, find_staleness(entry)) for entry in layer.entries]
    return rows, list(dict.fromkeys(map(str, errors)))  # a folder that is missing is missed once per GPU


def _to_json(row: _Row) -> dict[str, Any]:
    import msgspec

    return {"gpu": row.gpu, "layer": row.layer, "stale": row.stale, **msgspec.to_builtins(row.entry)}


def _print_table(rows: list[_Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not rows:
        return
    table = Table("GPU", "problem", "keys", box=None, header_style="bold")
    for title in ("TOPS", "us", "vs SDPA", "cosine"):
        table.add_column(title, justify="right")
    table.add_column("from")
    table.add_column("config")
    for row in rows:
        entry = row.entry
        cells = (row.gpu, entry.problem, entry.lengths.name, *_figures(entry), _origin(row), entry.config or "-")
        table.add_row(*cells, style=None if entry.measured else "dim italic")
    # wider than a terminal: a line per entry can be searched, and a config's name copied
    Console(width=max(Console().width, _WIDTH)).print(table)
    _explain_predictions(row.entry for row in rows)


def _explain_predictions(entries: Iterable[Entry]) -> None:
    """Say below a table what its predicted times are worth."""
    stated = {
        (entry.provenance.model_error, entry.provenance.model_checked_on) for entry in entries if not entry.measured
    }
    if not stated:
        return
    click.echo("~ and predicted: by a model of the GPU, never measured there.", err=True)
    for error, gpu in sorted((error, gpu) for error, gpu in stated if error is not None and gpu is not None):
        click.echo(f"The model's error: 9 of 10 full calls within {error:.0%}, checked on {gpu} alone.", err=True)


def _figures(entry: Entry) -> tuple[str, str, str, str]:
    figures = entry.figures
    return (
        _text(figures.tops, "{:.0f}"),
        _text(entry.kernel_time, "{:.1f}"),
        _text(figures.speed_vs_sdpa, "{:.2f}x"),
        _text(entry.min_cosine, "~{:.5f}" if entry.provenance.accuracy_from else "{:.5f}"),
    )


def _text(value: float | MeasuredTime | PredictedTime | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _origin(row: _Row) -> str:
    """Answer, provenance, layer and flags, e.g. `measured, shipped, stale`."""
    words = [row.entry.provenance.kind, row.layer, *([row.entry.tier] if row.entry.tier else [])]
    if row.entry.answer == "sdpa":
        words.insert(0, "answers sdpa")
    return ", ".join(words + (["stale"] if row.stale else []))


def _print_details(rows: list[_Row]) -> None:
    from sagegen.registry_file import dump_entries

    for row in rows:
        click.echo(f"# {row.gpu}, {_origin(row)}")
        click.echo(dump_entries(row.gpu, [row.entry]).split("entries:\n", 1)[1].removesuffix("...\n"))


def _show_journal(path: Path, gpu_name: str | None, problem_name: str | None, as_json: bool) -> None:
    from sagegen.tuning.distances import find_distances
    from sagegen.tuning.journal import read_journal

    cases = [
        case
        for case in find_distances(read_journal(path))
        if gpu_name in (None, case.gpu) and problem_name in (None, case.problem)
    ]
    if as_json:
        click.echo(json.dumps({"journal": str(path), "cases": [case.as_values() for case in cases]}))
    elif not cases:
        click.echo(f"{path} has no config that was measured{' for what was asked' if gpu_name or problem_name else ''}")
    else:
        _print_distances(cases)


def _print_distances(cases: list[CaseDistances]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("GPU", "problem", "tokens", "tier", "who", box=None, header_style="bold")
    for title in ("TOPS", "us", "winner", "interval"):
        table.add_column(title, justify="right")
    table.add_column("from")
    table.add_column("config")
    for case in cases:
        for distance in case.distances:
            place = (case.gpu, case.problem, str(case.tokens), case.tier or "-")
            table.add_row(*place, *_distance_cells(distance))
    Console(width=max(Console().width, _WIDTH)).print(table)


def _distance_cells(distance: Distance) -> tuple[str, ...]:
    interval = "-" if distance.interval is None else "{:.3f}..{:.3f}".format(*distance.interval)
    return (
        distance.role,
        f"{distance.tops:.0f}",
        f"{distance.kernel_us:.1f}",
        f"{distance.behind:.3f}x",
        interval,
        distance.phase,
        distance.config,
    )


def _show_space(gpu_name: str | None, problem: Problem, as_json: bool) -> None:
    from sagegen.gpu import find_gpu
    from sagegen.rules import Target, searched_configs
    from sagegen.space import FAMILIES

    target = Target(find_gpu(gpu_name), problem) if gpu_name else None
    families = [
        {
            "family": name,
            "configs": len(space),
            "searched": len(searched_configs(space, target)) if target else None,
            "params": [
                {"name": p.name, "label": p.label, "values": list(p.values), "doc": p.doc} for p in space.params
            ],
        }
        for name, space in FAMILIES.items()
    ]
    if as_json:
        click.echo(json.dumps({"gpu": gpu_name, "problem": problem.name, "families": families}))
        return
    for family in families:
        _print_family(family)
        if target is None:
            click.echo(f"{family['configs']} configs; --gpu NAME counts those that a tuning run tries")
        else:
            tried = f"{family['searched']} of {family['configs']} configs"
            click.echo(f"{tried} are valid and tried by a tuning run on {target.gpu.name} for {problem.name}")


def _print_family(family: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("parameter", "in names", "values", "what it does", box=None, header_style="bold")
    for param in family["params"]:
        table.add_row(param["name"], param["label"], ", ".join(map(str, param["values"])), param["doc"])
    click.echo(f"Family {family['family']}:")
    Console().print(table)
