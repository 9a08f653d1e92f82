"""`torch.ops.sagegen`: what torch.compile, fake tensors and tensor subclasses see of a call."""

from __future__ import annotations

import functools
from typing import Any

import torch

from sagegen.runtime.answers import Result, empty_output, into, no_result
from sagegen.runtime.arguments import Checked, cast_type, check_call, check_out, check_strided, needs_grad
from sagegen.runtime.dispatch import dispatcher
from sagegen.runtime.fallback import attend
from sagegen.runtime.options import Options, clamp_window
from sagegen.runtime.varlen import varlen_dispatcher
from sagegen.runtime.varlen_arguments import LAYOUT, Sequences, check_varlen
from sagegen.runtime.varlen_fallback import attend_varlen

_LIBRARY = torch.library.Library("sagegen", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPTIONS = (
    "bool is_causal, float? scale, int[]? window, str precision, float min_cosine, bool? smooth_k, bool? smooth_q, "
    "bool? smooth_v, bool? rotate, bool return_lse, str? backend"
)
_DENSE = f"(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, str layout, {_OPTIONS})"
_VARLEN = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    f"SymInt max_seqlen_k, {_OPTIONS})"
)
#: The last two check calls that need a gradient, which are traced through torch SDPA: their fakes do so while tracing.
for _schema in (
    f"attention{_DENSE} -> (Tensor, Tensor)",
    f"attention_varlen{_VARLEN} -> (Tensor, Tensor)",
    f"check{_DENSE} -> ()",
    f"check_varlen{_VARLEN} -> ()",
):
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
#: Positions among the fields of Options after the layout, which the ops take in order.
_IS_CAUSAL, _SCALE, _WINDOW, _RETURN_LSE = 0, 1, 2, 9


def call_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    out: torch.Tensor | None,
    layout: str,
    *options: Any,
) -> Result:
    """`Dispatcher.attention` by way of the op. A call that needs gradients is checked as eagerly, while it is traced,
    and traced through torch SDPA."""
    options = _for_schema(options)
    _check_strided(q=q, k=k, v=v, attn_mask=attn_mask)
    if (dtype := cast_type(q, k, v)) is not None:
        q, k = q.to(dtype), k.to(dtype)
    if out is not None:
        check_out(out, q)
    if needs_grad(q, k, v, attn_mask):
        torch.ops.sagegen.check(q, k, v, attn_mask, layout, *options)
        result = _attend_traced(q, k, v, attn_mask, layout, *options)
    else:
        both = torch.ops.sagegen.attention(q, k, v, attn_mask, layout, *options)
        result = both if options[_RETURN_LSE] else both[0]
    return into(out, result)


def call_varlen_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: Sequences,
    out: torch.Tensor | None,
    *options: Any,
) -> Result:
    """`VarlenDispatcher.attention` by way of the op, or checked and traced through torch SDPA as `call_op`."""
    options = _for_schema(options)
    _check_strided(q=q, k=k, v=v, cu_seqlens_q=sequences.cu_seqlens_q, cu_seqlens_k=sequences.cu_seqlens_k)
    if (dtype := cast_type(q, k, v)) is not None:
        q, k = q.to(dtype), k.to(dtype)
    if out is not None:
        check_out(out, q)
    if needs_grad(q, k, v):
        torch.ops.sagegen.check_varlen(q, k, v, *sequences, *options)
        result = attend_varlen(
            q,
            k,
            v,
            sequences,
            is_causal=options[_IS_CAUSAL],
            scale=options[_SCALE],
            window=options[_WINDOW],
            return_lse=options[_RETURN_LSE],
        )
    else:
        both = torch.ops.sagegen.attention_varlen(q, k, v, *sequences, *options)
        result = both if options[_RETURN_LSE] else both[0]
    return into(out, result)


