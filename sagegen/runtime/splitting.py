"""Calls whose scratch would exceed a limit: launched in parts, over batch items and then over groups of KV heads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from sagegen.layout import ceil_div
from sagegen.plan import Launcher, Loaded, Plan, Strides, TensorStrides, make_plan
from sagegen.problem import Problem, Shape
from sagegen.space import Config

_ELEMENT_BYTES = 2  # of q, k, v and out, in FP16 and BF16 alike
_LSE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Part:
    """The batch items and KV heads that a part of a call takes, the KV heads with all query heads that share them."""

    batch: range
    heads_kv: range

    def shape(self, whole: Shape) -> Shape:
        group = whole.heads_q // whole.heads_kv
        heads = len(self.heads_kv)
        return replace(whole, batch=len(self.batch), heads_q=heads * group, heads_kv=heads)


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A part's plan, and how many bytes after the call's own its q, k, v, out and lse begin."""

    plan: Plan
    offsets: tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class SplitCall:
    """The parts of a call on a loaded program.

    They run one after another on one workspace: the first kernel of a part starts when the part before it has ended.
    """

    parts: tuple[tuple[Launcher, tuple[int, int, int, int, int]], ...]

    def launch(self, q: int, k: int, v: int, out: int, lse: int, workspace: int, stream: int) -> None:
        """As `Launcher.launch`, of a plan that is not ragged."""
        for call, (q_at, k_at, v_at, out_at, lse_at) in self.parts:
            call.launch(q + q_at, k + k_at, v + v_at, out + out_at, lse and lse + lse_at, workspace, stream)


def split(shape: Shape, needs: Callable[[Shape], int], limit: int) -> tuple[Part, ...]:
    """Parts of a call that need at most `limit` bytes each, as few and as even as can be; all of it if that is enough.

    One KV head of one batch item is not split further, whatever it needs.

    Args:
        needs: scratch bytes of a part of some shape; more batch items or heads need more.
    """
    every_head = range(shape.heads_kv)
    batch = _count_fitting(shape.batch, lambda n: needs(Part(range(n), every_head).shape(shape)), limit)
    if batch:
        return tuple(Part(items, every_head) for items in _cut(shape.batch, batch))
    heads = _count_fitting(shape.heads_kv, lambda n: needs(Part(range(1), range(n)).shape(shape)), limit)
    return tuple(
        Part(range(item, item + 1), group)
        for item in range(shape.batch)
        for group in _cut(shape.heads_kv, max(1, heads))
    )


def _count_fitting(count: int, needs: Callable[[int], int], limit: int) -> int:
    """The most of `count` pieces that need no more than `limit`; 0 where a single one does."""
    return bisect_right(range(1, count + 1), limit, key=needs)


def _cut(count: int, most: int) -> Iterator[range]:
    """`count` pieces in runs of one length, at most `most`; the last may be shorter."""
    step = ceil_div(count, ceil_div(count, most))
    return (range(start, min(start + step, count)) for start in range(0, count, step))


def plan_parts(
    problem: Problem,
    config: Config,
    shape: Shape,
    strides: TensorStrides,
    softmax_scale: float,
    want_lse: bool,
    limit: int,
    window: tuple[int, int] | None = None,
) -> tuple[PlannedPart, ...]:
    """The plans of a call, one where its scratch is within `limit` bytes; their results are the same bits.

    Raises:
        ArgumentError: as `make_plan`.
    """
    make = partial(
        make_plan,
        problem,
        config,
        strides=strides,
        softmax_scale=softmax_scale,
        want_lse=want_lse,
        whole=shape,
        window=window,
    )
    parts = split(shape, lambda part: make(shape=part).workspace_bytes, limit)
    plans = {part: make(shape=part) for part in {part.shape(shape) for part in parts}}
    return tuple(PlannedPart(plans[part.shape(shape)], _offsets(part, shape, strides)) for part in parts)


def _offsets(part: Part, shape: Shape, strides: TensorStrides) -> tuple[int, int, int, int, int]:
    item, head_kv = part.batch.start, part.heads_kv.start
    head_q = head_kv * (shape.heads_q // shape.heads_kv)

    def of(own: Strides, head: int) -> int:
        return (item * own.batch + head * own.head) * _ELEMENT_BYTES

    lse = (item * shape.heads_q + head_q) * shape.q_len * _LSE_BYTES
    return of(strides.q, head_q), of(strides.k, head_kv), of(strides.v, head_kv), of(strides.out, head_q), lse


def prepare_parts(program: Loaded, parts: tuple[PlannedPart, ...]) -> Launcher | SplitCall:
    """The parts of a call on a loaded program; a call that is not split is its one plan's."""
    calls = {plan: program.prepare(plan) for plan in {part.plan for part in parts}}
    if len(parts) == 1:
        return calls[parts[0].plan]
    return SplitCall(tuple((calls[part.plan], part.offsets) for part in parts))


def workspace_bytes(parts: tuple[PlannedPart, ...]) -> int:
    """Scratch bytes of a call in these parts: they share it."""
    return max(part.plan.workspace_bytes for part in parts)
