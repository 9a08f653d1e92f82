"""The functions that a model calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sagegen.errors import ArgumentError
from sagegen.runtime.arguments import DEFAULT_MIN_COSINE
from sagegen.runtime.dispatch import dispatcher
from sagegen.runtime.fallback import torch_sdpa, with_positive_scale
from sagegen.runtime.library import call_op
from sagegen.runtime.torch_call import Views, torch_reason, view_as_attention

if TYPE_CHECKING:
    from sagegen.runtime.explanation import Explanation

#: Types whose address can be handed to a kernel; other subclasses of Tensor go through the op and its fake.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "HND",
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    attn_mask: torch.Tensor | None = None,
    precision: str = "auto",
    min_cosine: float = DEFAULT_MIN_COSINE,
    smooth_k: bool | None = None,
    smooth_q: bool | None = None,
    smooth_v: bool | None = None,
    rotate: bool | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v by the tuned kernel for this GPU and these lengths.

    What no kernel can do is answered by torch SDPA, with one log line per reason, or refused under SAGEGEN_STRICT=1:
    gradients, masks, windows, other head dims and dtypes. CPU tensors get exact attention in FP32.

    Args:
        q: [batch, heads_q, q_len, head_dim] for layout HND, [batch, q_len, heads_q, head_dim] for NHD; float16 or
            bfloat16. Any strides; a last dim that is not contiguous, or rows that are not 16 bytes apart, cost a copy.
        k, v: the same with heads_kv and kv_len; heads_kv divides heads_q (GQA).
        layout: `HND` or `NHD`.
        is_causal: query i sees key j when j <= i + kv_len - q_len, aligned bottom-right.
        scale: multiplies q . k; any finite number that keeps logits below some thousands (docs/numerics.md, Limits).
            None is 1/sqrt(head_dim).
        window: (left, right) keys that a query sees on each side of its causal position; -1 leaves a side open.
        attn_mask: bool (True is seen) or floating (added to the scores), broadcastable to
            [batch, heads_q, q_len, kv_len] in both layouts; combines with is_causal and window.
        precision: how Q and K are quantized: `int8`, `int4`, or `auto`: whichever tuned kernel is the fastest of those
            that reach `min_cosine`, INT8 where that is not known.
        min_cosine: least cosine, against FP64 on normal inputs, of the kernel that may answer. INT4 has 0.97 to 0.99:
            it needs a lower one than the default.
        smooth_k, smooth_q, smooth_v, rotate: True or False leave only tuned kernels that take that step of the
            quantizer, or do not; None leaves it to the kernel. All kernels smooth K.
        return_lse: also return the log-sum-exp of the scores.
        out: written and returned instead of a new tensor; q's shape, dtype and device. Strides that would have q copied
            cost a copy.
        backend: `kernel` raises where no kernel can answer; `sdpa` and `reference` force those. `emulator` runs an
            L20's default kernel on CPU tensors, about a second per million scores, and raises where no kernel can
            answer; it needs g++. None chooses.

    Returns:
        The output, q's shape and dtype. With `return_lse` also the natural-log log-sum-exp, float32,
        [batch, heads_q, q_len]. A query that sees no key gives 0 and -inf.

    Raises:
        TypeError, ArgumentError: a malformed argument; nothing was launched.
        UnsupportedError: no kernel can answer and `backend` or SAGEGEN_STRICT insists on one.
        DriverError: a launch was refused.
        EmulatorError: in the emulator a kernel raced, deadlocked or left its memory; the message quotes the line.
    """
    plain = type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN
    if torch.compiler.is_compiling() or not (plain or _has_stranger(q, k, v)):
        answer = call_op
    else:
        answer = dispatcher().attention
    # fmt: off
    return answer(
        q, k, v, attn_mask, out,
        layout, is_causal, scale, window, precision, min_cosine,
        smooth_k, smooth_q, smooth_v, rotate, return_lse, backend,
    )
    # fmt: on


