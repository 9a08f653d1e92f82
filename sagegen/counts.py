"""How many tiles, rows and token ranges a call has, from which its grids and its scratch follow."""

from __future__ import annotations

from dataclasses import dataclass

from sagegen.layout import (
    Layout,
    ceil_div,
    quantized_rows,
    row_unit,
    slots_of,
    spans_of_range,
    tokens_of_split,
)
from sagegen.problem import Shape
from sagegen.space import Config


@dataclass(frozen=True, slots=True)
class Ragged:
    """Batch items whose lengths only device memory has: int32 [batch, 4], each first and one past the last of its
    queries, and of its keys.

    Attributes:
        q_tokens, kv_tokens: that q and k have: of all items together, or of each of them.
        is_packed: all items lie in one row of tokens; else each has memory of its own.
    """

    q_tokens: int
    kv_tokens: int
    is_packed: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """How many of what a call has.

    Attributes:
        q_heads, kv_heads: of all batch items.
        group: query heads that share a KV head.
        q_tiles, k_tiles: of a head; of a ragged call of a head of all sequences together, at most.
        all_q_tiles, all_k_tiles: of all heads.
        q_rows: query rows of all heads that the quantizer writes.
        splits, split_tokens: token ranges of the statistics of a KV head.
        means: spans of a query head's rows, where Q is smoothed.
        ranges, range_spans: of those, where Q is balanced.
    """

    q_heads: int
    kv_heads: int
    group: int
    q_tiles: int
    k_tiles: int
    all_q_tiles: int
    all_k_tiles: int
    q_rows: int
    splits: int
    split_tokens: int
    means: int
    ranges: int
    range_spans: int


def count(config: Config, shape: Shape, layout: Layout, whole: Shape, ragged: Ragged | None) -> Counts:
    """What a call of `shape` has; the other arguments are those of `plan.make_plan`."""
    q_heads, kv_heads = shape.batch * shape.heads_q, shape.batch * shape.heads_kv
    group = shape.heads_q // shape.heads_kv
    if ragged is None:
        q_tiles, k_tiles = ceil_div(shape.q_len, config.block_q), ceil_div(shape.kv_len, config.block_k)
        all_q_tiles, all_k_tiles = q_heads * q_tiles, kv_heads * k_tiles
        q_rows = q_heads * quantized_rows(config, shape.q_len)
    else:
        items = 1 if ragged.is_packed else shape.batch
        q_tiles = slots_of(items * ragged.q_tokens, shape.batch, config.block_q)
        k_tiles = slots_of(items * ragged.kv_tokens, shape.batch, config.block_k)
        all_q_tiles, all_k_tiles = shape.heads_q * q_tiles, shape.heads_kv * k_tiles
        unit = row_unit(config)
        q_rows = shape.heads_q * slots_of(items * ragged.q_tokens, shape.batch, unit) * unit
    split_tokens = tokens_of_split(whole.batch * whole.heads_kv * config.measured_tensors, shape.kv_len)
    means = q_tiles * layout.means_per_tile
    range_spans = spans_of_range(means, group) if config.balances else 0
    return Counts(
        q_heads=q_heads,
        kv_heads=kv_heads,
        group=group,
        q_tiles=q_tiles,
        k_tiles=k_tiles,
        all_q_tiles=all_q_tiles,
        all_k_tiles=all_k_tiles,
        q_rows=q_rows if config.q_quantizer == "kernel" else 0,
        splits=ceil_div(shape.kv_len, split_tokens),
        split_tokens=split_tokens,
        means=means,
        ranges=ceil_div(means, range_spans) if config.balances else 0,
        range_spans=range_spans,
    )
