"""Balancing Q against K: its factors, what it must not change, what it is for, and how it is launched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagegen.abi import BALANCE_FIELDS, fields_of, pack_constants, unpack_constants
from sagegen.ablation.synthetic import draw_kind
from sagegen.gpu import find_gpu
from sagegen.layout import spans_of_range
from sagegen.measuring.inputs import Inputs, load_captured
from sagegen.plan import Plan, Strides, TensorStrides, make_plan
from sagegen.problem import Problem, Shape
from sagegen.reference import attention, quantized_attention
from sagegen.rules import Target, default_config
from sagegen.smoothing import balance_factors, smooth_queries, token_mean
from sagegen.space import Config

CAPTURED = Path(__file__).parents[1] / "data" / "smollm2_qkv.safetensors"
PROBLEM = Problem(64, "bf16", False, "int4")
GPUS = ("l20", "h200")


def balanced(gpu: str) -> Config:
    return replace(default_config(Target(find_gpu(gpu), PROBLEM)), balance="yes")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def factors(q: torch.Tensor, k: torch.Tensor, config: Config) -> torch.Tensor:
    return balance_factors(smooth_queries(q, config).gamma, k, token_mean(k, config), config)


# --- factors


def test_factors_by_hand() -> None:
    """Q is +-1 and K 5 +- 16 in channel 0, so that their root mean squares are 1 and 16; channel 1 is the reverse."""
    config = balanced("l20")
    sign = torch.tensor([1.0, -1.0]).repeat(64)
    q, k = (torch.zeros(1, 1, 128, 64) for _ in range(2))
    q[0, 0, :, 0], k[0, 0, :, 0] = sign, 5 + 16 * sign
    q[0, 0, :, 1], k[0, 0, :, 1] = 16 * sign, sign
    found = factors(q.bfloat16(), k.bfloat16(), config)
    assert found.flatten().tolist() == [4.0, 0.25] + [1.0] * 62


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (70, 33), (129, 1000), (1500, 257)])
def test_factors_are_those_of_fp64_for_all_queries_of_a_kv_head(gpu: str, q_len: int, kv_len: int) -> None:
    config = balanced(gpu)
    wide = (0.7 * draw(1, 1, 1, 64, seed=5)).exp()
    q = (draw(2, 6, q_len, 64) * wide + 3 * draw(1, 6, 1, 64, seed=1)).bfloat16()
    # an offset 100 times the spread: half of the digits of FP32's sum of squares
    k = (draw(2, 2, kv_len, 64, seed=2) / wide + 100 * draw(1, 2, 1, 64, seed=3)).bfloat16()
    smoothed = smooth_queries(q, config).gamma.double().reshape(2, 2, 3 * q_len, 64)
    centred = k.double() - k.double().mean(2, keepdim=True)
    sizes = [x.square().mean(2, keepdim=True).sqrt() for x in (centred, smoothed)]
    wanted = torch.where((sizes[0] > 0) & (sizes[1] > 0), (sizes[0] / sizes[1]).sqrt(), 1)
    assert torch.allclose(factors(q, k, config).double(), wanted, rtol=1e-4)


def test_a_channel_without_size_is_left_alone() -> None:
    q, k = draw(1, 2, 200, 64).bfloat16(), draw(1, 1, 200, 64, seed=1).bfloat16()
    q[..., 0] = 0
    q[..., 1] = 3  # what smoothing leaves of it is 0
    k[..., 2] = 0
    k[..., 3] = 7
    k[..., 4], q[..., 4] = 7, 0
    k[..., 5] *= 1e30  # its squares are beyond FP32
    found = factors(q, k, balanced("l20"))[0, 0, 0]
    assert found[:6].tolist() == [1.0] * 6
    assert (found[6:] != 1).all()


def test_without_quantization_balance_changes_no_score() -> None:
    config = balanced("l20")
    q, k = draw(1, 4, 150, 64).bfloat16(), (draw(1, 2, 130, 64, seed=1) * draw(1, 2, 1, 64, seed=2)).bfloat16()
    mean = token_mean(k, config)
    gamma_q, gamma_k = smooth_queries(q, config).gamma, k.float() - mean
    factor = balance_factors(gamma_q, k, mean, config).repeat_interleave(2, 1)
    gamma_k = gamma_k.repeat_interleave(2, 1)
    scores = (gamma_q * factor) @ (gamma_k / factor).transpose(-1, -2)
    assert torch.allclose(scores, gamma_q @ gamma_k.transpose(-1, -2), atol=1e-4)


# --- what it is worth


@pytest.mark.parametrize("gpu", GPUS)
def test_int4_of_a_language_model_gains_by_balance(gpu: str) -> None:
    """The order that an independent FP64 emulation found, with exact P·V: rotated 0.9917, balanced too 0.9927."""
    found = {}
    for name, config in (("balanced", balanced(gpu)), ("rotated", replace(balanced(gpu), balance="no"))):
        found[name] = [measure(inputs, config) for inputs in load_captured(CAPTURED).values()]
    pairs = list(zip(found["balanced"], found["rotated"], strict=True))
    assert all(better > worse for better, worse in pairs)
    # measured: 0.843 (l20) and 0.874 (h200)
    assert sum(1 - better for better, _ in pairs) < 0.92 * sum(1 - worse for _, worse in pairs)


@pytest.mark.parametrize("gpu", GPUS)
def test_int4_of_channels_that_differ_in_width_has_half_the_error(gpu: str) -> None:
    inputs = draw_kind("wide_channels", Shape(1, 4, 2, 300, 300), 64, seed=0).map(lambda x: x.bfloat16())
    rotated = measure(inputs, replace(balanced(gpu), balance="no"))
    assert 1 - measure(inputs, balanced(gpu)) < 0.6 * (1 - rotated)


def measure(inputs: Inputs, config: Config) -> float:
    """Cosine against FP64."""
    q, k, v = (x.bfloat16() for x in (inputs.q, inputs.k, inputs.v))
    out, _ = quantized_attention(q, k, v, PROBLEM, config, want_lse=False)
    exact = attention(q, k, v, out_dtype=torch.float64)
    return torch.nn.functional.cosine_similarity(out.double().flatten(), exact.flatten(), 0).item()


# --- launches


def plan(shape: Shape, config: Config) -> Plan:
    own = Strides(1, 2, 3)
    return make_plan(PROBLEM, config, shape, TensorStrides(own, own, own, own), 0.125, want_lse=False)


def test_grid_regions_and_ranges_by_hand() -> None:
    # 5,000 rows are 40 query tiles of one span; 4 heads share KV: 8 ranges each, of 5 spans. 900 keys: 8 splits of 128
    shape = Shape(batch=1, heads_q=8, heads_kv=2, q_len=5000, kv_len=900)
    config = balanced("l20")
    assert (config.mean_span, config.block_q) == (128, 128)
    made, plain = plan(shape, config), plan(shape, replace(config, balance="no"))
    assert made.launches[0].grid == 2 * 8 + 8 * 8
    assert plain.launches[0].grid == 2 * 8 + 8 * 40
    assert made.launches[1:] == plain.launches[1:]
    assert made.workspace_bytes == plain.workspace_bytes + 2 * 8 * 64 * 4 + 8 * 8 * 64 * 4
    values = unpack_constants(made.constants, fields_of(config, PROBLEM))
    assert (values["ranges"], values["range_spans"]) == (8, 5)
    assert values["q_squares_offset"] == values["k_squares_offset"] + 2 * 8 * 64 * 4 == made.workspace_bytes - 64 * 256
    assert made.constants[: len(plain.constants)] == plain.constants


@given(st.integers(1, 200_000), st.integers(1, 64))
def test_ranges_cover_all_spans_and_are_few(spans: int, group: int) -> None:
    of_range = spans_of_range(spans, group)
    ranges = -(-spans // of_range)
    assert (ranges - 1) * of_range < spans <= ranges * of_range
    assert ranges <= 16
    assert ranges * group <= max(32, group)


@pytest.mark.parametrize("gpu", GPUS)
def test_only_kernels_that_balance_have_its_parameters(gpu: str) -> None:
    config = balanced(gpu)
    fields = fields_of(config, PROBLEM)
    assert fields == fields_of(replace(config, balance="no"), PROBLEM) + BALANCE_FIELDS
    values = unpack_constants(plan(Shape(1, 1, 1, 9, 9), config).constants, fields)
    assert pack_constants(dict(values)) == plan(Shape(1, 1, 1, 9, 9), config).constants
    for forgotten in BALANCE_FIELDS:
        with pytest.raises(KeyError, match=forgotten.name):
            pack_constants({name: value for name, value in values.items() if name != forgotten.name})
