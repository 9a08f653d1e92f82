"""Attention with a recipe's numerics, in PyTorch, on any device that torch has."""

from __future__ import annotations

import math

import torch

from sagegen.ablation.preparing import Prepared, prepare
from sagegen.ablation.recipe import Recipe
from sagegen.ablation.weighting import Values, prepare_values, weigh
from sagegen.measuring.inputs import Inputs

#: Bytes of scores that are alive at once.
_CHUNK_BYTES = 64 << 20


def emulate(
    inputs: Inputs,
    recipe: Recipe,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """What attention with the numerics of `recipe` gives; finite inputs only.

    Args:
        inputs: q [batch, heads_q, q_len, dim], k and v [batch, heads_kv, kv_len, dim], any floating dtype.
        is_causal: query i sees key j when j <= i + kv_len - q_len.
        scale: of the scores; None is 1/sqrt(dim).
        compute: float32 or float64: of means, scales, scores and softmax.

    Returns:
        q's shape, dtype `compute`. A row that sees no key is 0.

    Raises:
        ArgumentError: rotation of a head dim that is no power of two.
    """
    scale = inputs.q.shape[-1] ** -0.5 if scale is None else scale
    wide = inputs.map(lambda x: x.to(compute))
    prepared = prepare(wide.q, wide.k, recipe)
    values = prepare_values(wide.v, recipe)
    batch, heads_q, q_len, _ = wide.q.shape
    group = heads_q // wide.k.shape[1]
    out = torch.empty_like(wide.q)
    rows = max(1, _CHUNK_BYTES // (compute.itemsize * group * max(1, wide.k.shape[2])))
    for entry in range(batch):
        for head in range(heads_q // group):
            for start in range(0, q_len, rows):
                place = (entry, slice(head * group, (head + 1) * group), slice(start, start + rows))
                scores = _scores(prepared, place, head) * scale
                if is_causal:
                    _mask(scores, start, q_len)
                part = Values(*(x[entry, head] for x in (values.numbers, values.scale, values.mean)))
                out[place] = weigh(scores, part, recipe)
    return out


def _scores(prepared: Prepared, place: tuple[int, slice, slice], head: int) -> torch.Tensor:
    """Of some rows of a KV head's query heads, [group, rows, kv_len]."""
    scores = prepared.q[place] @ prepared.k[place[0], head].T
    means = prepared.q_mean[place]
    return scores + means @ prepared.k_exact[place[0], head].T if means.any() else scores


def _mask(scores: torch.Tensor, start: int, q_len: int) -> None:
    rows, kv_len = scores.shape[-2:]
    last_key = torch.arange(start, start + rows, device=scores.device) + (kv_len - q_len)
    scores.masked_fill_(torch.arange(kv_len, device=scores.device) > last_key[:, None], -math.inf)
