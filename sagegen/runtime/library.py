"""`torch.ops.sagegen.attention`: what torch.compile, fake tensors and tensor subclasses see of a call."""

from __future__ import annotations

from typing import Any

import torch

from sagegen.runtime.answers import Result, empty_output
from sagegen.runtime.arguments import cast_type, check_out, needs_grad
from sagegen.runtime.dispatch import dispatcher
from sagegen.runtime.fallback import attend

_LIBRARY = torch.library.Library("sagegen", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "attention(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, str layout, bool is_causal, float? scale, "
    "int[]? window, str precision, float min_cosine, bool? smooth_k, bool? smooth_q, bool? smooth_v, bool? rotate, "
    "bool return_lse, str? backend) -> (Tensor, Tensor)"
)
#: Positions among the op's arguments after attn_mask, which are the fields of Options in order.
_LAYOUT, _IS_CAUSAL, _SCALE, _WINDOW, _RETURN_LSE = 0, 1, 2, 3, 10


def call_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    out: torch.Tensor | None,
    *options: Any,
) -> Result:
    """`Dispatcher.attention` by way of the op. A call that needs gradients is traced through torch SDPA instead."""
    if (dtype := cast_type(q, k, v)) is not None:
        q, k = q.to(dtype), k.to(dtype)
    if out is not None:
        check_out(out, q)
    if needs_grad(q, k, v, attn_mask):
        result = attend(
            q,
            k,
            v,
            layout=options[_LAYOUT],
            is_causal=options[_IS_CAUSAL],
            scale=options[_SCALE],
            window=options[_WINDOW],
            attn_mask=attn_mask,
            return_lse=options[_RETURN_LSE],
        )
    else:
        both = torch.ops.sagegen.attention(q, k, v, attn_mask, *options)
        result = both if options[_RETURN_LSE] else both[0]
    if out is None:
        return result
    if isinstance(result, tuple):
        return out.copy_(result[0]), result[1]
    return out.copy_(result)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    values = list(options)
    values[_WINDOW] = None if values[_WINDOW] is None else tuple(values[_WINDOW])
    with torch.no_grad():  # the op has no gradient; call_op sends calls that need one elsewhere
        result = dispatcher().attention(q, k, v, attn_mask, None, *values)
    out, lse = result if isinstance(result, tuple) else (result, q.new_empty(0, dtype=torch.float32))
    promised = _promise(q, k, v)
    return (out if out.stride() == promised.stride() else promised.copy_(out)), lse


def _fake_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, tokens = (1, 2) if options[_LAYOUT] == "HND" else (2, 1)
    lse_shape = (q.shape[0], q.shape[heads], q.shape[tokens]) if options[_RETURN_LSE] else (0,)
    return _promise(q, k, v), q.new_empty(lse_shape, dtype=torch.float32)


def _promise(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What the op's output looks like, whoever answers."""
    dtype = cast_type(q, k, v)
    return empty_output(q if dtype is None else q.to(dtype))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention", _attention, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("sagegen::attention", _fake_attention, lib=_LIBRARY)
