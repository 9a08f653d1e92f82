"""`sagegen gpus`: the table of known GPUs and what this machine has."""

from __future__ import annotations

import json

import click

from sagegen.cli.options import json_option
from sagegen.gpu import GPUS, DetectedGpu, Gpu, detect_gpus

_WIDTH = 120


@click.command("gpus")
@json_option
def command(as_json: bool) -> None:
    """List the known GPUs and those of this machine.

    \b
    Example:
      sagegen gpus
      sagegen gpus --json | jq '.present[0].product'
    """
    present = detect_gpus()
    if as_json:
        click.echo(
            json.dumps({"known": [_known(gpu) for gpu in GPUS.values()], "present": list(map(_present, present))})
        )
        return
    _print_known()
    click.echo()
    for gpu in present:
        name = gpu.gpu.name if gpu.gpu else "unknown to sagegen"
        click.echo(f"GPU {gpu.index}: {gpu.product}, {gpu.arch}, {gpu.sms} SMs, driver {gpu.driver}: {name}")
    if not present:
        click.echo("This machine has no visible NVIDIA GPU.")


def _known(gpu: Gpu) -> dict[str, object]:
    table = (field for field in Gpu.__slots__ if field not in ("peaks", "measured"))
    return {field: getattr(gpu, field) for field in table} | {"peaks": dict(gpu.peaks)}


def _present(gpu: DetectedGpu) -> dict[str, object]:
    return {field: getattr(gpu, field) for field in DetectedGpu.__slots__ if field != "gpu"} | {
        "gpu": gpu.gpu.name if gpu.gpu else None
    }


def _print_known() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "GPU", "arch", box=None, header_style="bold", caption="peaks: dense TOPS of mma.sync", caption_justify="left"
    )
    for title in ("SMs", "smem KiB", "L2 MiB", "GB/s", "MHz", "s8", "e4m3", "e4m3f16", "f16", "bf16"):
        table.add_column(title, justify="right")
    for gpu in GPUS.values():
        kinds = ("s8", "e4m3f32", "e4m3f16", "f16f32", "bf16f32")
        peaks = (f"{gpu.peaks[kind]:g}" if kind in gpu.peaks else "-" for kind in kinds)
        sizes = (gpu.sms, gpu.smem_per_block // 1024, gpu.l2_bytes // 2**20, f"{gpu.bandwidth_gbs:g}", gpu.boost_mhz)
        table.add_row(gpu.name, gpu.arch, *map(str, sizes), *peaks)
    # wider than a terminal: names must not be cut
    Console(width=max(Console().width, _WIDTH)).print(table)
