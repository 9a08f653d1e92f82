"""What a tile of the `wgmma` family costs: matrix products, and the part of the softmax that they do not hide.

A running wgmma takes issue slots and register ports from the softmax beside it, and the chip is at its power limit, so
what a variant reaches is close to the sum of its products alone and a share of its other instructions. The shares were
fitted to sustained runs on an H200 (batch 4, 32 heads, 16384 tokens); TOPS measured, predicted: see test_model.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from sagegen.gpu import Gpu
from sagegen.problem import Problem
from sagegen.space import WgmmaConfig
from sagegen.tuning.tile_cost import SMEM_BYTES, Tile, TileCost, matrix_rate, per_clock

#: wgmma's operations per clock and SM on an H200: 1929 and 1708 TOPS.
_WGMMA_RATES = {"s8": 7380.0, "e4m3f32": 6535.0}
#: The probes that measure the same: A in shared memory, and in registers as P is.
_PROBES = {"s8": "wgmma_s8_ss_n128", "e4m3f32": "wgmma_e4m3f32_rs_n128"}
#: A chip whose mma.sync has less is capped, and wgmma is no faster there (H20).
_UNCAPPED_MMA_S8 = 4000.0
_LANES = 128  # results per clock and SM of a full-rate instruction
#: Of one score, as full-rate instructions that the products do not hide. What E4M3's saves, a conversion from INT32, is
#: not known: no kernel of it has been timed.
_EXACT_INSTRUCTIONS = 5.4
_PACKED_INSTRUCTIONS = 2.9
_ROW_SUM_INSTRUCTIONS = 0.7
#: Of delta S: one FFMA more, and a float maximum of two where three integers share one. Counted, not fitted. Folded
#: into integers it takes an FFMA, saves their conversion, and in fp16 has one of its own for two rows.
_DELTA_INSTRUCTIONS = 1.5
_FOLDED_INSTRUCTIONS: Mapping[str, float] = {"f32": 0.1, "f16": 0.6}
#: FFMA or FMUL per output element, and what any instruction beside a wgmma costs.
_BESIDE_WGMMA = 1.75
#: Loop overhead and what is done once for a row, per warp and tile; more for each further set of K's scales.
_TILE_INSTRUCTIONS = 82
_SPAN_INSTRUCTIONS = 8
#: Two consumers leave gaps that a third one fills, or the second product of `overlap`.
_GAPS = {(3, "plain"): 1.0, (2, "overlap"): 1.06, (2, "plain"): 1.09}


def wgmma_registers(config: WgmmaConfig, problem: Problem) -> int:
    """Registers that a thread of the attention kernel starts with: one block has them all."""
    return 65536 // config.threads // 8 * 8


def wgmma_rate(gpu: Gpu, kind: str) -> float:
    """Operations per clock and SM of wgmma `kind`: as probed, else the H200's, or mma.sync's of a capped chip."""
    if probed := gpu.measured.matrix.get(_PROBES[kind]):
        return per_clock(gpu, probed)
    mma_s8 = matrix_rate(gpu, "s8")
    return mma_s8 if mma_s8 < _UNCAPPED_MMA_S8 else _WGMMA_RATES[kind]


def wgmma_tile_cost(tile: Tile) -> TileCost:
    config: WgmmaConfig = tile.config
    head_dim = tile.problem.head_dim
    scores = config.block_q * config.block_k
    columns = head_dim + (8 if config.row_sum == "ones" else 0)
    qk_kind = "e4m3f32" if config.has_float_scores else "s8"
    matrix = 2.0 * scores * (head_dim / wgmma_rate(tile.gpu, qk_kind) + columns / wgmma_rate(tile.gpu, "e4m3f32"))
    scalar = _instructions(config, head_dim, tile.layout.k_spans) / _LANES
    shared = (tile.layout.stage_bytes + tile.spill_bytes * 128 * config.consumers) / SMEM_BYTES
    units = {"matrix": matrix, "scalar": scalar, "shared": shared}
    clocks = matrix + scalar * _GAPS.get((config.consumers, config.schedule), 1.0)
    clocks += tile.spill_bytes * 128 * config.consumers / SMEM_BYTES
    return TileCost(units, lambda _: clocks)


def _exponent_instructions(config: WgmmaConfig) -> float:
    exact_share = 1 / config.exact_every if config.exact_every else float(not config.bounds_steps)
    return _PACKED_INSTRUCTIONS + exact_share * (_EXACT_INSTRUCTIONS - _PACKED_INSTRUCTIONS)


def _instructions(config: WgmmaConfig, head_dim: int, k_spans: int) -> float:
    """Lanes' full-rate instructions of a tile that the matrix products do not hide."""
    of_score = _exponent_instructions(config) + (_ROW_SUM_INSTRUCTIONS if config.row_sum == "fadd" else 0)
    if config.smooths_q:
        of_score += _FOLDED_INSTRUCTIONS[config.delta] if config.folds_delta else _DELTA_INSTRUCTIONS
    # a promotion, which carries the rescale unless that is skipped; else the rescale alone
    updates = (config.accumulation == "two") + (config.rescale == "always" and config.accumulation == "one")
    of_row_and_tile = updates * head_dim * _BESIDE_WGMMA
    of_warp = _BESIDE_WGMMA * 32 * (_TILE_INSTRUCTIONS + _SPAN_INSTRUCTIONS * (k_spans - 1))
    return config.block_q * (config.block_k * of_score + of_row_and_tile) + config.warps * of_warp
