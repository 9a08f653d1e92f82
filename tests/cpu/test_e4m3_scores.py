"""FP8 (e4m3) Q·K^T: rounding, the tensor core's sums, and what it costs beside INT8."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sagegen import quantizing
from sagegen.gpu import find_gpu
from sagegen.mma_rules import default_mma_config
from sagegen.operands import Operands, make_operands, multiply_qk
from sagegen.problem import Problem
from sagegen.quantizing import Accumulator
from sagegen.reference import attention, quantized_attention
from sagegen.rules import SEARCH_RULES, Target, broken_rules
from sagegen.space import Config, parse_config
from sagegen.wgmma_rules import default_wgmma_config

PROBLEM = Problem(128, "bf16", is_causal=False)
L20, H200 = (Target(find_gpu(name), PROBLEM) for name in ("l20", "h200"))
MMA = replace(default_mma_config(L20), qk="e4m3")
WGMMA = replace(default_wgmma_config(), qk="e4m3")
FAMILIES = pytest.mark.parametrize("config", [MMA, WGMMA], ids=["mma", "wgmma"])


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# --- rounding


@FAMILIES
def test_values_are_the_nearest_e4m3_numbers_with_the_largest_at_448(config: Config) -> None:
    # numbers are 2 apart from 16, 4 from 32 and 32 from 256; the least are 2^-9 apart; ties go to the even mantissa
    x = torch.tensor([448.0, 17, 19, -19, 33, 34, 271, 273, 2**-10, 3 * 2**-10, -0.9 * 2**-10])
    rounded, scale = quantizing.quantize_queries(x.reshape(1, 1, 1, -1), config)
    assert scale.item() == 1
    assert rounded.flatten().tolist() == [448, 16, 20, -20, 32, 32, 256, 288, 0, 2**-8, 0]


@FAMILIES
def test_a_scale_is_the_largest_over_448_and_one_of_zeros(config: Config) -> None:
    x = torch.zeros(1, 1, 2, 4)
    x[0, 0, 1, 2] = -7
    rounded, scales = quantizing.quantize_queries(x, replace(config, granularity="thread") if config is MMA else config)
    assert scales.flatten().tolist() == [1, 7 / 448]
    assert rounded[0, 0, 1].tolist() == [0, 0, -448, 0]


def test_rounding_loses_a_step_over_the_root_of_twelve() -> None:
    x = normal(1, 1, 4096, 128, seed=0).float()
    e4m3, e4m3_scale = quantizing.quantize_queries(x, WGMMA)
    int8, int8_scale = quantizing.quantize_queries(x, replace(WGMMA, qk="s8"))
    of_e4m3, of_int8 = ((y * s - x).square().mean().sqrt().item() for y, s in ((e4m3, e4m3_scale), (int8, int8_scale)))
    # steps of 3 bits of a mantissa, at least 2^-9; a row's largest, which has the largest step, is exact
    step = e4m3_scale * (x / e4m3_scale).abs().log2().floor().clamp_min(-6).exp2() / 8
    step[x.abs() == x.abs().amax(-1, keepdim=True)] = 0
    assert of_e4m3 == pytest.approx(step.square().mean().sqrt().item() / math.sqrt(12), rel=0.02)
    assert of_int8 == pytest.approx(int8_scale.square().mean().sqrt().item() / math.sqrt(12), rel=0.02)
    assert of_e4m3 > 2 * of_int8


# --- sums


def one_query(config: Config, channels: dict[int, tuple[float, float]]) -> Operands:
    """A query and two keys, one the other's negative, so that their mean is 0: by channel, query and key."""
    q, k = torch.zeros(1, 1, 1, 128), torch.zeros(1, 1, 2, 128)
    for channel, (query, key) in channels.items():
        q[..., channel], k[..., 0, channel], k[..., 1, channel] = query, key, -key
    return make_operands(q.bfloat16(), k.bfloat16(), k.bfloat16(), PROBLEM, config, 1.0, want_lse=False)


