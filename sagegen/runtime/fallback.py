"""torch SDPA with this package's semantics, and what is said when it stands in for a kernel."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagegen.errors import UnsupportedError
from sagegen.runtime.arguments import has_tangent
from sagegen.runtime.options import clamp_window

LOGGER = logging.getLogger("sagegen")

#: torch's own, bound before anyone patches torch.nn.functional with our sdpa(), which would then call itself.
torch_sdpa = torch.nn.functional.scaled_dot_product_attention

#: The largest scale that float32, which torch's fused attention has it in, rounds to 0.
LARGEST_NO_SCALE = 2.0**-150

#: What torch's fused kernels read at once.
_VECTOR_BYTES = 16
#: Bytes of mask or FP32 scores that are alive at once.
_CHUNK_BYTES = 256 << 20


class Lengths(NamedTuple):
    """How many rows and keys of each batch item are there; what lies behind them is padding, and finite.

    Attributes:
        q, kv: int64 [batch], on the tensors' device.
    """

    q: torch.Tensor
    kv: torch.Tensor


class _Masks(NamedTuple):
    """What decides which keys a row sees."""

    attn_mask: torch.Tensor | None
    is_causal: bool
    window: tuple[int, int] | None
    lengths: Lengths | None


@functools.cache
def warn_once(message: str) -> None:
    """Log `message`; the same text again is not logged."""
    LOGGER.warning(message)


def fall_back(reason: str, strict: bool) -> None:
    """Say, once per reason, that torch SDPA answers.

    Raises:
        UnsupportedError: `strict` is set.
    """
    if strict:
        raise UnsupportedError(f"no kernel can answer: {reason}", "unset SAGEGEN_STRICT to let torch SDPA answer")
    warn_once(f"torch SDPA answers: {reason}")


def with_positive_scale(q: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, float | None]:
    """q and scale of the same scores, the scale None or above 0 in float32 too.

    Torch's fused attention multiplies scores by the scale after it has masked them: -inf times 0 or less is NaN in all
    of a causal call (torch 2.14 on the CPU, all types), and it takes a row's maximum before, the smallest score then.
    """
    if scale is None or not scale <= LARGEST_NO_SCALE:
        return q, scale
    return (q * 0.0, 1.0) if scale >= -LARGEST_NO_SCALE else (-q, -scale)


def as_torch_reads(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a dense copy where torch's fused kernels would fault on a GPU.

    They read 16 bytes at a time and do not ask whether they may: an address or a stride between those ends the process'
    CUDA context with `misaligned address` (torch 2.11 on an H200, found by tests/gpu/test_property_calls.py).
    """
    if x.device.type != "cuda" or torch.compiler.is_compiling():
        return x
    is_read_askew = has_odd_rows(x) or _address(x) % _VECTOR_BYTES
    return x.clone(memory_format=torch.contiguous_format) if is_read_askew else x


def has_odd_rows(x: torch.Tensor) -> bool:
    """Whether rows of whole vectors begin between two of them."""
    size = x.element_size()
    strides = [stride * size for count, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if count > 1]
    return x.shape[-1] * size % _VECTOR_BYTES == 0 and any(stride % _VECTOR_BYTES for stride in strides)


def as_torch_masks(mask: torch.Tensor | None, kv_len: int) -> torch.Tensor | None:
    """`mask` with a column for every key: torch's fused kernels fail on one column for all (torch 2.11, cuDNN)."""
    if mask is None or mask.device.type != "cuda":
        return mask
    return mask.expand(*mask.shape[:-1], kv_len).contiguous() if mask.shape[-1] == 1 != kv_len else mask.contiguous()


def differentiable_forward(*inputs: torch.Tensor | None) -> AbstractContextManager[Any]:
    """Torch's answer written out in differentiable steps where an input has a tangent, which its fused ones refuse."""
    return sdpa_kernel(SDPBackend.MATH) if has_tangent(*inputs) else nullcontext()


