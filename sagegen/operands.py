"""What the softmax and P·V of a quantized kernel work with, and what they leave: the same for every family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sagegen.problem import Problem
from sagegen.quantizing import INT8_MAX, Accumulator, add_products, quantize_keys, quantize_queries, quantize_values
from sagegen.smoothing import DeltaS, balance_factors, mean_products, rotate, smooth_queries, token_mean
from sagegen.space import Config

LOG2_E = math.log2(math.e)
#: Steps of a score that the packed exponent must resolve: 256 units of an integer score, in eighths of a power of two.
STEP_UNITS = 2048.0
MIN_STEP = 0.125
#: By the FP16 accumulator of a tensor core, its FP32 one: native FP8 units, and FP16 units that stand in for them.
_FP32_ACCUMULATORS: Mapping[Accumulator, Accumulator] = {"fp16": "fp22", "fp16_halves": "fp32"}


@dataclass(frozen=True, slots=True)
class Operands:
    """Quantized Q, K and V of a call, float32. `rows` are those of all query heads that share a KV head, head by head.

    Attributes:
        q8, k8: whole numbers, of INT4 as of INT8, or E4M3, [batch, heads_kv, rows, dim] and [.., kv_len, dim].
        q_scale: of scores in log2 units, [batch, heads_kv, rows, 1].
        k_scale: [batch, heads_kv, kv_len, 1].
        k_peak: largest |K - mean|, [batch, heads_kv, 1, 1].
        values: [batch, heads_kv, kv_len, dim]; V is v_scale * values + v_mean, both [batch, heads_kv, 1, dim].
        row: index in its own head, [rows, 1].
        last_key: that a row sees, [rows, 1].
        delta: what the means of Q's spans add to the scores; None where Q is not smoothed.
        lse_bias: what K's mean adds to the lse, [batch, heads_kv, rows, 1].
        q_len: rows of a head.
        is_causal: whether `last_key` grows with the row.
        want_lse: whether the log-sum-exp is asked for, which some kernels take another exponent for.
    """

    q8: torch.Tensor
    q_scale: torch.Tensor
    k8: torch.Tensor
    k_scale: torch.Tensor
    k_peak: torch.Tensor
    values: torch.Tensor
    v_scale: torch.Tensor
    v_mean: torch.Tensor
    row: torch.Tensor
    last_key: torch.Tensor
    delta: DeltaS | None
    lse_bias: torch.Tensor
    q_len: int
    is_causal: bool
    want_lse: bool

    @property
    def kv_len(self) -> int:
        return self.k8.shape[2]


@dataclass(frozen=True, slots=True)
class TileSums:
    """What the loop over the key tiles leaves.

    Attributes:
        out: sum of P times `values`, [batch, heads_kv, rows, dim].
        total: sum of P as it divides `out`, [batch, heads_kv, rows, 1].
        exact_total: sum of P before it is rounded, likewise; says nothing unless the lse is wanted.
        peak: maximum score in log2 units, where P is `unit`, [batch, heads_kv, rows, 1].
    """

    out: torch.Tensor
    total: torch.Tensor
    exact_total: torch.Tensor
    peak: torch.Tensor
    unit: float


def make_operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: Config,
    scale: float,
    *,
    want_lse: bool,
) -> Operands:
    """Quantize a call's tensors, [batch, heads, tokens, dim], as `config` does."""
    batch, heads_kv, kv_len, head_dim = k.shape
    group = q.shape[1] // heads_kv
    rows = (batch, heads_kv, group * q.shape[2])
    mean = token_mean(k, config)
    centred = k.float() - mean
    k_peak = centred.abs().amax((2, 3), keepdim=True)
    least_q, least_k = _least_scales(k_peak, scale) if config.bounds_steps else (None, None)
    least_q = None if least_q is None else least_q.repeat_interleave(group, 1)
    gamma_q, gamma_k, delta = q.float(), centred, None
    if config.smooths_q:
        smoothed = smooth_queries(q, config)
        gamma_q, delta = smoothed.gamma, _make_delta(smoothed.means, q.shape[2], k, mean, config, scale, problem)
    if config.balances:
        factors = balance_factors(gamma_q, k, mean, config)
        gamma_q, gamma_k = gamma_q * factors.repeat_interleave(group, 1), gamma_k * (1 / factors)
    if config.rotates:
        gamma_q, gamma_k = rotate(gamma_q), rotate(gamma_k)
    q8, q_scale = quantize_queries(gamma_q, config, problem.precision, least_q)
    k8, k_scale = quantize_keys(gamma_k, config, problem.precision, least_k)
    values, v_scale, v_mean = quantize_values(v, config)
    row = torch.arange(q.shape[2], device=q.device).repeat(group)[:, None]
    return Operands(
        # the scale's sign goes into Q, its size into Q's scales, in the order of the kernels' roundings
        q8=q8.reshape(*rows, head_dim) * math.copysign(1, scale),
        q_scale=q_scale.reshape(*rows, 1) * abs(scale) * LOG2_E,
        k8=k8,
        k_scale=k_scale,
        k_peak=k_peak,
        values=values,
        v_scale=v_scale,
        v_mean=v_mean,
        row=row,
        last_key=row + (kv_len - q.shape[2]) if problem.is_causal else torch.full_like(row, kv_len - 1),
        delta=delta,
        lse_bias=q.float().reshape(*rows, head_dim) @ mean.transpose(-1, -2) * scale,
        q_len=q.shape[2],
        is_causal=problem.is_causal,
        want_lse=want_lse,
    )


