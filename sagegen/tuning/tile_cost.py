"""What one key tile of one block costs: the interface between the model and the families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sagegen.gpu import Gpu
from sagegen.layout import Layout, ceil_div
from sagegen.problem import Problem
from sagegen.tuning.tile_counts import TileCounts

SMEM_BYTES = 128  # of shared memory per clock and SM: 32 banks of 4 bytes (CUDA programming guide)
SCHEDULERS = 4  # per SM; each issues one warp instruction a clock (CUDA programming guide)


@dataclass(frozen=True, slots=True)
class Tile:
    """One key tile of one block.

    Attributes:
        config: of the family whose function gets it.
        tiles: that a block visits, on average.
        spill_bytes: of the attention kernel, per thread (stores + loads).
        counts: instructions of a tile that a warp issues, read off the machine code; None: the family's formula.
    """

    config: Any
    problem: Problem
    layout: Layout
    gpu: Gpu
    tiles: float
    spill_bytes: int
    counts: TileCounts | None = None

    @property
    def outputs(self) -> int:
        """Elements of a block's output."""
        return int(self.config.block_q) * self.problem.head_dim

    @property
    def masked_scores(self) -> int:
        """Scores of a block in tiles that the causal diagonal crosses."""
        if not self.problem.is_causal:
            return 0
        return ceil_div(self.config.block_q, self.config.block_k) * int(self.config.block_q * self.config.block_k)


@dataclass(frozen=True, slots=True)
class TileCost:
    """Clocks of a tile.

    Attributes:
        units: that each unit of an SM is busy with it.
        of_resident: that it takes, by how many blocks share the SM.
        of_block: that a block takes beside its tiles: filling and draining the pipeline, output, the causal mask.
    """

    units: Mapping[str, float]
    of_resident: Callable[[int], float]
    of_block: float


def is_emulated(gpu: Gpu, kind: str) -> bool:
    """Whether mma.sync `kind` has no unit on `gpu`, so that conversions, HMMA and adds stand in for it.

    False once it was probed: that rate has them all.
    """
    return kind.startswith("e4m3") and kind not in gpu.peaks and f"mma_{kind}" not in gpu.measured.matrix


def matrix_rate(gpu: Gpu, kind: str) -> float:
    """Operations per clock and SM of mma.sync `kind`: as probed, else by the GPU table.

    Of an emulated one the rate of its HMMA alone: what else it takes counts as instructions.
    """
    kind = "f16f32" if is_emulated(gpu, kind) else kind
    return per_clock(gpu, gpu.measured.matrix.get(f"mma_{kind}") or gpu.peaks[kind])


def per_clock(gpu: Gpu, tops: float) -> float:
    """Operations per clock and SM of the whole chip's 1e12 operations per second, at the boost clock."""
    return tops * 1e6 / (gpu.sms * gpu.boost_mhz)
