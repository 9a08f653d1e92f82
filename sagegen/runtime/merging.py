"""Merging attention over disjoint sets of keys into attention over all of them, as ring attention does.

The softmax over concatenated blocks from the softmax of each: FlashAttention (arXiv 2205.14135), section 3.1. With the
blocks' log-sum-exps L_i and outputs O_i the whole has L = log(sum_i exp(L_i)) and O = sum_i exp(L_i - L) O_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sagegen.errors import ArgumentError
from sagegen.runtime.arguments import check_strided

_OUTPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: By layout: axes of an output that its lse has, in the lse's order.
_LSE_AXES = {"HND": (0, 1, 2), "NHD": (0, 2, 1), "THD": (1, 0)}
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
            [batch, q_len, heads, head_dim] for NHD, [tokens, heads, head_dim] for THD, as `attention_varlen` gives
            them; all float16, all bfloat16 or all float32.
        lses: as many, in the same order: natural-log log-sum-exps, float32, [batch, heads, q_len], for THD
            [heads, tokens].
        layout: `HND`, `NHD` or `THD`.

    Returns:
        The output, in the outputs' layout and dtype, and its natural-log log-sum-exp, float32, of the lses' shape.

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
    """Values of an lse with the axes of an output in `layout`, the last of them 1."""
    return rows.permute(_LSE_AXES[layout]).unsqueeze(-1)  # a swap of axes at most, so the way back is the way there


def _check_parts(outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], layout: str) -> None:
    if layout not in _LSE_AXES:
        raise ArgumentError(f"layout={layout!r} does not exist", f"use one of {', '.join(_LSE_AXES)}")
    for name, parts in (("outputs", outputs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise TypeError(f"{name} must be a list or tuple of tensors, not {type(parts).__name__}")
        for place, part in enumerate(parts):
            if not isinstance(part, torch.Tensor):
                raise TypeError(f"{name}[{place}] must be a torch.Tensor, not {type(part).__name__}")
            check_strided(f"{name}[{place}]", part, _PARTS)
    if not outputs:
        raise ArgumentError("outputs: there are none to merge", _PARTS)
    if len(outputs) != len(lses):
        raise ArgumentError(f"lses: there are {len(lses)} for {len(outputs)} outputs", _PARTS)
    first = outputs[0]
    axes = _LSE_AXES[layout]
    if first.dim() != len(axes) + 1:
        remedy = "give layout='THD' for those of sagegen.attention_varlen" if first.dim() == 3 else _PARTS
        raise ArgumentError(f"outputs[0]: has {first.dim()} dimensions, not {len(axes) + 1} (layout {layout})", remedy)
    if first.dtype not in _OUTPUT_DTYPES:
        raise ArgumentError(f"outputs[0]: dtype {first.dtype} is not merged", "use float16, bfloat16 or float32")
    rows = tuple(first.shape[axis] for axis in axes)
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
