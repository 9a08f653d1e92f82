"""Checks a call's arguments: what is asked, or which argument is wrong, or why only torch SDPA can answer.

Layouts: HND is [batch, heads, tokens, dim], NHD is [batch, tokens, heads, dim].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from sagegen.errors import ArgumentError
from sagegen.plan import Strides, TensorStrides
from sagegen.problem import HEAD_DIMS, Dtype, Precision, Problem, Shape
from sagegen.runtime.options import Options, check_options, narrow

#: Kernels load 16 bytes at a time: addresses and strides must be multiples of that.
ALIGNMENT = 16

_KERNEL_DTYPES: dict[torch.dtype, Dtype] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_OTHER_DTYPES = (torch.float32, torch.float64)
_MASK_DTYPES = (torch.bool, *_KERNEL_DTYPES, *_OTHER_DTYPES)
#: What the `softmax_scale` of a kernel can be.
_MOST_SCALE = torch.finfo(torch.float32).max
ALIGNED_ELEMENTS = ALIGNMENT // 2
_CONTIGUOUS = "give a tensor of shape [batch, heads, tokens, dim] (HND) or [batch, tokens, heads, dim] (NHD)"


@dataclass(frozen=True, slots=True)
class Checked:
    """A call whose arguments fit each other.

    Attributes:
        shape: its lengths and counts; any may be zero.
        head_dim: channels per head.
        scale: of the scores.
        problem: what a kernel would be asked, in INT8 unless INT4 is asked for; None when `obstacle` says why not. Its
            head dim is the next that kernels have.
        obstacle: why no kernel can answer, None when one may.
        is_masked: an attn_mask is given.
        hides_keys: it hides whole keys and is all that does, so a kernel can do without them.
        window: keys that a query sees before and after its own, -1 for all; None where `problem` says it.
        cast: type that q and k are cast to, and that the output has; None where they have v's.
        copies: names of the tensors whose strides no kernel can read; they are made contiguous. None where all are
            padded, which copies them anyway.
    """

    shape: Shape
    head_dim: int
    scale: float
    problem: Problem | None
    obstacle: str | None
    is_masked: bool
    hides_keys: bool
    window: tuple[int, int] | None
    cast: torch.dtype | None
    copies: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the answer is known without computing: no queries, or no keys to see."""
        shape = self.shape
        return 0 in (shape.batch, shape.heads_q, shape.q_len, shape.kv_len)

    @property
    def padded_width(self) -> int | None:
        """Channels that kernels have, where a head has fewer and is padded with zeros; None where it is not."""
        wider = self.problem is not None and self.problem.head_dim > self.head_dim
        return self.problem.head_dim if self.problem is not None and wider else None


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
    check_options(options)
    check_tensors(q, k, v, 4, _CONTIGUOUS)
    shape = _read_shape(q, k, v, options.layout)
    if attn_mask is not None:
        _check_mask(attn_mask, q, shape)
    return make_checked(q, k, v, shape, options, attn_mask)


def make_checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shape: Shape,
    options: Options,
    attn_mask: torch.Tensor | None = None,
    *,
    is_packed: bool = False,
) -> Checked:
    """What a kernel would be asked by tensors that fit each other; `is_packed`: they hold many sequences."""
    head_dim = q.shape[-1]
    cast = cast_type(q, k, v)
    dtype = cast or q.dtype
    is_causal, window = narrow(options.is_causal, options.window)
    hides_keys = attn_mask is not None and not is_causal and window is None and is_key_mask(attn_mask)
    obstacle = _obstacle(dtype, head_dim, options, is_masked=attn_mask is not None and not hides_keys)
    is_padded = head_dim not in HEAD_DIMS
    return Checked(
        shape=shape,
        head_dim=head_dim,
        scale=float(options.scale) if options.scale is not None else head_dim**-0.5,
        problem=None if obstacle else _make_problem(head_dim, _KERNEL_DTYPES[dtype], options, is_packed or hides_keys),
        obstacle=obstacle,
        is_masked=attn_mask is not None,
        hides_keys=hides_keys,
        window=window,
        cast=cast,
        copies=() if is_padded else tuple(name for name, x in zip("qkv", (q, k, v), strict=True) if not is_readable(x)),
    )


