"""The truth that kernels are held to: exact attention, and the same numerics as a config, step by step.

Both run on any device that torch has. Sources of the formulas: SageAttention2 (arXiv 2411.10958) for the groups of the
scales, the E4M3 P·V and the two-level accumulation; FlashAttention-2 (arXiv 2307.08691) for the online softmax.
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch

from sagegen.errors import ArgumentError
from sagegen.layout import K_GROUPS
from sagegen.problem import Problem
from sagegen.space import Config

INT8_MAX = 127.0
E4M3_MAX = 448.0
#: Bytes of scores that are alive at once; lengths of 16K fit a small GPU this way.
_CHUNK_BYTES = 256 << 20
_LOG2_E = math.log2(math.e)
#: What the accumulators of `magic` start at, read as floats: 1.5 * 2^23.
_MAGIC = 12582912.0
#: Keys of one FP8 matrix instruction (mma.m16n8k32): the accumulator is cut after each.
_MMA_KEYS = 32
#: Mantissa bits of the FP8 tensor core's accumulator.
_FP22_BITS = 13
#: Below that of any sum of products, and a float32 has it.
_NO_EXPONENT = -100

_Layout = Literal["HND", "NHD"]


# fmt: off
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = ..., scale: float | None = ...,
    layout: _Layout = ..., return_lse: Literal[False] = ..., compute: torch.dtype = ...,
    out_dtype: torch.dtype | None = ..., rows: torch.Tensor | None = ...,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = ..., scale: float | None = ...,
    layout: _Layout = ..., return_lse: Literal[True], compute: torch.dtype = ...,
    out_dtype: torch.dtype | None = ..., rows: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
# fmt: on
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    layout: _Layout = "HND",
    return_lse: bool = False,
    compute: torch.dtype = torch.float64,
    out_dtype: torch.dtype | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(scale q k^T) v.

    A query row without a visible key gives 0 and lse -inf. NaN or Inf in a query, or in a key that it sees, makes that
    query's output and lse NaN; in a value that it sees, the channel of its output. What a mask hides reaches nothing.

    Args:
        q: [batch, heads_q, q_len, head_dim] for layout HND, [batch, q_len, heads_q, head_dim] for NHD.
        k, v: the same with heads_kv and kv_len; heads_kv divides heads_q.
        is_causal: query i sees key j when j <= i + kv_len - q_len.
        scale: of the scores; None is 1/sqrt(head_dim).
        compute: type of all arithmetic, float64 or float32.
        out_dtype: type of the output; None is q's.
        rows: 1-D int64 indices of the query rows to compute; None is all, in order.

    Returns:
        The output in q's layout, with only `rows` of it; with `return_lse` also the natural-log log-sum-exp, float32,
        [batch, heads_q, rows].

    Raises:
        ArgumentError: layout, rank, batch, head count, head dim or lengths do not fit each other.
    """
    _check(q, k, v, layout)
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    batch, heads_q, q_len, head_dim = q.shape
    heads_kv, kv_len = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    if rows is None:
        rows = torch.arange(q_len, device=q.device)
    # the last key that a row sees
    last_key = rows + (kv_len - q_len) if is_causal else torch.full_like(rows, kv_len - 1)
    group = heads_q // heads_kv
    grouped = q.index_select(2, rows).to(compute).reshape(batch, heads_kv, group, len(rows), head_dim)

    bad_query = ~grouped.isfinite().all(-1)
    first_bad_key = _first_bad(k.isfinite().all(-1, keepdim=True))
    first_bad_value = _first_bad(v.isfinite())
    grouped, k, v = (torch.where(x.isfinite(), x, 0).to(compute) for x in (grouped, k, v))

    out = grouped.new_zeros(*grouped.shape[:-1], v.shape[-1])
    lse = grouped.new_full(grouped.shape[:-1], -math.inf)
    step = max(1, _CHUNK_BYTES // max(1, batch * heads_q * kv_len * compute.itemsize))
    for start in range(0, len(rows) if kv_len else 0, step):
        part = slice(start, start + step)
        out[:, :, :, part], lse[:, :, :, part] = _rows(grouped[:, :, :, part], k, v, last_key[part], scale)

    sees_key = last_key >= 0
    spoiled = (bad_query | (last_key >= first_bad_key.squeeze(-1))) & sees_key
    lse.masked_fill_(spoiled, math.nan)
    sees_bad_value = (last_key[:, None] >= first_bad_value) & sees_key[:, None]
    out.masked_fill_(spoiled.unsqueeze(-1) | sees_bad_value, math.nan)
    out = out.flatten(1, 2).to(out_dtype or q.dtype)
    out = out.transpose(1, 2) if layout == "NHD" else out
    return (out, lse.flatten(1, 2).float()) if return_lse else out


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    if layout not in ("HND", "NHD"):
        raise ArgumentError(f"layout {layout!r} does not exist", "use HND or NHD")
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ArgumentError(f"q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dimensions", "give tensors of 4")
    heads = 1 if layout == "HND" else 2
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise ArgumentError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit each other")
    if k.shape[heads] == 0 or q.shape[heads] % k.shape[heads]:
        raise ArgumentError(f"q has {q.shape[heads]} heads, not a multiple of the {k.shape[heads]} of k and v")


def _first_bad(is_finite: torch.Tensor) -> torch.Tensor:
    """Index of the first token that is not finite, by channel; the length when there is none.

    Args:
        is_finite: bool [batch, heads, tokens, channels].

    Returns:
        int64 [batch, heads, 1, 1, channels].
    """
    batch, heads, length, channels = is_finite.shape
    tokens = torch.arange(length, device=is_finite.device)[:, None]
    bad = torch.where(is_finite, length, tokens)
    first = bad.amin(2) if length else bad.new_zeros(batch, heads, channels)
    return first[:, :, None, None]


def _rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last_key: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and lse of grouped rows, q [batch, heads_kv, group, rows, dim]; the heads of a group share k and v."""
    scores = (q.flatten(2, 3) @ k.transpose(-1, -2) * scale).view(*q.shape[:-1], -1)
    hidden = torch.arange(k.shape[2], device=k.device) > last_key[:, None]
    scores.masked_fill_(hidden, -math.inf)
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak.masked_fill(peak == -math.inf, 0)).exp_()
    total = weights.sum(-1, keepdim=True)
    out = (weights.flatten(2, 3) @ v).view(*q.shape[:-1], -1) / total.masked_fill(total == 0, 1)
    return out, (peak + total.log()).squeeze(-1)


def quantized_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: Config,
    *,
    scale: float | None = None,
    accumulator: Literal["fp32", "fp22"] = "fp32",
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel of `config` should compute, step by step in FP32; finite inputs only.

    Args:
        q: [batch, heads_q, q_len, head_dim], fp16 or bf16.
        k, v: [batch, heads_kv, kv_len, head_dim].
        scale: of the scores; None is 1/sqrt(head_dim).
        accumulator: of the FP8 P·V. `fp22` is what tensor cores with FP8 units have, see `add_fp8_products`.

    Returns:
        The output, float32, q's shape, and the natural-log log-sum-exp, float32, [batch, heads_q, q_len].

    Raises:
        ArgumentError: as `attention`.
    """
    _check(q, k, v, "HND")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch, heads_kv, kv_len, head_dim = k.shape
    rows = (batch, heads_kv, q.shape[1] // heads_kv * q.shape[2])  # the heads of a group one after another

    mean = k.float().mean(2, keepdim=True)
    q8, q_scale = quantize_queries(q.float(), config)
    k8, k_scale = quantize_keys(k.float() - mean, config)
    values, v_scale = quantize_values(v, config)
    # the scale's sign goes into Q, its size into Q's scales, in the order of the kernels' roundings
    q8 = q8.reshape(*rows, head_dim) * math.copysign(1, scale)
    q_scale = q_scale.reshape(*rows, 1) * abs(scale) * _LOG2_E
    last_key = torch.arange(q.shape[2], device=q.device).repeat(q.shape[1] // heads_kv)[:, None]
    last_key = last_key + (kv_len - q.shape[2]) if problem.is_causal else torch.full_like(last_key, kv_len - 1)

    unit = E4M3_MAX if config.quantizes_v else 1.0  # weights are up to that, so that P fills E4M3's range
    out = torch.zeros_like(q8)
    total = torch.zeros_like(q_scale)
    peak = torch.full_like(q_scale, -math.inf)
    for start in range(0, kv_len, config.block_k):
        keys = slice(start, min(start + config.block_k, kv_len))
        factor = q_scale * k_scale[:, :, keys].transpose(-1, -2)
        # products of INT8 over 128 channels stay below 2^24, so FP32 adds them exactly
        integers = q8 @ k8[:, :, keys].transpose(-1, -2)
        hidden = torch.arange(keys.start, keys.stop, device=q.device) > last_key
        scores = (integers * factor).masked_fill_(hidden, -math.inf)
        grown = torch.maximum(peak, scores.amax(-1, keepdim=True))
        anchor = grown.masked_fill(grown == -math.inf, 0)
        weights = _weights(integers, factor, anchor - math.log2(unit), config).masked_fill_(hidden, 0)
        decay = (peak - anchor).exp2()
        peak, total = grown, total * decay + weights.sum(-1, keepdim=True)
        out = _accumulate(out * decay, weights, values[:, :, keys], config, accumulator)
    out = out * v_scale / total.masked_fill(total == 0, 1)
    bias = q.float().reshape(*rows, head_dim) @ mean.transpose(-1, -2) * scale
    lse = (peak + (total / unit).log2()) / _LOG2_E + bias
    return out.view(q.shape), lse.view(q.shape[:-1])


def _weights(integers: torch.Tensor, factor: torch.Tensor, floor: torch.Tensor, config: Config) -> torch.Tensor:
    """2^(integers * factor - floor), the exponent rounded where kernels round it: once, since it is one FMA.

    `magic` has its bias in the scores, so bias times factor is subtracted too, as one FP32 number with the floor. That
    number is rounded up, which makes the weights of its keys smaller by up to 1.5 integer steps of a score.
    """
    shift = floor.double()
    if config.conversion == "magic":
        bias = _MAGIC * factor.double()
        shift = _round_up(bias + shift) - bias
    return (integers.double() * factor - shift).float().exp2()


def _round_up(x: torch.Tensor) -> torch.Tensor:
    """To FP32, towards plus infinity; float64."""
    nearest = x.float()
    above = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
    return torch.where(nearest.double() < x, above, nearest).double()


def quantize_queries(q: torch.Tensor, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 queries as whole float32 numbers, and one scale per row, [batch, heads, q_len, 1].

    Rows that share a scale: of a tile (`block`), of a span of q_span rows (`warp`), or those of a span that are equal
    modulo 8 (`thread`), which one thread of the MMA accumulator owns.
    """
    rows = torch.arange(q.shape[2], device=q.device)
    if config.granularity == "block":
        groups = rows // config.block_q
    elif config.granularity == "warp":
        groups = rows // config.q_span
    else:
        groups = rows // config.q_span * 8 + rows % 8
    return _quantize(q, groups)


def quantize_keys(k: torch.Tensor, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 keys as whole float32 numbers, and one scale per key, [batch, heads, kv_len, 1].

    Keys that share a scale: of a tile (`block`), of a span of k_span keys (`warp`), or those of a span in the columns
    {8n + 2i, 8n + 2i + 1} (`thread`), which one thread of the MMA accumulator owns.
    """
    keys = torch.arange(k.shape[2], device=k.device)
    if config.granularity == "block":
        groups = keys // config.block_k
    elif config.granularity == "warp":
        groups = keys // config.k_span
    else:
        groups = keys // config.k_span * K_GROUPS + keys % 8 // 2
    return _quantize(k, groups)


def _quantize(x: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to INT8 with scale max|x| / 127 of the token's group; a group of zeros has scale 1."""
    peaks = x.abs().amax(-1)
    count = int(groups.max()) + 1 if len(groups) else 0
    group_peaks = peaks.new_zeros(*peaks.shape[:2], count)
    group_peaks.scatter_reduce_(2, groups.expand_as(peaks), peaks, "amax")
    scales = torch.where(group_peaks > 0, group_peaks / INT8_MAX, 1)[:, :, groups].unsqueeze(-1)
    # times the reciprocal, as kernels do: a quotient rounds to another integer now and then
    return (x * (1 / scales)).round().clamp(-INT8_MAX, INT8_MAX), scales


def quantize_values(v: torch.Tensor, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """V as the P·V product reads it, float32, and its scale per channel, [batch, heads, 1, dim].

    E4M3 with scale max|v| / 448 and 1 for a channel of zeros; or V as it is, in 16 bits, with scale 1.
    """
    wide = v.float()
    if not config.quantizes_v:
        return wide, torch.ones_like(wide[:, :, :1])
    peaks = wide.abs().amax(2, keepdim=True)
    scales = torch.where(peaks > 0, peaks / E4M3_MAX, 1)
    return round_e4m3(wide * (1 / scales)), scales


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """To the nearest E4M3 number, ties to even, clamped to +-448; float32."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def truncate_fp22(x: torch.Tensor) -> torch.Tensor:
    """Cut float32 to 13 mantissa bits, toward zero: what the FP8 tensor core keeps of a sum."""
    return (x.view(torch.int32) & -(1 << (23 - _FP22_BITS))).view(torch.float32)


def add_fp8_products(total: torch.Tensor, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """total + p v as one instruction of the FP8 tensor core adds it; on sm_90 bit for bit (wgmma, docs/gpu-runs).

    The products and the total are cut toward zero to 13 bits below the largest exponent among them and added, and the
    sum is cut to 13 mantissa bits (SageAttention2, section 3.4, has only that). A product's exponent is the sum of its
    factors', whatever their mantissas.

    Args:
        total: float32 [..., rows, dim].
        p: E4M3 numbers in float32, [..., rows, keys], at most 32 keys.
        v: likewise, [..., keys, dim].
    """
    p_exponents, v_exponents = _exponents(p, lowest=-6), _exponents(v, lowest=-6)  # subnormals have that of 2^-6
    largest = _exponents(total, lowest=_NO_EXPONENT)
    for key in range(p.shape[-1]):
        largest = torch.maximum(largest, p_exponents[..., key, None] + v_exponents[..., key, None, :])
    unit = (largest + (127 - _FP22_BITS) << 23).view(torch.float32)  # a power of two
    kept = (total / unit).trunc()
    for key in range(p.shape[-1]):
        kept += (p[..., key, None] * v[..., key, None, :] / unit).trunc()
    return truncate_fp22(kept * unit)


def _exponents(x: torch.Tensor, lowest: int) -> torch.Tensor:
    """Of the largest power of two up to |x|, at least `lowest`, int32; of a zero _NO_EXPONENT."""
    return torch.where(x == 0, _NO_EXPONENT, (torch.frexp(x).exponent - 1).clamp_min(lowest))


def _accumulate(
    out: torch.Tensor, weights: torch.Tensor, values: torch.Tensor, config: Config, accumulator: str
) -> torch.Tensor:
    """out + P V of one tile, with P rounded as the config's P·V product reads it."""
    if not config.quantizes_v:
        narrow = torch.float16 if config.pv == "f16f32" else torch.bfloat16
        return out + weights.to(narrow).float() @ values
    p = round_e4m3(weights)
    for first in range(0, weights.shape[-1], config.accum_depth):
        partial = torch.zeros_like(out)
        for start in range(first, min(first + config.accum_depth, weights.shape[-1]), _MMA_KEYS):
            keys = slice(start, start + _MMA_KEYS)
            if accumulator == "fp22":
                partial = add_fp8_products(partial, p[..., keys], values[:, :, keys])
            else:
                partial = partial + p[..., keys] @ values[:, :, keys]
        out = out + partial
    return out
