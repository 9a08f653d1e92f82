"""What a tile of the `mma` family costs: counted instructions at rates per clock and SM.

The rates were measured on an H200; what a probe of the GPU says goes before them. How much of the units' time a Hopper
spends one after the other, and what a block costs beside its tiles, was fitted to one journal, of 2026-11-29 in bf16;
docs/model.md says how well that predicts the others.
"""

from __future__ import annotations

from collections.abc import Mapping

from sagegen.mma_rules import OTHER_REGISTERS, accumulator_registers
from sagegen.problem import Problem
from sagegen.space import MmaConfig
from sagegen.tuning.tile_cost import SCHEDULERS, SMEM_BYTES, Tile, TileCost, is_emulated, matrix_rate

_FULL_RATE = 128  # FFMA, FADD, MOV: results per clock and SM
_HALF_RATE = 64  # FMNMX, I2F, cvt f16x2 <- f32
_CVT_E4M3 = 32  # cvt e4m3x2 <- 2 x f32: two values each
_MUFU = 16  # ex2
_TILE_INSTRUCTIONS = 120  # per warp and tile, beside those of scores and products: what SASS has more than these
#: F2FP and FADD (or HADD2) of an emulated e4m3 product, beside its two HMMA: SASS of kernels for sm_90.
_EMULATION: Mapping[str, tuple[float, float]] = {"e4m3f32": (4.5, 4.0), "e4m3f16": (4.5, 1.0)}
_HOPPER = 9
#: Of a Hopper, whose warps hide little of mma.sync: shares of the units' time that add up. Fitted.
_HOPPER_SHARES: Mapping[str, float] = {
    "matrix": 0.71,
    "issue": 1.35,
    "mufu": 0.24,
    "half_rate": 0.23,
    "shared": 0.34,
    "local": 1.17,
}
#: What a scheduler with fewer than two warps loses, or gains with more, at most. Fitted.
_LONE_WARP = 0.7
_MOST_GAIN = 0.95
#: Clocks of a block beside its tiles: per output element, per masked score, and once. Fitted.
_OUTPUT_CLOCKS = 0.3
_MASK_CLOCKS = 0.13
_BLOCK_CLOCKS = 160.0


def mma_registers(config: MmaConfig, problem: Problem) -> int:
    """Registers that a thread of the attention kernel wants."""
    return accumulator_registers(config, problem) + OTHER_REGISTERS


def mma_tile_cost(tile: Tile) -> TileCost:
    units = _unit_clocks(tile)
    clocks = _in_turn if tile.gpu.compute_capability // 10 == _HOPPER else _overlapped
    warps: int = tile.config.warps
    return TileCost(
        units,
        lambda resident: clocks(units, resident * warps / SCHEDULERS),
        _BLOCK_CLOCKS + _OUTPUT_CLOCKS * tile.outputs + _MASK_CLOCKS * tile.masked_scores,
    )


def _unit_clocks(tile: Tile) -> dict[str, float]:
    config: MmaConfig = tile.config
    layout, head_dim = tile.layout, tile.problem.head_dim
    scores = config.block_q * config.block_k
    products = 2.0 * scores * head_dim
    shared_bytes = config.warps * (layout.k_tile_bytes + layout.v_tile_bytes)
    if config.smooths_q:
        shared_bytes += config.warps * layout.delta_bytes // layout.means_per_tile
    spilled_bytes = tile.spill_bytes * config.threads

    converts = config.conversion == "i2f" and not config.has_float_scores
    rate = tile.gpu.measured.units.get
    maxima, conversions, packings = float(scores), float(converts * scores), scores / 2
    pv_steps = products / 2 / (16 * 8 * (32 if config.quantizes_v else 16))
    unpackings, additions = _emulation(tile)
    if tile.counts is not None:
        issued = float(tile.counts.issued * config.warps)
    else:
        # scale-and-subtract FFMA, row sum FADD; the magic bias is the first MMA's constant operand and costs nothing.
        # With delta S the FFMA adds that, so the subtraction is an FADD, and so is that of the bias.
        per_score = 2 + config.smooths_q * (1 if converts else 2)
        full_rate = scores * per_score + config.block_q * head_dim * _output_updates(config, tile.tiles)
        qk_steps = products / 2 / (16 * 8 * (64 if config.qk == "s4" else 32))
        issued = (
            (maxima + conversions + packings + full_rate + scores) / 32  # `scores`: one ex2 each
            + pv_steps * (1 + unpackings + additions + (unpackings > 0))
            + qk_steps
            + (shared_bytes + spilled_bytes) / 512  # ldmatrix.x4
            + config.warps * _TILE_INSTRUCTIONS
        )
    qk_kind = "e4m3f32" if config.has_float_scores else config.qk
    pack_rate = rate("pack_e4m3", _CVT_E4M3) if config.quantizes_v else rate("pack_half2", _HALF_RATE)
    return {
        "matrix": products / matrix_rate(tile.gpu, qk_kind) + products / matrix_rate(tile.gpu, config.pv),
        "mufu": scores / rate("ex2", _MUFU),
        "half_rate": (
            maxima / rate("max", _HALF_RATE)
            + conversions / rate("i2f", _HALF_RATE)
            + packings / pack_rate
            + pv_steps * unpackings * 32 / _HALF_RATE
        ),
        "issue": issued / SCHEDULERS,
        "shared": (shared_bytes + layout.stage_bytes) / SMEM_BYTES,
        "local": spilled_bytes / SMEM_BYTES,
    }


def _emulation(tile: Tile) -> tuple[float, float]:
    """Conversions and additions that an emulated product of P V takes; none where there are units for it."""
    return _EMULATION[tile.config.pv] if is_emulated(tile.gpu, tile.config.pv) else (0.0, 0.0)


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
    phases = (units["matrix"], scalar, units["shared"] + units["local"])
    longest, total = max(phases), sum(phases)
    if warps_per_scheduler < 1:
        return total / warps_per_scheduler
    return longest + (total - longest) / warps_per_scheduler


def _in_turn(units: Mapping[str, float], warps_per_scheduler: float) -> float:
    """Clocks of one tile on a Hopper, where the units work one after the other even with two warps per scheduler."""
    total = sum(share * units[name] for name, share in _HOPPER_SHARES.items())
    return total * max(_MOST_GAIN, 1 + _LONE_WARP * (1 / warps_per_scheduler - 0.5))
