"""The card and the emulator agree on the same inputs: the emulator stands for the card on machines without one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from picked_configs import LEFT_ALONE, TRIED
from sagegen.emulator.program import load_emulated
from sagegen.env import read_env
from sagegen.launch import load_program
from sagegen.measuring.call import call_program
from sagegen.problem import DTYPES, TUNED_HEAD_DIMS, Problem

pytestmark = pytest.mark.gpu

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
CASES = [
    pytest.param(Problem(d, t, causal), index, id=f"{Problem(d, t, causal).name}-{index}")
    for d in TUNED_HEAD_DIMS
    for t in DTYPES
    for causal in (False, True)
    for index in range(TRIED + LEFT_ALONE)
]
#: Steps of E4M3 below 448 are 32 wide: an exponential whose last bit differs may round to the neighbour.
E4M3_STEP = 32 / 448
#: One step of the output's own rounding, relative.
OUTPUT_STEP = {"fp16": 2.0**-10, "bf16": 2.0**-7}


@pytest.fixture(scope="module")
def figures():
    """Rows of figures; written to $OUT when that is set, for docs/gpu-runs."""
    rows = []
    yield rows
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "emulator_agreement.json").write_text(json.dumps(rows, indent=1))


def draw(problem):
    """q, k, v with offsets in K and V, lengths off the tile edges, two query heads to a KV head."""
    generator = torch.Generator().manual_seed(0)
    dtype = TORCH_DTYPES[problem.dtype]
    q = torch.randn(1, 4, 300, problem.head_dim, generator=generator).to(dtype)
    k = (torch.randn(1, 2, 459, problem.head_dim, generator=generator) + 2).to(dtype)
    v = (torch.randn(1, 2, 459, problem.head_dim, generator=generator) + 0.5).to(dtype)
    return q, k, v


def step_of_one_weight(problem, q, k, v):
    """How far an output may move when one P rounds to the next E4M3 number, [batch, heads_q, q_len, 1].

    P is at most 1 before its scale, so a step of it moves a row by E4M3_STEP * |V| over the row's sum.
    """
    row_sum = row_sums(problem, q, k)
    return E4M3_STEP * v.float().abs().max() / row_sum


def row_sums(problem, q, k):
    """Sum of a row's weights, its largest being 1, [batch, heads_q, q_len, 1]."""
    scores = q.float() @ k.float().repeat_interleave(2, 1).transpose(-1, -2) * problem.head_dim**-0.5
    if problem.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        scores.masked_fill_(hidden, -torch.inf)
    return (scores - scores.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)


def fp16_sum_error(config):
    """Relative error of sums in FP16: half a step for each of 16 keys' products and for each of their additions.

    Where the compiler emulates the instruction, the card's FP16 products round in a way that is not published. The
    steps of different sums are independent, so their norms add up as squares do.
    """
    return (2 * config.accum_depth / 16) ** 0.5 * 2.0**-11 if config.sums_in_fp16 else 0.0


@pytest.mark.parametrize(("problem", "index"), CASES)
def test_card_and_emulator_agree(kernels, gpu, problem, index, figures):
    kernel = kernels[problem][index]
    q, k, v = draw(problem)
    emulated = load_emulated(problem, kernel.config, gpu, read_env())
    out, lse = call_program(emulated, problem, kernel.config, q, k, v, want_lse=True)

    program = load_program(kernel.cubin.read_bytes(), kernel.name, problem, kernel.config, 0)
    card_out, card_lse = call_program(program, problem, kernel.config, q.cuda(), k.cuda(), v.cuda(), want_lse=True)
    card_out, card_lse = card_out.cpu().float(), card_lse.cpu()
    program.unload()

    error = (out.float() - card_out).abs()
    allowed = step_of_one_weight(problem, q, k, v) + OUTPUT_STEP[problem.dtype] * card_out.abs()
    relative_l2 = (error.norm() / card_out.norm()).item()
    figures.append(
        {
            "problem": problem.name,
            "config": kernel.config.name,
            "relative_l2": relative_l2,
            "max_error": error.max().item(),
            "max_share_of_allowed": (error / allowed).max().item(),
            "equal_elements": (error == 0).float().mean().item(),
            "lse_max_error": (lse - card_lse).abs().max().item(),
        }
    )
    assert relative_l2 <= 1e-3 + fp16_sum_error(kernel.config)
    assert bool((error <= allowed).all())
    allowed_lse = torch.full_like(lse, 1e-3)
    if kernel.config.row_sum == "ones":  # the sum of rounded weights, of which one may be a step off
        allowed_lse += E4M3_STEP / row_sums(problem, q, k).squeeze(-1)
    assert bool(((lse - card_lse).abs() <= allowed_lse).all())
