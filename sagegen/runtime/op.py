"""The functions that a model calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sagegen.runtime.dispatch import dispatcher
from sagegen.runtime.library import call_op, call_varlen_op
from sagegen.runtime.options import DEFAULT_MIN_COSINE
from sagegen.runtime.varlen import varlen_dispatcher
from sagegen.runtime.varlen_arguments import Sequences

if TYPE_CHECKING:
    from collections.abc import Callable

    from sagegen.runtime.answers import Result
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
    gradients, masks that hide more than whole keys, head dims above 256, other dtypes. CPU tensors get exact attention
    in FP32.

    Args:
        q: [batch, heads_q, q_len, head_dim] for layout HND, [batch, q_len, heads_q, head_dim] for NHD; float16 or
            bfloat16. Any strides; a last dim that is not contiguous, or rows that are not 16 bytes apart, cost a copy,
            and so does a head_dim below 256 other than 64 and 128, which is padded.
        k, v: the same with heads_kv and kv_len; heads_kv divides heads_q (GQA). Beside a 16-bit v, q and k in float32
            are cast to its type, and the output has it.
        layout: `HND` or `NHD`.
        is_causal: query i sees key j when j <= i + kv_len - q_len, aligned bottom-right.
        scale: multiplies q . k; any finite number that keeps logits below some thousands (docs/numerics.md, Limits).
            None is 1/sqrt(head_dim).
        window: (left, right) keys that a query sees on each side of its causal position; -1 leaves a side open.
        attn_mask: bool (True is seen) or floating (added to the scores), broadcastable to
            [batch, heads_q, q_len, kv_len] in both layouts; combines with is_causal and window. A kernel takes a bool
            one that all heads and rows of a batch item share, without those: it leaves hidden keys out, at the price of
            copies of k and v. A floating one counts in its own precision: one in float32 beside 16-bit inputs has torch
            compute in float32; where it holds 0 and -inf alone, cast it to their type.
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
        The output, q's shape and v's dtype. With `return_lse` also the natural-log log-sum-exp, float32,
        [batch, heads_q, q_len]. A query that sees no key gives 0 and -inf.

    Raises:
        TypeError, ArgumentError: a malformed argument; nothing was launched.
        UnsupportedError: no kernel can answer and `backend` or SAGEGEN_STRICT insists on one.
        ConfigError: the config that SAGEGEN_PIN names breaks a rule for this GPU and problem.
        DriverError: a launch was refused.
        EmulatorError: in the emulator a kernel raced, deadlocked or left its memory; the message quotes the line.
    """
    answer: Callable[..., Result]
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


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
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
    """`attention` within each of many sequences that lie one behind another, without padding.

    By the config that is tuned for dense calls of these lengths, compiled at the first call. What no kernel can do is
    answered by torch SDPA, of padded copies, a bounded number of sequences at a time: as in `attention`, and Q smoothed
    or in INT4. CPU tensors get exact attention in FP32. The host never waits for the device, unless backend="reference"
    is asked for there.

    Args:
        q: [total_q, heads_q, head_dim], the query rows of all sequences; dtypes and head dims as in `attention`.
        k, v: [total_k, heads_kv, head_dim]; heads_kv divides heads_q (GQA).
        cu_seqlens_q: int32 [sequences + 1] on q's device, from 0 to total_q without falling: sequence i has the rows
            from value i up to value i + 1, which may be none. Checked where q is on the CPU. Elsewhere the values are
            never read on the host: wrong ones leave results unspecified, and memory outside of the tensors untouched.
        cu_seqlens_k: the same of k and v; a sequence without keys gives 0 and -inf.
        max_seqlen_q, max_seqlen_k: no sequence is longer. Torch's answer takes time for that many rows of each.
        is_causal: query i of a sequence sees its key j when j <= i + keys - queries, aligned bottom-right.
        window: (left, right) keys of its sequence that a query sees on each side of its causal position; -1 leaves a
            side open.
        scale, precision, min_cosine, smooth_k, smooth_q, smooth_v, rotate, out, backend: as in `attention`.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        The output, q's shape and v's dtype. With `return_lse` also the natural-log log-sum-exp, float32,
        [heads_q, total_q]. A query that sees no key gives 0 and -inf.

    Raises:
        TypeError, ArgumentError, UnsupportedError: as `attention`.
    """
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    answer: Callable[..., Result]
    plain = all(type(x) in _PLAIN for x in inputs)
    if torch.compiler.is_compiling() or not (plain or _has_stranger(*inputs)):
        answer = call_varlen_op
    else:
        answer = varlen_dispatcher().attention
    # fmt: off
    return answer(
        q, k, v, sequences, out,
        is_causal, scale, window, precision, min_cosine,
        smooth_k, smooth_q, smooth_v, rotate, return_lse, backend,
    )
    # fmt: on


def _has_stranger(*inputs: object) -> bool:
    """Whether one is no tensor at all; the dispatcher's checks name it."""
    return not all(isinstance(x, torch.Tensor) for x in inputs)


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

    Where it would raise UnsupportedError, since `backend` or SAGEGEN_STRICT insist on a kernel, this says what torch
    would answer without them: `is_fallback`, with the reason.

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
    parts that share what the largest of them needs, but for one with a mask of keys. 0 where torch SDPA or the
    reference answers; outputs, and copies of inputs whose strides no kernel reads, are not counted.

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


def warmup(
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
    """Do all that the first call of `attention` with the same arguments would do but compute: find or compile the
    kernel, load it, try it on a tiny problem (SAGEGEN_SELF_TEST).

    Kernels are per process and device, so any thread's calls find them, those inside a CUDA graph capture too; there a
    kernel that is not loaded yet cannot be, and torch SDPA answers. Waits for the device.

    Returns:
        What answers such calls, and why.

    Raises:
        TypeError, ArgumentError, UnsupportedError: as `attention`.
    """
    # fmt: off
    return dispatcher().warm_up(
        q, k, v, attn_mask,
        layout, is_causal, scale, window, precision, min_cosine,
        smooth_k, smooth_q, smooth_v, rotate, return_lse, backend,
    )
    # fmt: on


def last_dispatch() -> Explanation | None:
    """Why this thread's last call was answered as it was; None before the first. Calls inside torch.compile count."""
    return dispatcher().last
