"""FP8 (e4m3) Q·K^T where its scores lie far from those of INT8; whatever else it does, test_configs.py runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sagegen.emulator.program import load_emulated
from sagegen.env import read_env
from sagegen.gpu import find_gpu
from sagegen.measuring.call import call_program
from sagegen.problem import Problem
from sagegen.reference import attention
from sagegen.rules import Target, default_config

pytestmark = pytest.mark.emulator

PROBLEM = Problem(128, "bf16", is_causal=True)


@pytest.mark.parametrize("gpu_name", ["l20", "h200"])
def test_hidden_keys_count_less_than_the_lowest_score(gpu_name: str) -> None:
    """128 products of -448^2 are -25690112, below any score of INT8: hidden keys must count as less."""
    gpu = find_gpu(gpu_name)
    config = replace(default_config(Target(gpu, PROBLEM)), qk="e4m3")
    q = torch.full((1, 1, 64, 128), 8.0).bfloat16()
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    k = torch.full((1, 1, 64, 128), -8.0).bfloat16()
    k[:, :, 32:] = 8
    program = load_emulated(PROBLEM, config, gpu, read_env(), workers=2)
    out, lse = call_program(program, PROBLEM, config, q, k, v, want_lse=True)
    wanted, wanted_lse = attention(q, k, v, is_causal=True, return_lse=True, out_dtype=torch.float64)
    # the first 32 rows see scores of the lowest kind alone, all equal
    error = (out - wanted)[:, :, :32].norm(dim=-1) / wanted[:, :, :32].norm(dim=-1)
    assert (error < 0.07).all()  # of rounding V to E4M3: at most 2^-4
    torch.testing.assert_close(lse[:, :, :32], wanted_lse[:, :, :32], rtol=1e-3, atol=0)
