"""`sagegen show --diff`: what changed between two registries, as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sagegen.entry import Entry
    from sagegen.shipping.difference import Change

_WIDTH = 400


def show_difference(old: Path, new: Path, gpu_name: str | None, problem_name: str | None, as_json: bool) -> None:
    """Print what changed from `old` to `new`; as JSON what did not, too."""
    from sagegen.shipping.difference import find_changes
    from sagegen.shipping.sources import read_sources

    changes = [
        change
        for change in find_changes(read_sources(old), read_sources(new))
        if gpu_name in (None, change.gpu) and problem_name in (None, change.problem)
    ]
    if as_json:
        click.echo(json.dumps({"old": str(old), "new": str(new), "changes": [_to_values(c) for c in changes]}))
        return
    changed = [change for change in changes if change.words]
    if changed:
        _print_table(changed)
    click.echo(f"{len(changed)} of {len(changes)} ranges of lengths changed")


def _to_values(change: Change) -> dict[str, Any]:
    import msgspec

    old, new = (None if entry is None else msgspec.to_builtins(entry) for entry in (change.old, change.new))
    return {
        "gpu": change.gpu,
        "problem": change.problem,
        "kv_min": change.lengths.kv_min,
        "kv_max": change.lengths.kv_max,
        "tier": change.tier,
        "changes": list(change.words),
        "speed": change.speed,
        "speed_is": None if change.speed is None else "measured" if change.is_speed_measured else "predicted",
        "old": old,
        "new": new,
    }


def _print_table(changes: list[Change]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("GPU", "problem", "keys", "tier", "what", box=None, header_style="bold")
    for title in ("speed", "old cosine", "new cosine"):
        table.add_column(title, justify="right")
    table.add_column("old")
    table.add_column("new")
    for change in changes:
        table.add_row(
            change.gpu,
            change.problem,
            change.lengths.name,
            change.tier or "-",
            ", ".join(change.words),
            _speed(change),
            *(_cosine(entry) for entry in (change.old, change.new)),
            *(_describe(entry) for entry in (change.old, change.new)),
        )
    # wider than a terminal: a line per change can be searched
    Console(width=max(Console().width, _WIDTH)).print(table)


def _speed(change: Change) -> str:
    """`~` marks what is predicted, as everywhere."""
    if change.speed is None:
        return "-"
    return f"{'' if change.is_speed_measured else '~'}{change.speed:.3f}x"


def _cosine(entry: Entry | None) -> str:
    if entry is None or entry.min_cosine is None:
        return "-"
    return f"{'~' if entry.provenance.accuracy_from else ''}{entry.min_cosine:.5f}"


def _describe(entry: Entry | None) -> str:
    return "-" if entry is None else f"{entry.provenance.kind} {entry.provenance.date} {entry.config or entry.answer}"
