"""INT4 operands on a card: native where it has INT4 units, else from the PTX of an architecture that has them."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sagegen.compilers import FLAGS
from sagegen.gpu import find_gpu
from sagegen.launch import Program, load_program
from sagegen.measuring.call import call_program
from sagegen.problem import Problem
from sagegen.reference import fp8_accumulator, quantized_attention
from sagegen.render import render
from sagegen.rules import Target, default_config

pytestmark = pytest.mark.gpu

#: GPUs with INT4 units whose PTX is taken: 16-bit P V from sm_80 on, FP8 from sm_89 on.
NATIVE = ("a100", "l20")
PROBLEMS = [Problem(d, "bf16", causal, "int4") for d in (64, 128) for causal in (False, True)]
#: heads_q, heads_kv, q_len, kv_len: off every tile's edge, whole tiles and many of them.
SHAPES = ((6, 2, 77, 333), (4, 4, 512, 1024))


def load(source, native, gpu, toolkit, folder: Path) -> Program:
    """The source compiled to PTX for the GPU `native`, and that assembled for the card."""
    (folder / "kernel.cu").write_text(source.text)
    virtual = native.arch.replace("sm_", "compute_")
    command = [toolkit.nvcc, *FLAGS, "-gencode", f"arch={virtual},code={gpu.arch}", "kernel.cu", "-o", "kernel.cubin"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    cubin = (folder / "kernel.cubin").read_bytes()
    return load_program(cubin, source.name, source.problem, source.config, 0)


def draw(problem, shape):
    heads_q, heads_kv, q_len, kv_len = shape
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, heads_q, q_len, problem.head_dim, generator=generator)
    k, v = (torch.randn(1, heads_kv, kv_len, problem.head_dim, generator=generator) + 1 for _ in range(2))
    return tuple(x.bfloat16().cuda() for x in (q, k, v))


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_packed_operands_give_the_bits_of_the_container_and_their_numerics(problem, name, gpu, toolkit, tmp_path):
    native = find_gpu(name)
    if gpu.compute_capability < native.compute_capability:
        pytest.skip(f"needs a GPU that runs the PTX of {native.arch}")
    packed = default_config(Target(native, problem))
    assert packed.qk == "s4"
    programs = [load(render(problem, replace(packed, qk=qk)), native, gpu, toolkit, tmp_path) for qk in ("s4", "s8")]
    for shape in SHAPES:
        q, k, v = draw(problem, shape)
        (out, lse), (wanted, wanted_lse) = (
            call_program(program, problem, program.config, q, k, v, want_lse=True) for program in programs
        )
        assert torch.equal(out, wanted)
        # what K's mean adds to the lse is summed over the channels in another order
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
        accumulator = fp8_accumulator(packed, gpu.compute_capability)
        numerics, _ = quantized_attention(q, k, v, problem, packed, accumulator=accumulator)
        error = (out.float() - numerics).norm() / numerics.norm()
        assert error < 0.006, f"off by {error:.1e}"  # as in test_configs.py
