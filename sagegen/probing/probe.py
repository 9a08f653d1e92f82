"""A whole probe of one GPU: builds the kernels, has a worker run them one by one, and puts the result together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol

import numpy as np

from sagegen.build import BuildFailure, build_batch
from sagegen.gpu import DetectedGpu
from sagegen.measuring.jobs import Job, Reply
from sagegen.measuring.jobs import Probe as ProbeJob
from sagegen.probing.accumulator import read_accumulators
from sagegen.probing.probes import Probe, probes_for
from sagegen.probing.result import SCHEMA, Bits, Machine, ProbeResult, Rate
from sagegen.probing.sass import count_opcodes, describe, is_emulated
from sagegen.probing.source import kernel_entry, render_probe
from sagegen.store import Store
from sagegen.toolkit import Toolkit

#: A probe runs for less than a second; the first one of a worker starts CUDA.
TIMEOUT_S = 60.0
_UNIT_SCALE = {"operations": 1e12, "results": 1e12, "bytes": 1e9}


class Asker(Protocol):
    """What runs jobs: `measuring.worker.Worker`, or a script of a test."""

    def run(self, job: Job, timeout_s: float) -> Reply: ...


@dataclass(slots=True)
class _Gathered:
    """What is known so far."""

    rates: dict[str, Rate] = field(default_factory=dict)
    accumulators: dict[str, Bits] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    power_limit_w: float | None = None


def compute_capability(device: DetectedGpu) -> int:
    """Major times ten plus minor of a GPU of this machine."""
    return int(device.arch.removeprefix("sm_"))


def choose_probes(device: DetectedGpu, names: Sequence[str] = ()) -> tuple[Probe, ...]:
    """The probes that `device` can run; with `names` those among them."""
    return tuple(p for p in probes_for(compute_capability(device)) if not names or p.name in names)


def probe_gpu(
    device: DetectedGpu,
    probes: Sequence[Probe],
    worker: Asker,
    store: Store,
    toolkit: Toolkit,
    tell: Callable[[str], None] = lambda line: None,
) -> ProbeResult:
    """Measure `probes` on `device`. What fails is `absent` from the result, with the reason.

    Args:
        worker: of that GPU.
        tell: gets a line about what is done.

    Raises:
        BuildError, StoreError, ToolchainError, WorkerError: as `build_batch` and `Worker.run`.
    """
    tell(f"building {len(probes)} kernels for {device.arch}")
    built = build_batch(list(map(render_probe, probes)), device.arch, store, toolkit)
    gathered = _Gathered()
    for probe in probes:
        made = built[probe.name]
        if isinstance(made, BuildFailure):
            gathered.absent[probe.name] = f"did not compile: {made.reason}"
            continue
        tell(probe.name)
        reply = worker.run(ProbeJob(probe.name, str(made.cubin), device.index), TIMEOUT_S)
        if reply.outcome == "ok":
            counts = count_opcodes(made.cubin.read_bytes(), kernel_entry(probe), compute_capability(device))
            _gather(gathered, probe, counts, reply.data)
        else:
            gathered.absent[probe.name] = f"{reply.outcome}: {reply.reason}"
    return ProbeResult(
        schema=SCHEMA,
        gpu=device.gpu.name if device.gpu else device.product,
        machine=_machine(device, toolkit, gathered.power_limit_w),
        rates=gathered.rates,
        accumulators=gathered.accumulators,
        absent=gathered.absent,
    )


def _gather(gathered: _Gathered, probe: Probe, counts: Counter[str], data: Mapping[str, Any]) -> None:
    emulated, sass = is_emulated(probe, counts), describe(probe, counts)
    if probe.kind != "accumulator":
        gathered.rates[probe.name] = _make_rate(probe, data, emulated, sass)
        gathered.power_limit_w = gathered.power_limit_w or data["power_limit_w"]
        return
    alone, with_products = (np.array(data[name], np.float32) for name in ("alone", "with_products"))
    try:
        bits = read_accumulators(alone, with_products)
    except ValueError as error:
        gathered.absent[probe.name] = str(error)
        return
    gathered.accumulators[probe.name] = Bits(
        alone=bits.alone, with_products=bits.with_products, rounding=bits.rounding, emulated=emulated, sass=sass
    )


def _make_rate(probe: Probe, data: Mapping[str, Any], emulated: bool, sass: str) -> Rate:
    figures = data["figures"]
    scale = _UNIT_SCALE[probe.unit]
    return Rate(
        unit=probe.unit,
        per_clock=_rounded(figures["per_clock"]),
        per_second=_rounded(figures["per_second"] / scale),
        low=_rounded(figures["per_second_p20"] / scale),
        high=_rounded(figures["per_second_p80"] / scale),
        clock_mhz=_rounded(figures["clock_mhz"]),
        nvml_mhz=data["nvml_mhz"],
        power_w=data["power_w"],
        emulated=emulated,
        sass=sass,
    )


def _rounded(value: float) -> float:
    """Six digits: more than any run repeats."""
    return float(f"{value:.6g}")


def _machine(device: DetectedGpu, toolkit: Toolkit, power_limit_w: float | None) -> Machine:
    return Machine(
        product=device.product,
        sms=device.sms,
        driver=device.driver,
        nvcc=toolkit.build,
        power_limit_w=power_limit_w,
        date=datetime.now(timezone.utc).date().isoformat(),
    )
