"""What NVML says of a GPU while it is measured: clocks, power, temperature, slowdowns, and who else uses it."""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

#: NVML's clock event reasons that spoil a time: the chip or its power supply protects itself, or it is too hot. Those
#: that are left out are normal: idle clocks, clocks that somebody set, and the power cap (SW_POWER_CAP), at which a
#: large GPU under load sits all the time.
_SLOWDOWN_BITS = {  # nvml.h, nvmlClocksEventReason*
    "hardware slowdown": 0x08,
    "thermal slowdown": 0x20,
    "hardware thermal slowdown": 0x40,
    "power brake": 0x80,
}
#: A GPU that is busy in all of so many looks is in use; NVML's figure is of the last second or less.
_LOOKS, _LOOK_EVERY_S = 4, 0.4
_BUSY_PERCENT = 5


@dataclass(frozen=True, slots=True)
class GpuState:
    """One look at a GPU. A figure that the driver does not tell is None.

    Attributes:
        clock_mhz: SM clock at that moment.
        power_limit_w: enforced power limit.
        processes: ids of processes with a CUDA context on it, as far as NVML sees them (a container may hide them).
        busy_percent: share of the last sample period in which a kernel ran.
        power_w: what it draws, on many GPUs as the mean of the last second.
        temperature_c: of the chip.
        slowdowns: why its clock is held down at that moment, in so far as that spoils times; see `name_slowdowns`.
    """

    clock_mhz: float | None = None
    power_limit_w: float | None = None
    processes: tuple[int, ...] = ()
    busy_percent: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    slowdowns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which a series of times was taken. A figure that the driver does not tell is None.

    Attributes:
        looks: how often NVML was asked, between rounds.
        clock_mhz, power_w: medians; the SM clock and what the GPU draws.
        least_clock_mhz: the lowest clock of a round that counts.
        temperature_c: the highest.
        throttled: rounds in which the GPU slowed down to protect itself.
        dropped: of these, how many were left out and repeated. The others count, since too few would have been left.
        slowdowns: why, each reason once.
    """

    looks: int = 0
    clock_mhz: float | None = None
    least_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttled: int = 0
    dropped: int = 0
    slowdowns: tuple[str, ...] = ()


class Watch:
    """Looks at a GPU while times are taken, between two rounds.

    NVML takes time to answer, in which the GPU rests, so it is not asked after every short round: a round has the state
    of the last look.

    Args:
        look: at the GPU, e.g. `functools.partial(glance, handle)`.
        every_s: seconds between looks, at least.
        rest_s: how long a GPU that throttles is left to cool down.
    """

    def __init__(self, look: Callable[[], GpuState], every_s: float = 0.02, rest_s: float = 0.5) -> None:
        self._look = look
        self._every_s = every_s
        self._rest_s = rest_s
        self._looked_at = -math.inf
        self._states: list[GpuState] = []
        self._rounds = 0
        self._throttled = 0

    def is_throttled(self) -> bool:
        """Whether the round that just ended has to be repeated."""
        self._rounds += 1
        if time.monotonic() - self._looked_at >= self._every_s:
            self._states.append(self._look())
            self._looked_at = time.monotonic()
        if not self._states[-1].slowdowns:
            return False
        self._throttled += 1
        time.sleep(self._rest_s)
        return True

    def conditions(self, kept: int) -> dict[str, Any]:
        """Members of `Conditions`, as JSON has them, of all rounds so far.

        Args:
            kept: rounds whose times count.
        """
        states = self._states
        counting = [state for state in states if not state.slowdowns] or states
        clocks = [state.clock_mhz for state in counting if state.clock_mhz is not None]
        powers = [state.power_w for state in states if state.power_w is not None]
        temperatures = [state.temperature_c for state in states if state.temperature_c is not None]
        reasons = dict.fromkeys(reason for state in states for reason in state.slowdowns)
        found = Conditions(
            looks=len(states),
            clock_mhz=statistics.median(clocks) if clocks else None,
            least_clock_mhz=min(clocks, default=None),
            power_w=statistics.median(powers) if powers else None,
            temperature_c=max(temperatures, default=None),
            throttled=self._throttled,
            dropped=self._rounds - kept,
            slowdowns=tuple(reasons),
        )
        return asdict(found)


def read_state(gpu_index: int) -> GpuState:
    """The state of the GPU with NVML's index `gpu_index`; an empty one where there is no driver."""
    with _nvml() as nvml:
        if nvml is None:
            return GpuState()
        try:
            return look_at(nvml.nvmlDeviceGetHandleByIndex(gpu_index))
        except nvml.NVMLError:
            return GpuState()


