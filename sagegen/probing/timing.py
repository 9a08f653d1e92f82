"""How probes are timed: how long a loop has to run, and what cycles and times say of a rate. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sagegen.measuring.telemetry import GpuState

#: Of one sample, seconds: long against the launch, and what a loop is sized for.
SAMPLE_S = 0.05
SAMPLES = 5
#: Clocks and the power limit settle from idle, or from what was measured before.
SETTLE_S = 0.3
_FIRST_LOOPS = 64
_MOST_LOOPS = 2**31 - 1
#: A trial run this long is a base for the next guess.
_TELLING_S = 0.002


@dataclass(frozen=True, slots=True)
class Run:
    """One launch.

    Attributes:
        seconds: by events around it.
        cycles: SM cycles of each block's loops.
    """

    seconds: float
    cycles: tuple[int, ...]


class Launcher(Protocol):
    """What runs a probe's kernel: the GPU, or a script of a test."""

    def run(self, loops: int) -> Run:
        """Launch once with that many turns of the loop and wait for the end."""

    def look(self, loops: int) -> GpuState:
        """Launch once likewise, and the state of the GPU while it runs."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """All runs of one probe.

    Attributes:
        loops: turns of the loop in each.
        state: of the GPU while the last one ran.
    """

    loops: int
    runs: tuple[Run, ...]
    state: GpuState


def sample(
    launcher: Launcher, *, sample_s: float = SAMPLE_S, settle_s: float = SETTLE_S, count: int = SAMPLES
) -> Sampled:
    """Time a probe: size its loop so that a run takes `sample_s`, let the clocks settle, then `count` runs."""
    loops = find_loops(launcher.run, sample_s)
    settled = 0.0
    while settled < settle_s:
        settled += max(launcher.run(loops).seconds, 1e-6)
    runs = tuple(launcher.run(loops) for _ in range(count))
    return Sampled(loops, runs, launcher.look(loops))


def find_loops(run: Callable[[int], Run], wanted_s: float) -> int:
    """Turns of a loop that take `wanted_s` or a little more; time grows in proportion to them."""
    loops = _FIRST_LOOPS
    while True:
        seconds = run(loops).seconds
        if seconds >= wanted_s or loops == _MOST_LOOPS:
            return loops
        # a short run is mostly launch: grow by a bounded factor then
        factor = 1.1 * wanted_s / max(seconds, 1e-9)
        factor = max(1.1, min(factor, 64.0 if seconds < _TELLING_S else factor))
        loops = min(_MOST_LOOPS, math.ceil(loops * factor))


@dataclass(frozen=True, slots=True)
class Figures:
    """What the runs of one probe say.

    Attributes:
        per_clock: work per SM and cycle, by the SMs' own cycle counters.
        per_second: work per second of the whole chip, by events; median, 20th and 80th percentile.
        clock_mhz: SM clock that cycles and events imply.
    """

    per_clock: float
    per_second: float
    per_second_p20: float
    per_second_p80: float
    clock_mhz: float


def make_figures(runs: Sequence[Run], work: float, sms: int) -> Figures:
    """Figures of runs that each did `work` (operations, results or bytes) on all of `sms` SMs.

    Blocks of an SM run side by side, so the cycles of one block are the SM's; across the chip the median counts.

    Raises:
        ValueError: there are no runs, or one has no cycles.
    """
    if not runs or not all(run.cycles and run.seconds > 0 for run in runs):
        raise ValueError("a probe needs runs with cycles and times")
    seconds = np.array([run.seconds for run in runs])
    cycles = np.array([np.median(run.cycles) for run in runs])
    low, middle, high = np.percentile(work / seconds, (20, 50, 80)).tolist()
    return Figures(
        per_clock=float(work / sms / np.median(cycles)),
        per_second=middle,
        per_second_p20=low,
        per_second_p80=high,
        clock_mhz=float(np.median(cycles / seconds)) / 1e6,
    )
