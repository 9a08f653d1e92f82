"""A probe's result as rows of tables: what was measured beside what the GPU table says."""

from __future__ import annotations

from dataclasses import dataclass

from sagegen.gpu import Gpu
from sagegen.probing.probes import PROBES
from sagegen.probing.result import ProbeResult, Rate

_UNITS = {"operations": "TOPS", "results": "T results/s", "bytes": "GB/s"}


@dataclass(frozen=True, slots=True)
class Row:
    """One probe, in words.

    Attributes:
        table: what the GPU's row says; `-` where it says nothing.
        ratio: measured to table.
        note: `emulated` with the instructions, or the native ones.
    """

    name: str
    title: str
    per_clock: str
    per_second: str
    spread: str
    table: str
    ratio: str
    clock: str
    power: str
    note: str

    def cells(self) -> tuple[str, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


#: Titles of the columns, in the order of `Row.cells`.
COLUMNS = ("probe", "instruction", "/clk/SM", "rate", "spread", "table", "ratio", "MHz", "W", "SASS of a loop")


def table_value(name: str, gpu: Gpu | None) -> float | None:
    """What the table says of the probe `name`, in its unit: TOPS or GB/s."""
    if gpu is None:
        return None
    if name == "dram":
        return gpu.bandwidth_gbs
    return gpu.peaks.get(name.removeprefix("mma_")) if name.startswith("mma_") else None


def make_rows(result: ProbeResult, gpu: Gpu | None) -> list[Row]:
    """One row per rate, in the probes' order.

    Args:
        gpu: the row to compare with; None when the table has none.
    """
    return [_make_row(name, result.rates[name], table_value(name, gpu)) for name in PROBES if name in result.rates]


def _make_row(name: str, rate: Rate, table: float | None) -> Row:
    return Row(
        name=name,
        title=PROBES[name].title,
        per_clock=f"{rate.per_clock:.4g}",
        per_second=f"{rate.per_second:.4g} {_UNITS[rate.unit]}",
        spread=f"±{50 * (rate.high - rate.low) / rate.per_second:.1f}%",
        table=f"{table:g}" if table else "-",
        ratio=f"{rate.per_second / table:.2f}" if table else "-",
        clock=f"{rate.clock_mhz:.0f}",
        power="-" if rate.power_w is None else f"{rate.power_w:.0f}",
        note=f"emulated: {rate.sass}" if rate.emulated else rate.sass,
    )


def accumulator_lines(result: ProbeResult) -> list[str]:
    """A sentence per accumulator."""
    lines = []
    for name, bits in result.accumulators.items():
        emulated = f" (emulated: {bits.sass})" if bits.emulated else ""
        lines.append(
            f"accumulator of {PROBES[name].title}{emulated}: {bits.alone} mantissa bits alone, {bits.with_products} of "
            f"them with products that sum to 1, {bits.rounding}"
        )
    return lines
