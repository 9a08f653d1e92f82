"""Predicted time of a config on a GPU: ranks candidates for GPUs that are absent and picks where a search starts.

A first, static model. It counts what one K/V tile costs each unit of an SM, lets the resident warps overlap the units,
and lays the tiles out in waves. Its use is order, not absolute time. Rates per clock and SM were measured on an H200
("hardware.md" of the design notes) unless a line says otherwise; matrix rates and clocks come from the GPU table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from sagegen.gpu import Gpu
from sagegen.layout import Layout, ceil_div, make_layout, round_up
from sagegen.problem import Problem, Shape
from sagegen.rules import OTHER_REGISTERS, accumulator_registers
from sagegen.space import Config

_SCHEDULERS = 4  # per SM; each issues one warp instruction a clock (CUDA programming guide)
_FULL_RATE = 128  # FFMA, FADD, MOV: results per clock and SM
_HALF_RATE = 64  # FMNMX, I2F, cvt f16x2 <- f32
_CVT_E4M3 = 32  # cvt e4m3x2 <- 2 x f32: two values each
_MUFU = 16  # ex2
_SMEM_BYTES = 128  # 32 banks of 4 bytes a clock (CUDA programming guide)
_L2_BYTES = 18  # per clock and SM; a prototype drew this much (4.7 TB/s on an H200) without a sign of a limit
_TILE_INSTRUCTIONS = 80  # loop overhead per warp and tile that the same prototype was left with
_EMULATED_E4M3 = 1 / 3  # of the f16f32 rate: mma.sync e4m3 without QMMA is conversions, 2 HMMA and adds
_QUANTIZED_BYTES = {"q": 3, "k": 5, "v": 5}  # moved per element by the statistics and quantizing kernels
_DRAM_SHARE = 0.9  # of the bandwidth that the quantizers reach: 4.3 of 4.8 TB/s
_REGISTER_FILE = 65536  # 32-bit registers per SM, allocated to a warp in units of 8 per thread
_MAX_REGISTERS = 255
_RESERVED_SMEM = 1024  # the driver's own, in every block


@dataclass(frozen=True, slots=True)
class Measured:
    """What ptxas said of the attention kernel: registers per thread, spilled bytes per thread (stores + loads)."""

    registers: int
    spill_bytes: int = 0


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
        quantize_us: statistics and quantizers.
        units_us: time that each unit of the chip is busy, were it alone: matrix, mufu, half_rate, issue, shared.
        l2_us, dram_us: time to move the kernel's bytes.
        waves: rounds of resident blocks that the grid takes.
        occupancy: residency the prediction assumes.
    """

    kernel_us: float
    quantize_us: float
    units_us: Mapping[str, float]
    l2_us: float
    dram_us: float
    waves: float
    occupancy: Occupancy

    @property
    def call_us(self) -> float:
        """The full call: quantizers and attention."""
        return self.kernel_us + self.quantize_us

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
    q_tiles = ceil_div(shape.q_len, config.block_q)
    mean_tiles, most_tiles = _key_tiles(config.block_q, config.block_k, problem.is_causal, shape.q_len, shape.kv_len)
    grid = _Grid(
        config,
        problem,
        shape,
        gpu,
        make_layout(config, problem),
        estimate_occupancy(config, problem, gpu, measured),
        shape.batch * shape.heads_q * q_tiles,
        mean_tiles,
        most_tiles,
    )
    cycles = _tile_cycles(grid, measured.spill_bytes if measured else 0)
    visits = grid.blocks * mean_tiles
    l2_us = visits * grid.layout.stage_bytes / (_L2_BYTES * gpu.sms) / gpu.boost_mhz
    dram_us = _dram_bytes(grid) / (gpu.bandwidth_gbs * 1e3)
    return Prediction(
        kernel_us=max(_grid_cycles(grid, cycles) / gpu.boost_mhz, l2_us, dram_us),
        quantize_us=_quantize_us(config, problem, shape, gpu),
        units_us={name: value * visits / gpu.sms / gpu.boost_mhz for name, value in cycles.items()},
        l2_us=l2_us,
        dram_us=dram_us,
        waves=grid.blocks / grid.slots,
        occupancy=grid.occupancy,
    )


