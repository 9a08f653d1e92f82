"""Attention in FP64, written out once more for the tests: what every kernel and fallback is held to."""

from __future__ import annotations

import math

import torch


def seen_keys(
    q_len: int,
    kv_len: int,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Bool [q_len, kv_len]: query i stands at key i + kv_len - q_len."""
    at = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
    key = torch.arange(kv_len, device=device)[None]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if is_causal:
        seen &= key <= at
    left, right = window or (-1, -1)
    if left != -1:
        seen &= key >= at - left
    if right != -1:
        seen &= key <= at + right
    return seen


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse in FP64. A row that sees no key is 0 and -inf; what is not finite is NaN wherever it is seen.

    Args:
        q, k, v: [..., heads, tokens, dim], the heads of k and v dividing those of q.
        seen: bool, broadcastable to [..., heads, q_len, kv_len].
        bias: added to the scores.
    """
    group = q.shape[-3] // max(1, k.shape[-3])
    q, k, v = q.double(), k.double().repeat_interleave(group, -3), v.double().repeat_interleave(group, -3)
    bad_q, bad_k, bad_v = ~q.isfinite().all(-1), ~k.isfinite().all(-1), ~v.isfinite()
    q, k, v = (torch.where(x.isfinite(), x, 0) for x in (q, k, v))
    scores = torch.einsum("...id,...jd->...ij", q, k) * scale
    scores = (scores if bias is None else scores + bias.double()).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1) if k.shape[-2] else scores.new_full(scores.shape[:-1], -math.inf)
    weights = torch.where(lse[..., None] == -math.inf, 0, (scores - lse[..., None]).exp())
    is_spoiled = ((bad_q[..., None] | bad_k[..., None, :]) & seen).any(-1)
    sees_bad_value = seen.double() @ bad_v.double() > 0
    out = torch.einsum("...ij,...jd->...id", weights, v).masked_fill(is_spoiled[..., None] | sees_bad_value, math.nan)
    return out, lse.masked_fill(is_spoiled, math.nan)
