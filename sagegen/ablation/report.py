"""The results of tables as cells of text and as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from sagegen.ablation.study import Outcome, Result
from sagegen.ablation.tables import Table
from sagegen.errors import ToolchainError

_BAR_INCHES = 0.28


def make_headings(table: Table) -> tuple[str, ...]:
    headings = ("cosine", "worst case", "worst head", "1 - cosine", "relative L1", "RMSE")
    return ("what", "inputs", *headings, *(("V flushed",) if table.shows_flushed else ()))


def make_cells(table: Table, result: Result) -> tuple[str, ...]:
    """A row below `make_headings`; ± is the standard deviation over seeds or layers."""
    flushed = (f"{result.flushed_share:.4%}",) if table.shows_flushed else ()
    if math.isnan(result.worst_case):
        return (result.label, result.inputs, "overflow", *["-"] * 5, *flushed)
    return (
        result.label,
        result.inputs,
        f"{result.mean('cosine'):.6f} ±{result.spread('cosine'):.6f}",
        f"{result.worst_case:.6f}",
        f"{result.worst_head:.6f}",
        f"{1 - result.mean('cosine'):.3e}",
        f"{result.mean('relative_l1'):.5f} ±{result.spread('relative_l1'):.5f}",
        f"{result.mean('rmse'):.5g}",
        *flushed,
    )


def save_figure(outcomes: Sequence[Outcome], path: Path) -> None:
    """One field of bars per table: what its rows are ranked by, as an error on a log scale, with its spread.

    Raises:
        ToolchainError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    counts = [len(outcome.results) for outcome in outcomes]
    figure = Figure(figsize=(10, _BAR_INCHES * sum(counts) + 1.2 * len(counts)), layout="constrained")
    fields = figure.subplots(len(counts), 1, squeeze=False, height_ratios=[count + 2 for count in counts])
    for axes, outcome in zip(fields[:, 0], outcomes, strict=True):
        ranked_by = outcome.table.ranked_by
        means = [result.mean(ranked_by) for result in outcome.results]
        errors = [1 - mean if ranked_by == "cosine" else mean for mean in means]
        spreads = [result.spread(ranked_by) for result in outcome.results]
        names = [f"{result.label} ({result.inputs})" for result in outcome.results]
        axes.barh(range(len(names)), errors, xerr=spreads)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_title(outcome.table.title, fontsize=9)
        axes.set_xlabel("1 - cosine" if ranked_by == "cosine" else "relative L1", fontsize=8)
    figure.savefig(path)


def require_matplotlib() -> None:
    """Raises ToolchainError where figures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ToolchainError("figures need matplotlib", "pip install 'sagegen[report]'") from error
