"""What makes Q and K easier to quantize, in PyTorch as kernels do it: Q's span means, delta S, and rotation.

Sources: SageAttention2 (arXiv 2411.10958, section 3.2) for smoothing Q and for delta S. Rotating what smoothing has
left by a Hadamard matrix changes no score, and evens out the channels (docs/numerics.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sagegen.layout import QUANTIZE_THREADS, tokens_of_split
from sagegen.space import Config

#: Channels of one matrix instruction, and mantissa bits of fp16.
_STEP = 16
_HALF_BITS = 11


def span_means(q: torch.Tensor, span: int) -> torch.Tensor:
    """Means of every `span` rows, rounded to q's type, float32 [batch, heads, ceil(q_len / span), dim].

    Summed in the order of the kernels, since the last bit decides about the rounding now and then.

    Args:
        q: [batch, heads, q_len, dim], fp16 or bf16.
    """
    means = []
    for part in torch.split(q.float(), span, 2):
        share = torch.tensor(1 / part.shape[2], dtype=torch.float32, device=q.device)
        means.append(_add_rows(part, share).to(q.dtype).float())
    return torch.cat(means, 2)


def token_mean(k: torch.Tensor, config: Config) -> torch.Tensor:
    """K's mean over its tokens, float32 [batch, heads, 1, dim], summed in the order of the kernels.

    Args:
        k: [batch, heads, kv_len, dim], fp16 or bf16.
    """
    split = tokens_of_split(k.shape[0] * k.shape[1] * config.measured_tensors, k.shape[2])
    one = torch.ones((), device=k.device)
    total = torch.zeros_like(k[:, :, :1], dtype=torch.float32)
    for part in torch.split(k.float(), split, 2):
        total = total + _add_rows(part, one)
    return total / k.shape[2]


def _add_rows(x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Sum of `share` times each row, float32 [batch, heads, 1, dim].

    As a block of the statistics adds up: each of its rows of threads has every so many rows of the tensor, and then
    their sums are added one after another. A multiplication and an addition are rounded once.
    """
    rows_at_once = QUANTIZE_THREADS * 8 // x.shape[-1]
    partial = x.new_zeros(*x.shape[:2], rows_at_once, x.shape[3])
    for rows in torch.split(x, rows_at_once, 2):
        count = rows.shape[2]
        partial[:, :, :count] = (rows.double() * share.double() + partial[:, :, :count]).float()
    total = partial[:, :, :1]
    for row in range(1, rows_at_once):
        total = total + partial[:, :, row : row + 1]
    return total


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x H / sqrt(dim), H the Hadamard matrix of Sylvester's order; float32 in and out.

    The butterflies go from the lowest bit of the channel's index to the highest, as in the kernels: their order decides
    about last bits.

    Args:
        x: [..., dim], dim a power of two.
    """
    dim = x.shape[-1]
    for bit in (1 << shift for shift in range(dim.bit_length() - 1)):
        low, high = x.reshape(*x.shape[:-1], dim // (2 * bit), 2, bit).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
    rotated: torch.Tensor = x * dim**-0.5
    return rotated


@dataclass(frozen=True, slots=True)
class DeltaS:
    """What smoothing Q takes from the scores.

    Attributes:
        means: of Q's spans, head by head of those that share a KV head, [batch, heads_kv, spans, dim].
        span: of each row, int64 [rows].
        keys: K as it came, [batch, heads_kv, kv_len, dim].
        centre: the means' products with K's mean, [batch, heads_kv, spans, 1].
        factor: softmax scale in log2 units, float32 [].
        is_half: kept in fp16 with a scale per span, a power of two.
    """

    means: torch.Tensor
    span: torch.Tensor
    keys: torch.Tensor
    centre: torch.Tensor
    factor: torch.Tensor
    is_half: bool

    def of(self, keys: slice) -> torch.Tensor:
        """Of some keys, in log2 units, float32 [batch, heads_kv, rows, keys].

        Summed as a chain of matrix instructions does, since a last bit can decide how fp16 rounds.
        """
        total = self.means.new_zeros(())
        for means, own in zip(
            torch.split(self.means, _STEP, -1), torch.split(self.keys[:, :, keys], _STEP, -1), strict=True
        ):
            total = (total.double() + means.double() @ own.double().transpose(-1, -2)).float()
        delta = (total - self.centre) * self.factor
        if self.is_half:
            unit = torch.ldexp(torch.ones_like(delta), torch.frexp(delta).exponent - _HALF_BITS)
            delta = (delta / unit).round() * unit
        return delta[:, :, self.span]


def mean_products(means: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Products of Q's means with K's, float32 [batch, heads_kv, spans, 1]; half of the channels after the other.

    Args:
        means: [batch, heads_kv, spans, dim].
        mean: [batch, heads_kv, 1, dim].
    """
    halves = []
    for own, other in zip(means.chunk(2, -1), mean.chunk(2, -1), strict=True):
        total = torch.zeros_like(own[..., :1])
        for channel in range(own.shape[-1]):
            at = slice(channel, channel + 1)
            total = (own[..., at].double() * other[..., at].double() + total).float()
        halves.append(total)
    return halves[0] + halves[1]


@dataclass(frozen=True, slots=True)
class SmoothedQueries:
    """Q less its spans' means, float32 [batch, heads_q, q_len, dim], and the means, [batch, heads_q, spans, dim]."""

    gamma: torch.Tensor
    means: torch.Tensor


def smooth_queries(q: torch.Tensor, config: Config) -> SmoothedQueries:
    """Q as it is quantized, but for the rotation; `config` smooths Q."""
    means = span_means(q, config.mean_span)
    own = means.repeat_interleave(config.mean_span, 2)[:, :, : q.shape[2]]
    return SmoothedQueries(q.float() - own, means)
