"""Which tokens share a scale, and rounding to a number type with it."""

from __future__ import annotations

import math

import torch

from sagegen.ablation.recipe import QK_MAX, Granularity, QkType
from sagegen.errors import ArgumentError
from sagegen.layout import K_GROUPS
from sagegen.quantizing import group_peaks, round_e4m3

#: Rows of Q that a warp works on, and keys that it works on at a time (SageAttention2, section 3.2).
WARP_ROWS = 32
WARP_KEYS = 64


def query_groups(count: int, granularity: Granularity, block_q: int) -> torch.Tensor:
    """The scale group of each of `count` rows of Q, int64 [count].

    `tensor` is one group per head, `block` one per tile, `warp` one per 32 rows, `token` one per row; `thread` has the
    rows of a warp that are equal modulo 8, which one thread of the MMA accumulator owns.
    """
    rows = torch.arange(count)
    if granularity == "thread":
        return rows // WARP_ROWS * 8 + rows % 8
    return rows // {"tensor": max(count, 1), "block": block_q, "warp": WARP_ROWS, "token": 1}[granularity]


def key_groups(count: int, granularity: Granularity, block_k: int) -> torch.Tensor:
    """The scale group of each of `count` keys, int64 [count].

    As `query_groups`, but warps share a tile's keys, so that `warp` spans 64 keys, and `thread` has the columns
    {8n + 2i, 8n + 2i + 1} of 64.
    """
    keys = torch.arange(count)
    if granularity == "thread":
        return keys // WARP_KEYS * K_GROUPS + keys % 8 // 2
    return keys // {"tensor": max(count, 1), "block": block_k, "warp": WARP_KEYS, "token": 1}[granularity]


def round_groups(x: torch.Tensor, groups: torch.Tensor, kind: QkType) -> torch.Tensor:
    """x as its quantized numbers stand for it: rounded with the scale max|x| / largest number of its group.

    Args:
        x: [batch, heads, tokens, dim], floating point.
        groups: int64 [tokens].
        kind: `int8` and `int4` round to nearest even and clamp to ±127 and ±7; `exact` rounds nothing.

    Returns:
        x's shape and dtype; a group of zeros stays zeros.
    """
    if kind == "exact":
        return x
    groups = groups.to(x.device)
    scales = (group_peaks(x, groups) / QK_MAX[kind])[:, :, groups].unsqueeze(-1)
    scales = torch.where(scales > 0, scales, 1)
    if kind == "e4m3":
        return round_e4m3(x / scales).to(x.dtype) * scales
    return (x / scales).round().clamp(-QK_MAX[kind], QK_MAX[kind]) * scales


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x times the orthonormal Hadamard matrix of its last dimension, by log2(dim) steps of sums and differences.

    Raises:
        ArgumentError: the last dimension is no power of two.
    """
    dim = x.shape[-1]
    if dim < 1 or dim & (dim - 1):
        raise ArgumentError(f"a Hadamard rotation of {dim} channels does not exist here", "use a power of two")
    span = 1
    while span < dim:
        pairs = x.reshape(*x.shape[:-1], dim // (2 * span), 2, span)
        first, second = pairs.unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        span *= 2
    return x * (1 / math.sqrt(dim))
