"""From Q and K to what the first product multiplies: smoothing, balance, rotation, rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sagegen.ablation.grouping import key_groups, query_groups, rotate, round_groups
from sagegen.ablation.recipe import Balance, Recipe


@dataclass(frozen=True, slots=True)
class Prepared:
    """Scores before the softmax scale are `q k^T + q_mean k_exact^T`, up to a constant per row.

    Attributes:
        q: as its numbers stand for it, [batch, heads_q, q_len, dim].
        k: likewise, [batch, heads_kv, kv_len, dim].
        q_mean: what smoothing took from each row, q's shape.
        k_exact: gamma(K): smoothed, but neither balanced, rotated nor rounded; k's shape.
    """

    q: torch.Tensor
    k: torch.Tensor
    q_mean: torch.Tensor
    k_exact: torch.Tensor


def prepare(q: torch.Tensor, k: torch.Tensor, recipe: Recipe) -> Prepared:
    """Smooth, balance, rotate and round Q and K, in their own dtype (SageAttention2, sections 3.1 and 3.2).

    Args:
        q: [batch, heads_q, q_len, dim], float32 or float64.
        k: [batch, heads_kv, kv_len, dim]; heads_kv divides heads_q.

    Raises:
        ArgumentError: rotation of a head dim that is no power of two.
    """
    q_mean = block_means(q, recipe.block_q) if recipe.smooth_q else torch.zeros_like(q)
    k_exact = k - k.mean(2, keepdim=True) if recipe.smooth_k else k
    smooth_q, smooth_k = q - q_mean, k_exact
    if recipe.balance != "none":
        scales = balance_scales(smooth_q, smooth_k, recipe.balance)
        smooth_k = smooth_k * scales
        smooth_q = smooth_q / scales.repeat_interleave(q.shape[1] // k.shape[1], 1)
    if recipe.rotate:
        smooth_q, smooth_k = rotate(smooth_q), rotate(smooth_k)
    return Prepared(
        round_groups(smooth_q, query_groups(q.shape[2], recipe.granularity, recipe.block_q), recipe.qk),
        round_groups(smooth_k, key_groups(k.shape[2], recipe.granularity, recipe.block_k), recipe.qk),
        q_mean,
        k_exact,
    )


def block_means(q: torch.Tensor, block_q: int) -> torch.Tensor:
    """Each row's mean over the rows of its block, q's shape; the last block may be shorter."""
    blocks = torch.split(q, block_q, dim=2)
    return torch.cat([block.mean(2, keepdim=True).expand_as(block) for block in blocks], 2)


def balance_scales(q: torch.Tensor, k: torch.Tensor, balance: Balance) -> torch.Tensor:
    """What K's channels are multiplied by and Q's divided by: (size of Q / size of K)^0.5, 1 where either is 0.

    Args:
        q: [batch, heads_q, q_len, dim].
        k: [batch, heads_kv, kv_len, dim].
        balance: the size of a channel: `rms`, or `max` of magnitudes, over all tokens and a KV head's query heads.

    Returns:
        [batch, heads_kv, 1, dim]: one per KV head, since its query heads share the quantized K.
    """
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    sizes = [x.abs().amax(2) if balance == "max" else x.square().mean(2).sqrt() for x in (grouped, k)]
    ratio = (sizes[0] / sizes[1]).sqrt()
    usable = (sizes[0] > 0) & (sizes[1] > 0)
    return torch.where(usable, ratio, 1).unsqueeze(2)
