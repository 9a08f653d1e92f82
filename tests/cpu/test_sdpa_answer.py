"""Torch's own attention is called as it is where it means the same, and never where it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import sagegen
from sagegen.runtime import sdpa_answer
from sagegen.runtime.options import Options
from sagegen.runtime.sdpa_answer import PlainSdpaAnswer, prepare_sdpa


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw_qkv(q_len: int = 5, kv_len: int = 5, heads_kv: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draw(2, 4, q_len, 16), draw(2, heads_kv, kv_len, 16, seed=1), draw(2, heads_kv, kv_len, 16, seed=2)


def is_plain(inputs: Any, **options: Any) -> bool:
    mask = options.pop("attn_mask", None)
    answer = prepare_sdpa(inputs, None, Options(**options), mask)  # type: ignore[arg-type]
    return isinstance(answer, PlainSdpaAnswer)


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, scale: float = 0.25
) -> torch.Tensor:
    """In FP64, bottom-right."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.fixture
def general_runs(monkeypatch) -> list[torch.Tensor]:
    """Queries of calls that took the general way."""
    seen: list[torch.Tensor] = []
    original = sdpa_answer.attend
    monkeypatch.setattr(sdpa_answer, "attend", lambda q, *rest, **kw: seen.append(q) or original(q, *rest, **kw))
    return seen


@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [((5, 5), {}), ((5, 9), {}), ((5, 5), {"is_causal": True}), ((1, 9), {"is_causal": True}), ((5, 5), {"scale": 2})],
)
def test_plain_calls_are_right(lengths, options, heads_kv, general_runs):
    inputs = draw_qkv(*lengths, heads_kv)
    out = sagegen.attention(*inputs, backend="sdpa", **options)
    torch.testing.assert_close(out.double(), exact(*inputs, **options), rtol=1e-5, atol=1e-5)
    into = torch.empty_like(out)
    assert sagegen.attention(*inputs, backend="sdpa", out=into, **options) is into
    assert torch.equal(into, out)
    assert not general_runs


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((5, 9), {"is_causal": True}),
        ((9, 5), {"is_causal": True}),
        ((5, 5), {"window": (1, 1)}),
        ((5, 5), {"return_lse": True}),
        ((5, 5), {"scale": 0.0}),
        ((5, 5), {"scale": -1.0}),
        ((5, 5), {"layout": "NHD"}),
        ((5, 5), {"attn_mask": torch.ones(5, 5, dtype=torch.bool)}),
    ],
)
def test_calls_that_torch_means_otherwise_are_not_plain(lengths, options):
    assert is_plain(draw_qkv(*lengths))
    assert not is_plain(draw_qkv(*lengths), **options)


def test_rows_that_torchs_kernels_read_askew_are_not_plain():
    """On a GPU they end the context with `misaligned address`."""
    _, k, v = draw_qkv()
    assert not is_plain((draw(2, 4, 5, 18)[..., :16], k, v))
    assert is_plain((draw(2, 4, 5, 20)[..., :16], k, v))


def test_addresses_that_torchs_kernels_cannot_read_go_the_general_way(general_runs):
    q, k, v = draw_qkv()
    sagegen.attention(q, k, v, backend="sdpa")
    moved = torch.empty(q.numel() + 1)[1:].view_as(q).copy_(q)
    assert not general_runs
    out = sagegen.attention(moved, k, v, backend="sdpa")
    torch.testing.assert_close(out.double(), exact(q, k, v), rtol=1e-5, atol=1e-5)
    assert [x.data_ptr() for x in general_runs] == [moved.data_ptr()]


def test_autocast_goes_the_general_way_although_the_call_is_remembered(general_runs):
    inputs = draw_qkv()
    expected = sagegen.attention(*inputs, backend="sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        found = sagegen.attention(*inputs, backend="sdpa")
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert len(general_runs) == 1


def test_tangents_go_the_general_way_although_the_call_is_remembered():
    q, k, v = draw_qkv()
    sagegen.attention(q, k, v, backend="sdpa")
    tangent = draw(*q.shape, seed=3)
    with forward_ad.dual_level():
        sagegen.attention(q, k, v, backend="sdpa")
        out = sagegen.attention(forward_ad.make_dual(q, tangent), k, v, backend="sdpa")
        found = forward_ad.unpack_dual(out).tangent
    step = 1e-6
    slope = (exact(q.double() + step * tangent, k, v) - exact(q.double() - step * tangent, k, v)) / (2 * step)
    torch.testing.assert_close(found.double(), slope, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_exact_attention():
    inputs = [x.requires_grad_() for x in draw_qkv()]
    weights = draw(2, 4, 5, 16, seed=4)
    found = torch.autograd.grad((sagegen.attention(*inputs, backend="sdpa") * weights).sum(), inputs)
    expected = torch.autograd.grad((exact(*inputs) * weights).sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-46, -1e-46, 5e-324, 7e-46, -7e-46, 1e-45, -1e-45])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_scales_at_the_end_of_float32_give_causal_means(scale, dtype, needs_grad):
    """Torch's own fused attention has 0 for them, and then NaN."""
    q, k, v = (x.to(dtype) for x in draw_qkv())
    out = sagegen.attention(q.requires_grad_(needs_grad), k, v, is_causal=True, scale=scale, backend="sdpa")
    means = v.double().cumsum(2) / torch.arange(1, 6)[:, None]
    torch.testing.assert_close(out.double(), means, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    torch.testing.assert_close(sagegen.sdpa(q, k, v, is_causal=True, scale=scale), out)


@pytest.mark.parametrize("backend", [None, "reference", "sdpa"])
@pytest.mark.parametrize("in_dims", [(None, 0, 0), (None, 0, None), (None, None, 0), (0, 0, 0)])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_vmap_over_some_of_the_inputs(in_dims, backend, layout):
    batched = [x if at is None else torch.stack([x, -x, x + 1]) for x, at in zip(draw_qkv(), in_dims, strict=True)]

    def attend(q, k, v):
        return sagegen.attention(q, k, v, is_causal=True, layout=layout, backend=backend, return_lse=True)

    found = torch.func.vmap(attend, in_dims)(*batched)
    for i in range(3):
        one = attend(*(x if at is None else x[i] for x, at in zip(batched, in_dims, strict=True)))
        for ours, expected in zip(found, one, strict=True):
            torch.testing.assert_close(ours[i], expected, rtol=1e-5, atol=1e-5)
