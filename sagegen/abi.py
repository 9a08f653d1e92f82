"""The launch ABI: the one parameter struct that all kernels of a source take by value.

The templates render their C++ struct from `fields_of` a config and the launch plan packs it from the same, so both
sides agree by construction. Changing a member that older configs have bumps LAUNCH_ABI, which every registry entry
records; members that only a new feature needs are appended for its configs alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

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

_CODES = {"int64_t": "q", "int32_t": "i", "float": "f"}

#: The six pointers change with every call; the rest is fixed by shape and strides and packed once.
POINTER_STRUCT = struct.Struct(f"<{len(POINTERS)}Q")
CONSTANT_STRUCT = struct.Struct("<" + "".join(_CODES[f.c_type] for f in FIELDS[len(POINTERS) :]))
_SMOOTH_Q_STRUCT = struct.Struct(CONSTANT_STRUCT.format + "".join(_CODES[f.c_type] for f in SMOOTH_Q_FIELDS))
PARAMS_BYTES = POINTER_STRUCT.size + CONSTANT_STRUCT.size

_CONSTANT_NAMES = tuple(f.name for f in FIELDS[len(POINTERS) :])
_SMOOTH_Q_NAMES = tuple(f.name for f in SMOOTH_Q_FIELDS)


def fields_of(config: Config) -> tuple[Field, ...]:
    """The members of the struct that the kernels of `config` take."""
    return FIELDS + SMOOTH_Q_FIELDS if config.smooths_q else FIELDS


def pack_constants(values: dict[str, int | float]) -> bytes:
    """The part of the struct after the pointers.

    `values` names every field of it but the padding; either all or none of what only kernels that smooth Q have.
    """
    complete = {"padding": 0, **values}
    smooths_q = not set(_SMOOTH_Q_NAMES).isdisjoint(complete)
    names = _CONSTANT_NAMES + _SMOOTH_Q_NAMES * smooths_q
    if set(complete) != set(names):
        raise KeyError(f"launch parameters missing or unknown: {sorted(set(complete) ^ set(names))}")
    return (_SMOOTH_Q_STRUCT if smooths_q else CONSTANT_STRUCT).pack(*(complete[name] for name in names))


def unpack_constants(constants: bytes) -> dict[str, int | float]:
    """What `pack_constants` was given, and the padding; floats come back rounded to FP32."""
    smooths_q = len(constants) == _SMOOTH_Q_STRUCT.size
    values = (_SMOOTH_Q_STRUCT if smooths_q else CONSTANT_STRUCT).unpack(constants)
    return dict(zip(_CONSTANT_NAMES + _SMOOTH_Q_NAMES * smooths_q, values, strict=True))
