"""Predicted against measured times as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sagegen.errors import ToolchainError
from sagegen.tuning.validation import Pair

#: Readable on white and on black.
_INK = "#808080"
_COLORS = {"mma": "#d9730d", "wgmma": "#2f8fdd"}
_MARKERS = {"mma": "o", "wgmma": "^"}


def save_plot(pairs: Sequence[Pair], path: Path) -> None:
    """Draw `pairs`, kernels left and full calls right, into `path`; its suffix says the format.

    The background is transparent and the ink grey, so that it is legible on a light page and on a dark one. The same
    pairs give the same SVG.

    Raises:
        ToolchainError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolchainError("figures need matplotlib", "pip install 'sagegen[report]'") from error
    settings: Any = {
        "svg.hashsalt": "sagegen", "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK,
        "xtick.color": _INK, "ytick.color": _INK, "font.size": 11,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(11, 5.2), layout="constrained")
        kernels, calls = figure.subplots(1, 2)
        for axes, title, values in (
            (kernels, "attention kernel", [(p, p.measured_kernel_us, p.predicted_kernel_us) for p in pairs]),
            (calls, "full call", [(p, p.measured_call_us, p.predicted_call_us) for p in pairs]),
        ):
            axes.set(xscale="log", yscale="log", xlabel="measured, us", ylabel="predicted, us", title=title)
            axes.patch.set_alpha(0)
            for family, color in _COLORS.items():
                points = [(x, y) for pair, x, y in values if pair.config.family == family]
                axes.scatter(
                    [x for x, _ in points], [y for _, y in points], s=9, alpha=0.45, linewidths=0,
                    color=color, marker=_MARKERS[family], label=f"{family}: {len(points)}", rasterized=True,
                )  # fmt: skip
            ends = [min(x for _, x, _ in values) / 1.1, max(x for _, x, _ in values) * 1.1]
            axes.plot(ends, ends, color=_INK, linewidth=1, label="equal")
            axes.plot(ends, [1.1 * end for end in ends], color=_INK, linewidth=0.7, linestyle=":", label="10 % off")
            axes.plot(ends, [end / 1.1 for end in ends], color=_INK, linewidth=0.7, linestyle=":")
            axes.legend(frameon=False)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, dpi=160, metadata=metadata)