def estimate_occupancy(config: Config, problem: Problem, gpu: Gpu, measured: Measured | None = None) -> Occupancy:
    """Resident blocks per SM by shared memory, threads and registers; at least 1."""
    allowed = min(_MAX_REGISTERS, _REGISTER_FILE // (config.threads * config.min_blocks))
    wanted = accumulator_registers(config, problem) + OTHER_REGISTERS
    registers = measured.registers if measured else min(allowed, wanted)
    by_smem = gpu.smem_per_sm // (make_layout(config, problem).smem_bytes + _RESERVED_SMEM)
    by_threads = gpu.threads_per_sm // config.threads
    by_registers = _REGISTER_FILE // (round_up(registers, 8) * config.threads)
    return Occupancy(max(1, min(by_smem, by_threads, by_registers)), registers)


def matrix_rate(gpu: Gpu, kind: str) -> float:
    """Operations per clock and SM of mma.sync `kind`; e4m3 is emulated where the GPU table has no rate for it."""
    peak = gpu.peaks[kind] if kind in gpu.peaks else gpu.peaks["f16f32"] * _EMULATED_E4M3
    return peak * 1e6 / (gpu.sms * gpu.boost_mhz)


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


def _tile_cycles(grid: _Grid, spill_bytes: int) -> dict[str, float]:
    """Clocks that one key tile of one block keeps each unit of an SM busy."""
    config, layout, head_dim = grid.config, grid.layout, grid.problem.head_dim
    scores = config.block_q * config.block_k
    products = 2.0 * scores * head_dim
    shared_bytes = config.warps * (layout.k_tile_bytes + layout.v_tile_bytes) + spill_bytes * config.threads
    if config.q_operand == "smem":
        shared_bytes += layout.q_tile_bytes

    converts = config.conversion == "i2f"
    half_rate = scores * (2 if converts else 1)  # row maximum, I2F
    # scale-and-subtract FFMA, row sum FADD; the magic bias is the first MMA's constant operand and costs nothing
    full_rate = scores * 2 + config.block_q * head_dim * _output_updates(config, grid.mean_tiles)
    packed_cvt = scores / 2
    pv_step = 32 if config.quantizes_v else 16
    warp_instructions = (
        (half_rate + full_rate + scores + packed_cvt) / 32  # `scores`: one ex2 each
        + scores * head_dim / (16 * 8) * (1 / 32 + 1 / pv_step)  # mma
        + shared_bytes / 512  # ldmatrix.x4
        + config.warps * _TILE_INSTRUCTIONS
    )
    return {
        "matrix": products / matrix_rate(grid.gpu, "s8") + products / matrix_rate(grid.gpu, config.pv),
        "mufu": scores / _MUFU,
        "half_rate": half_rate / _HALF_RATE + packed_cvt / (_CVT_E4M3 if config.quantizes_v else _HALF_RATE),
        "issue": warp_instructions / _SCHEDULERS,
        "shared": (shared_bytes + layout.stage_bytes) / _SMEM_BYTES,
    }


def _output_updates(config: Config, tiles: float) -> float:
    """FFMA or FADD per output element and key tile: promotions of the FP8 accumulator, or rescaling alone.

    A promotion carries the rescale in its FFMA. Without one, `skip` pays only where a maximum of the warp's rows grew:
    for keys in random order a row's maximum grows at tile t with probability 1/t.
    """
    if config.quantizes_v:
        return config.block_k / config.accum_depth
    if config.rescale == "always":
        return 1.0
    count = max(1, round(tiles))
    return sum(1 - (1 - 1 / t) ** config.rows_per_warp for t in range(1, count + 1)) / count


def _grid_cycles(grid: _Grid, cycles: Mapping[str, float]) -> float:
    """Clocks until the last block has ended."""

    def block_cycles(resident: int, tiles: float) -> float:
        return tiles * resident * _overlapped(cycles, resident * grid.config.warps / _SCHEDULERS)

    resident = grid.occupancy.blocks_per_sm
    if grid.problem.is_causal:  # longest rows first: the work balances, but nothing ends before the longest block
        balanced = grid.blocks / grid.slots * block_cycles(resident, grid.mean_tiles)
        return max(balanced, block_cycles(1, grid.most_tiles))
    full_waves, rest = divmod(grid.blocks, grid.slots)
    last = ceil_div(rest, grid.gpu.sms)
    return full_waves * block_cycles(resident, grid.mean_tiles) + (block_cycles(last, grid.mean_tiles) if last else 0.0)


def _overlapped(cycles: Mapping[str, float], warps_per_scheduler: float) -> float:
    """Clocks of one tile when that many warps share a scheduler: alone a warp goes through its phases one by one."""
    scalar = max(cycles["mufu"], cycles["half_rate"], cycles["issue"])  # pipes that one instruction stream feeds
    phases = (cycles["matrix"], scalar, cycles["shared"])
    longest, total = max(phases), sum(phases)
    if warps_per_scheduler < 1:
        return total / warps_per_scheduler
    return longest + (total - longest) / warps_per_scheduler


def _dram_bytes(grid: _Grid) -> float:
    """Bytes the attention kernel takes from or leaves in device memory: K and V again for each block if L2 is small."""
    shape, stage = grid.shape, grid.layout.stage_bytes
    once = shape.batch * shape.heads_q * shape.q_len * grid.problem.head_dim * (1 + 2)  # INT8 in, 16 bits out
    kv_heads = shape.batch * shape.heads_kv
    head_bytes = ceil_div(shape.kv_len, grid.config.block_k) * stage
    heads_in_flight = max(1.0, min(grid.slots, grid.blocks) * kv_heads / grid.blocks)
    if heads_in_flight * head_bytes <= grid.gpu.l2_bytes:
        return once + kv_heads * head_bytes
    return once + grid.blocks * grid.mean_tiles * stage


def _quantize_us(config: Config, problem: Problem, shape: Shape, gpu: Gpu) -> float:
    """Time of the statistics and quantizing kernels: bound by the bytes they move."""
    rows = {"q": shape.heads_q * shape.q_len, "k": shape.heads_kv * shape.kv_len}
    if config.quantizes_v:
        rows["v"] = shape.heads_kv * shape.kv_len
    moved = shape.batch * problem.head_dim * sum(_QUANTIZED_BYTES[name] * count for name, count in rows.items())
    return moved / (gpu.bandwidth_gbs * 1e3 * _DRAM_SHARE)