@FAMILIES
@pytest.mark.parametrize("channel", [1, 40], ids=["same instruction", "next instruction"])
@pytest.mark.parametrize(
    ("accumulator", "total"),
    # 448^2 = 200704 has exponent 17, so what is left of 13 bits is a multiple of 16
    [("fp22", 200704), ("fp32", 200712), ("fp16", 200704), ("fp16_halves", 200712)],
)
def test_scores_keep_13_bits_of_a_mantissa(config: Config, channel: int, accumulator: Accumulator, total: int) -> None:
    operands = one_query(config, {0: (448, 448), channel: (8, 1)})
    scores = multiply_qk(operands, slice(0, 2), config, accumulator)
    assert scores.flatten().tolist() == [total, -total]


@FAMILIES
def test_integer_scores_are_exact_whatever_the_accumulator(config: Config) -> None:
    int8 = replace(config, qk="s8")
    operands = one_query(int8, {0: (127, 127), 40: (1, 1)})
    assert multiply_qk(operands, slice(0, 2), int8, "fp22").flatten().tolist() == [16130, -16130]


@pytest.mark.parametrize("family", ["mma", "wgmma"])
def test_rows_whose_every_score_is_below_all_int8_scores(family: str) -> None:
    """128 products of -448^2 are -25690112: a hidden key must count as less, or nothing is left of the row."""
    config = MMA if family == "mma" else WGMMA
    q, v = torch.full((1, 1, 64, 128), 8.0).bfloat16(), normal(1, 1, 64, 128, seed=1)
    k = torch.full((1, 1, 64, 128), -8.0).bfloat16()
    k[:, :, 32:] = 8
    out, _ = quantized_attention(q, k, v, replace(PROBLEM, is_causal=True), config, accumulator="fp22")
    wanted = attention(q, k, v, is_causal=True, out_dtype=torch.float64)
    error = (out - wanted)[:, :, :32].norm(dim=-1) / wanted[:, :, :32].norm(dim=-1)
    assert (error < 0.07).all()  # of rounding V to E4M3: at most 2^-4


# --- what it costs


@pytest.mark.parametrize("head_dim", [64, 128])
def test_e4m3_is_coarser_than_int8_and_finer_than_int4(head_dim: int) -> None:
    """With 16-bit P·V only Q·K^T is rounded: by 3 bits of a mantissa, by 7 bits of the range, or by 3 of it."""
    q, k, v = (normal(1, 2, 512, head_dim, seed=seed) for seed in range(3))
    exact = attention(q, k, v, out_dtype=torch.float64)
    config = replace(MMA, pv="bf16f32", accum_depth=0)

    def error(problem: Problem, qk: str) -> float:
        out, _ = quantized_attention(q, k, v, problem, replace(config, qk=qk), accumulator="fp22")
        return ((out - exact).norm() / exact.norm()).item()

    problem = replace(PROBLEM, head_dim=head_dim)
    e4m3, int8, int4 = error(problem, "e4m3"), error(problem, "s8"), error(replace(problem, precision="int4"), "s8")
    assert 2 * int8 < e4m3 < int4 / 3


@FAMILIES
def test_smoothing_and_rotation_take_offsets_away(config: Config) -> None:
    q, k, v = (normal(1, 2, 384, 128, seed=seed) for seed in range(3))
    offset = 4 * normal(1, 1, 1, 128, seed=3)
    q, k = q + offset, k + offset
    exact = attention(q, k, v, out_dtype=torch.float64)

    def error(config: Config) -> float:
        return (
            (quantized_attention(q, k, v, PROBLEM, config, accumulator="fp22")[0] - exact).norm() / exact.norm()
        ).item()

    smooth = replace(config, mean_span=64)
    assert error(smooth) < error(config) / 2
    assert error(replace(smooth, rotate="yes")) < error(config) / 2


# --- who may use it


@pytest.mark.parametrize(("config", "target"), [(MMA, L20), (WGMMA, H200)], ids=["mma", "wgmma"])
def test_e4m3_is_valid_by_name_and_tuning_leaves_it_out(config: Config, target: Target) -> None:
    assert parse_config(config.name) == config
    assert config.name.endswith("_qke4m3")
    assert not broken_rules(config, target)
    refusing = [rule.name for rule in SEARCH_RULES[config.family] if rule.margin(config, target) > 0]
    assert refusing == ["e4m3_scores"]
