"""The truth that kernels are held to: exact attention, and the same numerics as a config, step by step.

Both run on any device that torch has. Sources of the formulas: SageAttention2 (arXiv 2411.10958) for quantized
attention, FlashAttention-2 (arXiv 2307.08691) for the online softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import torch

from sagegen.errors import ArgumentError
from sagegen.mma_numerics import sum_mma_tiles
from sagegen.operands import LOG2_E, Operands, TileSums, make_operands
from sagegen.problem import Problem
from sagegen.quantizing import Accumulator
from sagegen.space import Config
from sagegen.wgmma_numerics import sum_wgmma_tiles

#: Bytes of scores that are alive at once; lengths of 16K fit a small GPU this way.
_CHUNK_BYTES = 256 << 20
_SUM_TILES: Mapping[str, Callable[[Operands, Any, Accumulator], TileSums]] = {
    "mma": sum_mma_tiles,
    "wgmma": sum_wgmma_tiles,
}

#: Architectures whose mma.sync has FP8 units, which cut an FP32 accumulator to 13 mantissa bits; sm_90 emulates it.
_FP8_MMA_ARCHITECTURES = (89, 120)

_Layout = Literal["HND", "NHD"]


# fmt: off
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = ..., scale: float | None = ...,
    window: tuple[int, int] | None = ..., layout: _Layout = ...,
    return_lse: Literal[False] = ..., compute: torch.dtype = ...,
    out_dtype: torch.dtype | None = ..., rows: torch.Tensor | None = ...,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = ..., scale: float | None = ...,
    window: tuple[int, int] | None = ..., layout: _Layout = ...,
    return_lse: Literal[True], compute: torch.dtype = ...,
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
    window: tuple[int, int] | None = None,
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
        window: (left, right) keys that query i sees on each side of key i + kv_len - q_len; -1 leaves a side open.
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
    if torch.amp.is_autocast_available(q.device.type) and torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):  # which would have products of matrices in 16 bits
            again: Any = attention  # the overloads know literals only
            result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = again(
                q, k, v, is_causal=is_causal, scale=scale, window=window, layout=layout,
                return_lse=return_lse, compute=compute, out_dtype=out_dtype, rows=rows,
            )  # fmt: skip
            return result
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    batch, heads_q, q_len, head_dim = q.shape
    heads_kv, kv_len = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    if rows is None:
        rows = torch.arange(q_len, device=q.device)
    first_key, last_key = visible_keys(rows, q_len, kv_len, is_causal, window)
    group = heads_q // heads_kv
    grouped = q.index_select(2, rows).to(compute).reshape(batch, heads_kv, group, len(rows), head_dim)

    sees_key = last_key >= first_key
    bad_query = ~grouped.isfinite().all(-1)
    sees_bad_key = _meets(~k.isfinite().all(-1, keepdim=True), first_key, last_key).squeeze(-1)
    sees_bad_value = _meets(~v.isfinite(), first_key, last_key)
    grouped, k, v = (torch.where(x.isfinite(), x, 0).to(compute) for x in (grouped, k, v))

    step = max(1, _CHUNK_BYTES // max(1, batch * heads_q * kv_len * compute.itemsize))
    slices = [slice(start, start + step) for start in range(0, len(rows) if kv_len else 0, step)]
    # put together, not written into one tensor, which torch.func.vmap over keys alone refuses
    parts = [_rows(grouped[:, :, :, own], k, v, first_key[own], last_key[own], scale) for own in slices]
    if not parts:
        parts = [(grouped.new_zeros(*grouped.shape[:-1], v.shape[-1]), grouped.new_full(grouped.shape[:-1], -math.inf))]
    out, lse = (torch.cat(of_rows, 3) for of_rows in zip(*parts, strict=True))

    spoiled = bad_query & sees_key | sees_bad_key
    lse = lse.masked_fill(spoiled, math.nan)
    out = out.masked_fill(spoiled.unsqueeze(-1) | sees_bad_value, math.nan)
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
        raise ArgumentError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit each other",
            "give one batch, one head dim of q and k, and as many heads and tokens of v as of k",
        )
    if k.shape[heads] == 0 or q.shape[heads] % k.shape[heads]:
        raise ArgumentError(
            f"q has {q.shape[heads]} heads, not a multiple of the {k.shape[heads]} of k and v",
            "give whole groups of query heads per head of k and v",
        )


def visible_keys(
    rows: torch.Tensor, q_len: int, kv_len: int, is_causal: bool, window: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last key that each of `rows` sees, int64; the first is beyond the last where it sees none."""
    left, right = window or (-1, -1)
    left, right = min(left, kv_len), 0 if is_causal else min(right, q_len)  # no row has more on either side
    own = rows + (kv_len - q_len)
    first = (own - left).clamp_min(0) if left >= 0 else torch.zeros_like(rows)
    last = (own + right).clamp_max(kv_len - 1) if right >= 0 else torch.full_like(rows, kv_len - 1)
    return first, last


