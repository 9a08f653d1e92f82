"""Compiled calls that need a gradient: traced through torch SDPA, after the checks that eager calls get."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sagegen
from sagegen.env import Env
from sagegen.errors import ArgumentError, UnsupportedError
from sagegen.runtime import fallback, library, op
from sagegen.runtime import sdpa as sdpa_module
from sagegen.runtime.dispatch import Dispatcher
from sagegen.runtime.machine import CudaRuntime


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """A function that gives this test a dispatcher of its own, with settings."""

    def use(**changes):
        env = replace(Env(tmp_path / "cache", tmp_path / "tuned", False, "warning", None), **changes)
        dispatcher = Dispatcher(CudaRuntime(), lambda: env)
        for module in (op, library, sdpa_module):
            monkeypatch.setattr(module, "dispatcher", lambda: dispatcher)

    fallback.warn_once.cache_clear()
    torch._dynamo.reset()
    use()
    return use


def call(function, *inputs, dynamic=None):
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*inputs)


def inputs(*shape):
    q, k, v = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).unbind()
    return q.clone().requires_grad_(), k, v


def options_of(**options):
    return lambda q, k, v: sagegen.attention(q, k, v, **options)


WRONG = {
    "window": (options_of(window=(-3, 0)), ArgumentError, "has a negative side"),
    "precision": (options_of(precision="x"), ArgumentError, "precision='x' does not exist"),
    "min_cosine": (options_of(min_cosine=9), ArgumentError, "is no cosine"),
    "layout": (options_of(layout="NDH"), ArgumentError, "layout='NDH' does not exist"),
    "backend": (options_of(backend="x"), ArgumentError, "backend='x' does not exist"),
    "scale": (options_of(scale=float("nan")), ArgumentError, "scale=nan is not finite"),
    "kernel": (options_of(backend="kernel"), UnsupportedError, "backend='kernel' cannot answer"),
    "emulator": (options_of(backend="emulator"), UnsupportedError, "requires a gradient"),
    "lengths": (
        lambda q, k, v: sagegen.attention(q, k, v[:, :, :3].contiguous()),
        ArgumentError,
        r"v: length (3|s\d+) does not match k's (8|s\d+)",
    ),
    "dtype": (lambda q, k, v: sagegen.attention(q, k.double(), v), ArgumentError, "k: dtype torch.float64 is not"),
    "mask": (
        lambda q, k, v: sagegen.attention(q, k, v, attn_mask=torch.ones(8, 7, dtype=torch.bool)),
        ArgumentError,
        "does not broadcast",
    ),
    "heads": (lambda q, k, v: sagegen.attention(q[:, :1], k, v), ArgumentError, "no multiple of k's 2"),
}


@pytest.mark.parametrize(("name", "dynamic"), [*((name, None) for name in WRONG), ("lengths", True), ("kernel", True)])
def test_what_an_eager_call_refuses_a_compiled_one_does(settings, name, dynamic):
    function, kind, message = WRONG[name]
    given = inputs(1, 2, 8, 64)
    with pytest.raises(kind, match=message):
        function(*given)
    with pytest.raises(Exception, match=message):
        call(function, *given, dynamic=dynamic)


def test_strictness_holds_in_compiled_calls(settings):
    settings(strict=True)
    for inner in (sagegen.attention, lambda *x: sagegen.attention(*x, window=(1, 1))):
        with pytest.raises(Exception, match=r"no kernel can answer: .* requires a gradient"):
            call(inner, *inputs(1, 2, 8, 64))
    settings(strict=True, backend="sdpa")  # who asks for torch gets it
    assert call(sagegen.attention, *inputs(1, 2, 8, 64)).shape == (1, 2, 8, 64)
    assert sagegen.last_dispatch().answer == "sdpa"


def test_a_patched_backend_holds_in_compiled_calls(settings):
    attend = torch.compile(lambda *x: torch.nn.functional.scaled_dot_product_attention(*x), backend="aot_eager")
    with sagegen.patched(backend="kernel"), pytest.raises(Exception, match="backend='kernel' cannot answer"):
        attend(*inputs(1, 2, 8, 64))


VARLEN_WRONG = {
    "type": ({"cu": torch.int64}, "cu_seqlens_q: dtype torch.int64 is not torch.int32"),
    "shape": ({"v_rows": 5}, r"v: length (5|s\d+) does not match k's (8|s\d+)"),
    "longest": ({"longest": 2}, r"max_seqlen_q=.+ rows of q do not fit"),
    "backend": ({"options": {"backend": "kernel"}}, "backend='kernel' cannot answer"),
    "window": ({"options": {"window": (-3, 0)}}, "has a negative side"),
}


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, None) for name in VARLEN_WRONG), ("shape", True), ("longest", True)]
)
def test_sequences_are_checked_while_tracing(settings, name, dynamic):
    change, message = VARLEN_WRONG[name]
    q, k, v = inputs(8, 2, 64)
    v = v[: change.get("v_rows", 8)]
    starts = torch.tensor([0, 5, 8], dtype=change.get("cu", torch.int32))
    longest = change.get("longest", 5)

    def attend(q, k, v, starts):
        return sagegen.attention_varlen(q, k, v, starts, starts, longest, longest, **change.get("options", {}))

    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        attend(q, k, v, starts)
    with pytest.raises(Exception, match=message):
        call(attend, q, k, v, starts, dynamic=dynamic)


def test_sequences_whose_longest_varies_are_checked_by_that(settings):
    q, k, v = inputs(8, 2, 64)
    starts = torch.tensor([0, 5, 8], dtype=torch.int32)

    def attend(q, k, v, longest):
        return sagegen.attention_varlen(q, k, v, starts, starts, longest, longest)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for longest in (5, 6, 7):
        torch.testing.assert_close(compiled(q, k, v, longest), attend(q, k, v, longest))
    with pytest.raises(Exception, match="do not fit 2 sequences"):
        compiled(q, k, v, 3)


@pytest.mark.parametrize("lengths", [(0, 8), (8, 0)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "return_lse": True}, {"window": (1, 1)}])
def test_nothing_to_compute_is_0_with_dynamic_shapes(settings, lengths, options):
    compiled = torch.compile(
        lambda *x: sagegen.attention(*x, **options), fullgraph=True, backend="aot_eager", dynamic=True
    )
    q, k, v = torch.ones(1, 2, lengths[0], 64, requires_grad=True), *torch.ones(2, 1, 2, lengths[1], 64).unbind()
    result = compiled(q, k, v)
    out, lse = result if isinstance(result, tuple) else (result, torch.full((1, 2, lengths[0]), -torch.inf))
    assert torch.equal(out, torch.zeros(1, 2, lengths[0], 64))
    assert torch.equal(lse, torch.full((1, 2, lengths[0]), -torch.inf))
    out.sum().backward()
    assert torch.equal(q.grad, torch.zeros_like(q))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (2, 1)}])
def test_head_counts_may_change_under_dynamic_shapes(settings, options):
    compiled = torch.compile(
        lambda *x: sagegen.attention(*x, **options), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for heads in (4, 6, 8, 2):
        q, k, v = inputs(2, heads, 8, 32)
        k, v = k[:, :2], v[:, :2]
        torch.testing.assert_close(compiled(q, k, v), sagegen.attention(q, k, v, **options))


@pytest.mark.parametrize("window", [(2**63, 0), (10**30, 10**30)])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_compiled_windows_may_be_beyond_64_bits(settings, window, needs_grad):
    q, k, v = inputs(1, 2, 8, 64)
    q = q if needs_grad else q.detach()
    starts = torch.tensor([0, 5, 8], dtype=torch.int32)
    expected = sagegen.attention(q, k, v, is_causal=window[1] == 0)
    torch.testing.assert_close(call(lambda *x: sagegen.attention(*x, window=window), q, k, v), expected)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    expected = sagegen.attention_varlen(*rows, starts, starts, 5, 5, is_causal=window[1] == 0)
    for attend in (torch.compile(sagegen.attention_varlen, backend="eager", fullgraph=True), sagegen.attention_varlen):
        torch.testing.assert_close(attend(*rows, starts, starts, 5, 5, window=window), expected)
