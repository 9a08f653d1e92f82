"""Predicted time of a config on a GPU: ranks candidates for GPUs that are absent and picks where a search starts.

A first, static model. It counts what one K/V tile costs each unit of an SM, lets the resident warps overlap the units,
and lays the tiles out in waves. Its use is order, not absolute time. Rates per clock and SM were measured on an H200
("hardware.md" of the design notes) unless a line says otherwise; matrix rates and clocks come from the GPU table. What
a probe measured on the GPU (`Gpu.measured`) goes before both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sagegen.gpu import Gpu
from sagegen.layout import Layout, ceil_div, make_layout, round_up
from sagegen.problem import Problem, Shape
from sagegen.space import Config
from sagegen.tuning.mma_cost import mma_registers, mma_tile_cost
from sagegen.tuning.tile_cost import Tile, TileCost
from sagegen.tuning.tile_counts import TileCounts
from sagegen.tuning.wgmma_cost import wgmma_registers, wgmma_tile_cost

#: Recorded with every prediction; another one, so that figures of different models are not compared, with every change
#: of what they say.
MODEL = "2"

#: By family, what nine of ten predicted full calls were nearer to the measured ones than, relative to these, in the
#: journals that no coefficient was fitted to (docs/model.md); and the GPU of those. Nobody has measured other GPUs.
MODEL_ERROR: Mapping[str, float] = {"mma": 0.09, "wgmma": 0.06}
MODEL_CHECKED_ON = "h200"

#: Of L2 per clock and SM: an A100's by its whitepaper (5120 for 108), a Hopper's as `sagegen probe` read it on an H200;
#: elsewhere what a prototype drew without a sign of a limit.
_L2_BYTES: Mapping[str, float] = {"sm_80": 47.0, "sm_90": 54.0}
_LEAST_L2_BYTES = 18.0
_QUANTIZED_BYTES = {"q": 3, "k": 5, "v": 5}  # moved per element by the statistics and quantizing kernels
#: Microseconds of the statistics and quantizers beside their bytes: launches and tails, more where Q has one too, and
#: per 1000 keys of a head where tiles leave the quantizer of `wgmma` uneven. Fitted, to a block's clocks' journals.
_LAUNCH_US = 30.0
_QUERY_LAUNCH_US = 20.0
_UNEVEN_US: Mapping[int, float] = {64: 0.067, 192: 0.033}
_DRAM_SHARE = 0.9  # of the bandwidth that the quantizers reach: 4.3 of 4.8 TB/s
_REGISTER_FILE = 65536  # 32-bit registers per SM, allocated to a warp in units of 8 per thread
_MAX_REGISTERS = 255
_RESERVED_SMEM = 1024  # the driver's own, in every block


@dataclass(frozen=True, slots=True)
class _Family:
    """What the model needs to know of a family: registers that a thread wants, and what a tile costs."""

    registers: Callable[[Any, Problem], int]
    tile_cost: Callable[[Tile], TileCost]


_FAMILIES: Mapping[str, _Family] = {
    "mma": _Family(mma_registers, mma_tile_cost),
    "wgmma": _Family(wgmma_registers, wgmma_tile_cost),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What a compiled attention kernel says: registers per thread, spilled bytes per thread (stores + loads).

    `counts` are the instructions of a tile, where a disassembler told them.
    """

    registers: int
    spill_bytes: int = 0
    counts: TileCounts | None = None


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks that one SM holds at once, and the registers per thread that this assumes."""

    blocks_per_sm: int
    registers: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of one call, and where it goes.

    Attributes:
        kernel_us: the attention kernel, microseconds.
        quantize_us: bytes of the statistics and quantizers.
        launch_us: that these take beside.
        units_us: time that each unit of the chip is busy, were it alone; their names are the family's.
        l2_us, dram_us: time to move the kernel's bytes.
        waves: rounds of resident blocks that the grid takes.
        occupancy: residency the prediction assumes.
    """

    kernel_us: float
    quantize_us: float
    launch_us: float
    units_us: Mapping[str, float]
    l2_us: float
    dram_us: float
    waves: float
    occupancy: Occupancy

    @property
    def call_us(self) -> float:
        """The full call: quantizers and attention."""
        return self.kernel_us + self.quantize_us + self.launch_us

    @property
    def limit(self) -> str:
        """The unit or memory that is busy longest."""
        busy = {**self.units_us, "l2": self.l2_us, "dram": self.dram_us}
        return max(busy, key=lambda name: busy[name])