def _check_strided(**inputs: torch.Tensor | None) -> None:
    """Refuse tensors that the op's dispatch, which comes before its checks, has other words for."""
    for name, x in inputs.items():
        if isinstance(x, torch.Tensor):
            check_strided(name, x, "give a dense one")


def _attend_traced(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, layout: str, *options: Any
) -> Result:
    """A checked call as operations of torch, with gradients."""
    if q.numel() == 0 or k.numel() == 0:
        return no_result(q, k, v, layout, options[_RETURN_LSE])
    return attend(
        q,
        k,
        v,
        layout=layout,
        is_causal=options[_IS_CAUSAL],
        scale=options[_SCALE],
        window=options[_WINDOW],
        attn_mask=attn_mask,
        return_lse=options[_RETURN_LSE],
    )


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, layout: str, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    values = _as_given(options)
    with torch.no_grad():  # the op has no gradient; call_op sends calls that need one elsewhere
        result = dispatcher().attention(q, k, v, attn_mask, None, layout, *values)
    return _as_promised(q, k, v, result)


def _attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    values = _as_given(options)
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    with torch.no_grad():
        result = varlen_dispatcher().attention(q, k, v, sequences, None, *values)
    return _as_promised(q, k, v, result)


def _fake_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, layout: str, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, tokens = (1, 2) if layout == "HND" else (2, 1)
    lse_shape = (q.shape[0], q.shape[heads], q.shape[tokens]) if options[_RETURN_LSE] else (0,)
    return _promise(q, k, v), q.new_empty(lse_shape, dtype=torch.float32)


def _fake_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    lse_shape = (q.shape[1], q.shape[0]) if options[_RETURN_LSE] else (0,)
    return _promise(q, k, v), q.new_empty(lse_shape, dtype=torch.float32)


def _for_schema(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The caller's options, whose windows may be beyond the 64 bits of an op's argument."""
    window = options[_WINDOW]
    if not (isinstance(window, tuple) and len(window) == 2 and all(isinstance(side, int) for side in window)):
        return options  # the op's schema or the checks name what is wrong
    return (*options[:_WINDOW], clamp_window(window), *options[_WINDOW + 1 :])


def _as_given(options: tuple[Any, ...]) -> list[Any]:
    """The options of an op, which has lists of what the caller has in tuples."""
    values = list(options)
    values[_WINDOW] = None if values[_WINDOW] is None else tuple(values[_WINDOW])
    return values


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, layout: str, *options: Any
) -> None:
    asked = Options(layout, *_as_given(options))
    _note_gradient(check_call(q, k, v, asked, attn_mask), asked, q.device)


def _check_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> None:
    asked = Options(LAYOUT, *_as_given(options))
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _note_gradient(check_varlen(q, k, v, sequences, asked), asked, q.device)


def _note_gradient(checked: Checked, asked: Options, device: torch.device) -> None:
    """Record, or refuse, that torch answers a call which needs a gradient."""
    ours = dispatcher()
    choose = functools.partial(ours.choose, checked, asked, device, True)
    ours.last = ours.find_program(choose(), asked, device, choose)[0]


def _as_promised(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, result: Result
) -> tuple[torch.Tensor, torch.Tensor]:
    """An answer as the op's output, which has strides that its fake can know and no lse that is None."""
    out, lse = result if isinstance(result, tuple) else (result, q.new_empty(0, dtype=torch.float32))
    promised = _promise(q, k, v)
    return (out if out.stride() == promised.stride() else promised.copy_(out)), lse


def _promise(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What the op's output looks like, whoever answers."""
    dtype = cast_type(q, k, v)
    return empty_output(q if dtype is None else q.to(dtype))


for _name, _real, _fake in (
    ("attention", _attention, _fake_attention),
    ("attention_varlen", _attention_varlen, _fake_attention_varlen),
    ("check", _check, _check),
    ("check_varlen", _check_varlen, _check_varlen),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _real, _key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"sagegen::{_name}", _fake, lib=_LIBRARY)
