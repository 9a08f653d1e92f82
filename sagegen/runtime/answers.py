"""Prepared answers: everything of a call but its tensors is decided, `run` takes those.

Each kind has the `explanation` of why it was chosen and one method, `run(q, k, v, out)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

from sagegen import reference
from sagegen.plan import Launcher, Loaded
from sagegen.problem import Problem
from sagegen.runtime.addresses import UNALIGNED, addresses, aligned, private_if_shared
from sagegen.runtime.device import Device
from sagegen.runtime.explanation import Explanation
from sagegen.runtime.options import Options
from sagegen.runtime.padding import pad_channels
from sagegen.runtime.splitting import SplitCall
from sagegen.space import Config

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
#: Of the types that kernels read.
ELEMENT_BYTES = 2


class Streams(Protocol):
    """Where a kernel's answer launches."""

    def raw_stream(self, index: int) -> int: ...

    def current_device(self) -> int: ...

    def guard(self, index: int) -> AbstractContextManager[Any]: ...


class Runtime(Streams, Protocol):
    """The machine below the dispatcher; tests put a recorder in its place."""

    def device(self, device: torch.device) -> Device: ...

    def load_program(self, cubin: bytes, name: str, problem: Problem, config: Config, index: int) -> Loaded: ...

    def check_program(self, program: Loaded, name: str, problem: Problem, index: int) -> None: ...

    def is_capturing(self) -> bool: ...


@runtime_checkable
class MaskedAnswer(Protocol):
    """One that a call's mask is added to, so that what is remembered need not hold it."""

    @property
    def explanation(self) -> Explanation: ...

    def with_mask(self, attn_mask: torch.Tensor | None) -> Answer: ...

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result: ...


class Answer(Protocol):
    """What the dispatcher keeps per kind of call."""

    @property
    def explanation(self) -> Explanation: ...

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result: ...


def empty_output(q: torch.Tensor) -> torch.Tensor:
    """An output for `q`: of its strides where q is dense, so a transposed view stays one; its last dim has 1."""
    out = torch.empty_like(q)
    return out if out.stride()[-1] == 1 else torch.empty(q.shape, dtype=q.dtype, device=q.device)


@dataclass(slots=True)
class KernelAnswer:
    """Runs a kernel, on a GPU or in the emulator. Not for concurrent use: `prepared` owns a parameter buffer.

    Attributes:
        workspace_elements: scratch, in elements of the inputs' type.
        lse_shape: of the lse, or None when none is wanted.
        again: dispatches anew, for inputs whose addresses no kernel can read.
    """

    explanation: Explanation
    prepared: Launcher | SplitCall
    workspace_elements: int
    lse_shape: tuple[int, ...] | None
    device: torch.device
    index: int
    streams: Streams
    again: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Result]

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        table: torch.Tensor | None = None,
    ) -> Result:
        """Launch; `table` has the lengths of a ragged problem's batch items."""
        q_at, k_at, v_at = addresses(q, k, v)
        if (q_at | k_at | v_at) & UNALIGNED:
            return self.again(aligned("q", q), aligned("k", k), aligned("v", v), out)
        target = empty_output(q) if out is None else private_if_shared(out, (q, k, v))
        workspace = q.new_empty(self.workspace_elements)  # torch.empty of bytes takes longer
        lse, lse_at = None, 0
        if self.lse_shape is not None:
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
            lse_at = lse.data_ptr()
        index, streams = self.index, self.streams
        at = (q_at, k_at, v_at, target.data_ptr(), lse_at, workspace.data_ptr(), streams.raw_stream(index))
        arguments = at if table is None else (*at, table.data_ptr())
        if streams.current_device() == index:
            self.prepared.launch(*arguments)
        else:
            with streams.guard(index):
                self.prepared.launch(*arguments)
        if out is not None:
            target = _written(out, target)
        return target if lse is None else (target, lse)


@dataclass(frozen=True, slots=True)
class CopyAnswer:
    """Makes the inputs contiguous whose strides no kernel can read, then runs `inner`."""

    inner: KernelAnswer
    copies: tuple[str, ...]

    @property
    def explanation(self) -> Explanation:
        return self.inner.explanation

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
        addresses(q, k, v)
        q, k, v = copy_inputs(q, k, v, self.copies)
        return self.inner.run(q, k, v, out)