@dataclass(frozen=True, slots=True)
class _Grid:
    """One call laid out over the chip.

    Attributes:
        blocks: thread blocks of the attention kernel.
        mean_tiles, most_tiles: key tiles that a block visits, on average and at most.
    """

    config: Config
    problem: Problem
    shape: Shape
    gpu: Gpu
    layout: Layout
    occupancy: Occupancy
    blocks: int
    mean_tiles: float
    most_tiles: int

    @property
    def slots(self) -> int:
        return self.gpu.sms * self.occupancy.blocks_per_sm


def predict(config: Config, problem: Problem, shape: Shape, gpu: Gpu, measured: Measured | None = None) -> Prediction:
    """Predicted time of `config` for one call.

    Args:
        config: valid on `gpu` for `problem`; the time of an invalid one means nothing.
        shape: of the call; q_len and kv_len >= 1.
        measured: ptxas figures of the attention kernel; without them registers are estimated and nothing spills.
    """
    layout = make_layout(config, problem)
    q_tiles = ceil_div(shape.q_len, config.block_q)
    mean_tiles, most_tiles = _key_tiles(config.block_q, config.block_k, problem.is_causal, shape.q_len, shape.kv_len)
    grid = _Grid(
        config,
        problem,
        shape,
        gpu,
        layout,
        _occupancy(config, problem, layout, gpu, measured),
        shape.batch * shape.heads_q * q_tiles,
        mean_tiles,
        most_tiles,
    )
    family = _FAMILIES[config.family]
    spill_bytes, counts = (measured.spill_bytes, measured.counts) if measured else (0, None)
    cost = family.tile_cost(Tile(config, problem, layout, gpu, mean_tiles, spill_bytes, counts))
    visits = grid.blocks * mean_tiles
    l2_bytes = gpu.measured.l2_bytes or _L2_BYTES.get(gpu.arch, _LEAST_L2_BYTES)
    l2_us = visits * layout.stage_bytes / (l2_bytes * gpu.sms) / gpu.boost_mhz
    dram_us = _dram_bytes(grid) / ((gpu.measured.dram_gbs or gpu.bandwidth_gbs) * 1e3)
    return Prediction(
        kernel_us=max(_grid_clocks(grid, cost) / gpu.boost_mhz, l2_us, dram_us),
        quantize_us=_quantize_us(grid),
        launch_us=_launch_us(config, shape),
        units_us={name: value * visits / gpu.sms / gpu.boost_mhz for name, value in cost.units.items()},
        l2_us=l2_us,
        dram_us=dram_us,
        waves=grid.blocks / grid.slots,
        occupancy=grid.occupancy,
    )


def estimate_occupancy(config: Config, problem: Problem, gpu: Gpu, measured: Measured | None = None) -> Occupancy:
    """Resident blocks per SM by shared memory, threads and registers; at least 1."""
    return _occupancy(config, problem, make_layout(config, problem), gpu, measured)


