"""A loaded program bound to tensors: what the gate, the benchmarks and the tests launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sagegen.plan import Launcher, Loaded, Role, Strides, TensorStrides, make_plan
from sagegen.problem import Problem, Shape
from sagegen.space import Config


@dataclass(frozen=True, slots=True)
class BoundCall:
    """One call, ready to launch as often as wanted; owns its output and scratch.

    Attributes:
        out: q's shape and dtype.
        lse: float32 [batch, heads_q, q_len], natural log, or None.
        workspace: uint8 scratch.
        inputs: q, k, v, kept alive.
    """

    prepared: Launcher
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out: torch.Tensor
    lse: torch.Tensor | None
    workspace: torch.Tensor

    def launch(self) -> None:
        """Launch all kernels on torch's current stream."""
        self.prepared.launch(*self.addresses(), _current_stream(self.out.device))

    def launch_role(self, role: Role) -> None:
        """Launch one kernel; `attention` needs a `launch` before it, which fills the workspace."""
        self.prepared.launch_role(role, *self.addresses(), _current_stream(self.out.device))

    def addresses(self) -> tuple[int, int, int, int, int, int]:
        """Of the launch ABI's pointers, in order; 0 for an lse that is not wanted."""
        q, k, v = self.inputs
        lse = 0 if self.lse is None else self.lse.data_ptr()
        return q.data_ptr(), k.data_ptr(), v.data_ptr(), self.out.data_ptr(), lse, self.workspace.data_ptr()


class Allocator:
    """Where a call's output, lse and scratch come from; the gate puts guard zones around them."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)


def bind_call(
    program: Loaded,
    problem: Problem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    want_lse: bool = False,
    window: tuple[int, int] | None = None,
    allocator: Allocator | None = None,
) -> BoundCall:
    """Plan a call and allocate what it needs.

    Args:
        q: [batch, heads_q, q_len, head_dim], any strides with contiguous channels.
        k, v: [batch, heads_kv, kv_len, head_dim], likewise.
        softmax_scale: of the scores; None is 1/sqrt(head_dim).
        window: of a windowed problem; see `plan.make_plan`.

    Raises:
        ArgumentError: the call needs more thread blocks than a grid has.
    """
    allocator = allocator or Allocator()
    shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    out = _empty_like(q, allocator)
    strides = TensorStrides(_strides(q), _strides(k), _strides(v), _strides(out))
    scale = problem.head_dim**-0.5 if softmax_scale is None else softmax_scale
    plan = make_plan(problem, config, shape, strides, scale, want_lse, window=window)
    return BoundCall(
        prepared=program.prepare(plan),
        inputs=(q, k, v),
        out=out,
        lse=allocator.empty(tuple(q.shape[:3]), torch.float32, q.device) if want_lse else None,
        workspace=allocator.empty((plan.workspace_bytes,), torch.uint8, q.device),
    )


def call_program(
    program: Loaded,
    problem: Problem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    want_lse: bool = False,
    window: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch a call once, as `bind_call`; its output and lse, which are not ready until the stream has run."""
    call = bind_call(program, problem, config, q, k, v, softmax_scale=softmax_scale, want_lse=want_lse, window=window)
    call.launch()
    # the caching allocator reuses the workspace in stream order, so it may be freed before the kernels end
    return call.out, call.lse


def _strides(x: torch.Tensor) -> Strides:
    batch, head, token, _ = x.stride()
    return Strides(batch, head, token)


def _empty_like(q: torch.Tensor, allocator: Allocator) -> torch.Tensor:
    """Uninitialized, q's shape, dense, in q's order of heads and tokens."""
    batch, heads, length, head_dim = q.shape
    if q.stride(1) < q.stride(2):  # NHD
        return allocator.empty((batch, length, heads, head_dim), q.dtype, q.device).transpose(1, 2)
    return allocator.empty((batch, heads, length, head_dim), q.dtype, q.device)


def _current_stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
