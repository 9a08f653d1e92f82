"""`sagegen tune --verify`: repeats finals and says whether they agree with what was decided."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from sagegen.tuning.events import Listener
    from sagegen.tuning.repeat import Repetition
    from sagegen.tuning.request import Request, Tools

_WIDTH = 240


def repeat_and_report(request: Request, tools: Tools, listen: Listener, as_json: bool) -> None:
    """Repeat the finals, print what they say, and end the process: 0 they agree, 1 some do not."""
    from sagegen.tuning.repeat import repeat_finals

    repetitions = repeat_finals(request, tools, listen)
    failed = [repetition for repetition in repetitions if repetition.disagreements]
    if as_json:
        cases = [repetition.as_values() for repetition in repetitions]
        click.echo(json.dumps({"gpu": request.gpu.name, "agrees": not failed, "cases": cases}))
    else:
        _print_table(repetitions)
        for repetition in failed:
            case = f"{repetition.problem} at {repetition.tokens} tokens"
            click.echo(f"{case}: {'; '.join(repetition.disagreements)}")
        click.echo(f"{len(repetitions) - len(failed)} of {len(repetitions)} finals agree")
    raise SystemExit(1 if failed else 0)


def _print_table(repetitions: Sequence[Repetition]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("problem", "tokens", "tier", box=None, header_style="bold")
    for title in ("then", "now", "interval"):
        table.add_column(title, justify="right")
    for title in ("agrees", "winner", "over"):
        table.add_column(title)
    for repetition in repetitions:
        case = (repetition.problem, str(repetition.tokens), repetition.tier or "-")
        if not repetition.comparisons:
            table.add_row(*case, "-", "-", "-", "no" if repetition.disagreements else "yes", repetition.winner, "-")
        for comparison in repetition.comparisons:
            again = comparison.again
            table.add_row(
                *case,
                "-" if comparison.recorded is None else f"{comparison.recorded:.3f}x",
                f"{again.ratio:.3f}x",
                f"{again.low:.3f}..{again.high:.3f}",
                "no" if comparison.disagreement else "yes",
                repetition.winner,
                comparison.config,
            )
    # wider than a terminal: a line per comparison can be searched
    Console(width=max(Console().width, _WIDTH)).print(table)
