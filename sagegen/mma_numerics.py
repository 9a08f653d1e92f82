"""The `mma` family's softmax and P·V, step by step in FP32."""

from __future__ import annotations

import math

import torch

from sagegen.operands import Operands, TileSums, multiply_qk
from sagegen.quantizing import MAGIC, Accumulator, add_products, round_e4m3, round_up_fp32
from sagegen.space import MmaConfig

#: From here on a step of FP32 is so large that a weight at a row's maximum could round to more than the unit.
_COARSE = 2.0**20
#: What rounding to FP32 is off by at most, of a number.
_HALF_STEP = 2.0**-24


def sum_mma_tiles(operands: Operands, config: MmaConfig, accumulator: Accumulator) -> TileSums:
    unit = float(config.p_max) if config.quantizes_v else 1.0  # weights are up to that
    log2_unit = float(torch.tensor(math.log2(unit)))  # an FP32 number, as in kernels
    out = torch.zeros_like(operands.q8)
    total = torch.zeros_like(operands.q_scale)
    peak = torch.full_like(operands.q_scale, -math.inf)
    for start in range(0, operands.kv_len, config.block_k):
        keys = slice(start, min(start + config.block_k, operands.kv_len))
        factor = operands.q_scale * operands.k_scale[:, :, keys].transpose(-1, -2)
        products = multiply_qk(operands, keys, config, accumulator)
        hidden = torch.arange(keys.start, keys.stop, device=out.device) > operands.last_key
        if operands.delta is None:
            scores = (products.double() * factor).float()
        else:  # one FMA, rounded once
            scores = (products.double() * factor + operands.delta.of(keys)).float()
        scores = scores.masked_fill_(hidden, -math.inf)
        grown = torch.maximum(peak, scores.amax(-1, keepdim=True))
        anchor = grown.masked_fill(grown == -math.inf, 0)
        floor = _floor_of(anchor, log2_unit, config)
        weights = (scores - floor).exp2() if operands.delta else _weights(products, factor, floor, config)
        weights = weights.masked_fill_(hidden, 0)
        decay = (peak - anchor).exp2()
        peak, total = grown, total * decay + weights.sum(-1, keepdim=True)
        out = _accumulate(out * decay, weights, operands.values[:, :, keys], config, accumulator)
    return TileSums(out, total, total, peak, unit)


def _floor_of(anchor: torch.Tensor, log2_unit: float, config: MmaConfig) -> torch.Tensor:
    """What is subtracted from a row's scores, FP32: rounded up where a weight could else round to above the unit."""
    exact = anchor.double() - log2_unit
    if not config.sums_in_fp16:
        return exact.float()
    bound = round_up_fp32(anchor.double() + anchor.double().abs() * _HALF_STEP)
    return torch.where(anchor.abs() < _COARSE, exact.float(), round_up_fp32(bound - log2_unit).float())


def _weights(products: torch.Tensor, factor: torch.Tensor, floor: torch.Tensor, config: MmaConfig) -> torch.Tensor:
    """2^(products * factor - floor), the exponent rounded where kernels round it: once, since it is one FMA.

    `magic` has its bias in the scores, so bias times factor is subtracted too, as one FP32 number with the floor. That
    number is rounded up, which makes the weights of its keys smaller by up to 1.5 integer steps of a score.
    """
    shift = floor.double()
    if config.conversion == "magic":
        bias = MAGIC * factor.double()
        shift = round_up_fp32(bias + shift) - bias
    return (products.double() * factor - shift).float().exp2()


def _accumulate(
    out: torch.Tensor, weights: torch.Tensor, values: torch.Tensor, config: MmaConfig, accumulator: Accumulator
) -> torch.Tensor:
    """out + P V of one tile, with P rounded as the config's P·V product reads it."""
    if not config.quantizes_v:
        narrow = torch.float16 if config.pv == "f16f32" else torch.bfloat16
        return out + weights.to(narrow).float() @ values
    p = round_e4m3(weights)
    if config.accum_depth == 0:
        return add_products(out, p, values, accumulator)
    for start in range(0, weights.shape[-1], config.accum_depth):
        keys = slice(start, start + config.accum_depth)
        out = out + add_products(torch.zeros_like(out), p[..., keys], values[:, :, keys], accumulator)
    return out
