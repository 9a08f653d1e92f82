"""What makes Q and K easier to quantize, in PyTorch as kernels do it: Q's span means, delta S, balance and rotation.

Sources: SageAttention2 (arXiv 2411.10958, section 3.2) for smoothing Q and for delta S; SmoothQuant (arXiv 2211.10438,
equation 4) for moving size between channels, with root mean squares in the place of maxima. Rotating what smoothing has
left by a Hadamard matrix changes no score, and evens out the channels (docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sagegen.layout import QUANTIZE_THREADS, ceil_div, spans_of_range, tokens_of_split
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
    return _add_in_order([_add_rows(part, one) for part in torch.split(k.float(), split, 2)]) / k.shape[2]


def _add_rows(x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Sum of `share`, one number or x's shape, times each row, float32 [batch, heads, 1, dim].

    As a block of the statistics adds up: each of its rows of threads has every so many rows of the tensor, and then
    their sums are added one after another. A multiplication and an addition are rounded once.
    """
    rows_at_once = QUANTIZE_THREADS * 8 // x.shape[-1]
    partial = x.new_zeros(*x.shape[:2], rows_at_once, x.shape[3])
    shares = share.double().expand(x.shape)
    for rows, own in zip(torch.split(x, rows_at_once, 2), torch.split(shares, rows_at_once, 2), strict=True):
        count = rows.shape[2]
        partial[:, :, :count] = (rows.double() * own + partial[:, :, :count]).float()
    total = partial[:, :, :1]
    for row in range(1, rows_at_once):
        total = total + partial[:, :, row : row + 1]
    return total


def balance_factors(gamma_q: torch.Tensor, k: torch.Tensor, k_mean: torch.Tensor, config: Config) -> torch.Tensor:
    """What gamma(Q)'s channels are multiplied by, and gamma(K)'s divided by: (rms of K / rms of Q)^0.5.

    1 where either is all zeros. Summed in the order of the kernels.

    Args:
        gamma_q: Q less its spans' means, float32 [batch, heads_q, q_len, dim].
        k: [batch, heads_kv, kv_len, dim], fp16 or bf16.
        k_mean: of K's tokens, float32 [batch, heads_kv, 1, dim].

    Returns:
        float32 [batch, heads_kv, 1, dim]: one per KV head, since its query heads share the quantized K.
    """
    batch, heads_kv, kv_len, dim = k.shape
    heads_q, q_len = gamma_q.shape[1:3]
    group = heads_q // heads_kv
    split = tokens_of_split(batch * heads_kv * config.measured_tensors, kv_len)
    k_squares = _add_in_order(
        [_add_rows(part, part) for part in torch.split(k.float() - k[:, :, :1].float(), split, 2)]
    )
    spans = ceil_div(q_len, config.block_q) * config.block_q // config.mean_span
    of_range = spans_of_range(spans, group) * config.mean_span
    ranges = torch.cat([_add_rows(part, part) for part in torch.split(gamma_q, of_range, 2)], 2)
    q_squares = _add_in_order(torch.split(ranges.reshape(batch, heads_kv, -1, dim), 1, 2))

    shift = (k_mean - k[:, :, :1].float()).double()
    k_square = (k_squares / kv_len - shift * shift).float()
    ratio = k_square / (q_squares / torch.tensor(q_len, dtype=torch.float32).mul(group))
    return torch.where((ratio > 0) & ratio.isfinite(), _square_root(_square_root(ratio)), 1)


def _square_root(x: torch.Tensor) -> torch.Tensor:
    """Of float32, rounded to nearest, which PyTorch's own is not on every CPU."""
    return x.double().sqrt().float()


def _add_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts' sum, one after another."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
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
        seen: keys of the tiles that some row of a span's query tile sees, int64 [spans, 1].
    """

    means: torch.Tensor
    span: torch.Tensor
    keys: torch.Tensor
    centre: torch.Tensor
    factor: torch.Tensor
    is_half: bool
    seen: torch.Tensor

    def of(self, keys: slice) -> torch.Tensor:
        """Of some keys, in log2 units, float32 [batch, heads_kv, rows, keys]."""
        delta = self._of_spans(keys)
        if self.is_half:
            unit = torch.ldexp(torch.ones_like(delta), torch.frexp(delta).exponent - _HALF_BITS)
            delta = (delta / unit).round() * unit
        return delta[:, :, self.span]

    def largest(self) -> torch.Tensor:
        """Largest size that a row's span has with keys that count, float32 [batch, heads_kv, rows, 1]."""
        sizes = self._of_spans(slice(None)).abs()
        hidden = torch.arange(sizes.shape[-1], device=sizes.device) >= self.seen
        return sizes.masked_fill_(hidden, 0).amax(-1, keepdim=True)[:, :, self.span]

    def _of_spans(self, keys: slice) -> torch.Tensor:
        """Before it is stored, float32 [batch, heads_kv, spans, keys].

        Summed as a chain of matrix instructions does, since a last bit can decide how fp16 rounds.
        """
        total = self.means.new_zeros(())
        for means, own in zip(
            torch.split(self.means, _STEP, -1), torch.split(self.keys[:, :, keys], _STEP, -1), strict=True
        ):
            total = (total.double() + means.double() @ own.double().transpose(-1, -2)).float()
        return (total - self.centre) * self.factor


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
