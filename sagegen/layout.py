"""Sizes that follow from a config and a head dim: tile records, shared memory, spans.

The quantizer writes these layouts and the attention kernel reads them. Rules, templates and launch plans all take
their numbers from here, so no constant is written twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sagegen.problem import Problem
from sagegen.space import Config

#: Column groups of one K span: thread t of a quad owns keys {8k + 2t, 8k + 2t + 1} (SageAttention2, per-thread scales).
K_GROUPS = 4
#: Token ranges that the statistics of K and V are reduced over before the quantizer combines them.
_MAX_SPLITS = 16
_MIN_SPLIT_TOKENS = 128
#: Blocks of the statistics that fill any known GPU several times.
_STATISTICS_BLOCKS = 1024
#: Ranges of Q's spans that its squares are summed over: of a head, and of all heads that share a KV head together.
#: Every block of the quantizer reads them all.
_MAX_RANGES = 16
_MAX_SHARED_RANGES = 32
#: Means of Q that one block of delta S multiplies with 128 keys: eight tiles of the matrix product.
DELTA_MEANS = 128
#: Keys of such a block, 16 for each warp, and means of a tile of the product.
DELTA_KEYS = 128
MEAN_TILE = 16
#: Threads of the statistics and quantizing kernels: one warp per 16 rows of the largest query tile.
QUANTIZE_THREADS = 256
#: Alignment in bytes of workspace regions.
REGION_ALIGN = 256
#: Of tiles in shared memory: a tile's longest row, which swizzles rely on, but for 16-bit V of more than 128 channels.
_TILE_ALIGN = 256

#: Alignment of tiles in shared memory that wgmma reads: 8 rows of its widest swizzle.
_WGMMA_ALIGN = 1024
#: Warps of the wgmma family's producer that can quantize Q, and channels of a row that one of their threads takes.
QUERY_WARPS = 3
_QUERY_CHANNELS = 16
#: Shared memory of the wgmma family's mbarriers.
BARRIER_BYTES = 256

_IO_BYTES = 2  # fp16 and bf16


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def tokens_of_split(heads: int, kv_len: int) -> int:
    """Tokens of one block of the statistics: enough blocks for a GPU, and few splits, which every later block reads.

    Args:
        heads: KV heads of a call, times the tensors that blocks of their own measure.
    """
    splits = min(_MAX_SPLITS, max(1, ceil_div(_STATISTICS_BLOCKS, heads)))
    return round_up(ceil_div(kv_len, splits), _MIN_SPLIT_TOKENS)


def spans_of_range(spans: int, group: int) -> int:
    """Spans of one block of the statistics where Q is balanced: few ranges, which every later block reads.

    Args:
        spans: of a query head.
        group: query heads that share a KV head.
    """
    return ceil_div(spans, min(_MAX_RANGES, max(1, _MAX_SHARED_RANGES // group)))


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte sizes of one config's tiles.

    Attributes:
        qk_row_bytes: row of a tile of Q or K: INT8, or two INT4 in a byte.
        q_tile_bytes: query tile in MMA fragment order, or as shared memory has it (`wgmma`).
        k_spans: sets of K_GROUPS scales that a K tile carries.
        k_tile_bytes: K tile, swizzled, without its trailer.
        k_record_bytes: K tile, its scales, then one bit per key that holds a NaN or Inf; what one bulk copy brings.
        v_tile_bytes: V tile in shared memory: e4m3 transposed, or the caller's 16-bit rows.
        v_record_bytes: quantized V tile and its bits of non-finite keys; 0 when V is not quantized.
        means_per_tile: spans of a query tile whose means are subtracted from Q; 0 where Q is not smoothed.
        delta_bytes: delta S of a query tile and a key tile.
        delta_offset: where a stage has it.
        stage_bytes: shared memory of one K and one V tile, and their delta S.
        staged_q_bytes: shared memory of a work's queries as the caller has them; 0 where Q comes quantized.
        smem_bytes: dynamic shared memory of the attention kernel.
    """

    qk_row_bytes: int
    q_tile_bytes: int
    k_spans: int
    k_tile_bytes: int
    k_record_bytes: int
    v_tile_bytes: int
    v_record_bytes: int
    means_per_tile: int
    delta_bytes: int
    delta_offset: int
    stage_bytes: int
    staged_q_bytes: int
    smem_bytes: int


