"""Checks a call's arguments: what is asked, or which argument is wrong, or why only torch SDPA can answer.

Layouts: HND is [batch, heads, tokens, dim], NHD is [batch, tokens, heads, dim].
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch

from sagegen.entry import ASSUMED_COSINES
from sagegen.errors import ArgumentError
from sagegen.plan import Strides, TensorStrides
from sagegen.problem import HEAD_DIMS, Dtype, Problem, Shape

LAYOUTS = ("HND", "NHD")
PRECISIONS = ("auto", "int8", "int4")
#: Arguments that ask for a step of the quantizer, and the config's attribute that says whether it takes it.
STEPS = {"smooth_q": "smooths_q", "smooth_v": "smooths_v", "rotate": "rotates"}
BACKENDS = ("kernel", "emulator", "sdpa", "reference")
DEFAULT_MIN_COSINE = ASSUMED_COSINES["int8"]
#: Kernels load 16 bytes at a time: addresses and strides must be multiples of that.
ALIGNMENT = 16

_KERNEL_DTYPES: dict[torch.dtype, Dtype] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_OTHER_DTYPES = (torch.float32, torch.float64)
_ALIGNED_ELEMENTS = ALIGNMENT // 2
_CONTIGUOUS = "give a tensor of shape [batch, heads, tokens, dim] (HND) or [batch, tokens, heads, dim] (NHD)"


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `attention` that are no tensors, as the caller gave them. See there for their meaning."""

    layout: str = "HND"
    is_causal: bool = False
    scale: float | None = None
    window: tuple[int, int] | None = None
    precision: str = "auto"
    min_cosine: float = DEFAULT_MIN_COSINE
    smooth_k: bool | None = None
    smooth_q: bool | None = None
    smooth_v: bool | None = None
    rotate: bool | None = None
    return_lse: bool = False
    backend: str | None = None

    @property
    def steps(self) -> dict[str, bool]:
        """The steps of the quantizer that the caller wants, or wants not, by argument."""
        asked = {name: getattr(self, name) for name in STEPS}
        return {name: value for name, value in asked.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Checked:
    """A call whose arguments fit each other.

    Attributes:
        shape: its lengths and counts; any may be zero.
        head_dim: channels per head.
        scale: of the scores.
        problem: what a kernel would be asked, in INT8 unless INT4 is asked for; None when `obstacle` says why not.
        obstacle: why no kernel can answer, None when one may.
        is_masked: an attn_mask or a window is given.
        copies: names of the tensors whose strides no kernel can read; they are made contiguous.
    """

    shape: Shape
    head_dim: int
    scale: float
    problem: Problem | None
    obstacle: str | None
    is_masked: bool
    copies: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the answer is known without computing: no queries, or no keys to see."""
        shape = self.shape
        return 0 in (shape.batch, shape.heads_q, shape.q_len, shape.kv_len)


def check_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, attn_mask: torch.Tensor | None = None
) -> Checked:
    """Check all arguments of a call.

    Args:
        q: [batch, heads_q, q_len, head_dim] in layout HND.
        k, v: [batch, heads_kv, kv_len, head_dim]; heads_kv divides heads_q.
        attn_mask: bool or floating, broadcastable to [batch, heads_q, q_len, kv_len] in both layouts.

    Raises:
        TypeError: an argument is of the wrong Python type.
        ArgumentError: an argument has a wrong value, shape, dtype or device; the message names it.
    """
    _check_options(options)
    _check_tensors(q, k, v)
    shape = _read_shape(q, k, v, options.layout)
    head_dim = q.shape[-1]
    if attn_mask is not None:
        _check_mask(attn_mask, q, shape)
    obstacle = _obstacle(q, head_dim, options, attn_mask)
    return Checked(
        shape=shape,
        head_dim=head_dim,
        scale=float(options.scale) if options.scale is not None else head_dim**-0.5,
        problem=None if obstacle else _make_problem(head_dim, _KERNEL_DTYPES[q.dtype], options),
        obstacle=obstacle,
        is_masked=attn_mask is not None or options.window is not None,
        copies=tuple(name for name, x in (("q", q), ("k", k), ("v", v)) if not is_readable(x)),
    )


def _make_problem(head_dim: int, dtype: Dtype, options: Options) -> Problem:
    return Problem(head_dim, dtype, options.is_causal, "int4" if options.precision == "int4" else "int8")


def check_backend(name: str, value: str | None) -> None:
    """Raise ArgumentError, naming the argument or variable `name`, unless `value` is None or one of BACKENDS."""
    if value is not None and value not in BACKENDS:
        raise ArgumentError(f"{name}={value!r} does not exist", f"use one of {', '.join(BACKENDS)}")


def check_out(out: torch.Tensor, q: torch.Tensor) -> None:
    """Check that `out` can take the answer to `q`.

    Raises:
        TypeError, ArgumentError: it can't.
    """
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor, not {type(out).__name__}")
    for what, has, needs in (
        ("shape", tuple(out.shape), tuple(q.shape)),
        ("dtype", out.dtype, q.dtype),
        ("device", out.device, q.device),
    ):
        if has != needs:
            raise ArgumentError(f"out: {what} is {has}, q's is {needs}", "make it with torch.empty_like(q)")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ArgumentError(
            f"out: strides {out.stride()} put several elements in one place", "make it with torch.empty_like(q)"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("out: requires a gradient, which writing into it would lose", "leave out= away")


def needs_grad(*inputs: torch.Tensor | None) -> bool:
    """Whether one requires a gradient and grad mode is on."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def is_readable(x: torch.Tensor) -> bool:
    """Whether a kernel can read `x`'s strides: dim contiguous, the rest whole vectors apart; size-1 dims are free."""
    *outer, channel = zip(x.shape, x.stride(), strict=True)
    return (channel[0] <= 1 or channel[1] == 1) and all(
        size <= 1 or stride % _ALIGNED_ELEMENTS == 0 for size, stride in outer
    )


def read_strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layout: str) -> TensorStrides:
    """Strides of a call's tensors in elements; 0 for a size-1 dim, whatever torch says: no index reaches it."""
    heads, tokens = (1, 2) if layout == "HND" else (2, 1)

    def read(x: torch.Tensor) -> Strides:
        strides = [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]
        return Strides(strides[0], strides[heads], strides[tokens])

    return TensorStrides(read(q), read(k), read(v), read(out))


