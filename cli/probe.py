"""`sagegen probe`: what this GPU's units reach, beside what the table says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sagegen.cli.options import json_option
from sagegen.errors import GpuMismatchError, UnknownNameError
from sagegen.probing.probes import PROBES

if TYPE_CHECKING:
    from sagegen.gpu import DetectedGpu
    from sagegen.probing.result import ProbeResult

_WIDTH = 200


@click.command("probe")
@click.option("--gpu", "gpu_name", metavar="NAME", help="GPU that this machine must have. [its first one]")
@click.option("--only", "names", metavar="NAME", multiple=True, help="Only this probe; may be repeated.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="YAML file to write.")
@json_option
def command(gpu_name: str | None, names: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Measure what the units of this machine's GPU reach.

    Matrix instructions, special functions, conversions, FP32, copies in device memory and reads from L2, each in a loop
    of its own on changing random operands; and how many mantissa bits the FP8 accumulators keep. Instructions that
    the compiler emulates are flagged from the machine code. `sagegen tune --probe FILE` has the model prefer the
    result to the table of GPUs. A probe that fails is exit code 1.

    \b
    Example:
      sagegen probe --gpu h200 -o h200-probe.yaml
      sagegen probe --only mma_s8 --only ex2
      sagegen tune --gpu h200 --probe h200-probe.yaml
    """
    unknown = [name for name in names if name not in PROBES]
    if unknown:
        raise UnknownNameError(f"there is no probe {unknown[0]!r}", f"probes are: {', '.join(PROBES)}")
    device = _find_device(gpu_name)
    result = _probe(device, names)
    if output:
        from sagegen.probing.result import dump_result

        output.write_text(dump_result(result))
    _show(result, device, as_json)
    if output:
        click.echo(f"Written to {output}", err=True)
    if result.absent:
        raise SystemExit(1)


def _find_device(gpu_name: str | None) -> DetectedGpu:
    from sagegen.gpu import detect_gpus, find_gpu
    from sagegen.measuring.subjects import require_gpu

    if gpu_name is not None:
        return require_gpu(find_gpu(gpu_name), "probe runs kernels")
    present = detect_gpus()
    if not present:
        raise GpuMismatchError(
            "probe runs kernels, and this machine has no GPU that a driver reports",
            "run it on a machine with one, or see what is missing with: sagegen doctor",
        )
    return present[0]


def _probe(device: DetectedGpu, names: tuple[str, ...]) -> ProbeResult:
    from sagegen.env import read_env
    from sagegen.measuring.telemetry import describe_others, read_state
    from sagegen.measuring.worker import Worker
    from sagegen.probing.probe import choose_probes, probe_gpu
    from sagegen.store import open_store
    from sagegen.toolkit import find_toolkit

    probes = choose_probes(device, names)
    if not probes:
        raise UnknownNameError(f"{device.product} has none of these instructions", "leave out --only")
    env = read_env()
    toolkit = find_toolkit(env)
    if others := describe_others(read_state(device.index), ()):
        click.echo(f"Warning: {others}", err=True)
    with Worker(device.index) as worker:
        return probe_gpu(
            device, probes, worker, open_store(env), toolkit, lambda line: click.echo(f"probe: {line}", err=True)
        )


def _show(result: ProbeResult, device: DetectedGpu, as_json: bool) -> None:
    from sagegen.probing.report import accumulator_lines
    from sagegen.probing.result import to_values

    if as_json:
        click.echo(json.dumps(to_values(result)))
    else:
        _print_table(result, device)
        for line in accumulator_lines(result):
            click.echo(line)
    for name, reason in result.absent.items():
        click.echo(f"Error: {name}: {reason}", err=True)


def _print_table(result: ProbeResult, device: DetectedGpu) -> None:
    from rich.console import Console
    from rich.table import Table

    from sagegen.probing.report import COLUMNS, make_rows

    table = Table(box=None, header_style="bold")
    for title in COLUMNS:
        is_text = title in ("probe", "instruction", "SASS of a loop")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=True)
    for row in make_rows(result, device.gpu):
        table.add_row(*row.cells())
    gpu = device.gpu
    known = f"table: {gpu.boost_mhz} MHz boost, {gpu.source}" if gpu else "not in the table of GPUs"
    # wider than a terminal: a line per probe can be searched
    Console(width=max(Console().width, _WIDTH)).print(table)
    click.echo(f"{result.gpu}: {result.machine.product}, {result.machine.sms} SMs, {known}")