def _address(x: torch.Tensor) -> int:
    """Of the first element; within its storage where it has no memory, inside torch.func."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return int(x.storage_offset() * x.element_size())


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "HND",
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    attn_mask: torch.Tensor | None = None,
    lengths: Lengths | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention by torch SDPA; differentiable. Arguments are those of `sagegen.attention`, already checked.

    Unlike SDPA itself: causal is aligned bottom-right, query heads may share K and V, and rows without a visible key
    give 0 and lse -inf.

    Args:
        lengths: of the batch items, each of which is aligned by its own; padding sees no key and is none.

    Returns:
        The output in q's layout and dtype; with `return_lse` also the natural-log log-sum-exp, float32,
        [batch, heads_q, q_len].
    """
    with without_autocast(q.device.type):
        return _attend(
            q, k, v, layout, scale, return_lse, _Masks(attn_mask, is_causal, clamp_window(window), lengths)
        )  # fmt: skip


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Autocast off for a kind of device: results have the inputs' types, and sums are not in 16 bits, inside it too."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)  # takes some 8 us on the host, where it changes nothing too
    return nullcontext()


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str,
    scale: float | None,
    return_lse: bool,
    masks: _Masks,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k, v = (as_torch_reads(x) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    q_len, kv_len = q.shape[2], k.shape[2]
    gqa = False
    if q.shape[1] != k.shape[1]:  # asked so, for under dynamic shapes bool() leaves a SymBool, which torch refuses
        gqa = True
    if q_len == 1:  # bottom-right: the only query sees every key
        masks = masks._replace(is_causal=False)
    attn_mask, is_causal, window, lengths = masks
    masked = attn_mask is not None or window is not None or lengths is not None or (is_causal and q_len != kv_len)
    if not masked:
        positive_q, positive = with_positive_scale(q, scale)
        with differentiable_forward(q, k, v):
            out = torch_sdpa(positive_q, k, v, is_causal=is_causal, scale=positive, enable_gqa=gqa)
    else:
        if attn_mask is not None:
            k, v = _blank_hidden(k, v, attn_mask)
        parts = [
            _attend_rows(q[:, :, rows], k, v, _mask_rows(masks, rows, q_len, kv_len, q.device), scale, gqa)
            for rows in chunks(q_len, _bytes_per_row(masks, q, kv_len))
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    lse = _log_sum_exp(q, k, masks, scale) if return_lse else None
    out = out.transpose(1, 2) if layout == "NHD" else out
    return out if lse is None else (out, lse)


def _blank_hidden(k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v with zeros at keys that the mask hides from every row of a batch item, which may hold NaN: padding."""
    if attn_mask.shape[-1] == 1:  # all keys of a row are alike
        return k, v
    seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf
    seen = seen[(None,) * (4 - seen.dim())].any(2).any(1)  # [batch or 1, kv_len]
    hidden = ~seen[:, None, :, None]
    return k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)


def chunks(count: int, bytes_per_item: int) -> Iterator[slice]:
    """Slices of `count` items, each of as many as keep memory bounded."""
    step = max(1, _CHUNK_BYTES // max(1, bytes_per_item))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _bytes_per_row(masks: _Masks, q: torch.Tensor, kv_len: int) -> int:
    """What a row of queries takes while torch answers: its mask. With lengths, which leave no mask to all items in
    common, also its scores in FP32, as torch has them where no fused kernel of its takes the mask."""
    if masks.lengths is not None:
        return 4 * q.shape[0] * q.shape[1] * kv_len
    return kv_len * (1 if masks.attn_mask is None else math.prod(masks.attn_mask.shape[:-2]))


def _mask_rows(masks: _Masks, rows: slice, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """What the query rows `rows` see: bool (True is seen), or attn_mask's dtype, added to the scores."""
    attn_mask, is_causal, window, lengths = masks
    left, right = window or (-1, -1)
    right = 0 if is_causal else right
    keys = torch.arange(kv_len, device=device)
    own = torch.arange(rows.start, rows.stop, device=device)[:, None]
    at = own + (kv_len - q_len)  # the last key that a causal row sees
    end = torch.full_like(at, kv_len)
    if lengths is not None:
        q_lengths, kv_lengths = (x[:, None, None, None] for x in lengths)
        at = own + (kv_lengths - q_lengths)
        end = torch.where(own < q_lengths, kv_lengths, 0)
    visible = keys < (torch.minimum(end, at + (right + 1)) if right >= 0 else end)
    if left >= 0:
        visible = visible & (keys >= at - left)
    if attn_mask is None:
        return visible
    mask = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., rows, :]
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -math.inf)


def _attend_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, gqa: bool
) -> torch.Tensor:
    seen = mask if mask.dtype == torch.bool else mask != -math.inf
    blind = ~seen.any(-1, keepdim=True)
    # a blind row sees everything and is zeroed afterwards: a softmax over nothing is NaN, and so is its gradient
    dtype = q.dtype
    if mask.dtype == torch.bool:
        safe = mask | blind
    else:  # torch's fused kernels want one type for all; it must hold what the mask holds
        wide = torch.promote_types(dtype, mask.dtype)
        q, k, v, safe = (x.to(wide) for x in (q, k, v, mask.masked_fill(blind, 0)))
    positive_q, positive = with_positive_scale(q, scale)
    with differentiable_forward(q, k, v, mask):
        out = torch_sdpa(positive_q, k, v, attn_mask=safe, scale=positive, enable_gqa=gqa)
    return out.masked_fill(blind, 0).to(dtype)


def _log_sum_exp(q: torch.Tensor, k: torch.Tensor, masks: _Masks, scale: float) -> torch.Tensor:
    """Natural-log log-sum-exp of the scores, FP32, [batch, heads_q, q_len]."""
    batch, heads_q, q_len, _ = q.shape
    heads_kv, kv_len = k.shape[1], k.shape[2]
    keys = k.float().transpose(-1, -2)
    parts = []
    for rows in chunks(q_len, 4 * batch * heads_q * kv_len):
        grouped = q[:, :, rows].float().reshape(batch, heads_kv, -1, q.shape[-1])
        scores = (grouped @ keys * scale).reshape(batch, heads_q, -1, kv_len)
        mask = _mask_rows(masks, rows, q_len, kv_len, q.device)
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        parts.append(scores.logsumexp(-1).float())  # a mask in FP64 makes FP64 scores
    return torch.cat(parts, 2)
