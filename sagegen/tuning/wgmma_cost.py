"""What a tile of the `wgmma` family costs: matrix products, and the part of the softmax that they do not hide.

A running wgmma takes issue slots and register ports from the softmax beside it, and the chip is at its power limit, so
what a variant reaches is close to the sum of its products alone and a share of its other instructions. The shares, and
what a block costs beside its tiles, were fitted to journals of an H200: 2026-11-30 and 30b in bf16, 30c in fp16.
docs/model.md says how well that predicts the others.
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
#: Clocks of an SM that the products do not hide, per score: by the exact exponent, by the packed one, and added up for
#: the row's sum. Fitted. What E4M3's scores save, a conversion from INT32, is not known: no kernel of it was timed.
_EXACT_CLOCKS = 0.0459
_PACKED_CLOCKS = 0.0176
_ROW_SUM_CLOCKS = 0.0062
#: Of delta S, per score: one FFMA more, and a float maximum of two where three integers share one. Counted, not
#: fitted, at 128 lanes. Folded into integers it takes an FFMA, saves their conversion, and in fp16 has one of its own
#: for two rows.
_DELTA_CLOCKS = 1.5 / 128
_FOLDED_CLOCKS: Mapping[str, float] = {"f32": 0.1 / 128, "f16": 0.6 / 128}
#: Per output element that is rescaled or promoted, and per warp and tile; more for each further set of K's scales.
_UPDATE_CLOCKS = 0.0013
_TILE_CLOCKS = 52.0
_SPAN_SHARE = 0.05
#: Instructions of a warp and tile by these same properties, read off the SASS of tests/data/h200-tile-counts.json: a
#: lane has block_k / 2 scores. What is counted in a variant's own code, by what this says, scales its clocks.
_EXACT_INSTRUCTIONS = 4.0
_PACKED_INSTRUCTIONS = 2.1
_ROW_SUM_INSTRUCTIONS = 1.0
_TILE_INSTRUCTIONS = 130
_PACKED_TILE_INSTRUCTIONS = 20
_SPAN_INSTRUCTIONS = 8
#: Two consumers leave gaps that a third one fills, or the second product of `overlap`. Fitted.
_GAPS = {(3, "plain"): 0.85, (2, "overlap"): 1.06, (2, "plain"): 1.13}
#: Clocks of a block beside its tiles: once, once more with a mask, per output element, per masked score, and per
#: element of Q that the producer quantizes. Fitted; the last one down to what a race allows (2026-11-30c-h200.md).
_BLOCK_CLOCKS = 2110.0
_CAUSAL_CLOCKS = 640.0
_OUTPUT_CLOCKS = 0.235
_MASK_CLOCKS = 0.066
_QUERY_CLOCKS = 0.14


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
    scalar = _scalar_clocks(tile)
    spills = tile.spill_bytes * 128 * config.consumers / SMEM_BYTES
    units = {"matrix": matrix, "scalar": scalar, "shared": tile.layout.stage_bytes / SMEM_BYTES + spills}
    clocks = matrix + scalar * _GAPS.get((config.consumers, config.schedule), 1.0) + spills
    return TileCost(units, lambda _: clocks, _block_clocks(tile))


def _block_clocks(tile: Tile) -> float:
    config: WgmmaConfig = tile.config
    per_output = _OUTPUT_CLOCKS + (_QUERY_CLOCKS if config.q_quantizer == "prologue" else 0.0)
    masked = _CAUSAL_CLOCKS if tile.problem.is_causal else 0.0
    return _BLOCK_CLOCKS + masked + per_output * tile.outputs + _MASK_CLOCKS * tile.masked_scores


def _scalar_clocks(tile: Tile) -> float:
    """Clocks of a tile's other instructions that the matrix products do not hide."""
    config: WgmmaConfig = tile.config
    exact = _exact_share(config)
    of_score = exact * _EXACT_CLOCKS + (1 - exact) * _PACKED_CLOCKS
    if config.row_sum == "fadd":
        of_score += _ROW_SUM_CLOCKS
    of_warp = _TILE_CLOCKS * (1 + _SPAN_SHARE * (tile.layout.k_spans - 1))
    clocks = config.block_q * config.block_k * of_score + config.warps * of_warp
    clocks += _updates(config) * _UPDATE_CLOCKS * tile.outputs
    if tile.counts is not None:
        clocks *= tile.counts.issued / expected_instructions(config, tile.problem.head_dim, tile.layout.k_spans)
    if config.smooths_q:
        added = _FOLDED_CLOCKS[config.delta] if config.folds_delta else _DELTA_CLOCKS
        clocks += config.block_q * config.block_k * added
    return clocks


def expected_instructions(config: WgmmaConfig, head_dim: int, k_spans: int) -> float:
    """Instructions that a consumer's warp issues for a tile that needs no mask; delta S is left out."""
    exact, scores = _exact_share(config), config.block_k / 2
    of_score = exact * _EXACT_INSTRUCTIONS + (1 - exact) * _PACKED_INSTRUCTIONS
    if config.row_sum == "fadd":
        of_score += _ROW_SUM_INSTRUCTIONS
    of_tile = _TILE_INSTRUCTIONS + (_PACKED_TILE_INSTRUCTIONS if exact < 1 else 0)
    return scores * of_score + of_tile + _updates(config) * head_dim / 2 + _SPAN_INSTRUCTIONS * (k_spans - 1)


def _exact_share(config: WgmmaConfig) -> float:
    """Of the scores, whose exponent is the exact one."""
    return 1 / config.exact_every if config.exact_every else float(not config.bounds_steps)


def _updates(config: WgmmaConfig) -> int:
    """Passes over the output per tile: a promotion, which carries the rescale unless that is skipped, or a rescale."""
    return (config.accumulation == "two") + (config.rescale == "always" and config.accumulation == "one")
