"""Where a call's tensors lie, and copies of those that no kernel can use where they are."""

from __future__ import annotations

import torch

from sagegen.errors import UnsupportedError
from sagegen.runtime.arguments import ALIGNMENT
from sagegen.runtime.fallback import warn_once

#: Bits of an address that no kernel can use.
UNALIGNED = ALIGNMENT - 1


def addresses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int]:
    """Where the tensors are; those inside a transform of torch.func are nowhere: an error, or address 0."""
    try:
        found = q.data_ptr(), k.data_ptr(), v.data_ptr()
    except RuntimeError as error:
        raise transformed() from error
    if 0 in found:
        raise transformed()
    return found


def check_outside(*inputs: torch.Tensor) -> None:
    """Raise UnsupportedError where one is inside a transform of torch.func."""
    try:
        for x in inputs:
            x.data_ptr()
    except RuntimeError as error:
        raise transformed() from error


def transformed() -> UnsupportedError:
    """The error of tensors that are inside a transform of torch.func where a kernel would need them outside."""
    return UnsupportedError(
        "q, k, v, or what goes with them: no kernel takes part in torch.func's transforms (vmap, jvp, functionalize)",
        "call it outside of them, with the batch as a dim of its own, or with backend='sdpa'",
    )


def aligned(name: str, x: torch.Tensor) -> torch.Tensor:
    if not x.data_ptr() & UNALIGNED:
        return x
    warn_once(f"{name} is copied in every call: its address is no multiple of {ALIGNMENT} bytes")
    return x.clone(memory_format=torch.contiguous_format)


def private_if_shared(out: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """`out`, or scratch of its strides when a kernel can't write there while it reads the inputs."""
    check_outside(out)
    start, end = _extent(out)
    shared = any(low < end and start < high for low, high in map(_extent, inputs))
    if shared or start & UNALIGNED:
        return torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
    return out


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and past the last byte that `x` can touch."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
