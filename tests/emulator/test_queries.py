"""Queries quantized by the attention kernel are those that the quantizing kernel makes, whatever their layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sagegen.emulator.program import load_emulated
from sagegen.env import read_env
from sagegen.gpu import find_gpu
from sagegen.measuring.call import bind_call
from sagegen.problem import Problem
from sagegen.space import parse_config

pytestmark = pytest.mark.emulator

H200 = find_gpu("h200")
EXACT = "wgmma_c3_bk128_st2_scplain_acone_ks64_rsskip_suones_exmufu_laearly"
PACKED = "wgmma_c2_bk256_st2_scplain_acone_ks256_rsskip_suones_expacked"
MIXED = "wgmma_c2_bk256_st2_scplain_acone_ks256_rsskip_suones_exmixed4_laearly"
#: heads_q, heads_kv, q_len, kv_len: less than a tile, whole tiles, one row more, several works per block.
SHAPES = ((2, 1, 1, 70), (2, 2, 384, 40), (6, 2, 193, 130))


def draw(problem: Problem, shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries as slices of a fused [tokens, heads, 3, channels] tensor, with a row of zeros, a NaN and an Inf."""
    heads_q, heads_kv, q_len, kv_len = shape
    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if problem.dtype == "bf16" else torch.float16
    fused = torch.randn(1, q_len, heads_q, 3, problem.head_dim, generator=generator).to(dtype)
    q = fused[:, :, :, 1].transpose(1, 2)
    if q_len > 100:
        q[0, 0, 5] = 0
        q[0, 1, 77, 3] = float("nan")
        q[0, 1, 99, 63] = float("-inf")
    k, v = (torch.randn(1, heads_kv, kv_len, problem.head_dim, generator=generator).to(dtype) + 1 for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("config_name", "problem"),
    [(EXACT, Problem(128, "bf16", False)), (PACKED, Problem(64, "fp16", True)), (MIXED, Problem(64, "bf16", False))],
    ids=["exact", "packed", "mixed"],
)
def test_outputs_are_bitwise_those_of_the_quantizing_kernel(
    problem: Problem, config_name: str, shape: tuple[int, int, int, int]
) -> None:
    q, k, v = draw(problem, shape)
    apart = parse_config(config_name)
    results = []
    for config in (apart, replace(apart, q_quantizer="prologue")):
        program = load_emulated(problem, config, H200, read_env(), workers=2)
        for scale in (0.09, -0.2):
            call = bind_call(program, problem, config, q, k, v, softmax_scale=scale, want_lse=True)
            call.launch()
            without = bind_call(program, problem, config, q, k, v, softmax_scale=scale, want_lse=False)
            without.launch()
            results.append((call.out, call.lse, without.out))
    for (out, lse, alone), (other_out, other_lse, other_alone) in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(other_out, out, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(other_alone, alone, rtol=0, atol=0, equal_nan=True)
        # q . mean(K) is summed in another order
        torch.testing.assert_close(other_lse, lse, rtol=0, atol=2e-6, equal_nan=True)
