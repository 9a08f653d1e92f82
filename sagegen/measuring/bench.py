"""How a kernel is timed: cold or sustained, alone or against others in the same rounds.

Times are CUDA-event times in microseconds. `cold` times flush L2 before every launch; `sustained` ones are the mean of
launches back to back, where the GPU sits at its power limit; `burst` ones are of a few launches after a rest, at the
highest clock. Quote them by name: they differ by up to a quarter.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagegen.measuring.jobs import SDPA_CUDNN, SDPA_FLASH

#: Long enough for clocks to rise from idle.
WARM_UP_S = 0.05
#: Hides the host's launches behind the flush, where twice the L2 would be too short for that.
_LEAST_FLUSH_BYTES = 512 << 20
#: Calls of a batch: fewer launches than the driver queues before it makes the host wait (about 1,000).
_HOST_CALLS = 100

#: Cycles that the GPU waits while the host queues the launches of a burst: 0.2 ms or so, and 13 ms at most.
_HIDE_CYCLES = 400_000
_MOST_HIDE_CYCLES = 64 * _HIDE_CYCLES

Launch = Callable[[], None]
T = TypeVar("T")


class Timer(Protocol):
    """Where times come from: the GPU, or a script of a test."""

    def cold(self, launch: Launch) -> float:
        """Microseconds of one launch with cold L2."""

    def warm(self, launch: Launch) -> float:
        """Microseconds of one launch right behind another: L2 holds what that left."""

    def sustained(self, launch: Launch, seconds: float) -> float:
        """Mean microseconds of launches back to back for at least `seconds`."""


class EventTimer:
    """CUDA events on the current stream of one device."""

    def __init__(self, device: torch.device) -> None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(max(2 * l2_bytes, _LEAST_FLUSH_BYTES), dtype=torch.uint8, device=device)
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def cold(self, launch: Launch) -> float:
        self._flushed.zero_()
        return self._time(launch, 1)

    def warm(self, launch: Launch) -> float:
        launch()
        return self._time(launch, 1)

    def sustained(self, launch: Launch, seconds: float) -> float:
        guess = self._time(launch, 3) / 3
        count, spent = 0, 0.0
        while spent < seconds * 1e6:
            more = max(1, math.ceil((seconds * 1e6 - spent) / guess))
            spent += self._time(launch, more)
            count += more
            guess = spent / count
        return spent / count

    def settled(self, launch: Launch, settle: int, count: int, look: Launch) -> float:
        """Mean microseconds of `count` launches that follow `settle` others without a pause.

        Args:
            look: called while they run, if the host is ahead of the GPU.
        """
        for _ in range(settle):
            launch()
        self._start.record()
        for _ in range(count):
            launch()
        self._end.record()
        look()
        return self._wait() / count

    def burst(self, launch: Launch, idle_s: float, count: int) -> float:
        """Mean microseconds of `count` launches after the GPU has rested for `idle_s`.

        The launches' way through the host does not count: where the GPU came to them before all were queued, the
        burst is repeated behind a longer wait.
        """
        hide = _HIDE_CYCLES
        while True:
            torch.cuda.synchronize(self._flushed.device)
            time.sleep(idle_s)
            torch.cuda._sleep(hide)  # type: ignore[no-untyped-call]
            self._start.record()
            for _ in range(count):
                launch()
            self._end.record()
            was_ahead = not self._start.query()  # type: ignore[no-untyped-call]
            mean = self._wait() / count
            if was_ahead or hide >= _MOST_HIDE_CYCLES:
                return mean
            hide *= 4

    def _time(self, launch: Launch, count: int) -> float:
        self._start.record()
        for _ in range(count):
            launch()
        self._end.record()
        return self._wait()

    def _wait(self) -> float:
        """Microseconds between the two events, once they have passed."""
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3


def warm_up(launch: Launch, timer: Timer) -> None:
    timer.sustained(launch, WARM_UP_S)


def _never() -> bool:
    """Of a GPU that is not looked at."""
    return False


def take_rounds(take: Callable[[], T], count: int, is_throttled: Callable[[], bool] = _never) -> list[T]:
    """`count` rounds of times, in the order taken; a round in which the GPU throttled is dropped and repeated.

    After twice as many rounds it ends with what it has, and where less than half of `count` is left, throttled rounds
    fill up.

    Args:
        take: takes the times of a round.
        is_throttled: asked after each round; see `telemetry.Watch`.
    """
    good: list[T] = []
    throttled: list[T] = []
    while len(good) < count and len(good) + len(throttled) < 2 * count:
        taken = take()
        (throttled if is_throttled() else good).append(taken)
    return good if 2 * len(good) >= count else [*good, *throttled[: count - len(good)]]


def time_cold(launch: Launch, timer: Timer, count: int, is_throttled: Callable[[], bool] = _never) -> list[float]:
    """`count` times of single launches with cold L2, in the order measured, after a warm-up; see `take_rounds`."""
    warm_up(launch, timer)
    return take_rounds(lambda: timer.cold(launch), count, is_throttled)


def time_warm(launch: Launch, timer: Timer, count: int, is_throttled: Callable[[], bool] = _never) -> list[float]:
    """The same with warm L2, right behind a launch of the same; without a warm-up."""
    return take_rounds(lambda: timer.warm(launch), count, is_throttled)


def time_host(call: Callable[[], object], wait: Callable[[], object], batches: int = 9) -> list[float]:
    """Microseconds of host time per call, one figure a batch.

    Args:
        call: warmed up here; launches work and does not wait for it.
        wait: waits for the device, between batches and outside of the time, so that no launch queue fills up.
    """
    times = []
    for _ in range(batches + 1):
        wait()
        start = time.perf_counter()
        for _ in range(_HOST_CALLS):
            call()
        times.append((time.perf_counter() - start) / _HOST_CALLS * 1e6)
    wait()
    return times[1:]


def interleave(
    launches: Mapping[str, T],
    sample: Callable[[T], float],
    rounds: int,
    seed: int = 0,
    is_throttled: Callable[[], bool] = _never,
) -> dict[str, list[float]]:
    """Time rivals against each other: every round samples each once, in a random order of its own.

    Drift of clocks and temperature then falls on all alike, and times of one round form pairs.

    Args:
        launches: by name; whatever `sample` takes.
        sample: the time of one of them, e.g. `timer.cold`.
        is_throttled: as in `take_rounds`.

    Returns:
        By name, one time per round.
    """
    random = np.random.default_rng(seed)
    names = list(launches)

    def take() -> dict[str, float]:
        order = [names[index] for index in random.permutation(len(names))]
        return {name: sample(launches[name]) for name in order}

    taken = take_rounds(take, rounds, is_throttled)
    return {name: [times[name] for times in taken] for name in names}


#: torch SDPA backends that kernels are compared with.
PEERS = {SDPA_FLASH: SDPBackend.FLASH_ATTENTION, SDPA_CUDNN: SDPBackend.CUDNN_ATTENTION}


def find_peers(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, names: Collection[str] = tuple(PEERS)
) -> tuple[dict[str, Launch], dict[str, str]]:
    """torch SDPA on the same inputs, HND: launches by peer, and why the others cannot run here.

    SDPA aligns its causal mask top-left, so a causal comparison needs equal lengths.
    """
    found: dict[str, Launch] = {}
    absent: dict[str, str] = {}
    for name, backend in ((name, PEERS[name]) for name in PEERS if name in names):
        launch = functools.partial(_run_sdpa, backend, q, k, v, is_causal)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                launch()
            except RuntimeError as error:
                why = [str(warning.message).partition("(Triggered")[0].strip() for warning in said]
                absent[name] = " ".join(why) or str(error)
                continue
        found[name] = launch
    return found, absent


def _run_sdpa(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> None:
    with sdpa_kernel(backend):
        torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
        )