def _check_options(options: Options) -> None:
    for name, value, allowed in (
        ("layout", options.layout, LAYOUTS),
        ("precision", options.precision, PRECISIONS),
    ):
        if value not in allowed:
            raise ArgumentError(f"{name}={value!r} does not exist", f"use one of {', '.join(map(str, allowed))}")
    check_backend("backend", options.backend)
    for name in ("is_causal", "return_lse"):
        if not isinstance(getattr(options, name), bool):
            raise TypeError(f"{name} must be a bool, not {type(getattr(options, name)).__name__}")
    for name in ("smooth_k", *STEPS):
        if not isinstance(getattr(options, name), (bool, type(None))):
            raise TypeError(f"{name} must be a bool or None, not {type(getattr(options, name)).__name__}")
    _check_number("scale", options.scale)
    _check_number("min_cosine", options.min_cosine)
    _check_window(options.window)


def _check_number(name: str, value: object) -> None:
    if value is None and name == "scale":
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not math.isfinite(value):
        raise ArgumentError(f"{name}={value} is not finite", "give a finite number")
    if name == "min_cosine" and not 0 <= float(value) <= 1:
        raise ArgumentError(f"min_cosine={value} is no cosine that an output could have to reach", "use 0 to 1")


def _check_window(window: object) -> None:
    if window is None:
        return
    if not isinstance(window, tuple) or len(window) != 2 or not all(type(side) is int for side in window):
        raise TypeError(f"window must be a pair of ints (left, right) or None, not {window!r}")
    if min(window) < -1:
        raise ArgumentError(f"window={window} has a negative side", "-1 leaves a side open")


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
        if x.layout is not torch.strided or x.is_nested:
            raise ArgumentError(f"{name}: only plain strided tensors are supported", _CONTIGUOUS)
        if x.dim() != 4:
            raise ArgumentError(f"{name}: has {x.dim()} dimensions, not 4", _CONTIGUOUS)
        if x.dtype not in _KERNEL_DTYPES and x.dtype not in _OTHER_DTYPES:
            raise ArgumentError(f"{name}: dtype {x.dtype} is not supported", "use float16 or bfloat16")
        if x.dtype != q.dtype:
            raise ArgumentError(f"{name}: dtype {x.dtype} is not q's {q.dtype}", f"cast it: {name}.to(q.dtype)")
        if x.device != q.device:
            raise ArgumentError(f"{name}: on {x.device}, but q is on {q.device}", f"move it: {name}.to(q.device)")