def cast_type(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.dtype | None:
    """v's type where q and k are float32 beside a 16-bit v, as rotary embeddings in float32 leave them; else None."""
    return v.dtype if q.dtype == k.dtype == torch.float32 and v.dtype in _KERNEL_DTYPES else None


def is_key_mask(mask: torch.Tensor) -> bool:
    """Whether a mask of 2 to 4 dims says of every row and head of a batch item the same: one of them, or expanded."""
    shared = range(max(0, mask.dim() - 3), mask.dim() - 1)
    return mask.dtype == torch.bool and all(mask.shape[dim] == 1 or mask.stride(dim) == 0 for dim in shared)


def _make_problem(head_dim: int, dtype: Dtype, options: Options, is_ragged: bool) -> Problem:
    width = next(width for width in HEAD_DIMS if width >= head_dim)
    is_causal, window = narrow(options.is_causal, options.window)
    precision: Precision = "int4" if options.precision == "int4" else "int8"
    return Problem(width, dtype, is_causal, precision, window is not None, is_ragged)


def check_out(out: torch.Tensor, q: torch.Tensor) -> None:
    """Check that `out` can take the answer to `q`.

    Raises:
        TypeError, ArgumentError: it can't.
    """
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor, not {type(out).__name__}")
    check_strided("out", out, "make it with torch.empty_like(q)")
    for what, has, needs in (
        ("shape", tuple(out.shape), tuple(q.shape)),
        ("dtype", out.dtype, q.dtype),
        ("device", out.device, q.device),
    ):
        if has != needs:
            raise ArgumentError(f"out: {what} is {has}, q's is {needs}", "make it with torch.empty_like(q)")
    if _overlaps_itself(out):
        raise ArgumentError(
            f"out: strides {out.stride()} put several elements in one place", "make it with torch.empty_like(q)"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("out: requires a gradient, which writing into it would lose", "leave out= away")


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two indices may mean one place: each dim must step past all that the denser ones reach."""
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def needs_grad(*inputs: torch.Tensor | None) -> bool:
    """Whether one requires a gradient and grad mode is on, or has a tangent of forward-mode differentiation."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return True
    return has_tangent(*inputs)


def has_tangent(*inputs: torch.Tensor | None) -> bool:
    """Whether one has a tangent of forward-mode differentiation."""
    if forward_ad._current_level < 0:
        return False
    return any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
        for x in inputs
    )


def is_readable(x: torch.Tensor) -> bool:
    """Whether kernels can read `x` by its strides, or write: dim contiguous, the rest whole vectors apart; size-1 dims
    are free."""
    *outer, channel = zip(x.shape, x.stride(), strict=True)
    return (channel[0] <= 1 or channel[1] == 1) and all(
        size <= 1 or stride % ALIGNED_ELEMENTS == 0 for size, stride in outer
    )


def read_strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layout: str) -> TensorStrides:
    """Strides of a call's tensors in elements; 0 for a size-1 dim, whatever torch says: no index reaches it."""
    heads, tokens = (1, 2) if layout == "HND" else (2, 1)

    def read(x: torch.Tensor) -> Strides:
        strides = [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]
        return Strides(strides[0], strides[heads], strides[tokens])

    return TensorStrides(read(q), read(k), read(v), read(out))


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rank: int, remedy: str) -> None:
    """Check that q, k and v are tensors of `rank` dims, of types that belong together, on one device.

    Args:
        remedy: says what shape a tensor must have.

    Raises:
        TypeError, ArgumentError: they aren't.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
        check_strided(name, x, remedy)
        if x.dim() != rank:
            raise ArgumentError(f"{name}: has {x.dim()} dimensions, not {rank}", remedy)
        if x.dtype not in _KERNEL_DTYPES and x.dtype not in _OTHER_DTYPES:
            raise ArgumentError(f"{name}: dtype {x.dtype} is not supported", "use float16 or bfloat16")
        if x.dtype != q.dtype and not (name == "v" and cast_type(q, k, v)):
            raise ArgumentError(f"{name}: dtype {x.dtype} is not q's {q.dtype}", f"cast it: {name}.to(q.dtype)")
        if x.device != q.device:
            raise ArgumentError(f"{name}: on {x.device}, but q is on {q.device}", f"move it: {name}.to(q.device)")


def check_strided(name: str, x: torch.Tensor, remedy: str) -> None:
    """Raise ArgumentError where `x`, the argument `name`, is nested or sparse."""
    if x.layout is not torch.strided or x.is_nested:
        raise ArgumentError(f"{name}: only plain strided tensors are supported", remedy)


def check_heads(heads_q: int, heads_kv: int, width: int, where: str, remedy: str) -> None:
    """Check that heads have channels and that every KV head serves as many query heads.

    Args:
        where: which layout the counts were read in, after a space; empty where there is one only.
    """
    if width == 0:
        raise ArgumentError("q: width 0, heads have no channels", "give q, k and v of one width from 1 on")
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ArgumentError(f"q: {heads_q} heads are no multiple of k's {heads_kv}{where}", remedy)


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
            raise ArgumentError(
                f"{name}: {what} {x.shape[axis]} does not match {of}'s {needs} (layout {layout})",
                f"give {name} {of}'s {what}, or the other layout=",
            )
    heads_q, heads_kv = q.shape[heads], k.shape[heads]
    check_heads(heads_q, heads_kv, q.shape[3], f" (layout {layout})", "check the layout and the GQA ratio")
    return Shape(q.shape[0], heads_q, heads_kv, q.shape[tokens], k.shape[tokens])


def _check_mask(mask: torch.Tensor, q: torch.Tensor, shape: Shape) -> None:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attn_mask must be a torch.Tensor or None, not {type(mask).__name__}")
    check_strided("attn_mask", mask, "give a dense one")
    if mask.device != q.device:
        raise ArgumentError(f"attn_mask: on {mask.device}, but q is on {q.device}", "move it: attn_mask.to(q.device)")
    if mask.dtype not in _MASK_DTYPES:
        raise ArgumentError(
            f"attn_mask: dtype {mask.dtype} is neither bool nor floating of 16 bits or more",
            "True keeps a key, 0.0 as well",
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


def _obstacle(dtype: torch.dtype, head_dim: int, options: Options, *, is_masked: bool) -> str | None:
    """The first thing of a call that no kernel of this version does."""
    reasons = (
        (is_masked, "attn_mask has no kernel but of bools that hide keys from all rows and heads, without causality"),
        (dtype not in _KERNEL_DTYPES, f"{dtype} has no kernel (float16 and bfloat16 have)"),
        (
            options.scale is not None and abs(float(options.scale)) > _MOST_SCALE,
            f"scale={options.scale} has no kernel: it is beyond float32",
        ),
        (head_dim > HEAD_DIMS[-1], f"head_dim {head_dim} has no kernel, {HEAD_DIMS[-1]} is the widest"),
        (options.smooth_k is False, "smooth_k=False has no kernel: all subtract the mean of K"),
    )
    return next((why for holds, why in reasons if holds), None)
