"""What NVML says of a GPU while it is measured: clocks, power and its limit, and who else uses it."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuState:
    """One look at a GPU. A figure that the driver does not tell is None.

    Attributes:
        clock_mhz: SM clock at that moment.
        power_limit_w: enforced power limit.
        processes: ids of processes with a CUDA context on it, as far as NVML sees them (a container may hide them).
        busy_percent: share of the last sample period in which a kernel ran.
        power_w: what it draws, on many GPUs as the mean of the last second.
    """

    clock_mhz: float | None = None
    power_limit_w: float | None = None
    processes: tuple[int, ...] = ()
    busy_percent: int | None = None
    power_w: float | None = None


def read_state(gpu_index: int) -> GpuState:
    """The state of the GPU with NVML's index `gpu_index`; an empty one where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return GpuState()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(gpu_index)

        def ask(question: str, *arguments: object) -> object | None:
            try:
                answer: object = getattr(pynvml, question)(handle, *arguments)
            except pynvml.NVMLError:  # not supported, or not allowed to this user
                return None
            return answer

        clock = ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM)
        limit = ask("nvmlDeviceGetEnforcedPowerLimit")
        power = ask("nvmlDeviceGetPowerUsage")
        processes = ask("nvmlDeviceGetComputeRunningProcesses")
        rates = ask("nvmlDeviceGetUtilizationRates")
    except pynvml.NVMLError:
        return GpuState()
    finally:
        pynvml.nvmlShutdown()
    return GpuState(
        clock_mhz=float(clock) if isinstance(clock, int) else None,
        power_limit_w=limit / 1000 if isinstance(limit, int) else None,
        processes=tuple(int(p.pid) for p in processes) if isinstance(processes, list) else (),
        busy_percent=int(getattr(rates, "gpu", 0)) if rates is not None else None,
        power_w=power / 1000 if isinstance(power, int) else None,
    )


def describe_others(state: GpuState, own: Collection[int]) -> str | None:
    """A sentence about other users of the GPU, who make times wrong; None when it seems idle.

    Args:
        own: ids of processes of this tuning run.
    """
    others = sorted(set(state.processes) - set(own) - {os.getpid()})
    if others:
        return f"other processes use the GPU ({', '.join(map(str, others))}): times will be off until they end"
    if not state.processes and state.busy_percent:
        return f"something else keeps the GPU {state.busy_percent} % busy: times will be off until it ends"
    return None