def find_loss(gpu_index: int) -> str | None:
    """What NVML says when it does not find a GPU that was there before; None while it finds it."""
    with _nvml() as nvml:
        if nvml is None:
            return "NVML does not start any more"
        try:
            nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByIndex(gpu_index))
        except nvml.NVMLError_NotSupported:
            return None
        except nvml.NVMLError as error:
            return f"NVML says: {error}"
    return None


def open_handle(uuid: str) -> object | None:
    """NVML's handle of a GPU, for `glance`; None where NVML does not know it. NVML stays open.

    Args:
        uuid: as CUDA has it, without a prefix.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        handle: object = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None
    return handle


def look_at(handle: object) -> GpuState:
    """The whole state of the GPU behind one of NVML's handles, while NVML is open."""
    ask = functools.partial(_ask, handle)
    limit = ask("nvmlDeviceGetEnforcedPowerLimit")
    processes = ask("nvmlDeviceGetComputeRunningProcesses")
    rates = ask("nvmlDeviceGetUtilizationRates")
    return replace(
        glance(handle),
        power_limit_w=limit / 1000 if isinstance(limit, int) else None,
        processes=tuple(int(p.pid) for p in processes) if isinstance(processes, list) else (),
        busy_percent=int(getattr(rates, "gpu", 0)) if rates is not None else None,
    )


def glance(handle: object) -> GpuState:
    """Of that only what may change from round to round: clock, power, temperature and slowdowns."""
    import pynvml

    ask = functools.partial(_ask, handle)
    clock = ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM)
    power = ask("nvmlDeviceGetPowerUsage")
    temperature = ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    return GpuState(
        clock_mhz=float(clock) if isinstance(clock, int) else None,
        power_w=power / 1000 if isinstance(power, int) else None,
        temperature_c=temperature if isinstance(temperature, int) else None,
        slowdowns=name_slowdowns(reasons) if isinstance(reasons, int) else (),
    )


def _ask(handle: object, question: str, *arguments: object) -> object | None:
    """NVML's answer; None where it is not supported, or not allowed to this user."""
    import pynvml

    try:
        answer: object = getattr(pynvml, question)(handle, *arguments)
    except pynvml.NVMLError:
        return None
    return answer


def name_slowdowns(reasons: int) -> tuple[str, ...]:
    """Those of NVML's clock event reasons, a bit each, that spoil times, in words."""
    return tuple(name for name, bit in _SLOWDOWN_BITS.items() if reasons & bit)


def kept_slowdowns(conditions: Mapping[str, Any]) -> str:
    """Why times that count are of a GPU that slowed down, in words; empty where none are."""
    if conditions.get("throttled", 0) <= conditions.get("dropped", 0):
        return ""
    return ", ".join(conditions["slowdowns"])


def find_others(gpu_index: int) -> str | None:
    """Who else uses a GPU that this run has not touched yet, as `describe_others`.

    Takes a second where NVML shows no processes but a busy GPU: that may just be the end of what kept it busy, so it
    counts when it stays so.
    """
    for _ in range(_LOOKS):
        state = read_state(gpu_index)
        others = describe_others(state, own=())
        if others is None or state.processes:
            return others
        time.sleep(_LOOK_EVERY_S)
    return others


def describe_others(state: GpuState, own: Collection[int]) -> str | None:
    """A sentence about other users of the GPU, who make times wrong; None when it seems idle.

    Args:
        own: ids of processes of this tuning run.
    """
    others = sorted(set(state.processes) - set(own) - {os.getpid()})
    if others:
        return f"other processes use the GPU ({', '.join(map(str, others))}): times will be off until they end"
    if not state.processes and (state.busy_percent or 0) >= _BUSY_PERCENT:
        return f"something else keeps the GPU {state.busy_percent} % busy: times will be off until it ends"
    return None


@contextmanager
def _nvml() -> Iterator[ModuleType | None]:
    """NVML's module while NVML is open; None where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
