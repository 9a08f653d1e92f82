"""`torch.nn.functional.scaled_dot_product_attention` with a kernel where one gives the same, torch elsewhere."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch

from sagegen.errors import ArgumentError
from sagegen.runtime.dispatch import dispatcher
from sagegen.runtime.fallback import (
    as_torch_masks,
    as_torch_reads,
    differentiable_forward,
    torch_sdpa,
    with_positive_scale,
)
from sagegen.runtime.op import attention
from sagegen.runtime.torch_call import Views, torch_reason, view_as_attention


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with a kernel where one gives the same, torch elsewhere.

    Keeps torch's signature, its causal rule, which aligns top-left when lengths differ, and its broadcasting: inputs of
    three dims or of more than four, and batches or heads that broadcast, reach a kernel as views. On CPU tensors torch
    answers unless SAGEGEN_BACKEND names a backend. `sagegen.patched` puts it in torch's place, with options.

    Raises:
        UnsupportedError: torch would have to answer a call on a GPU and SAGEGEN_STRICT=1 is set, or SAGEGEN_BACKEND is
            `kernel` or `emulator`.
        What torch raises for a call that it refuses.
    """
    return sdpa_with({}, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def sdpa_with(
    options: Mapping[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`sdpa` with further keywords of `attention`, already checked: precision, accuracy, steps and backend.

    Raises:
        UnsupportedError: torch would have to answer, and the backend that is asked for or SAGEGEN_STRICT=1 forbids it.
    """
    if not all(isinstance(x, torch.Tensor) for x in (query, key, value)):  # torch has its own words for it
        return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if any(x.is_nested or x.layout is not torch.strided for x in given if isinstance(x, torch.Tensor)):
        _note_torch("inputs are not plain strided tensors", query.device.type, options.get("backend"))
        return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if is_causal and attn_mask is not None:
        attn_mask, is_causal = _with_causality(query, key, attn_mask), False
    scale = _as_number(scale)
    backend = options.get("backend")
    kind = query.device.type
    reason: str | None = f"tensors are on {kind}"
    if kind == "cuda" or (kind == "cpu" and (backend is not None or _is_backend_set())):
        query, key, value, attn_mask = _as_autocast(kind, query, key, value, attn_mask)
        reason = torch_reason(query, key, value, attn_mask, dropout_p, is_causal, scale)
    found = reason or view_as_attention(query, key, value, enable_gqa)
    if isinstance(found, Views):
        try:
            return _attend_views(found, attn_mask, is_causal, scale, options)
        except ArgumentError as error:  # torch has its own words for it
            found = str(error)
    _note_torch(found, kind, backend)
    return _attend_by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _with_causality(query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
    """`attn_mask` and is_causal=True in one mask, where the installed torch takes both.

    Its fused kernels may drop one of the two on a GPU (torch 2.11).

    Raises:
        RuntimeError: it does not.
    """
    if not _takes_causality_with_mask():
        raise RuntimeError("attn_mask: excludes is_causal=True, as in torch; hide the later keys in attn_mask, too")
    causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return attn_mask & causal if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~causal, -math.inf)


@torch.compiler.assume_constant_result
@functools.cache
def _takes_causality_with_mask() -> bool:
    """Whether torch answers a call with both: 2.9.1 does, 2.14 refuses."""
    x = torch.zeros(1, 1, 2, 64, dtype=torch.float16)
    try:
        torch_sdpa(x, x, x, attn_mask=torch.ones(2, 2, dtype=torch.bool), is_causal=True)
    except RuntimeError:
        return False
    return True


def _as_number(scale: Any) -> Any:
    """A scale that is a tensor as the number that torch makes of it; compiled code leaves that to torch."""
    if not isinstance(scale, torch.Tensor) or torch.compiler.is_compiling():
        return scale
    return scale.item() if scale.dim() == 0 and not scale.requires_grad else scale


def _as_autocast(kind: str, *inputs: Any) -> Any:
    """The inputs in the type that torch's autocast gives its own function's, before `attention`, which it leaves alone.

    Args:
        kind: of the inputs' device.
    """
    if not torch.is_autocast_enabled(kind):
        return inputs
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 and x.device.type == kind
        else x
        for x in inputs
    )


def _attend_by_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Torch's own function, without its faults on a GPU: what its fused kernels cannot read, a scale of 0 or less, and
    rows that a bool mask hides, which are not 0 there (torch 2.11 on an H200: the mean of the values)."""
    given: Any = scale
    if isinstance(given, numbers.Real):  # torch has its own words for what is none
        query, scale = with_positive_scale(query, scale)
    query, key, value = (as_torch_reads(x) for x in (query, key, value))
    attn_mask = as_torch_masks(attn_mask, key.shape[-2]) if key.dim() > 1 else attn_mask
    blind = None
    if attn_mask is not None and attn_mask.dtype == torch.bool and attn_mask.device.type == "cuda":
        blind = ~attn_mask.any(-1, keepdim=True)
        attn_mask = attn_mask | blind
    with differentiable_forward(query, key, value, attn_mask):
        out = torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return out if blind is None else out.masked_fill(blind, 0)


@torch.compiler.assume_constant_result
def _is_backend_set() -> bool:
    """Whether SAGEGEN_BACKEND names one; compiled code keeps what held when it was traced."""
    return dispatcher().env.backend is not None


@torch.compiler.assume_constant_result
def _note_torch(reason: str, device: str, backend: str | None) -> None:
    """Record, or refuse, that torch answers; compiled code does so when it is traced."""
    dispatcher().answer_by_torch(reason, device, backend)


def _attend_views(
    views: Views, attn_mask: torch.Tensor | None, is_causal: bool, scale: float | None, options: Mapping[str, Any]
) -> torch.Tensor:
    """`attention` of four-dimensional views, its output in torch's shape."""
    result = attention(
        views.query, views.key, views.value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, **options
    )
    out = result[0] if isinstance(result, tuple) else result
    return out if len(views.shape) == 4 else out.view(views.shape)
