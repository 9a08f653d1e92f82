"""A call in the words of torch's scaled_dot_product_attention, as one of `attention`: views, and why there are none."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from sagegen.runtime.arguments import is_key_mask


class Views(NamedTuple):
    """What `attention` takes, [batch, heads, tokens, dim] with one dim of batch, and the shape of torch's output."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    shape: Sequence[int]


def torch_reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> str | None:
    """Why only torch's own function gives what its signature promises; None when `attention` may too.

    All that torch takes and `attention` does not must be here: in compiled code nothing is found out later.
    """
    if any(x.is_nested or x.layout is not torch.strided for x in (query, key, value)):
        return "inputs are not plain strided tensors"
    if not query.dtype == key.dtype == value.dtype:  # `attention` casts some, torch refuses
        return "inputs are of different types"
    if min(query.dim(), key.dim(), value.dim()) < 2:
        return "an input has less than 2 dimensions"
    if dropout_p:
        return "dropout has no kernel"
    if attn_mask is not None and not _is_key_mask(query, key, value, attn_mask):
        return "attn_mask has no kernel but of bools that hide keys from all rows and heads of four-dimensional inputs"
    if is_causal and query.shape[-2] != key.shape[-2]:
        return "is_causal with unequal lengths means top-left alignment here"
    if query.shape[-1] != value.shape[-1] or query.shape[-1] == 0:
        return "the width of the values is not that of the queries, or is 0"
    if scale is not None and not _is_finite(scale):
        return f"scale={scale} is no finite number"
    return None


def _is_key_mask(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether `attention` takes the inputs as they are, and a kernel the mask."""
    is_plain = query.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    return is_plain and 2 <= mask.dim() <= 4 and is_key_mask(mask)


def view_as_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> Views | str:
    """Views of the inputs for `attention`, or why there are none.

    As torch has it, the dims before the last two broadcast; with `enable_gqa` the third from the end counts heads, and
    queries have a multiple of those of keys and values. Without it one head of keys and values serves all queries,
    which for `attention` is GQA too: it is quantized once.

    Args:
        query: [..., heads_q, q_len, head_dim], of two dims or more.
        key, value: [..., heads_kv, kv_len, head_dim], of two dims or more.
    """
    inputs = (query, key, value)
    if query.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]:
        return Views(*inputs, query.shape)
    if enable_gqa and min(x.dim() for x in inputs) < 3:
        return "enable_gqa needs a dim of heads"
    rank = max(x.dim() for x in inputs)
    query, key, value = (x[(None,) * (max(rank, 4) - x.dim())] for x in inputs)
    heads = _broadcast_heads(query.shape[-3], key.shape[-3], value.shape[-3], enable_gqa)
    if heads is None:
        return "head counts differ" if enable_gqa else "head counts differ without enable_gqa"
    batch = _broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if batch is None:
        return "batch sizes do not broadcast"
    heads_q, heads_kv = heads
    pairs = ((query, heads_q), (key, heads_kv), (value, heads_kv))
    query, key, value = (x.expand(*batch, count, -1, -1) for x, count in pairs)
    if not (_merges(query) and _merges(key) and _merges(value)):
        return "the batch dims do not merge into one without a copy"
    shape = (*batch, *query.shape[-3:])[-rank:]
    return Views(_merge(query), _merge(key), _merge(value), shape)


def _broadcast_heads(query: int, key: int, value: int, enable_gqa: bool) -> tuple[int, int] | None:
    """Heads of the queries, and of keys and values, for `attention`; None when torch refuses, or does more."""
    shared = _broadcast((key,), (value,))
    if shared is None:
        return None
    (heads_kv,) = shared
    if heads_kv in (1, query):  # one head of keys and values serves any number of queries
        return query, heads_kv
    if enable_gqa:
        return (query, heads_kv) if heads_kv and query % heads_kv == 0 else None
    return (heads_kv, heads_kv) if query == 1 else None


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that all of one rank broadcast to; None when they do not."""
    result = []
    for sizes in zip(*shapes, strict=True):
        size = 1
        for own in sizes:
            if size == 1:
                size = own
            elif own not in (1, size):
                return None
        result.append(size)
    return tuple(result)


def _merges(x: torch.Tensor) -> bool:
    """Whether a view has the dims before the last three as one."""
    outer = [(size, stride) for size, stride in zip(x.shape[:-3], x.stride()[:-3], strict=True) if size != 1]
    pairs = pairwise(outer)
    return x.numel() == 0 or all(stride == size * inner for (_, stride), (size, inner) in pairs)


def _merge(x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 4:
        return x
    size = math.prod(x.shape[:-3])
    return x.view(size, *x.shape[-3:]) if x.numel() else x.reshape(size, *x.shape[-3:])


def _is_finite(scale: Any) -> bool:
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        return False
    return bool(scale - scale == 0)  # math.isfinite breaks the graph where a compiled function's scale varies
