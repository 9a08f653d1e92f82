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
    q, k, v = _match_heads(q, k, v)
    bad_q, bad_k, bad_v = ~q.isfinite().all(-1), ~k.isfinite().all(-1), ~v.isfinite()
    weights, lse = _weigh(q, k, seen, scale, bias)
    is_spoiled = ((bad_q[..., None] | bad_k[..., None, :]) & seen).any(-1)
    sees_bad_value = seen.double() @ bad_v.double() > 0
    out = torch.einsum("...ij,...jd->...id", weights, _finite(v))
    out = out.masked_fill(is_spoiled[..., None] | sees_bad_value, math.nan)
    return out, lse.masked_fill(is_spoiled, math.nan)


def usual_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
) -> float:
    """Norm of the output if each value had a random sign: what rounding of weights and values is in proportion to.

    Of few numbers the output itself may be next to 0 where these cancel. Arguments as those of `attend`.
    """
    q, k, v = _match_heads(q, k, v)
    weights, _ = _weigh(q, k, seen, scale, bias)
    return torch.einsum("...ij,...jd->", weights.square(), _finite(v).square()).sqrt().item()


def _match_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group = q.shape[-3] // max(1, k.shape[-3])
    return q.double(), k.double().repeat_interleave(group, -3), v.double().repeat_interleave(group, -3)


def _weigh(
    q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, scale: float, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and lse; a row that sees no key has weights of 0."""
    scores = torch.einsum("...id,...jd->...ij", _finite(q), _finite(k)) * scale
    scores = (scores if bias is None else scores + bias.double()).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1) if k.shape[-2] else scores.new_full(scores.shape[:-1], -math.inf)
    return torch.where(lse[..., None] == -math.inf, 0, (scores - lse[..., None]).exp()), lse


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isfinite(), x, 0)
