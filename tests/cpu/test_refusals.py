"""What `attention` refuses in words of its own, leaves to torch, or keeps from autocast, on tensors of the CPU."""

from __future__ import annotations

import pytest
import torch

import sagegen
from sagegen.errors import ArgumentError, UnsupportedError
from sagegen.runtime import sdpa as sdpa_module
from sagegen.runtime.options import Options


@pytest.fixture
def qkv():
    return torch.randn(3, 1, 2, 8, 64, generator=torch.Generator().manual_seed(0)).unbind()


def nested(layout):
    parts = [torch.ones(5, 2, 16), torch.ones(3, 2, 16)]
    x = torch.nested.nested_tensor(parts, layout=layout)
    return x.transpose(1, 2) if layout == torch.jagged else x


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_and_named(qkv, layout):
    q, k, v = qkv
    x, starts = nested(layout), torch.tensor([0, 8], dtype=torch.int32)
    rows = q[0].transpose(0, 1)
    for name, call in {
        "q": lambda: sagegen.attention(x, x, x),
        "attn_mask": lambda: sagegen.attention(q, k, v, attn_mask=x),
        "out": lambda: sagegen.attention(q, k, v, out=x),
        r"outputs\[0\]": lambda: sagegen.merge_lse([x], [x]),
        r"lses\[0\]": lambda: sagegen.merge_lse([q], [x]),
        "cu_seqlens_q": lambda: sagegen.attention_varlen(rows, rows, rows, x, starts, 8, 8),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{name}: only plain strided"):
            call()
    with pytest.raises(ArgumentError, match=r"^q: only plain strided"):
        sagegen.attention_varlen(x, x, x, starts, starts, 8, 8)


def test_torch_answers_nested_tensors_through_sdpa():
    x = nested(torch.jagged)
    torchs = torch.nn.functional.scaled_dot_product_attention
    found, expected = (attend(x, x, x).unbind() for attend in (sagegen.sdpa, torchs))
    assert all(torch.equal(part, other) for part, other in zip(found, expected, strict=True))
    strided = torch.nested.nested_tensor([torch.ones(2, 5, 16), torch.ones(2, 3, 16)])
    assert sagegen.sdpa(strided, strided, strided).is_nested


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (torch.ones(8, 8).to(torch.float8_e4m3fn), "float8_e4m3fn is neither"),
        (torch.ones(8, 8).to_sparse(), "only plain strided"),
    ],
)
def test_masks_that_nothing_adds_are_named(qkv, mask, why):
    with pytest.raises(ArgumentError, match=f"^attn_mask: .*{why}"):
        sagegen.attention(*qkv, attn_mask=mask)


def test_a_scale_beyond_float32_is_named(qkv):
    inputs = [x.bfloat16() for x in qkv]
    for scale in (1e300, -1e300, 10**300):
        with pytest.raises(UnsupportedError, match=r"scale=-?1.* is beyond float32"):
            sagegen.attention(*inputs, scale=scale, backend="emulator")


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (2, 1)}])
def test_tangents_of_cpu_tensors(qkv, options):
    q, k, v = qkv

    def exact(x):
        at = torch.arange(8)
        left, right = options.get("window", (8, 8))
        right = 0 if "is_causal" in options else right
        hidden = (at < at[:, None] - left) | (at > at[:, None] + right)
        return (x @ k.mT / 8).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    _, expected = torch.func.jvp(exact, (q,), (k,))
    _, found = torch.func.jvp(lambda x: sagegen.attention(x, k, v, **options), (q,), (k,))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("usual", "alike"),
    [
        ({"is_causal": True}, {"is_causal": 1}),
        ({"return_lse": False}, {"return_lse": 0}),
        ({"scale": 1.0}, {"scale": True}),
        ({"window": (1, 0)}, {"window": (True, False)}),
        ({"smooth_k": True}, {"smooth_k": 1}),
        ({"min_cosine": 1.0}, {"min_cosine": True}),
    ],
)
def test_what_equals_an_option_is_none(qkv, usual, alike):
    """A remembered call must not vouch for one that equals it."""
    starts = torch.tensor([0, 8], dtype=torch.int32)
    rows = [x[0].transpose(0, 1) for x in qkv]
    sagegen.attention(*qkv, **usual)
    sagegen.attention_varlen(*rows, starts, starts, 8, 8, **usual)
    with pytest.raises(TypeError, match=next(iter(alike))):
        sagegen.attention(*qkv, **alike)
    with pytest.raises(TypeError, match=next(iter(alike))):
        sagegen.attention_varlen(*rows, starts, starts, 8, 8, **alike)


# --- autocast


@pytest.mark.parametrize("backend", [None, "sdpa", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_autocast_changes_nothing(qkv, backend, dtype, needs_grad):
    q, k, v = (x.to(dtype) for x in qkv)
    q.requires_grad_(needs_grad)
    torch._dynamo.reset()

    def attend(q, k, v):
        return sagegen.attention(q, k, v, window=(3, 3), backend=backend, return_lse=True)

    expected = attend(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        for function in (attend, torch.compile(attend, fullgraph=True, backend="eager")):
            for found, one in zip(function(q, k, v), expected, strict=True):
                torch.testing.assert_close(found, one, rtol=1e-6, atol=1e-6)


def test_opcheck_under_autocast(qkv):
    values = [getattr(Options(), name) for name in Options.__slots__]
    with torch.autocast("cpu", torch.bfloat16):
        results = torch.library.opcheck(torch.ops.sagegen.attention.default, (*qkv, None, *values))
    assert set(results.values()) == {"SUCCESS"}


def test_sdpa_has_the_type_that_torchs_own_has_under_autocast(qkv):
    with torch.autocast("cpu", torch.bfloat16), sagegen.patched(backend="reference"):
        found = torch.nn.functional.scaled_dot_product_attention(*qkv)
    assert sagegen.last_dispatch().answer == "reference"
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.float(), torch.nn.functional.scaled_dot_product_attention(*qkv), rtol=2e-2, atol=2e-2
    )


# --- torch's own function


def test_a_scale_that_is_none_is_refused_in_torchs_words(qkv):
    with pytest.raises(TypeError, match="argument 'scale' must be float, not str"):
        sagegen.sdpa(*qkv, scale="1")


def test_a_scale_in_a_tensor_counts_as_its_number(qkv):
    with sagegen.patched(backend="reference"):
        found = torch.nn.functional.scaled_dot_product_attention(*qkv, scale=torch.tensor(0.25))
    assert sagegen.last_dispatch().answer == "reference"
    torch.testing.assert_close(
        found, torch.nn.functional.scaled_dot_product_attention(*qkv, scale=0.25), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_torch_that_takes_causality_with_a_mask_gets_both(qkv, monkeypatch, dtype):
    monkeypatch.setattr(sdpa_module, "_takes_causality_with_mask", lambda: True)
    q, k, v = qkv
    seen = (torch.arange(64).view(8, 8) % 3 > 0) | torch.eye(8, dtype=torch.bool)
    mask = seen if dtype == torch.bool else torch.zeros(8, 8).masked_fill(~seen, -torch.inf)
    both = (q @ k.mT / 8).masked_fill(~seen.tril(), -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(sagegen.sdpa(q, k, v, mask, is_causal=True), both, rtol=1e-4, atol=1e-5)
