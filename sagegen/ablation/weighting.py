"""From scores to the output: the online softmax, P and V in their number types, and the accumulator of P·V."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sagegen.ablation.recipe import Recipe
from sagegen.quantizing import MMA_KEYS, add_fp8_products, add_fp16_products, round_e4m3


@dataclass(frozen=True, slots=True)
class Values:
    """V as the second product reads it: V is `scale * numbers + mean`.

    Attributes:
        numbers: [batch, heads, kv_len, dim], float32 or float64.
        scale, mean: [batch, heads, 1, dim].
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    mean: torch.Tensor

    @property
    def flushed_share(self) -> float:
        """The share of numbers that are zero."""
        return float((self.numbers == 0).double().mean())


def prepare_values(v: torch.Tensor, recipe: Recipe) -> Values:
    """V, smoothed and rounded per channel with scale max|v| / v_max; 1 for a channel of zeros (SageAttention2, 3.3).

    Args:
        v: [batch, heads, kv_len, dim], float32 or float64.
    """
    mean = v.mean(2, keepdim=True) if recipe.smooth_v else torch.zeros_like(v[:, :, :1])
    v = v - mean
    if not recipe.v_peak:
        return Values(round_weights(v, recipe), torch.ones_like(mean), mean)
    peaks = v.abs().amax(2, keepdim=True)
    scale = torch.where(peaks > 0, peaks / recipe.v_peak, 1)
    return Values(round_weights(v / scale, recipe), scale, mean)


def round_weights(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """x, scaled already, in the type of P and V; x's shape and dtype."""
    if recipe.pv == "exact":
        return x
    if recipe.pv == "fp16":
        return x.half().to(x.dtype)
    if recipe.pv == "e4m3":
        return round_e4m3(x).to(x.dtype)
    if recipe.pv == "e5m2":
        return x.clamp(-57344, 57344).to(torch.float8_e5m2).to(x.dtype)
    return x.round().clamp(-127, 127)


def weigh(scores: torch.Tensor, values: Values, recipe: Recipe) -> torch.Tensor:
    """softmax(scores) V as tiles of `block_k` keys compute it, each with the row's maximum so far.

    Args:
        scores: natural logs, -inf where masked, [..., rows, kv_len]; changed in place.
        values: of the same leading dimensions.

    Returns:
        [..., rows, dim]; 0 in rows that are masked altogether.
    """
    sees_key = scores.amax(-1, keepdim=True) > -math.inf
    peaks = _running_peaks(scores, recipe.block_k)
    last = peaks[..., -1:]
    tile_of = torch.arange(scores.shape[-1], device=scores.device) // recipe.block_k
    weights = scores.sub_(peaks[..., tile_of]).exp_()
    decay = (peaks - last).exp()
    total = (weights * decay[..., tile_of]).sum(-1, keepdim=True)
    p = round_weights(weights * recipe.p_peak, recipe)
    if recipe.adds_in_chains:
        out = _add_tiles(p, values.numbers, peaks, recipe)
    else:
        out = (p * decay[..., tile_of]) @ values.numbers
    out = out * values.scale / (total.masked_fill(total == 0, 1) * recipe.p_peak) + values.mean
    return torch.where(sees_key, out, 0)


def _running_peaks(scores: torch.Tensor, block_k: int) -> torch.Tensor:
    """Each row's maximum after every tile, [..., rows, tiles]; 0 until a key is seen."""
    tiles = [tile.amax(-1) for tile in torch.split(scores, block_k, -1)]
    peaks = torch.stack(tiles, -1).cummax(-1).values
    return peaks.masked_fill(peaks == -math.inf, 0)


def _add_tiles(p: torch.Tensor, v: torch.Tensor, peaks: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """P·V tile after tile in FP32, rescaled to the row's new maximum before each."""
    p, v = p.float(), v.float()
    out = p.new_zeros(*p.shape[:-1], v.shape[-1])
    for tile, start in enumerate(range(0, p.shape[-1], recipe.block_k)):
        if tile:
            out = out * (peaks[..., tile - 1 : tile] - peaks[..., tile : tile + 1]).exp().float()
        end = min(start + recipe.block_k, p.shape[-1])
        if not recipe.two_level:
            out = _add_chain(out, p[..., start:end], v[..., start:end, :], recipe)
            continue
        for first in range(start, end, recipe.accum_depth):
            keys = slice(first, min(first + recipe.accum_depth, end))
            out = out + _add_chain(torch.zeros_like(out), p[..., keys], v[..., keys, :], recipe)
    return out.to(peaks.dtype)


def _add_chain(total: torch.Tensor, p: torch.Tensor, v: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """total + p v by one matrix instruction after the other, of 32 keys each."""
    for start in range(0, p.shape[-1], MMA_KEYS):
        keys = slice(start, start + MMA_KEYS)
        if recipe.accumulator == "fp22":
            total = add_fp8_products(total, p[..., keys], v[..., keys, :])
        else:
            total = add_fp16_products(total, p[..., keys], v[..., keys, :])
    return total
