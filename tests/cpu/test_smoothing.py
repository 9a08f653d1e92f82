"""Smoothing Q and rotating: what they must not change, and what they are for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sagegen.gpu import find_gpu
from sagegen.measuring.inputs import load_captured
from sagegen.operands import LOG2_E, make_operands
from sagegen.problem import Problem
from sagegen.reference import attention, quantized_attention
from sagegen.rules import Target, default_config
from sagegen.smoothing import rotate, span_means, token_mean
from sagegen.space import Config

CAPTURED = Path(__file__).parents[1] / "data" / "smollm2_qkv.safetensors"


def int4_default(gpu: str, head_dim: int = 64) -> Config:
    return default_config(Target(find_gpu(gpu), Problem(head_dim, "bf16", False, "int4")))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- means


@pytest.mark.parametrize(("rows", "span"), [(1, 64), (64, 64), (200, 64), (129, 128), (400, 192)])
def test_span_means_are_those_of_fp64_rounded_to_the_queries_type(rows: int, span: int) -> None:
    q = (draw(2, 3, rows, 64) + 5 * draw(2, 3, 1, 64, seed=1)).bfloat16()
    means = span_means(q, span)
    assert means.shape == (2, 3, math.ceil(rows / span), 64)
    for index in range(means.shape[2]):
        exact = q[:, :, index * span : (index + 1) * span].double().mean(2)
        # FP32's sum may fall to the other side of a tie
        assert ((means[:, :, index] - exact).abs() <= exact.abs() * (2**-8 + 1e-5) + 1e-7).all()
        assert torch.equal(means[:, :, index], means[:, :, index].bfloat16().float())


def test_the_mean_over_tokens_is_that_of_fp64() -> None:
    k = (draw(1, 2, 5000, 128) + 3).half()
    assert torch.allclose(token_mean(k, int4_default("l20", 128)).double(), k.double().mean(2, keepdim=True), rtol=1e-6)


# --- delta S


@pytest.mark.parametrize("gpu", ["l20", "h200"])
@pytest.mark.parametrize(("delta", "limit"), [("f32", 1e-5), ("f16", 2**-11)])
def test_delta_s_is_what_smoothing_takes_from_the_scores(gpu: str, delta: str, limit: float) -> None:
    """Of grouped heads and a short last span, against products in FP64."""
    q, k, v = (draw(2, heads, tokens, 64, seed=heads).bfloat16() for heads, tokens in ((4, 300), (2, 130), (2, 130)))
    q, k = q + 2 * draw(2, 4, 1, 64, seed=7).bfloat16(), k + 4 * draw(2, 2, 1, 64, seed=8).bfloat16()
    config = replace(int4_default(gpu), delta=delta)
    problem = Problem(64, "bf16", False, "int4")
    operands = make_operands(q, k, v, problem, config, 0.3, want_lse=True)
    assert operands.delta is not None
    found = operands.delta.of(slice(17, 130))
    centred = k.double() - k.double().mean(2, keepdim=True)
    for head in range(4):
        for start in range(0, 300, config.mean_span):
            rows = slice(start, min(start + config.mean_span, 300))
            mean = span_means(q, config.mean_span)[:, head, start // config.mean_span, None].double()
            exact = mean @ centred[:, head // 2, 17:].transpose(-1, -2) * (0.3 * LOG2_E)
            first = head % 2 * 300 + start
            own = found[:, head // 2, first : first + rows.stop - rows.start]
            assert torch.equal(own, own[:, :1].expand_as(own))
            error = (own[:, :1] - exact).abs()
            assert (error <= limit * exact.abs().amax(-1, keepdim=True)).all()


def test_without_quantization_smoothing_and_rotation_change_no_score() -> None:
    q, k = (draw(1, 1, 128, 128, seed=seed) + 3 * draw(1, 1, 1, 128, seed=seed + 2) for seed in (0, 1))
    means = span_means(q.bfloat16(), 128)
    gamma_q, gamma_k = q - means, k - k.mean(2, keepdim=True)
    delta = means @ gamma_k.transpose(-1, -2)
    for rotated in (False, True):
        left, right = (rotate(gamma_q), rotate(gamma_k)) if rotated else (gamma_q, gamma_k)
        scores = left @ right.transpose(-1, -2) + delta
        assert torch.allclose(scores, q @ gamma_k.transpose(-1, -2), atol=2e-3)


# --- rotation


def sylvester(dim: int) -> torch.Tensor:
    """The Hadamard matrix by its definition."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@pytest.mark.parametrize("dim", [64, 128])
def test_a_rotation_is_the_hadamard_matrix_over_the_root_of_its_size(dim: int) -> None:
    x = draw(5, dim)
    assert torch.allclose(rotate(x).double(), x.double() @ sylvester(dim) / dim**0.5, atol=1e-5)
    assert torch.allclose(rotate(rotate(x)), x, atol=1e-5)


# --- what they are worth


def cosines(config: Config) -> list[float]:
    """Of INT4 against FP64, three heads of each captured layer of SmolLM2."""
    found = []
    for inputs in load_captured(CAPTURED).values():
        q, k, v = (x.bfloat16() for x in (inputs.q, inputs.k, inputs.v))
        problem = Problem(q.shape[-1], "bf16", False, "int4")
        out, _ = quantized_attention(q, k, v, problem, config, want_lse=False)
        exact = attention(q, k, v, out_dtype=torch.float64)
        found.append(torch.nn.functional.cosine_similarity(out.double().flatten(), exact.flatten(), 0).item())
    return found


@pytest.mark.parametrize("gpu", ["l20", "h200"])
def test_int4_of_a_language_model_needs_q_smoothed_and_gains_by_rotation(gpu: str) -> None:
    """The order that an independent FP64 emulation found: K 0.9474, Q and K 0.9856, with rotation 0.9917."""
    best = replace(int4_default(gpu), balance="no")
    assert best.smooths_q
    assert best.rotates
    rotated = cosines(best)
    smoothed = cosines(replace(best, rotate="no"))
    k_only = cosines(replace(best, rotate="no", mean_span=0, delta="f32"))
    assert sum(rotated) > sum(smoothed) + 0.0015 * len(rotated)
    assert min(rotated) > min(smoothed) + 0.002
    assert sum(smoothed) > sum(k_only) + 0.02 * len(rotated)
