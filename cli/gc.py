"""`sagegen gc`: remove from the kernel stores what nobody needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from sagegen.cli.options import FiniteRange, json_option

if TYPE_CHECKING:
    from sagegen.shipping.sweep import Stray


@dataclass(frozen=True, slots=True)
class _Row:
    """A stray, and what became of it: `removed`, `in use`, or `would be removed`."""

    stray: Stray
    fate: str


@click.command("gc")
@click.option(
    "--days",
    type=FiniteRange(min=0),
    default=30,
    show_default=True,
    help="Keep kernels that were built or loaded within so many days.",
)
@click.option("--dry-run", is_flag=True, help="Say what would go; remove nothing.")
@json_option
def command(days: float, dry_run: bool, as_json: bool) -> None:
    """Remove from the cache folder the compiled kernels that nobody needs.

    Those are kernels that no registry names and that no process built or loaded for --days, damaged ones, and what
    killed processes left behind a day ago or earlier. Registries, journals and cubins beside registries stay. It may
    run beside builds: what is being built is locked, and stays.

    \b
    Example:
      sagegen gc --dry-run
      sagegen gc --days 7
    """
    from sagegen.env import read_env
    from sagegen.errors import StoreError
    from sagegen.shipping.sweep import DAY_S, find_strays, remove_stray

    env = read_env()
    if env.named_cache_dir not in (None, env.cache_dir):  # another folder stands in, which nobody asked to be swept
        raise StoreError(
            f"{env.named_cache_dir} cannot be written, so nothing can be removed from it", "set SAGEGEN_CACHE_DIR"
        )
    rows = []
    for stray in find_strays(env, days * DAY_S):
        fate = "would be removed" if dry_run else "removed" if remove_stray(stray) else "in use"
        rows.append(_Row(stray, fate))
    freed = sum(row.stray.size for row in rows if row.fate != "in use")
    if as_json:
        click.echo(json.dumps({"freed_bytes": freed, "dry_run": dry_run, "strays": [_to_values(row) for row in rows]}))
        return
    for row in rows:
        idle = row.stray.idle_s / DAY_S
        click.echo(f"{row.fate}: {row.stray.kind:8} {row.stray.size / 1e6:8.2f} MB, {idle:.0f} days  {row.stray.path}")
    verb = "would be freed" if dry_run else "freed"
    click.echo(f"{freed / 1e6:.2f} MB {verb}")


def _to_values(row: _Row) -> dict[str, object]:
    stray = row.stray
    return {
        "path": str(stray.path),
        "kind": stray.kind,
        "bytes": stray.size,
        "idle_s": round(stray.idle_s),
        "fate": row.fate,
    }
