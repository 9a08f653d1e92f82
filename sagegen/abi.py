"""The launch ABI: the one parameter struct that all kernels of a source take by value.

The templates render their C++ struct from `fields_of` a config and the launch plan packs it from the same, so both
sides agree by construction. Changing a member that older configs have bumps LAUNCH_ABI, which every registry entry
records; members that only a new feature needs are appended for its configs alone.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass

from sagegen.problem import Problem
from sagegen.space import Config

LAUNCH_ABI = 1


@dataclass(frozen=True, slots=True)
class Field:
    """One member: its name, its C++ type and what it holds."""

    name: str
    c_type: str
    doc: str


POINTERS = (
    Field("q", "const uint16_t*", "queries, fp16 or bf16 bits"),
    Field("k", "const uint16_t*", "keys"),
    Field("v", "const uint16_t*", "values"),
    Field("out", "uint16_t*", "output, same type as q"),
    Field("lse", "float*", "log-sum-exp [batch, heads_q, q_len], natural log; null when not wanted"),
    Field("workspace", "uint8_t*", "scratch of one call; the *_offset members point into it"),
)
OFFSETS = (
    Field("q_tiles_offset", "int64_t", "INT8 query tiles in MMA fragment order"),
    Field("q_scales_offset", "int64_t", "float per query row: scale of its group, times |softmax scale| * log2(e)"),
    Field("lse_bias_offset", "int64_t", "float per query row: softmax scale * q . mean(K)"),
    Field("k_records_offset", "int64_t", "INT8 key tiles with scales and bits of non-finite keys"),
    Field("v_records_offset", "int64_t", "e4m3 value tiles, transposed, with bits of non-finite keys"),
    Field("k_sums_offset", "int64_t", "float [split, head_dim] per KV head: sums of K over a split's tokens"),
    Field("v_peaks_offset", "int64_t", "float [split, head_dim] per KV head: largest |V| over a split's tokens"),
    Field("v_scales_offset", "int64_t", "float [head_dim] per KV head: scale of V's channel"),
)
STRIDES = tuple(
    Field(f"{tensor}_{axis}_stride", "int64_t", "in elements")
    for tensor in ("q", "k", "v", "out")
    for axis in ("batch", "head", "token")
)
COUNTS = (
    Field("heads_q", "int32_t", ""),
    Field("heads_kv", "int32_t", "divides heads_q (GQA)"),
    Field("q_len", "int32_t", ""),
    Field("kv_len", "int32_t", ""),
    Field("q_tiles", "int32_t", "query tiles per head"),
    Field("k_tiles", "int32_t", "key tiles per head"),
    Field("kv_heads_total", "int32_t", "batch * heads_kv"),
    Field("q_heads_total", "int32_t", "batch * heads_q"),
    Field("splits", "int32_t", "token ranges of the statistics"),
    Field("split_tokens", "int32_t", "tokens of a range"),
)
SCALARS = (
    Field("softmax_scale", "float", "multiplies q . k; may be zero or negative"),
    Field("padding", "int32_t", "keeps the size a multiple of 8"),
)
FIELDS = POINTERS + OFFSETS + STRIDES + COUNTS + SCALARS
#: Of kernels that smooth Q, after the others.
SMOOTH_Q_FIELDS = (
    Field("q_means_offset", "int64_t", "means of Q's spans, 16 bits, as MMA operands: 16 spans of a KV head at a time"),
    Field("deltas_offset", "int64_t", "delta S per span of queries and key, as the threads of a quad read it"),
    Field("delta_scales_offset", "int64_t", "float per span of queries: scale of its delta S in 16 bits"),
)
#: Of kernels that balance Q against K, which smooth Q too, after those.
BALANCE_FIELDS = (
    Field(
        "k_squares_offset", "int64_t", "float [split, head_dim] per KV head: sums of squares of K less its first key"
    ),
    Field("q_squares_offset", "int64_t", "float [range, head_dim] per query head: sums of squares of Q less its means"),
    Field("ranges", "int32_t", "ranges of Q's spans per head"),
    Field("range_spans", "int32_t", "spans of a range"),
)

#: Of kernels with a sliding window, after those.
WINDOW_FIELDS = (
    Field(
        "bad_keys_offset", "int64_t", "int per key of a KV head: how much of it, and of its V, is NaN or Inf (wgmma)"
    ),
    Field("window_left", "int32_t", "keys that a query sees before its own; NO_LIMIT where that side is open"),
    Field("window_right", "int32_t", "keys that it sees after its own"),
)
#: Of kernels whose batch items have lengths of their own, after those. The pointer changes with every call.
RAGGED_FIELDS = (
    Field("sequences", "const int32_t*", "by batch item: first query, one past its last, first key, one past its last"),
    Field("q_tokens", "int32_t", "queries that those numbers may reach"),
    Field("kv_tokens", "int32_t", "keys likewise"),
    Field("q_item_tokens", "int32_t", "queries of a batch item that has memory of its own; 0 where all lie in one row"),
    Field("kv_item_tokens", "int32_t", "keys likewise"),
)

_CODES = {"int64_t": "q", "int32_t": "i", "float": "f", "const int32_t*": "Q"}

#: The six pointers change with every call; the rest is fixed by shape and strides and packed once.
POINTER_STRUCT = struct.Struct(f"<{len(POINTERS)}Q")
_CONSTANTS = FIELDS[len(POINTERS) :]
CONSTANT_STRUCT = struct.Struct("<" + "".join(_CODES[f.c_type] for f in _CONSTANTS))
PARAMS_BYTES = POINTER_STRUCT.size + CONSTANT_STRUCT.size

#: What some kernels append, in order.
_APPENDED = (SMOOTH_Q_FIELDS, BALANCE_FIELDS, WINDOW_FIELDS, RAGGED_FIELDS)
_UNSET = ("padding", "sequences")
#: Where the struct of a ragged problem has its last pointer, counted from its end.
SEQUENCES_FROM_END = struct.calcsize("<" + "".join(_CODES[field.c_type] for field in RAGGED_FIELDS))
#: An open side of a window.
NO_LIMIT = 2**30


def fields_of(config: Config, problem: Problem) -> tuple[Field, ...]:
    """The members of the struct that the kernels of `config` for `problem` take."""
    has = (config.smooths_q, config.balances, problem.is_windowed, problem.is_ragged)
    return sum(itertools.compress(_APPENDED, has), FIELDS)


def pack_constants(values: dict[str, int | float]) -> bytes:
    """The part of the struct after the pointers.

    `values` names every field of it but the padding and what is set per call; all or none of what only some kernels
    have.
    """
    has = (not values.keys().isdisjoint(field.name for field in group) for group in _APPENDED)
    fields = sum(itertools.compress(_APPENDED, has), _CONSTANTS)
    complete = {**{field.name: 0 for field in fields if field.name in _UNSET}, **values}
    if wrong := complete.keys() ^ {field.name for field in fields}:
        raise KeyError(f"launch parameters missing or unknown: {sorted(wrong)}")
    return _struct(fields).pack(*(complete[field.name] for field in fields))


def unpack_constants(constants: bytes, fields: tuple[Field, ...] = FIELDS) -> dict[str, int | float]:
    """What `pack_constants` was given, and the padding; floats come back rounded to FP32.

    Args:
        fields: `fields_of` a kernel; or those that all kernels have, with which it begins.
    """
    own = fields[len(POINTERS) :]
    return dict(zip((field.name for field in own), _struct(own).unpack_from(constants), strict=True))


def _struct(fields: tuple[Field, ...]) -> struct.Struct:
    return struct.Struct("<" + "".join(_CODES[f.c_type] for f in fields))
