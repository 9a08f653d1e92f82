"""Random calls of kernels: drawn by number, made on any device, and measured against exact attention.

A call follows from its number alone, so the number is all that it takes to run it again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from sagegen.measuring.call import Allocator
from sagegen.measuring.inputs import DTYPES as TORCH_DTYPES
from sagegen.measuring.inputs import Inputs, draw_normal
from sagegen.problem import DTYPES, TUNED_HEAD_DIMS, Problem, Shape

#: batch x query heads x queries x keys of a call at most: its exact answer takes a millisecond or two in FP64.
MOST_SCORES = 1 << 23
LONGEST = 3000

Memory = Literal["HND", "NHD", "gaps", "fused_kv", "one_batch"]


@dataclass(frozen=True, slots=True)
class RandomCall:
    """One call.

    Attributes:
        draw: chooses among the kinds of kernels at hand.
        memory: where q, k and v lie, a key of MEMORIES.
        inputs: what they hold, a key of INPUTS.
    """

    index: int
    draw: int
    problem: Problem
    shape: Shape
    memory: Memory
    inputs: str
    want_lse: bool

    def pick(self, kinds: list[str]) -> str:
        return kinds[self.draw % len(kinds)]


def draw_call(index: int) -> RandomCall:
    """The call of a number."""
    rng = random.Random(index)
    problem = Problem(rng.choice(TUNED_HEAD_DIMS), rng.choice(DTYPES), rng.random() < 0.5)
    return RandomCall(
        index=index,
        draw=rng.randrange(1 << 30),
        problem=problem,
        shape=_draw_shape(rng),
        memory=rng.choice(tuple(MEMORIES)),
        inputs=rng.choice(tuple(INPUTS)),
        want_lse=rng.random() < 0.5,
    )


def _draw_shape(rng: random.Random) -> Shape:
    while True:
        heads_kv, group = rng.choice((1, 1, 2, 3, 4, 8)), rng.choice((1, 1, 1, 2, 3, 4, 7, 8))
        q_len, kv_len = _draw_length(rng), _draw_length(rng)
        if rng.random() < 0.3:
            kv_len = q_len
        shape = Shape(rng.choice((1, 1, 1, 2, 3, 5)), heads_kv * group, heads_kv, q_len, kv_len)
        if shape.batch * shape.heads_q * q_len * kv_len <= MOST_SCORES:
            return shape


def _draw_length(rng: random.Random) -> int:
    """Skewed to few tokens and to the edges of tiles, whose sizes are multiples of 64."""
    kind = rng.random()
    if kind < 0.3:
        return rng.randint(1, 40)
    if kind < 0.6:
        return 64 * rng.choice((1, 1, 2, 2, 3, 4, 5, 6, 8, 12, 16)) + rng.choice((-1, 0, 0, 1))
    if kind < 0.85:
        return rng.randint(41, 600)
    return int(math.exp(rng.uniform(math.log(600), math.log(LONGEST))))


# --- what q, k and v hold


def _offset_keys(x: Inputs) -> None:
    x.k.add_(10 * torch.cos(torch.arange(x.k.shape[-1], device=x.k.device)))


def _stretch(factor: float) -> Callable[[Inputs], None]:
    def alter(x: Inputs) -> None:
        x.q[..., 5::64] *= factor
        x.k[..., 5::64] *= factor

    return alter


def _scale_queries(factor: float) -> Callable[[Inputs], None]:
    return lambda x: x.q.mul_(factor)


#: Changes of normal float32 inputs, in place.
INPUTS: Mapping[str, Callable[[Inputs], object]] = {
    "normal": lambda x: None,
    "k_offset": _offset_keys,
    "outliers_x8": _stretch(8),
    "outliers_x16": _stretch(16),
    "q_x0.25": _scale_queries(0.25),
    "q_x4": _scale_queries(4),
    "q_x16": _scale_queries(16),
    "v_offset": lambda x: x.v.add_(1),
}


# --- where they lie


def _transpose(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _surround(x: torch.Tensor) -> torch.Tensor:
    """A view with rows and channels around it that are NaN."""
    wide = x.new_full((*x.shape[:2], x.shape[2] + 3, x.shape[3] + 24), math.nan)
    return wide[:, :, 2 : 2 + x.shape[2], 8 : 8 + x.shape[3]].copy_(x)


def _fuse(x: Inputs) -> Inputs:
    """K and V of one projection's output, [batch, tokens, 2 heads_kv, head_dim]."""
    k, v = torch.cat([x.k.transpose(1, 2), x.v.transpose(1, 2)], 2).chunk(2, 2)
    return Inputs(_transpose(x.q), k.transpose(1, 2), v.transpose(1, 2))


#: All strides are ones that kernels read without a copy.
MEMORIES: Mapping[Memory, Callable[[Inputs], Inputs]] = {
    "HND": lambda x: x,
    "NHD": lambda x: x.map(_transpose),
    "gaps": lambda x: x.map(_surround),
    "fused_kv": _fuse,
    "one_batch": lambda x: Inputs(x.q, *(y[:1].expand_as(y) for y in (x.k, x.v))),
}


def make_inputs(call: RandomCall, device: torch.device | str) -> Inputs:
    """q, k and v of a call; the same values for every run on one kind of device."""
    generator = torch.Generator(device).manual_seed(call.index)
    inputs = draw_normal(call.shape, call.problem.head_dim, generator)
    INPUTS[call.inputs](inputs)
    return MEMORIES[call.memory](inputs.map(lambda x: x.to(TORCH_DTYPES[call.problem.dtype])))


class PoisonedAllocator(Allocator):
    """Memory that is NaN in every type, so that what a kernel does not write shows."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        return torch.full((size,), 0xFF, dtype=torch.uint8, device=device).view(dtype).view(shape)
