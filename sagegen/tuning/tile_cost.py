"""What one key tile of one block costs: the interface between the model and the families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sagegen.gpu import Gpu
from sagegen.layout import Layout
from sagegen.problem import Problem

SMEM_BYTES = 128  # of shared memory per clock and SM: 32 banks of 4 bytes (CUDA programming guide)
_EMULATED_E4M3 = 1 / 3  # of the f16f32 rate: mma.sync e4m3 without QMMA is conversions, 2 HMMA and adds


@dataclass(frozen=True, slots=True)
class Tile:
    """One key tile of one block.

    Attributes:
        config: of the family whose function gets it.
        tiles: that a block visits, on average.
        spill_bytes: of the attention kernel, per thread (stores + loads).
    """

    config: Any
    problem: Problem
    layout: Layout
    gpu: Gpu
    tiles: float
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class TileCost:
    """Clocks of a tile.

    Attributes:
        units: that each unit of an SM is busy with it.
        of_resident: that it takes, by how many blocks share the SM.
    """

    units: Mapping[str, float]
    of_resident: Callable[[int], float]


def matrix_rate(gpu: Gpu, kind: str) -> float:
    """Operations per clock and SM of mma.sync `kind`: as probed, else by the GPU table.

    e4m3 is emulated where the table has no rate for it.
    """
    probed = gpu.measured.matrix.get(f"mma_{kind}")
    peak = probed or (gpu.peaks[kind] if kind in gpu.peaks else gpu.peaks["f16f32"] * _EMULATED_E4M3)
    return per_clock(gpu, peak)


def per_clock(gpu: Gpu, tops: float) -> float:
    """Operations per clock and SM of the whole chip's 1e12 operations per second, at the boost clock."""
    return tops * 1e6 / (gpu.sms * gpu.boost_mhz)
