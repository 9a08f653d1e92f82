"""Sequences of many lengths by torch SDPA, without asking the device how long they are."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sagegen.runtime.fallback import Lengths, attend, chunks
from sagegen.runtime.varlen_arguments import LAYOUT, Sequences, read_varlen_shape

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class _Rows(NamedTuple):
    """Rows of some sequences, each padded to one length.

    Attributes:
        lengths: int64 [sequences].
        places: int64 [sequences, longest]; rows of the packed tensor, which padding has one of, too.
        exist: bool [sequences, longest]; False is padding.
    """

    lengths: torch.Tensor
    places: torch.Tensor
    exist: torch.Tensor


def attend_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: Sequences,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
) -> Result:
    """Attention within each sequence by torch SDPA; differentiable. Arguments are `attention_varlen`'s, checked.

    Sequences are padded to the longest that the caller admits, as many at a time as keeps memory bounded. Whatever
    cu_seqlens hold, only rows of the tensors are read and written; rows of no sequence give 0 and lse -inf.

    Returns:
        The output, q's shape and dtype; with `return_lse` also the natural-log log-sum-exp, float32,
        [heads_q, total_q].
    """
    shape = read_varlen_shape(q, k, sequences)
    total = q.shape[0]
    # the last row is none: padding is written there
    out = q.new_zeros(total + 1, *q.shape[1:])
    lse = q.new_full((total + 1, shape.heads_q), -math.inf, dtype=torch.float32)
    if 0 in (shape.batch, shape.heads_q, shape.q_len, shape.kv_len):
        for x in (q, k, v):
            out = out + x[:0].sum()  # keeps the output in the graph, with gradient 0
        return _take_off(out, lse if return_lse else None, total)
    padded = 2 * (shape.heads_q * shape.q_len + shape.heads_kv * shape.kv_len) * q.shape[2] * q.element_size()
    for part in chunks(shape.batch, padded):
        rows = _find_rows(sequences.cu_seqlens_q, part, shape.q_len, total)
        keys = _find_rows(sequences.cu_seqlens_k, part, shape.kv_len, k.shape[0])
        result = attend(
            _pad(q, rows),
            _pad(k, keys),
            _pad(v, keys),
            layout=LAYOUT,
            is_causal=is_causal,
            scale=scale,
            window=window,
            lengths=Lengths(rows.lengths, keys.lengths),
            return_lse=return_lse,
        )
        target = torch.where(rows.exist, rows.places, total).flatten()
        if isinstance(result, tuple):
            lse.index_copy_(0, target, result[1].transpose(1, 2).flatten(0, 1))
            result = result[0]
        out.index_copy_(0, target, result.flatten(0, 1))
    return _take_off(out, lse if return_lse else None, total)


def _find_rows(cu_seqlens: torch.Tensor, part: slice, longest: int, total: int) -> _Rows:
    """The rows of the sequences in `part`, `longest` of each and none outside of the `total`."""
    starts = cu_seqlens.long()
    lengths = starts[1:][part] - starts[:-1][part]
    within = torch.arange(longest, device=cu_seqlens.device)
    places = starts[:-1][part, None] + within
    exist = (within < lengths[:, None]) & (places >= 0) & (places < total)
    return _Rows(lengths, places.clamp(0, total - 1), exist)


def _pad(x: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """`x` as [sequences, longest, heads, dim], with zeros in padding: what the rows there hold must leave no trace."""
    return x[rows.places].masked_fill(~rows.exist[:, :, None, None], 0)


def _take_off(out: torch.Tensor, lse: torch.Tensor | None, total: int) -> Result:
    return out[:total] if lse is None else (out[:total], lse[:total].transpose(0, 1).contiguous())