def _occupancy(config: Config, problem: Problem, layout: Layout, gpu: Gpu, measured: Measured | None) -> Occupancy:
    allowed = min(_MAX_REGISTERS, _REGISTER_FILE // (config.threads * config.min_blocks))
    wanted = _FAMILIES[config.family].registers(config, problem)
    registers = measured.registers if measured else min(allowed, wanted)
    by_smem = gpu.smem_per_sm // (layout.smem_bytes + _RESERVED_SMEM)
    by_threads = gpu.threads_per_sm // config.threads
    by_registers = _REGISTER_FILE // (round_up(registers, 8) * config.threads)
    return Occupancy(max(1, min(by_smem, by_threads, by_registers)), registers)


@lru_cache(maxsize=256)
def _key_tiles(block_q: int, block_k: int, is_causal: bool, q_len: int, kv_len: int) -> tuple[float, int]:
    """Key tiles that a query tile visits: on average, and at most."""
    every = ceil_div(kv_len, block_k)
    if not is_causal:
        return every, every
    q_tiles = ceil_div(q_len, block_q)
    last_keys = (min((tile + 1) * block_q, q_len) + kv_len - q_len for tile in range(q_tiles))
    visited = [ceil_div(min(max(keys, 0), kv_len), block_k) for keys in last_keys]
    return sum(visited) / q_tiles, max(visited)


def _grid_clocks(grid: _Grid, cost: TileCost) -> float:
    """Clocks until the last block has ended."""

    def block_clocks(resident: int, tiles: float) -> float:
        return resident * (tiles * cost.of_resident(resident) + cost.of_block)

    resident = grid.occupancy.blocks_per_sm
    balanced = grid.blocks / grid.slots * block_clocks(resident, grid.mean_tiles)
    if grid.problem.is_causal:  # longest rows first: the work balances, but nothing ends before the longest block
        return max(balanced, block_clocks(1, grid.most_tiles))
    full_waves, rest = divmod(grid.blocks, grid.slots)
    last = ceil_div(rest, grid.gpu.sms)
    in_step = full_waves * block_clocks(resident, grid.mean_tiles)
    in_step += block_clocks(last, grid.mean_tiles) if last else 0.0
    # blocks drift apart, and what drifted fills a part of the last wave; the second wave begins in step
    return (in_step + balanced) / 2 if full_waves > 1 else in_step


def _dram_bytes(grid: _Grid) -> float:
    """Bytes the attention kernel takes from or leaves in device memory: K and V again for each block if L2 is small."""
    shape, stage = grid.shape, grid.layout.delta_offset  # K and V of a tile; delta S is each query tile's own
    q_bytes = 1 if grid.config.q_quantizer == "kernel" else 2
    once = shape.batch * shape.heads_q * shape.q_len * grid.problem.head_dim * (q_bytes + 2)  # 16 bits out
    once += _delta_bytes(grid.config, grid.layout, shape)
    kv_heads = shape.batch * shape.heads_kv
    head_bytes = ceil_div(shape.kv_len, grid.config.block_k) * stage
    heads_in_flight = max(1.0, min(grid.slots, grid.blocks) * kv_heads / grid.blocks)
    if heads_in_flight * head_bytes <= grid.gpu.l2_bytes:
        return once + kv_heads * head_bytes
    return once + grid.blocks * grid.mean_tiles * stage


def _delta_bytes(config: Config, layout: Layout, shape: Shape) -> int:
    """Delta S of a call."""
    tiles = ceil_div(shape.q_len, config.block_q) * ceil_div(shape.kv_len, config.block_k)
    return shape.batch * shape.heads_q * tiles * layout.delta_bytes


def _quantize_us(grid: _Grid) -> float:
    """Time of the statistics and quantizing kernels: bound by the bytes they move."""
    config, shape, gpu = grid.config, grid.shape, grid.gpu
    rows = {"k": shape.heads_kv * shape.kv_len}
    if config.q_quantizer == "kernel":
        rows["q"] = shape.heads_q * shape.q_len
    if config.quantizes_v:
        rows["v"] = shape.heads_kv * shape.kv_len
    moved = shape.batch * grid.problem.head_dim * sum(_QUANTIZED_BYTES[name] * count for name, count in rows.items())
    moved += _delta_bytes(config, grid.layout, shape)
    return moved / ((gpu.measured.dram_gbs or gpu.bandwidth_gbs * _DRAM_SHARE) * 1e3)


def _launch_us(config: Config, shape: Shape) -> float:
    """What the statistics and quantizing kernels take beside their bytes."""
    uneven = _UNEVEN_US.get(config.block_k, 0.0) if config.family == "wgmma" else 0.0
    of_queries = _QUERY_LAUNCH_US if config.q_quantizer == "kernel" else 0.0
    return _LAUNCH_US + of_queries + uneven * shape.batch * shape.heads_kv * shape.kv_len / 1000
