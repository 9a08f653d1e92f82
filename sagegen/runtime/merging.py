"""Merging attention over disjoint sets of keys into attention over all of them, as ring attention does.

The softmax over concatenated blocks from the softmax of each: FlashAttention (arXiv 2205.14135), section 3.1. With the
blocks' log-sum-exps L_i and outputs O_i the whole has L = log(sum_i exp(L_i)) and O = sum_i exp(L_i - L) O_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sagegen.errors import ArgumentError
from sagegen.runtime.options import LAYOUTS

_OUTPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PARTS = "give the results of sagegen.attention(..., return_lse=True), one per set of keys"


def merge_lse(
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], *, layout: str = "HND"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the same queries over all keys, from attention over disjoint sets of them.

    Sums are FP32. A part in which a row saw no key has lse -inf there: it counts for nothing, whatever its output
    holds, and a row that is -inf in all parts gives 0 and -inf. NaN makes the rows NaN that it is in, and so does an
    lse of +inf, which FlashAttention-2 gives for rows without keys: replace it by -inf before. Plain torch operations:
    differentiable, traced by torch.compile, no synchronization with the host.

    Args:
        outputs: a list or tuple of at least one; each [batch, heads, q_len, head_dim] for layout HND,
            [batch, q_len, heads, head_dim] for NHD; all float16, all bfloat16 or all float32.
        lses: as many, in the same order: natural-log log-sum-exps, float32, [batch, heads, q_len] in both layouts.
        layout: `HND` or `NHD`.

    Returns:
        The output, in the outputs' layout and dtype, and its natural-log log-sum-exp, float32, [batch, heads, q_len].

    Raises:
        TypeError, ArgumentError: a malformed argument, named with its place in the list.
    """
    _check_parts(outputs, lses, layout)
    peak = torch.stack([lse.detach() for lse in lses]).amax(0)
    peak = peak.masked_fill(peak == -math.inf, 0)  # -inf - -inf would be NaN
    weights = [torch.exp(lse - peak) for lse in lses]
    total = torch.stack(weights).sum(0)
    blind = total == 0
    total = total.masked_fill(blind, 1)
    merged = torch.zeros(outputs[0].shape, dtype=torch.float32, device=outputs[0].device)
    for output, lse, weight in zip(outputs, lses, weights, strict=True):
        # masked, not only weighted by 0: kernels of others leave anything in rows without keys
        seen = output.float().masked_fill(_over_channels(lse == -math.inf, layout), 0)
        merged = merged + _over_channels(weight / total, layout) * seen
    return merged.to(outputs[0].dtype), (peak + torch.log(total)).masked_fill(blind, -math.inf)


def _over_channels(rows: torch.Tensor, layout: str) -> torch.Tensor:
    """Values of [batch, heads, q_len] with the axes of an output in `layout`, the last of them 1."""
    return (rows if layout == "HND" else rows.transpose(1, 2)).unsqueeze(-1)


def _check_parts(outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], layout: str) -> None:
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout={layout!r} does not exist", f"use one of {', '.join(LAYOUTS)}")
    for name, parts in (("outputs", outputs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise TypeError(f"{name} must be a list or tuple of tensors, not {type(parts).__name__}")
        for place, part in enumerate(parts):
            if not isinstance(part, torch.Tensor):
                raise TypeError(f"{name}[{place}] must be a torch.Tensor, not {type(part).__name__}")
    if not outputs:
        raise ArgumentError("outputs: there are none to merge", _PARTS)
    if len(outputs) != len(lses):
        raise ArgumentError(f"lses: there are {len(lses)} for {len(outputs)} outputs", _PARTS)
    first = outputs[0]
    if first.dim() != 4:
        raise ArgumentError(f"outputs[0]: has {first.dim()} dimensions, not 4", _PARTS)
    if first.dtype not in _OUTPUT_DTYPES:
        raise ArgumentError(f"outputs[0]: dtype {first.dtype} is not merged", "use float16, bfloat16 or float32")
    heads, tokens = (1, 2) if layout == "HND" else (2, 1)
    rows = (first.shape[0], first.shape[heads], first.shape[tokens])
    for place, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        _check_like(f"outputs[{place}]", output, tuple(first.shape), first.dtype, first.device)
        _check_like(f"lses[{place}]", lse, rows, torch.float32, first.device)


def _check_like(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(x.shape) != shape:
        raise ArgumentError(f"{name}: shape {tuple(x.shape)} is not {shape}, as outputs[0] and layout ask", _PARTS)
    if x.dtype != dtype:
        raise ArgumentError(f"{name}: dtype {x.dtype} is not {dtype}", f"cast it: {name}.to({dtype})")
    if x.device != device:
        raise ArgumentError(f"{name}: on {x.device}, but outputs[0] is on {device}", f"move it: {name}.to('{device}')")