def _has_stranger(*inputs: object) -> bool:
    """Whether one is no tensor at all; the dispatcher's checks name it."""
    return not all(isinstance(x, torch.Tensor) for x in inputs)


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
    answers unless SAGEGEN_BACKEND names a backend.

    Raises:
        UnsupportedError: torch would have to answer a call on a GPU and SAGEGEN_STRICT=1 is set, or SAGEGEN_BACKEND is
            `kernel` or `emulator`.
        What torch raises for a call that it refuses.
    """
    if is_causal and attn_mask is not None:  # torch refuses that, in its own words
        return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    found = _find_views(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(found, Views):
        try:
            return _attend_views(found, is_causal, scale)
        except ArgumentError as error:  # torch has its own words for it
            found = str(error)
    _note_torch(found, query.device.type)
    query, scale = with_positive_scale(query, scale)
    return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _find_views(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Views | str:
    """What `attention` would be given, or why only torch may answer."""
    kind = query.device.type
    if kind != "cuda" and not (kind == "cpu" and _is_backend_set()):
        return f"tensors are on {kind}"
    reason = torch_reason(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return reason or view_as_attention(query, key, value, enable_gqa)


@torch.compiler.assume_constant_result
def _is_backend_set() -> bool:
    """Whether SAGEGEN_BACKEND names one; compiled code keeps what held when it was traced."""
    return dispatcher().env.backend is not None


@torch.compiler.assume_constant_result
def _note_torch(reason: str, device: str) -> None:
    """Record, or refuse, that torch answers; compiled code does so when it is traced."""
    dispatcher().answer_by_torch(reason, device)


def _attend_views(views: Views, is_causal: bool, scale: float | None) -> torch.Tensor:
    """`attention` of four-dimensional views, its output in torch's shape."""
    result = attention(views.query, views.key, views.value, is_causal=is_causal, scale=scale)
    out = result[0] if isinstance(result, tuple) else result
    return out if len(views.shape) == 4 else out.view(views.shape)


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "HND",
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    attn_mask: torch.Tensor | None = None,
    precision: str = "auto",
    min_cosine: float = DEFAULT_MIN_COSINE,
    smooth_k: bool | None = None,
    smooth_q: bool | None = None,
    smooth_v: bool | None = None,
    rotate: bool | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Explanation:
    """What `attention` with the same arguments would answer, and why; runs, loads and builds nothing.

    Raises:
        TypeError, ArgumentError: as `attention`.
    """
    # fmt: off
    return dispatcher().explain(
        q, k, v, attn_mask,
        layout, is_causal, scale, window, precision, min_cosine,
        smooth_k, smooth_q, smooth_v, rotate, return_lse, backend,
    )
    # fmt: on


def workspace_bytes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "HND",
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    attn_mask: torch.Tensor | None = None,
    precision: str = "auto",
    min_cosine: float = DEFAULT_MIN_COSINE,
    smooth_k: bool | None = None,
    smooth_q: bool | None = None,
    smooth_v: bool | None = None,
    rotate: bool | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> int:
    """Bytes of scratch that `attention` with the same arguments allocates for its kernels; runs and builds nothing.

    That is room for the quantized Q, K and V, their scales and, where Q is smoothed, the scores' correction of one row
    per block of queries (SageAttention2, section 3.2). A call that would need more than SAGEGEN_WORKSPACE_MIB runs in
    parts that share what the largest of them needs. 0 where torch SDPA or the reference answers; outputs, and copies
    of inputs whose strides no kernel reads, are not counted.

    Raises:
        TypeError, ArgumentError: as `attention`.
    """
    # fmt: off
    return dispatcher().workspace_bytes(
        q, k, v, attn_mask,
        layout, is_causal, scale, window, precision, min_cosine,
        smooth_k, smooth_q, smooth_v, rotate, return_lse, backend,
    )
    # fmt: on


def last_dispatch() -> Explanation | None:
    """Why this thread's last call was answered as it was; None before the first. Calls inside torch.compile count."""
    return dispatcher().last
