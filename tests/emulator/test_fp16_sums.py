"""Kernels whose P V is summed in FP16, at logits where FP32 has steps that P would notice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sagegen.emulator.program import load_emulated
from sagegen.env import read_env
from sagegen.gpu import find_gpu
from sagegen.measuring.call import call_program
from sagegen.mma_rules import default_mma_config
from sagegen.problem import Problem
from sagegen.reference import quantized_attention
from sagegen.rules import Target

pytestmark = pytest.mark.emulator

L20 = find_gpu("l20")
PROBLEM = Problem(64, "fp16", is_causal=False)
#: SageAttention2++'s peaks: 64 keys of 224 * 4.5 are 64512, and one P that rounds to 240 brings them beyond FP16.
PEAKS = {"pv": "e4m3f16", "accum_depth": 64, "p_max": 224, "v_max": 4.5}


@pytest.mark.parametrize("mean_span", [0, 64])
@pytest.mark.parametrize("conversion", ["i2f", "magic"])
def test_no_weight_exceeds_its_scale_however_large_the_logits(conversion: str, mean_span: int) -> None:
    """Equal values, so that every sum is as large as it can be; scores of 2^17 to 2^23 log2 units."""
    config = replace(default_mma_config(Target(L20, PROBLEM)), **PEAKS, conversion=conversion, mean_span=mean_span)
    program = load_emulated(PROBLEM, config, L20, read_env())
    q = torch.randn(1, 1, 70, 64, generator=torch.Generator().manual_seed(1)).half()
    k = torch.ones(1, 1, 256, 64).half()
    k[:, :, ::64] = -1  # else K less its mean is 0
    v = torch.ones_like(k)
    # `magic` rounds its constant up by whole log2 units beyond these, until no weight is left (docs/numerics.md)
    scales = (1e4, 3e4, 1e5) if conversion == "magic" and not mean_span else (1e4, 1e5, 3e5, 6e5, 1e6, 1e7)
    for scale in scales:
        out, _ = call_program(program, PROBLEM, config, q, k, v, softmax_scale=scale)
        wanted, _ = quantized_attention(q, k, v, PROBLEM, config, scale=scale, accumulator="fp16")
        assert out.isfinite().all(), scale
        assert (out.float() - wanted).norm() <= 1e-3 * wanted.norm(), scale
