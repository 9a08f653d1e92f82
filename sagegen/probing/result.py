"""The YAML file of a probe's result: its schema, reading it strictly, and what the model takes from it.

schema: 1
gpu: h200
machine: {...}       # where it was measured
rates: {name: ...}   # by probe
accumulators: {name: ...}
absent: {name: why}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from sagegen.errors import ProbeError
from sagegen.gpu import Gpu, Rates
from sagegen.probing.probes import PROBES, Unit

SCHEMA = 1
_REMEDY = "probe again with: sagegen probe -o FILE"


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything in the file: immutable, and a misspelled key is an error."""


class Machine(_Record, frozen=True):
    """Where a probe ran: the driver's name of the GPU, its SMs, driver, nvcc's build string, power limit in W, date."""

    product: str
    sms: int
    driver: str
    nvcc: str
    power_limit_w: float | None
    date: str


class Rate(_Record, frozen=True):
    """What one probe measured.

    Attributes:
        unit: what is counted: `operations` (two per multiply-add), `results` (per lane), `bytes` (read + written).
        per_clock: of it per SM and cycle, by the SMs' cycle counters.
        per_second: of the whole chip, in 1e12 operations, 1e12 results or 1e9 bytes; median of the runs.
        low, high: 20th and 80th percentile of the runs.
        clock_mhz: SM clock that cycles and times imply.
        nvml_mhz, power_w: what NVML said while it ran; power over its own, longer window.
        emulated: other instructions stand in for the native one.
        sass: instructions of one turn of the kernel's loop that do the work.
    """

    unit: Unit
    per_clock: float
    per_second: float
    low: float
    high: float
    clock_mhz: float
    nvml_mhz: float | None
    power_w: float | None
    emulated: bool
    sass: str


class Bits(_Record, frozen=True):
    """Mantissa bits that an accumulator keeps: of C alone, with products added, and what happens to the next one."""

    alone: int
    with_products: int
    rounding: Literal["truncates", "rounds to nearest", "keeps all"]
    emulated: bool
    sass: str


class ProbeResult(_Record, frozen=True):
    """The whole file.

    Attributes:
        gpu: name in sagegen's table; of a GPU that it lacks, the architecture.
        absent: why a probe has no figures.
    """

    schema: int
    gpu: str
    machine: Machine
    rates: dict[str, Rate]
    accumulators: dict[str, Bits]
    absent: dict[str, str] = {}

    def as_rates(self) -> Rates:
        """What the model takes."""
        matrix = {n: rate.per_second for n, rate in self.rates.items() if PROBES[n].kind in ("mma", "wgmma")}
        units = {n: rate.per_clock for n, rate in self.rates.items() if PROBES[n].kind == "unit"}
        dram, l2 = self.rates.get("dram"), self.rates.get("l2")
        return Rates(matrix, units, dram.per_second if dram else None, l2.per_clock if l2 else None)


def dump_result(result: ProbeResult) -> str:
    """The file's text: YAML, floats in full."""
    text: str = yaml.safe_dump(msgspec.to_builtins(result), sort_keys=False, width=1 << 20, allow_unicode=True)
    return text


def parse_result(text: str, where: str) -> ProbeResult:
    """The result in `text`.

    Args:
        where: the file's name, for messages.

    Raises:
        ProbeError: it is no YAML, lacks a member, has one that it should not have, or a figure no GPU has.
    """
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ProbeError(f"{where}{line}: not YAML: {getattr(error, 'problem', error)}", _REMEDY) from error
    try:
        result = msgspec.convert(values, ProbeResult)
    except msgspec.ValidationError as error:
        raise ProbeError(f"{where}: {error}", _REMEDY) from error
    if result.schema != SCHEMA:
        raise ProbeError(f"{where}: schema {result.schema}, this sagegen reads {SCHEMA}", _REMEDY)
    for name in (*result.rates, *result.accumulators):
        if name not in PROBES:
            raise ProbeError(f"{where}: there is no probe {name!r}", _REMEDY)
    for name, rate in result.rates.items():
        if not 0 < rate.per_clock < float("inf") or not 0 < rate.per_second < float("inf"):
            raise ProbeError(f"{where}: the rate of {name} is not positive and finite", _REMEDY)
    return result


def measured_gpu(gpu: Gpu, file: Path | None) -> Gpu:
    """`gpu` with the rates of a probe's file, which the model then prefers to the table's; without a file as it is.

    Raises:
        ProbeError: the file is malformed or of another GPU.
        OSError: it cannot be read.
    """
    if file is None:
        return gpu
    result = parse_result(file.read_text(), str(file))
    if result.gpu != gpu.name:
        raise ProbeError(
            f"{file} is a probe of {result.gpu}, not of {gpu.name}", f"probe {gpu.name}, or name it with --gpu"
        )
    return replace(gpu, measured=result.as_rates())


def to_values(result: ProbeResult) -> Mapping[str, Any]:
    """The result in built-in types, as the file has it."""
    values: dict[str, Any] = msgspec.to_builtins(result)
    return values
