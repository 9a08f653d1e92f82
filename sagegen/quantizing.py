"""The arithmetic of quantized kernels in PyTorch: rounding to INT8, INT4 and E4M3, and the FP8 tensor core's sums.

Sources: SageAttention2 (arXiv 2411.10958) for the groups of the scales and the E4M3 P·V.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch

from sagegen.layout import K_GROUPS
from sagegen.problem import Precision
from sagegen.space import Config

#: Of FP8 products. An FP32 one is `fp22` in tensor cores with FP8 units, and elsewhere `fp32`, which loses nothing; an
#: FP16 one is `fp16` in such tensor cores, and elsewhere `fp16_halves`: two products of FP16 units stand in for one.
Accumulator = Literal["fp32", "fp22", "fp16", "fp16_halves"]

INT8_MAX = 127.0
#: Largest value of Q and K that a scale maps to.
QK_MAX: Mapping[Precision, float] = {"int8": INT8_MAX, "int4": 7.0}
E4M3_MAX = 448.0
#: 1.5 * 2^23, a float that whole numbers can be added to as integers: what integer sums start at to be read as floats.
MAGIC = 12582912.0
#: Keys of one FP8 matrix instruction (m16n8k32, m64nNk32): the accumulator is cut after each.
MMA_KEYS = 32
#: Mantissa bits of the FP8 tensor core's accumulator.
_FP22_BITS = 13
#: Below that of any sum of products, and a float32 has it.
_NO_EXPONENT = -100


def quantize_queries(
    q: torch.Tensor, config: Config, precision: Precision = "int8", least: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries as float32: whole numbers of `precision`, or E4M3; and one scale per row, [batch, heads, q_len, 1].

    `least`: lower limit of a head's scales, [batch, heads, 1, 1].

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
    return _quantize(q, groups, config, precision, least)


def quantize_keys(
    k: torch.Tensor, config: Config, precision: Precision = "int8", least: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys as float32: whole numbers of `precision`, or E4M3; and one scale per key, [batch, heads, kv_len, 1].

    `least`: lower limit of a head's scales, [batch, heads, 1, 1].

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
    return _quantize(k, groups, config, precision, least)


def _quantize(
    x: torch.Tensor, groups: torch.Tensor, config: Config, precision: Precision, least: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to whole numbers with scale max|x| / QK_MAX of the token's group, or `least` of its head; or to E4M3.

    A group of zeros has scale 1.
    """
    largest = E4M3_MAX if config.has_float_scores else QK_MAX[precision]
    peaks = group_peaks(x, groups)
    # the last bit of a scale now and then rounds to another integer, so that families differ
    group_scales = peaks * (1 / largest) if config.family == "wgmma" else peaks / largest
    scales = group_scales[:, :, groups].unsqueeze(-1)
    if least is not None:
        scales = torch.maximum(scales, least)
    scales = torch.where(scales > 0, scales, 1)
    # times the reciprocal, as kernels do: a quotient rounds to another integer now and then
    scaled = x * (1 / scales)
    return round_e4m3(scaled) if config.has_float_scores else scaled.round().clamp(-largest, largest), scales


def group_peaks(x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """max|x| of each group of tokens, [batch, heads, groups].

    Args:
        x: [batch, heads, tokens, dim].
        groups: the group of each token, int64 [tokens].
    """
    peaks = x.abs().amax(-1)
    count = int(groups.max()) + 1 if len(groups) else 0
    return peaks.new_zeros(*peaks.shape[:2], count).scatter_reduce_(2, groups.expand_as(peaks), peaks, "amax")


def quantize_values(v: torch.Tensor, config: Config) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """V as the P·V product reads it, float32, and per channel its scale and what the output gets back, [.., 1, dim].

    E4M3 with scale max|v| / v_max and 1 for a channel of zeros, of V without its mean where the config smooths V; or V
    as it is, in 16 bits, with scale 1. Of the wgmma family a smoothed V gets back its mean less what rounding added to
    it, so that both V have the same mean: equal weights then give an exact output, and others a better one.
    """
    wide = v.float()
    mean = wide.mean(2, keepdim=True) if config.smooths_v else torch.zeros_like(wide[:, :, :1])
    if not config.quantizes_v:
        return wide, torch.ones_like(mean), mean
    wide = wide - mean
    peaks = wide.abs().amax(2, keepdim=True)
    scales = torch.where(peaks > 0, peaks / config.v_max, 1)
    rounded = round_e4m3(wide * (1 / scales))
    if config.smooths_v and config.family == "wgmma":
        mean = mean - rounded.mean(2, keepdim=True) * scales
    return rounded, scales, mean


def round_up_fp32(x: torch.Tensor) -> torch.Tensor:
    """To FP32, towards plus infinity; float64."""
    nearest = x.float()
    above = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
    return torch.where(nearest.double() < x, above, nearest).double()


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


def add_fp16_products(total: torch.Tensor, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """total + p v as one instruction with an FP16 accumulator adds it: exactly, then rounded to nearest.

    How the unit aligns the products is not published, and no GPU that has it was at hand; the emulator does the same
    (sagegen/emulator/runtime/mma_narrow.cpp). A sum beyond 65504 becomes an infinity.

    Args:
        total, p, v: as of `add_fp8_products`; a total is an FP16 number.
    """
    return (total + p @ v).half().float()


def _exponents(x: torch.Tensor, lowest: int) -> torch.Tensor:
    """Of the largest power of two up to |x|, at least `lowest`, int32; of a zero _NO_EXPONENT."""
    return torch.where(x == 0, _NO_EXPONENT, (torch.frexp(x).exponent - 1).clamp_min(lowest))


def add_products(total: torch.Tensor, p: torch.Tensor, v: torch.Tensor, accumulator: Accumulator) -> torch.Tensor:
    """total + p v of E4M3 numbers as a chain of matrix instructions adds them.

    Args:
        total, p, v: as of `add_fp8_products`, but for any number of keys.
    """
    for start in range(0, p.shape[-1], MMA_KEYS):
        keys = slice(start, start + MMA_KEYS)
        if accumulator == "fp22":
            total = add_fp8_products(total, p[..., keys], v[..., keys, :])
        elif accumulator == "fp16":
            total = add_fp16_products(total, p[..., keys], v[..., keys, :])
        elif accumulator == "fp16_halves":
            for first in (start, start + MMA_KEYS // 2):
                keys = slice(first, first + MMA_KEYS // 2)
                products = add_fp16_products(torch.zeros_like(total), p[..., keys], v[..., keys, :])
                total = (total + products).half().float()
        else:
            total = total + p[..., keys] @ v[..., keys, :]
    return total