def _read_shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> Shape:
    heads, tokens = (1, 2) if layout == "HND" else (2, 1)
    for name, x, axis, what, needs, of in (
        ("k", k, 0, "batch", q.shape[0], "q"),
        ("v", v, 0, "batch", q.shape[0], "q"),
        ("k", k, 3, "width", q.shape[3], "q"),
        ("v", v, 3, "width", q.shape[3], "q"),
        ("v", v, tokens, "length", k.shape[tokens], "k"),
        ("v", v, heads, "head count", k.shape[heads], "k"),
    ):
        if x.shape[axis] != needs:
            raise ArgumentError(f"{name}: {what} {x.shape[axis]} does not match {of}'s {needs} (layout {layout})")
    if q.shape[3] == 0:
        raise ArgumentError("q: width 0, heads have no channels")
    heads_q, heads_kv = q.shape[heads], k.shape[heads]
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ArgumentError(
            f"q: {heads_q} heads are no multiple of k's {heads_kv} (layout {layout})",
            "check the layout and the GQA ratio",
        )
    return Shape(q.shape[0], heads_q, heads_kv, q.shape[tokens], k.shape[tokens])


def _check_mask(mask: torch.Tensor, q: torch.Tensor, shape: Shape) -> None:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attn_mask must be a torch.Tensor or None, not {type(mask).__name__}")
    if mask.device != q.device:
        raise ArgumentError(f"attn_mask: on {mask.device}, but q is on {q.device}", "move it: attn_mask.to(q.device)")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ArgumentError(
            f"attn_mask: dtype {mask.dtype} is neither bool nor floating", "True keeps a key, 0.0 as well"
        )
    full = (shape.batch, shape.heads_q, shape.q_len, shape.kv_len)
    fits = 2 <= mask.dim() <= 4 and all(
        has in (1, needs) for has, needs in zip(reversed(mask.shape), reversed(full), strict=False)
    )
    if not fits:
        raise ArgumentError(
            f"attn_mask: shape {tuple(mask.shape)} does not broadcast to [batch, heads, q_len, kv_len] {full}",
            "that order holds in both layouts",
        )


def _obstacle(q: torch.Tensor, head_dim: int, options: Options, attn_mask: torch.Tensor | None) -> str | None:
    """The first thing of a call that no kernel of this version does."""
    reasons = (
        (attn_mask is not None, "attn_mask has no kernel yet"),
        (options.window is not None, "window has no kernel yet"),
        (q.dtype not in _KERNEL_DTYPES, f"{q.dtype} has no kernel (float16 and bfloat16 have)"),
        (head_dim not in HEAD_DIMS, f"head_dim {head_dim} has no kernel ({' and '.join(map(str, HEAD_DIMS))} have)"),
        (options.smooth_k is False, "smooth_k=False has no kernel: all subtract the mean of K"),
    )
    return next((why for holds, why in reasons if holds), None)
