"""A race as its worker runs it: kernels and peers on the same inputs, sustained and in bursts, in mixed order."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sagegen.measuring import bench
from sagegen.measuring.call import BoundCall
from sagegen.measuring.cudnn_fp8 import Fp8Attention
from sagegen.measuring.inputs import Inputs
from sagegen.measuring.jobs import BURST_LAUNCHES, CUDNN_FP8, SETTLE_S, Race, Tell
from sagegen.measuring.telemetry import read_state

_WARM_LAUNCHES = 3
#: Times vary; a sample shall still last as long as it was asked for.
_MARGIN = 1.03


class RaceTimer(Protocol):
    """Where times come from: `bench.EventTimer`, or a script of a test."""

    def settled(self, launch: bench.Launch, settle: int, count: int, look: bench.Launch) -> float: ...

    def burst(self, launch: bench.Launch, idle_s: float, count: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Rival:
    """Someone in a race.

    Attributes:
        owner: whom a failure belongs to: a candidate's source name, or a peer.
        output: what its last launch gave, q's shape; None where it is not looked at.
    """

    owner: str
    launch: bench.Launch
    output: Callable[[], torch.Tensor] | None = None


def own_rivals(calls: Sequence[BoundCall], names: Sequence[str], job: Race) -> dict[str, Rival]:
    """The candidates' parts: `kernel i` is the attention kernel alone, `call i` everything.

    Args:
        calls: each launched once, so that its attention kernel may run alone.
        names: their source names.
    """
    rivals: dict[str, Rival] = {}
    for index, (call, name) in enumerate(zip(calls, names, strict=True)):
        for part in job.parts:
            launch = call.launch if part == "call" else functools.partial(call.launch_role, "attention")
            rivals[f"{part} {index}"] = Rival(name, launch, functools.partial(getattr, call, "out"))
    return rivals


def find_peers(
    inputs: Inputs, is_causal: bool, wanted: Sequence[str], tell: Tell
) -> tuple[dict[str, Rival], dict[str, str], dict[str, str]]:
    """The peers that can run here, why the others cannot, and versions of their libraries.

    Raises:
        RuntimeError: a peer spoiled the CUDA context.
    """
    found: dict[str, Rival] = {}
    absent: dict[str, str] = {}
    versions: dict[str, str] = {}
    for name in wanted:
        tell(name)
        if name != CUDNN_FP8:
            launches, why = bench.find_peers(inputs.q, inputs.k, inputs.v, is_causal, (name,))
            found.update({peer: Rival(peer, launch) for peer, launch in launches.items()})
            absent.update(why)
            continue
        try:
            call = Fp8Attention(inputs.q, inputs.k, inputs.v, is_causal)
            call.launch()
        except Exception as error:  # ours to report, whatever a foreign library raises
            absent[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        else:
            found[name] = Rival(name, call.launch, call.output)
            versions.update(call.versions)
        if inputs.q.is_cuda:
            torch.cuda.synchronize(inputs.q.device)  # raises when the context is spoiled
    return found, absent, versions


def run_race(rivals: Mapping[str, Rival], job: Race, timer: RaceTimer, tell: Tell) -> dict[str, Any]:
    """Times of all rivals: `sustained_us`, `burst_us` and `clock_mhz`, each by rival, one figure a round."""
    clocks: dict[str, list[float | None]] = {name: [] for name in rivals}
    fastest = {name: _warm_up(rival, timer, tell) for name, rival in rivals.items()}

    def sustain(name: str) -> float:
        tell(rivals[name].owner)
        settle, count = (_count(seconds, fastest[name]) for seconds in (SETTLE_S, job.sustained_s))

        def look() -> None:
            clocks[name].append(read_state(job.gpu_index).clock_mhz)

        time_us = timer.settled(rivals[name].launch, settle, count, look)
        fastest[name] = min(fastest[name], time_us)
        return time_us

    def burst(name: str) -> float:
        tell(rivals[name].owner)
        return timer.burst(rivals[name].launch, job.idle_s, BURST_LAUNCHES)

    names = {name: name for name in rivals}
    sustained = bench.interleave(names, sustain, job.rounds, job.seed)
    bursts = bench.interleave(names, burst, job.burst_rounds, job.seed + 1)
    return {"sustained_us": sustained, "burst_us": bursts, "clock_mhz": clocks}


def _warm_up(rival: Rival, timer: RaceTimer, tell: Tell) -> float:
    tell(rival.owner)
    return timer.settled(rival.launch, 1, _WARM_LAUNCHES, lambda: None)


def _count(seconds: float, time_us: float) -> int:
    """Launches that take so long."""
    return max(1, math.ceil(_MARGIN * seconds * 1e6 / time_us))


def agreement(rivals: Mapping[str, Rival], inputs: Inputs, is_causal: bool) -> dict[str, float]:
    """Cosine of each rival's output with torch's own: shows who computes something else.

    torch's causal mask is top-left, so a causal race needs equal lengths.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth = torch.nn.functional.scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, is_causal=is_causal, enable_gqa=inputs.q.shape[1] != inputs.k.shape[1]
        )
    found = {}
    for name, rival in rivals.items():
        if rival.output is not None:
            rival.launch()
            found[name] = _cosine(rival.output(), truth)
    return found


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    a, b = one.float().flatten(), other.float().flatten()
    dot, a2, b2 = (float((x * y).sum(dtype=torch.float64)) for x, y in ((a, b), (a, a), (b, b)))
    return dot / math.sqrt(a2 * b2) if a2 > 0 and b2 > 0 else 0.0
