"""How far an output is from exact attention, by the papers' figures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Deviation:
    """Of one layer's output o from the truth r; NaN where o is not finite (SageAttention2, section 4.1).

    Attributes:
        cosine: sum(o r) / sqrt(sum(o^2) sum(r^2)) over all heads.
        worst_head: the least cosine of a head.
        relative_l1: sum|o - r| / sum|r|.
        rmse: sqrt(mean((o - r)^2)), in V's units.
    """

    cosine: float
    worst_head: float
    relative_l1: float
    rmse: float


def find_deviation(out: torch.Tensor, truth: torch.Tensor) -> Deviation:
    """Compare two outputs [batch, heads, rows, dim] in FP64."""
    o, r = out.double(), truth.double()
    if not o.isfinite().all():
        return Deviation(math.nan, math.nan, math.nan, math.nan)
    error = o - r
    heads = _cosine(o.flatten(0, 1).flatten(1), r.flatten(0, 1).flatten(1))
    return Deviation(
        float(_cosine(o.flatten(), r.flatten())),
        float(heads.min()),
        float(error.abs().sum() / r.abs().sum()),
        float(error.square().mean().sqrt()),
    )


def _cosine(o: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return (o * r).sum(-1) / (o.square().sum(-1) * r.square().sum(-1)).sqrt()