def multiply_qk(operands: Operands, keys: slice, config: Config, accumulator: Accumulator) -> torch.Tensor:
    """Q K^T of some keys as the tensor core leaves it, float32 [batch, heads_kv, rows, keys]: scores without scales.

    Args:
        accumulator: of the config's FP8 P·V. Scores have an FP32 one, also where those sums are in FP16.
    """
    k8 = operands.k8[:, :, keys].transpose(-1, -2)
    if not config.has_float_scores:
        # products of INT8 over 256 channels stay below 2^22, so FP32 adds them exactly
        return operands.q8 @ k8
    zeros = operands.q8.new_zeros(*operands.q8.shape[:-1], k8.shape[-1])
    return add_products(zeros, operands.q8, k8, _FP32_ACCUMULATORS.get(accumulator, accumulator))


def _make_delta(
    means: torch.Tensor,
    q_len: int,
    k: torch.Tensor,
    k_mean: torch.Tensor,
    config: Config,
    scale: float,
    problem: Problem,
) -> DeltaS:
    """Delta S of a call. `means`: of Q's spans, [batch, heads_q, spans, dim]."""
    batch, heads_q, spans, head_dim = means.shape
    group = heads_q // k.shape[1]
    grouped = means.reshape(batch, k.shape[1], group * spans, head_dim)
    own = torch.arange(q_len, device=means.device) // config.mean_span
    seen = torch.full((spans,), k.shape[2], device=means.device)
    if problem.is_causal:
        tile = torch.arange(spans, device=means.device) * config.mean_span // config.block_q
        last_key = (tile + 1) * config.block_q - 1 + k.shape[2] - q_len
        seen = (last_key // config.block_k + 1) * config.block_k
    return DeltaS(
        means=grouped,
        span=torch.cat([own + head * spans for head in range(group)]),
        keys=k.float(),
        centre=mean_products(grouped, k_mean),
        factor=torch.tensor(scale, dtype=torch.float32, device=k.device) * LOG2_E,
        is_half=config.delta == "f16",
        seen=seen.repeat(group)[:, None],
    )


def _least_scales(k_peak: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower limits of the scales of Q and K, so that no step of the packed exponent is below MIN_STEP."""
    least_k = 0.5 / INT8_MAX * k_peak
    step = STEP_UNITS * abs(scale) * LOG2_E * least_k
    return torch.where(step > 0, 1.001 * MIN_STEP / step, 0), least_k
