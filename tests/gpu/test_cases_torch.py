"""Reports of users of such kernels, as in test_cases.py: torch.compile, graphs, what SDPA answers, fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import sagegen
import sagegen.runtime.library  # registers the op
from public_calls import BF16, FP16, assert_close, draw_qkv, kernel
from sagegen.runtime.options import Options

pytestmark = pytest.mark.gpu

#: Of a process that has CUDA already: seconds of its first call, who answered, and what was logged.
_FIRST_CALL = """
import logging, sys, time
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import torch, sagegen
q, k, v = (torch.randn(1, 8, {length}, 128, device="cuda").bfloat16() for _ in range(3))
torch.cuda.synchronize()
start = time.perf_counter()
out = sagegen.attention(q, k, v, {options})
torch.cuda.synchronize()
print("seconds", time.perf_counter() - start)
answer = sagegen.last_dispatch()
print("answer", answer.answer, answer.provenance)
exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
print("cosine", torch.nn.functional.cosine_similarity(out.float().flatten(), exact.float().flatten(), 0).item())
"""


def first_call(options: str = "", length: int = 8192, **variables: str) -> tuple[dict[str, list[str]], str]:
    """The facts that a fresh process prints, and all that it said."""
    script = _FIRST_CALL.format(options=options, length=length)
    environ = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {words[0]: words[1:] for words in lines if words[0] in ("seconds", "answer", "cosine")}, done.stdout


@pytest.fixture(params=[96, 128])
def inputs(request, kernels):
    return draw_qkv(1, 8, 8, 333, 333, request.param, BF16)


def test_d5_opcheck(inputs):
    values = [getattr(Options(backend="kernel", is_causal=True, return_lse=True), name) for name in Options.__slots__]
    results = torch.library.opcheck(torch.ops.sagegen.attention.default, (*inputs, None, *values))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_d5_compiled_calls_are_eager_ones(inputs, mode):
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    torch._dynamo.reset()

    def call(q, k, v):
        return kernel(q * 1.0, k, v, is_causal=True) + 1

    compiled = torch.compile(call, fullgraph=True, mode=mode)
    for seed in range(4):
        fresh = draw_qkv(1, 8, 8, 333, 333, inputs[0].shape[-1], BF16, seed=seed)
        ours, eager = compiled(*fresh).clone(), call(*fresh)
        assert torch.equal(ours, eager)
        assert ours.stride() == eager.stride()


def test_d5_other_lengths_do_not_break_the_graph(kernels):
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: kernel(*x), fullgraph=True, dynamic=True)
    for length in (64, 100, 257):
        fresh = draw_qkv(1, 4, 2, length, length + 5, 64)
        assert torch.equal(compiled(*fresh), kernel(*fresh))


def test_d6_torch_answers_where_it_is_faster():
    q, k, v = draw_qkv(32, 5, 5, 512, 512, 64, FP16)
    sagegen.attention(q, k, v)
    answer = sagegen.last_dispatch()
    assert (answer.answer, answer.is_fallback) == ("sdpa", False)
    assert "faster" in answer.reason


def test_d7_a_warm_first_call_starts_no_compiler(tmp_path, record_property):
    """Of a shipped kernel, with its self-test."""
    facts, said = first_call(SAGEGEN_CACHE_DIR=str(tmp_path), SAGEGEN_NVCC="/no/nvcc")
    untried, _ = first_call(SAGEGEN_CACHE_DIR=str(tmp_path), SAGEGEN_NVCC="/no/nvcc", SAGEGEN_SELF_TEST="0")
    assert facts["answer"] == ["kernel", "measured"], said
    assert float(facts["cosine"][0]) > 0.998
    print(f"\nfirst call {facts['seconds'][0]} s, without self-test {untried['seconds'][0]} s")
    assert float(facts["seconds"][0]) < 1


def test_d7_a_cold_first_call_says_that_it_compiles(tmp_path, toolkit):
    options = "smooth_q=True, precision='int8'"
    facts, said = first_call(options, SAGEGEN_CACHE_DIR=str(tmp_path))
    assert facts["answer"] == ["kernel", "untuned"], said
    assert float(facts["cosine"][0]) > 0.998
    assert "this happens once" in said or "compiled " in said
    again, said = first_call(
        "smooth_q=True, precision='int8'", SAGEGEN_CACHE_DIR=str(tmp_path), SAGEGEN_NVCC="/no/nvcc"
    )
    assert again["answer"] == ["kernel", "untuned"], said
    assert "compil" not in said


def test_a_warmed_up_kernel_is_captured_at_its_first_call(kernels):
    q, k, v = draw_qkv(2, 8, 2, 200, 300, 64, BF16)
    assert sagegen.warmup(q, k, v, backend="kernel", return_lse=True).answer == "kernel"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernel(q, k, v, return_lse=True)
    graph.replay()
    wanted, wanted_lse = kernel(q, k, v, return_lse=True)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)


@pytest.mark.parametrize("length", [333, 4096])
@pytest.mark.parametrize("backend", [None, "kernel", "sdpa"])
def test_autocast_changes_no_result(backend, length):
    """Whoever answers; torch's own function is on autocast's list."""
    q, k, v = draw_qkv(1, 8, 8, length, length, 128, BF16)

    def attend():
        return sagegen.attention(q, k, v, is_causal=True, return_lse=True, backend=backend)

    expected = attend()
    with torch.autocast("cuda", FP16):
        found = attend()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a_float32_mask_beside_16_bit_inputs_is_not_rounded(dtype):
    """A bias in steps of 1/1024 around 300, which 16 bits round by up to 1: exact attention in FP64 sees each step."""
    q, k, v = draw_qkv(1, 4, 4, 128, 1024, 64, dtype)
    bias = 300 + torch.arange(1024, device="cuda").expand(128, -1) * 4 / 1024
    scores = q.double() @ k.double().mT / 8 + bias.double()
    out, lse = sagegen.attention(q, k, v, attn_mask=bias, return_lse=True)
    assert out.dtype == dtype
    assert_close(out, scores.softmax(-1) @ v.double(), l2=0.01, cosine=0.9999)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-3)