@dataclass(frozen=True, slots=True)
class CopyOutAnswer:
    """Runs `inner` into a tensor of its own and copies that into the caller's, whose strides no kernel can write."""

    inner: KernelAnswer | CopyAnswer

    @property
    def explanation(self) -> Explanation:
        return self.inner.explanation

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
        return into(out, self.inner.run(q, k, v, None))


@dataclass(frozen=True, slots=True)
class PadAnswer:
    """Gives every head zeros up to the width that `inner` has, which change no score, and takes them off its output."""

    inner: KernelAnswer
    width: int

    @property
    def explanation(self) -> Explanation:
        return self.inner.explanation

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
        addresses(q, k, v)
        width = self.width
        padded = self.inner.run(pad_channels(q, width), pad_channels(k, width), pad_channels(v, width), None)
        wide, lse = padded if isinstance(padded, tuple) else (padded, None)
        target = empty_output(q) if out is None else out
        target.copy_(wide[..., : q.shape[-1]])
        return target if lse is None else (target, lse)


@dataclass(frozen=True, slots=True)
class CastAnswer:
    """Casts q and k to v's type, which the output has then, and runs `inner`."""

    inner: Answer

    def with_mask(self, attn_mask: torch.Tensor | None) -> CastAnswer:
        inner = self.inner
        return replace(self, inner=inner.with_mask(attn_mask)) if isinstance(inner, MaskedAnswer) else self

    @property
    def explanation(self) -> Explanation:
        return self.inner.explanation

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
        return self.inner.run(q.to(v.dtype), k.to(v.dtype), v, out)


def copy_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: tuple[str, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v, those in `names` as fresh contiguous tensors."""
    fresh = torch.contiguous_format
    return (
        q.clone(memory_format=fresh) if "q" in names else q,
        k.clone(memory_format=fresh) if "k" in names else k,
        v.clone(memory_format=fresh) if "v" in names else v,
    )


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """Exact attention in FP32, or in FP64 for FP64 inputs."""

    explanation: Explanation
    options: Options

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
        options = self.options
        result = reference.attention(
            q,
            k,
            v,
            is_causal=options.is_causal,
            window=options.window,
            scale=None if options.scale is None else float(options.scale),
            layout="HND" if options.layout == "HND" else "NHD",
            return_lse=options.return_lse,  # type: ignore[call-overload]  # the overloads know literals only
            compute=torch.float64 if q.dtype == torch.float64 else torch.float32,
        )
        return _laid_out_as(empty_output(q), result) if out is None else into(out, result)


def _laid_out_as(like: torch.Tensor, result: Result) -> Result:
    """`result` with the strides that `like` has; not written into it, which torch.func.vmap over keys alone refuses."""
    out, *rest = result if isinstance(result, tuple) else (result,)
    out = out.new_empty_strided(like.shape, like.stride()).copy_(out)
    return (out, *rest) if rest else out  # type: ignore[return-value]


def no_result(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, return_lse: bool) -> Result:
    """0 and lse -inf: attention where there is no query, or no key to see."""
    zeros = empty_output(q).zero_()
    for x in (q, k, v):
        if torch.is_grad_enabled() and x.requires_grad:
            zeros = zeros + x[:0].sum()  # keeps the output in the graph, with gradient 0
    if not return_lse:
        return zeros
    heads, tokens = (1, 2) if layout == "HND" else (2, 1)
    shape = (q.shape[0], q.shape[heads], q.shape[tokens])
    return zeros, torch.full(shape, -math.inf, dtype=torch.float32, device=q.device)


@dataclass(frozen=True, slots=True)
class ZerosAnswer:
    """No query, or no key to see: 0 and lse -inf."""

    explanation: Explanation
    options: Options

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
        return into(out, no_result(q, k, v, self.options.layout, self.options.return_lse))


def into(out: torch.Tensor | None, result: Result) -> Result:
    """`result` with its output copied into `out`, when there is one."""
    if out is None:
        return result
    if isinstance(result, tuple):
        return out.copy_(result[0]), result[1]
    return out.copy_(result)


def _written(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target is not out:
        return out.copy_(target)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)  # autograd must notice a write that it did not see
    return out
