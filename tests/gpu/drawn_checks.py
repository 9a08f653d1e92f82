"""What a drawn call is held to: attention in FP64, written out here, and what the call must leave alone."""

from __future__ import annotations

import math
from typing import Any

import torch

import sagegen
from drawn_calls import DrawnCall, Tensors, make_tensors
from exact_attention import attend, seen_keys, usual_norm
from sagegen.runtime.explanation import KERNEL_ANSWERS

#: Largest error of an output, by the largest value: two roundings, of weights and of the output, and some.
EXACT_ERRORS = {"float16": 2.0**-9, "bfloat16": 2.0**-6, "float32": 1e-4, "float64": 1e-5}
EXACT_LSE = 1e-4
#: Of kernels: relative L2 and the largest error of an lse, as LIMITS of call_errors.py has them for such inputs.
KERNEL_L2, KERNEL_LSE = 0.075, 0.08


def exact(call: DrawnCall, x: Tensors) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Output, HND, lse and `usual_norm` in FP64. A row that sees no key is 0 and -inf."""
    q, k, v = (y if call.layout == "HND" else y.transpose(1, 2) for y in (x.q, x.k, x.v))
    bias = None if x.mask is None or x.mask.dtype == torch.bool else x.mask
    inputs = (q, k, v, visible(call, x), call.head_dim**-0.5 if call.scale is None else call.scale, bias)
    return (*attend(*inputs), usual_norm(*inputs))


def visible(call: DrawnCall, x: Tensors) -> torch.Tensor:
    """[q_len, kv_len], or what that broadcasts to with a bool mask."""
    seen = seen_keys(call.q_len, call.kv_len, call.is_causal, call.window, x.q.device)
    return seen & x.mask if x.mask is not None and x.mask.dtype == torch.bool else seen


def options_of(call: DrawnCall, x: Tensors) -> dict[str, Any]:
    """Arguments of `sagegen.attention`, but for out=, as of `sagegen.explain`."""
    return {
        "layout": call.layout,
        "is_causal": call.is_causal,
        "window": call.window,
        "attn_mask": x.mask,
        "scale": call.scale,
        "return_lse": call.return_lse,
    }


def check_call(call: DrawnCall, device: str, backend: str | None = None) -> str:
    """Make a call and compare everything that comes back; what answered is returned."""
    x = make_tensors(call, device)
    expected, expected_lse, usual = exact(call, x)
    before = [y.clone() for y in (x.q, x.k, x.v)]
    result = sagegen.attention(x.q, x.k, x.v, **options_of(call, x), out=x.out, backend=backend)
    out, lse = result if call.return_lse else (result, None)
    answer = sagegen.last_dispatch().answer
    assert out is x.out or x.out is None
    assert (out.shape, out.dtype, out.device) == (x.q.shape, x.q.dtype, x.q.device)
    out = out if call.layout == "HND" else out.transpose(1, 2)
    v = x.v if call.layout == "HND" else x.v.transpose(1, 2)
    check_output(answer, out.double(), expected, expected_lse == -math.inf, v, usual)
    if lse is not None:
        assert (lse.shape, lse.dtype) == (expected_lse.shape, torch.float32)
        check_lse(answer, lse.double(), expected_lse)
    for name, y, was in zip("qkv", (x.q, x.k, x.v), before, strict=True):
        assert call.out == name or torch.equal(y.nan_to_num(7), was.nan_to_num(7)), f"{name} was written"
    return answer


def check_output(
    answer: str, out: torch.Tensor, expected: torch.Tensor, blind: torch.Tensor, v: torch.Tensor, usual: float
) -> None:
    """Compare an output, HND, with the exact one.

    Args:
        blind: which rows see no key.
        v: HND; NaN in what nobody sees.
        usual: of `usual_norm`.
    """
    assert not out[blind].any(), "a row that sees no key is not 0"
    if not out.numel() or not v.numel():
        return
    largest = v.double().nan_to_num(0).abs().max().item()
    error = (out - expected).abs().max().item()
    if answer not in KERNEL_ANSWERS:
        assert error <= EXACT_ERRORS[str(v.dtype).removeprefix("torch.")] * largest, (answer, error)
        return
    found, limit = (out - expected).norm().item(), KERNEL_L2 * max(expected.norm().item(), usual)
    assert found <= limit, (answer, found, limit)
    assert error <= 0.25 * largest, (answer, error)


def check_lse(answer: str, lse: torch.Tensor, expected: torch.Tensor) -> None:
    blind = expected == -math.inf
    assert (lse[blind] == -math.inf).all(), "the lse of a row that sees no key is not -inf"
    if blind.all():
        return
    error = torch.where(blind, 0, (lse - expected) / (1 if answer in KERNEL_ANSWERS else 1 + expected.abs()))
    limit = KERNEL_LSE if answer in KERNEL_ANSWERS else EXACT_LSE
    assert error.abs().max().item() <= limit, (answer, error.abs().max().item())
