"""A thousand times the same call gives the same bits: whatever the scratch held, however blocks were scheduled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from kernel_kinds import KINDS, KernelKind
from sagegen.launch import Program
from sagegen.measuring.call import BoundCall, bind_call
from sagegen.measuring.gate import figures
from sagegen.measuring.inputs import DTYPES as TORCH_DTYPES
from sagegen.measuring.inputs import draw_normal
from sagegen.problem import Problem, Shape
from sagegen.reference import attention as exact

pytestmark = pytest.mark.gpu

REPEATS = 1000
#: Every how many repeats another stream gets work, which moves blocks to other SMs at other times.
DISTURBED = 10
CASES = [
    (Problem(128, "bf16", True), Shape(1, 8, 2, 1333, 1333)),
    (Problem(128, "bf16", False), Shape(2, 4, 4, 129, 2047)),
    (Problem(64, "bf16", True), Shape(3, 6, 1, 77, 1001)),
    (Problem(64, "fp16", False), Shape(1, 40, 40, 1000, 193)),
    (Problem(128, "fp16", True), Shape(1, 7, 7, 300, 100)),
    (Problem(64, "bf16", False), Shape(1, 14, 2, 1, 4096)),
]


@pytest.fixture
def program(kind_kernels: Mapping[Any, Any], kind: KernelKind, problem: Problem) -> Iterator[Program]:
    if (kind, problem) not in kind_kernels:
        pytest.skip(kind.needs())
    program = kind_kernels[kind, problem].load()
    yield program
    torch.cuda.synchronize()
    program.unload()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("problem", "shape"), CASES, ids=lambda value: getattr(value, "name", None))
def test_repeats_give_the_same_bits(program: Program, problem: Problem, shape: Shape) -> None:
    inputs = draw_normal(shape, problem.head_dim, torch.Generator("cuda").manual_seed(0))
    q, k, v = (x.to(TORCH_DTYPES[problem.dtype]) for x in (inputs.q, inputs.k, inputs.v))
    call = bind_call(program, problem, program.config, q, k, v, want_lse=True)
    call.launch()
    first = [bits(x).clone() for x in (call.out, call.lse)]
    ref = exact(q, k, v, is_causal=problem.is_causal, out_dtype=torch.float64)
    assert figures(call.out, ref).cosine > 0.998  # the bits of a right answer

    different = torch.zeros((), dtype=torch.int64, device="cuda")
    side, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for repeat in range(REPEATS):
        if repeat % DISTURBED == 0:
            with torch.cuda.stream(side):
                matrix @ matrix
        spoil(call, repeat)
        call.launch()
        for x, wanted in zip((call.out, call.lse), first, strict=True):
            different += (bits(x) != wanted).sum()
    assert different.item() == 0


def bits(x: torch.Tensor) -> torch.Tensor:
    """NaN equals itself here."""
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def spoil(call: BoundCall, repeat: int) -> None:
    """Fill what the kernels write with bytes that change: NaN in every type, zeros, and others."""
    for x in (call.out, call.lse, call.workspace):
        x.view(torch.uint8).fill_((0xFF, 0x00, 0x7F, 0xA5)[repeat % 4])
