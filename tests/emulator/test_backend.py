"""sagegen.attention(..., backend="emulator") on CPU tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import sagegen
from exact_attention import attend
from ragged_calls import check_close
from sagegen.env import read_env
from sagegen.errors import UnsupportedError
from sagegen.runtime import fallback
from sagegen.runtime.dispatch import Dispatcher
from sagegen.runtime.machine import CudaRuntime
from sagegen.runtime.options import Options

pytestmark = pytest.mark.emulator


@pytest.fixture
def make():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.bfloat16: torch.randn(shape, generator=generator).to(dtype)


def check(q, k, v, **options):
    """Answered by the emulator, close to the exact answer but not equal to it."""
    out, lse = sagegen.attention(q, k, v, backend="emulator", return_lse=True, **options)
    assert sagegen.last_dispatch().answer == "emulator"
    options.pop("out", None)
    exact, exact_lse = sagegen.attention(q, k, v, backend="reference", return_lse=True, **options)
    error = (out.double() - exact.double()).norm() / exact.double().norm()
    assert 0.001 < error < 0.05  # INT8 and FP8
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=0.06)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    return out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_gqa_in_both_layouts(make, is_causal, layout):
    q, k, v = make(2, 4, 70, 64), make(2, 2, 90, 64), make(2, 2, 90, 64)
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    check(q, k, v, is_causal=is_causal, layout=layout)


def test_fp16_a_scale_and_other_strides(make):
    k, v = (make(1, 2, 70, 192, dtype=torch.float16)[..., 64:] for _ in range(2))
    check(make(1, 2, 50, 128, dtype=torch.float16), k, v, scale=-0.05)


@pytest.mark.parametrize("head_dim", [1, 5, 40, 80, 96, 120])
def test_a_head_dim_between_those_of_kernels(make, head_dim):
    q, k, v = make(1, 4, 50, head_dim), make(1, 2, 70, head_dim), make(1, 2, 70, head_dim)
    out = check(q, k, v, is_causal=True)
    assert out.is_contiguous()
    assert check(q, k, v, is_causal=True, out=torch.empty_like(q)).equal(out)


def test_steps_of_the_quantizer_that_the_default_config_has_not(make):
    q, k, v = (make(1, 2, 70, 64) + offset for offset in (1, -2, 1))
    kernels = set()
    for steps in ({}, {"smooth_q": True}, {"rotate": True}, {"smooth_v": True}, {"smooth_q": True, "smooth_v": True}):
        check(q, k, v, **steps)
        kernels.add(sagegen.explain(q, k, v, backend="emulator", **steps).kernel)
    assert len(kernels) == 5


def test_an_out_whose_channels_are_apart(make):
    q = make(1, 2, 40, 64)
    out = torch.empty(1, 2, 64, 40, dtype=torch.bfloat16).transpose(2, 3)
    assert check(q, q, q, out=out) is out


def test_a_tensor_whose_channels_are_apart_is_copied(make):
    fallback.warn_once.cache_clear()
    q = make(1, 2, 70, 64)
    check(q, make(1, 2, 64, 70).transpose(2, 3), q)


def test_out_is_written(make):
    q = make(1, 2, 40, 64)
    out = torch.empty(1, 40, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert check(q, q, q, out=out) is out
    k = q.clone()
    assert check(q, k, q, out=torch.empty_like(q)).equal(sagegen.attention(q, k, q, backend="emulator", out=k))


def test_inputs_are_not_written_and_the_bits_repeat(make):
    inputs = [make(1, 2, 70, 64) for _ in range(3)]
    before = [x.clone() for x in inputs]
    first = sagegen.attention(*inputs, backend="emulator")
    assert torch.equal(sagegen.attention(*inputs, backend="emulator"), first)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("head_dim", [64, 40])
def test_keys_that_a_mask_hides_leave_no_trace(make, layout, head_dim):
    """NaN there, in every third key, in the first of two items alone, in all, in none."""
    q, k, v = make(2, 4, 70, head_dim), make(2, 2, 150, head_dim), make(2, 2, 150, head_dim)
    masks = (torch.arange(150).remainder(3) > 0).expand(2, 150), torch.tensor([[False], [True]]).expand(2, 150)
    for mask in (*masks, torch.zeros(2, 150).bool(), torch.ones(2, 150).bool()):
        spoiled = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v)]
        inputs = [x if layout == "HND" else x.transpose(1, 2) for x in (q, *spoiled)]
        before = [x.clone() for x in inputs]
        out, lse = sagegen.attention(
            *inputs, attn_mask=mask[:, None, None], layout=layout, return_lse=True, backend="emulator"
        )
        assert sagegen.last_dispatch().problem.is_ragged
        torch.testing.assert_close(inputs, before, rtol=0, atol=0, equal_nan=True)
        out = out if layout == "HND" else out.transpose(1, 2)
        for item in range(2):
            seen = torch.ones(70, int(mask[item].sum()), dtype=torch.bool)
            kept = (x[item, :, mask[item]] for x in (k, v))
            check_close(out[item], lse[item], *attend(q[item], *kept, seen, head_dim**-0.5))


def test_masks_of_one_shape_are_not_taken_for_each_other(make):
    """The last two call what was prepared for the first."""
    q = make(1, 2, 40, 64)
    for keys in (slice(0, 40), slice(0, 7), slice(20, 40)):
        mask = torch.zeros(1, 40, dtype=torch.bool)
        mask[:, keys] = True
        out, lse = sagegen.attention(q, q, q, attn_mask=mask, return_lse=True, backend="emulator")
        check_close(out, lse, *attend(q, q, q, mask, 0.125))


def test_a_query_that_sees_no_key(make):
    q, k = make(1, 2, 20, 64), make(1, 2, 5, 64)
    out, lse = sagegen.attention(q, k, k, is_causal=True, return_lse=True, backend="emulator")
    assert not out[:, :, :15].any()
    assert (lse[:, :, :15] == -torch.inf).all()


def test_compiled_code_calls_it(make):
    q = make(1, 2, 40, 64)
    function = torch.compile(
        lambda q: sagegen.attention(q, q, q, backend="emulator") + 1, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(function(q), sagegen.attention(q, q, q, backend="emulator") + 1)


def test_the_environment_asks_for_it_and_nothing_heavy_was_loaded_before():
    script = (
        "import sys, torch, sagegen; q = torch.ones(1, 1, 8, 64, dtype=torch.float16); sagegen.attention;"
        "assert not {m for m in sys.modules if m.startswith(('jinja2', 'sagegen.emulator', 'filelock'))};"
        "sagegen.attention(q, q, q); print(sagegen.last_dispatch().answer)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "SAGEGEN_BACKEND": "emulator"},
    )
    assert done.stdout == "emulator\n"


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_call_in_parts_gives_the_bits_of_the_whole(make, layout):
    """GQA, two batch items, causal with unequal lengths, an lse: by batch item, then by single KV heads."""
    q, k, v = make(2, 4, 70, 64), make(2, 2, 150, 64), make(2, 2, 150, 64)
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    results, needs = [], []
    for limit in (1 << 30, 100_000, 1):
        dispatcher = Dispatcher(CudaRuntime(), lambda limit=limit: replace(read_env(), workspace_limit=limit))
        options = Options(layout=layout, is_causal=True, return_lse=True, backend="emulator")
        values = [getattr(options, name) for name in Options.__slots__]
        needs.append(dispatcher.workspace_bytes(q, k, v, None, *values))
        results.append(dispatcher.attention(q, k, v, None, None, *values))
    assert needs[0] > 100_000 > needs[1] > needs[2] > 1
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_scratch_is_what_the_emulators_kernel_takes(make):
    q = make(2, 4, 70, 64)
    assert sagegen.workspace_bytes(q, q, q, backend="emulator") > 3 * q.numel()  # a byte per channel, padded to tiles
    assert sagegen.workspace_bytes(q, q, q) == 0  # the reference answers


def test_a_model_inside_patched_runs_in_the_emulator(make):
    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    q, model = make(1, 2, 70, 64), Model()
    with sagegen.patched(model, backend="emulator"):
        out = model(q)
    assert sagegen.last_dispatch().answer == "emulator"
    assert torch.equal(out, sagegen.attention(q, q, q, is_causal=True, backend="emulator"))


def test_four_parts_of_the_keys_merge_into_the_whole(make):
    """Parts of 50, 0, 30 and 61 keys, each with the mean of its own keys subtracted."""
    q, k, v = make(1, 2, 40, 64), make(1, 2, 141, 64), make(1, 2, 141, 64)
    parts = [
        sagegen.attention(q, k[:, :, keys], v[:, :, keys], backend="emulator", return_lse=True)
        for keys in (slice(0, 50), slice(50, 50), slice(50, 80), slice(80, 141))
    ]
    out, lse = sagegen.merge_lse([part[0] for part in parts], [part[1] for part in parts])
    scores = q.double() @ k.double().mT / 8
    expected = scores.softmax(-1) @ v.double()
    assert 0.001 < (out.double() - expected).norm() / expected.norm() < 0.05
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=0.06)


@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("transform", ["vmap", "jvp", "functionalize"])
def test_transforms_of_torch_func_are_refused(make, transform, head_dim):
    q = make(3, 1, 2, 20, head_dim)

    def call(x):
        return sagegen.attention(x, x, x, backend="emulator")

    call(q[0])  # what is remembered must not answer
    calls = {
        "vmap": lambda: torch.func.vmap(call)(q),
        "jvp": lambda: torch.func.jvp(call, (q[0],), (q[0],)),
        "functionalize": lambda: torch.func.functionalize(call)(q[0]),
    }
    why = "requires a gradient" if transform == "jvp" else r"torch.func's transforms .*backend='sdpa'"
    with pytest.raises(UnsupportedError, match=why):
        calls[transform]()


def test_tangents_are_not_lost(make):
    q = make(1, 2, 20, 64)
    sagegen.attention(q, q, q, backend="emulator")  # what is remembered must not answer
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(UnsupportedError, match="requires a gradient"):
            sagegen.attention(q, dual, q, backend="emulator")


def test_a_mask_inside_vmap_is_refused_by_name(make):
    inputs = [make(1, 2, 8, 64) for _ in range(3)]
    masks = torch.ones(3, 1, 1, 1, 8, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match=r"torch.func's transforms"):
        torch.func.vmap(lambda mask: sagegen.attention(*inputs, attn_mask=mask, backend="emulator"))(masks)
