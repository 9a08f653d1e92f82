"""What a tile of the `mma` family costs: counted instructions at rates per clock and SM.

The rates were measured on an H200; what a probe of the GPU says goes before them.
"""

from __future__ import annotations

from collections.abc import Mapping

from sagegen.mma_rules import OTHER_REGISTERS, accumulator_registers
from sagegen.problem import Problem
from sagegen.space import MmaConfig
from sagegen.tuning.tile_cost import SMEM_BYTES, Tile, TileCost, matrix_rate

_SCHEDULERS = 4  # per SM; each issues one warp instruction a clock (CUDA programming guide)
_FULL_RATE = 128  # FFMA, FADD, MOV: results per clock and SM
_HALF_RATE = 64  # FMNMX, I2F, cvt f16x2 <- f32
_CVT_E4M3 = 32  # cvt e4m3x2 <- 2 x f32: two values each
_MUFU = 16  # ex2
_TILE_INSTRUCTIONS = 80  # loop overhead per warp and tile that a prototype was left with


def mma_registers(config: MmaConfig, problem: Problem) -> int:
    """Registers that a thread of the attention kernel wants."""
    return accumulator_registers(config, problem) + OTHER_REGISTERS


def mma_tile_cost(tile: Tile) -> TileCost:
    units = _unit_clocks(tile)
    warps: int = tile.config.warps
    return TileCost(units, lambda resident: _overlapped(units, resident * warps / _SCHEDULERS))


def _unit_clocks(tile: Tile) -> dict[str, float]:
    config: MmaConfig = tile.config
    layout, head_dim = tile.layout, tile.problem.head_dim
    scores = config.block_q * config.block_k
    products = 2.0 * scores * head_dim
    shared_bytes = config.warps * (layout.k_tile_bytes + layout.v_tile_bytes) + tile.spill_bytes * config.threads
    if config.q_operand == "smem":
        shared_bytes += layout.q_tile_bytes
    if config.smooths_q:
        shared_bytes += config.warps * layout.delta_bytes // layout.means_per_tile

    converts = config.conversion == "i2f" and not config.has_float_scores
    half_rate = scores * (2 if converts else 1)  # row maximum, I2F
    rate = tile.gpu.measured.units.get
    # scale-and-subtract FFMA, row sum FADD; the magic bias is the first MMA's constant operand and costs nothing.
    # With delta S the FFMA adds that, so the subtraction is an FADD, and so is that of the bias.
    per_score = 2 + config.smooths_q * (1 if converts else 2)
    full_rate = scores * per_score + config.block_q * head_dim * _output_updates(config, tile.tiles)
    packed_cvt = scores / 2
    qk_step, pv_step = 64 if config.qk == "s4" else 32, 32 if config.quantizes_v else 16
    warp_instructions = (
        (half_rate + full_rate + scores + packed_cvt) / 32  # `scores`: one ex2 each
        + scores * head_dim / (16 * 8) * (1 / qk_step + 1 / pv_step)  # mma
        + shared_bytes / 512  # ldmatrix.x4
        + config.warps * _TILE_INSTRUCTIONS
    )
    qk_kind = "e4m3f32" if config.has_float_scores else config.qk
    return {
        "matrix": products / matrix_rate(tile.gpu, qk_kind) + products / matrix_rate(tile.gpu, config.pv),
        "mufu": scores / rate("ex2", _MUFU),
        "half_rate": (
            scores / rate("max", _HALF_RATE)
            + converts * scores / rate("i2f", _HALF_RATE)
            + packed_cvt / (rate("pack_e4m3", _CVT_E4M3) if config.quantizes_v else rate("pack_half2", _HALF_RATE))
        ),
        "issue": warp_instructions / _SCHEDULERS,
        "shared": (shared_bytes + layout.stage_bytes) / SMEM_BYTES,
    }


def _output_updates(config: MmaConfig, tiles: float) -> float:
    """Instructions per output element and key tile: promotions of the FP8 accumulator, or rescaling alone.

    A promotion is an FFMA or FADD; of an FP16 accumulator a conversion goes before it.
    A promotion carries the rescale in its FFMA. Without one, `skip` pays only where a maximum of the warp's rows grew:
    for keys in random order a row's maximum grows at tile t with probability 1/t.
    """
    if config.quantizes_v and config.accum_depth:
        return config.block_k / config.accum_depth * (2 if config.sums_in_fp16 else 1)
    if config.rescale == "always":
        return 1.0
    count = max(1, round(tiles))
    return sum(1 - (1 - 1 / t) ** config.rows_per_warp for t in range(1, count + 1)) / count


def _overlapped(units: Mapping[str, float], warps_per_scheduler: float) -> float:
    """Clocks of one tile when that many warps share a scheduler: alone a warp goes through its phases one by one."""
    scalar = max(units["mufu"], units["half_rate"], units["issue"])  # pipes that one instruction stream feeds
    phases = (units["matrix"], scalar, units["shared"])
    longest, total = max(phases), sum(phases)
    if warps_per_scheduler < 1:
        return total / warps_per_scheduler
    return longest + (total - longest) / warps_per_scheduler