def _meets(is_bad: torch.Tensor, first_key: torch.Tensor, last_key: torch.Tensor) -> torch.Tensor:
    """Whether one of the keys from first to last is bad, by row and channel.

    Args:
        is_bad: bool [batch, heads, tokens, channels].
        first_key, last_key: int64 [rows].

    Returns:
        bool [batch, heads, 1, rows, channels].
    """
    before = torch.nn.functional.pad(is_bad.int().cumsum(2, dtype=torch.int32), (0, 0, 1, 0))  # bad keys before each
    end = (last_key + 1).clamp_min(0)
    bad = before.index_select(2, end) - before.index_select(2, torch.minimum(first_key, end))
    return bad.unsqueeze(2) > 0


def _rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_key: torch.Tensor,
    last_key: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and lse of grouped rows, q [batch, heads_kv, group, rows, dim]; the heads of a group share k and v."""
    scores = (q.flatten(2, 3) @ k.transpose(-1, -2) * scale).view(*q.shape[:-1], -1)
    keys = torch.arange(k.shape[2], device=k.device)
    hidden = (keys < first_key[:, None]) | (keys > last_key[:, None])
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
    accumulator: Accumulator = "fp32",
    want_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel of `config` should compute, step by step in FP32; finite inputs only.

    Args:
        q: [batch, heads_q, q_len, head_dim], fp16 or bf16.
        k, v: [batch, heads_kv, kv_len, head_dim].
        scale: of the scores; None is 1/sqrt(head_dim).
        accumulator: of the FP8 P·V, see `fp8_accumulator`. `fp32` shows what all others lose, FP16 ones too.
        want_lse: whether the call asks for the lse: with it kernels of the packed exponent take the exact one.

    Returns:
        The output, float32, q's shape, and the natural-log log-sum-exp, float32, [batch, heads_q, q_len], NaN unless
        wanted.

    Raises:
        ArgumentError: as `attention`.
    """
    _check(q, k, v, "HND")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    operands = make_operands(q, k, v, problem, config, scale, want_lse=want_lse)
    sums = _SUM_TILES[config.family](operands, config, accumulator)
    # in the kernels' order: where an output is a tie between two numbers of its type, the last bit decides
    total = sums.total.masked_fill(sums.total < torch.finfo(torch.float32).tiny, 1)  # kernels have no smaller weight
    out = sums.out * (1 / total) * operands.v_scale
    out = torch.where(operands.last_key >= 0, out + operands.v_mean, 0)  # a row that sees no key stays 0
    lse = (sums.peak + (sums.exact_total / sums.unit).log2()) / LOG2_E + operands.lse_bias
    if not want_lse:
        lse = torch.full_like(lse, math.nan)
    return out.view(q.shape), lse.view(q.shape[:-1])


def fp8_accumulator(config: Config, architecture: int) -> Accumulator:
    """The accumulator of `config`'s FP8 products on a compute capability: that of every wgmma, and of most mma.sync."""
    is_native = config.family == "wgmma" or architecture in _FP8_MMA_ARCHITECTURES
    if config.sums_in_fp16:
        return "fp16" if is_native else "fp16_halves"
    return "fp22" if is_native else "fp32"
