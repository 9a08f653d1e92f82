"""Inputs with the outliers that the papers' techniques are for, by kind.

All draws come from a CPU generator with an explicit seed, so that a kind has the same values on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sagegen.errors import UnknownNameError
from sagegen.measuring.inputs import Inputs, draw_normal
from sagegen.problem import Shape

#: Share of the channels of Q, and of K, that are biased, and the middle of the biases' magnitudes beside unit normals.
_BIASED_SHARE = 0.6
_Q_BIAS, _K_BIAS = 2.0, 2.5


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of inputs.

    Attributes:
        why: what it has of real inputs, and which technique it tells from others.
        alter: takes unit normal float32 inputs and a generator, and changes them in place.
    """

    name: str
    why: str
    alter: Callable[[Inputs, torch.Generator], None]


def draw_kind(name: str, shape: Shape, head_dim: int, seed: int) -> Inputs:
    """The inputs of a kind, float32 on the CPU.

    Raises:
        UnknownNameError: no kind has that name.
    """
    if name not in KINDS:
        raise UnknownNameError(f"there are no inputs {name!r}", f"use one of {', '.join(KINDS)}")
    generator = torch.Generator().manual_seed(seed)
    inputs = draw_normal(shape, head_dim, generator)
    KINDS[name].alter(inputs, generator)
    return inputs


def _leave(inputs: Inputs, generator: torch.Generator) -> None:
    pass


def _bias_channels(inputs: Inputs, generator: torch.Generator) -> None:
    """Add to each biased channel a number that all tokens share, of random sign and 0.5 to 1.5 times the middle.

    Q's and K's biased channels differ as far as they can, so that moving size from one to the other helps; they are
    many, so that a rotation finds no channel to spread.
    """
    heads_kv, dim = inputs.k.shape[1], inputs.k.shape[-1]
    ranks = torch.rand(1, heads_kv, 1, dim, generator=generator).argsort(-1).argsort(-1)
    count = round(_BIASED_SHARE * dim)
    group = inputs.q.shape[1] // heads_kv
    for x, middle, is_biased in (
        (inputs.q, _Q_BIAS, (ranks < count).repeat_interleave(group, 1)),
        (inputs.k, _K_BIAS, ranks >= dim - count),
    ):
        size = (1, x.shape[1], 1, dim)
        signs = torch.randn(size, generator=generator).sign()
        x.add_(is_biased * signs * middle * (0.5 + torch.rand(size, generator=generator)))


def _enlarge_tokens(inputs: Inputs, generator: torch.Generator) -> None:
    """Biased channels, and 1 of 64 tokens of Q and of K three times as large: they spoil the scale of their group."""
    _bias_channels(inputs, generator)
    for x in (inputs.q, inputs.k):
        x.mul_(1 + 2 * (torch.rand(*x.shape[:3], 1, generator=generator) < 1 / 64))


def _widen_channels(inputs: Inputs, generator: torch.Generator) -> None:
    """Biased channels whose spreads differ too, by factors exp(0.7 z), z normal: what smoothing leaves."""
    for x in (inputs.q, inputs.k):
        x.mul_((0.7 * torch.randn(1, x.shape[1], 1, x.shape[-1], generator=generator)).exp())
    _bias_channels(inputs, generator)


def _draw_to_first(inputs: Inputs, generator: torch.Generator) -> None:
    """The first key has most of every row's weight and a small value, as the first token of a language model."""
    inputs.q[..., 0] = 8
    inputs.k[:, :, 0, 0] = 8 * (inputs.k.shape[-1] / 64) ** 0.5
    inputs.v[:, :, 0] *= 0.05


def _bias_values(inputs: Inputs, generator: torch.Generator) -> None:
    size = (1, inputs.v.shape[1], 1, inputs.v.shape[-1])
    inputs.v.add_(2 * torch.randn(size, generator=generator))


def _lift_values(inputs: Inputs, generator: torch.Generator) -> None:
    inputs.v.add_(1)


def _enlarge_values(inputs: Inputs, generator: torch.Generator) -> None:
    """Values of hundreds, and 1 of 128 tokens 30 times as large: they push the others of a channel towards zero."""
    inputs.v.mul_(100 * (1 + 29 * (torch.rand(*inputs.v.shape[:3], 1, generator=generator) < 1 / 128)))


#: Every kind, by name.
KINDS = {
    kind.name: kind
    for kind in (
        Kind("normal", "unit normal q, k and v: no outliers", _leave),
        Kind("biased_channels", "60 % of the channels of Q and of K have a bias that all tokens share", _bias_channels),
        Kind("large_tokens", "biased channels, and 1 of 64 tokens three times as large", _enlarge_tokens),
        Kind("wide_channels", "biased channels whose spreads differ", _widen_channels),
        Kind("sink", "the first key draws most of the weight and has a small value", _draw_to_first),
        Kind("biased_values", "V with a bias per channel, 2 times normal", _bias_values),
        Kind("lifted_values", "V = normal + 1: sums that grow with the keys", _lift_values),
        Kind("large_values", "V of hundreds, 1 of 128 tokens 30 times larger still", _enlarge_values),
    )
}