def make_layout(config: Config, problem: Problem) -> Layout:
    """The layout of `config` for `problem`'s head dim."""
    k_spans = 1 if config.granularity == "block" else max(1, config.block_k // config.k_span)
    key_bits = 0 if config.family == "wgmma" else config.block_k // 8
    qk_row = problem.head_dim // 2 if config.qk == "s4" else problem.head_dim
    k_tile = config.block_k * qk_row
    k_record = round_up(k_tile + k_spans * K_GROUPS * 4 + key_bits, 16)
    v_tile = config.block_k * problem.head_dim * (1 if config.quantizes_v else _IO_BYTES)
    v_record = round_up(v_tile + key_bits, 16) if config.quantizes_v else 0
    align = tile_align(config, problem)
    ones = 8 * config.block_k if config.row_sum == "ones" else 0
    means_per_tile = config.block_q // config.mean_span if config.smooths_q else 0
    delta = means_per_tile * config.block_k * (4 if config.delta == "f32" else 2)
    delta_offset = round_up(k_record, align) + round_up(max(v_tile, v_record) + ones, align)
    stage = delta_offset + round_up(delta, align)
    barriers = 0
    q_tile = config.block_q * qk_row
    if config.family == "wgmma":  # and of two works: Q, its scales, and what belongs to the KV head
        barriers = BARRIER_BYTES + q_tile + 2 * 4 * (config.block_q + config.head_rows * problem.head_dim)
    staged_q = _staged_q_bytes(config, problem)
    if staged_q:  # and what the lse of two works adds
        barriers += staged_q + 2 * 4 * config.block_q
    return Layout(
        qk_row_bytes=qk_row,
        q_tile_bytes=q_tile,
        k_spans=k_spans,
        k_tile_bytes=k_tile,
        k_record_bytes=k_record,
        v_tile_bytes=v_tile,
        v_record_bytes=v_record,
        means_per_tile=means_per_tile,
        delta_bytes=delta,
        delta_offset=delta_offset,
        stage_bytes=stage,
        staged_q_bytes=staged_q,
        smem_bytes=config.stages * stage + (q_tile if config.q_operand == "smem" else 0) + barriers,
    )


def tile_align(config: Config, problem: Problem) -> int:
    """Alignment in bytes of tiles in shared memory."""
    if config.family == "wgmma":
        return _WGMMA_ALIGN
    return _TILE_ALIGN if config.quantizes_v else max(_TILE_ALIGN, _IO_BYTES * problem.head_dim)


def _staged_q_bytes(config: Config, problem: Problem) -> int:
    """Whole passes of the warps that quantize Q: a thread's two vectors lie where only it knows."""
    if config.q_quantizer == "kernel":
        return 0
    threads = 32 * QUERY_WARPS
    rows_at_once = threads * _QUERY_CHANNELS // problem.head_dim
    return ceil_div(config.block_q, rows_at_once) * threads * _QUERY_CHANNELS * _IO_BYTES


def quantized_rows(config: Config, q_len: int) -> int:
    """Query rows per head that the quantizer writes and the attention kernel may read: whole tiles of both."""
    return round_up(round_up(q_len, config.block_q), config.quantize_rows)


def row_unit(config: Config) -> int:
    """Query rows that whole tiles of the quantizer and of the attention kernel both fill."""
    return math.lcm(config.block_q, config.quantize_rows)


def slots_of(tokens: int, sequences: int, block: int) -> int:
    """Tiles of `block` tokens for sequences of any lengths that together have `tokens`.

    Sequence b's begin at tile (tokens before it) // block + b: those before it have ended there.
    """
    return tokens // block + sequences
