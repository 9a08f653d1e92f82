"""What makes Q and K easier to quantize, in PyTorch as kernels do it: Q's span means, delta S, and rotation.

Sources: SageAttention2 (arXiv 2411.10958, section 3.2) for smoothing Q and for delta S. Rotating what smoothing has left
by a Hadamard matrix changes no score, and evens out the channels (docs/numerics.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sagegen.layout import QUANTIZE_THREADS
from sagegen.space import Config


def span_means(q: torch.Tensor, span: int) -> torch.Tensor:
    """Means of every `span` rows, rounded to q's type, float32 [batch, heads, ceil(q_len / span), dim].

    Summed in the order of the kernels, since the last bit decides about the rounding now and then.

    Args:
        q: [batch, heads, q_len, dim], fp16 or bf16.
    """
    rows_at_once = QUANTIZE_THREADS * 8 // q.shape[-1]
    means = []
    for part in q.float().split(span, 2):
        share = torch.tensor(1 / part.shape[2], dtype=torch.float32, device=q.device).double()
        partial = part.new_zeros(*part.shape[:2], rows_at_once, part.shape[3])
        for rows in part.split(rows_at_once, 2):
            count = rows.shape[2]
            partial[:, :, :count] = (rows.double() * share + partial[:, :, :count]).float()
        total = torch.zeros_like(partial[:, :, 0])
        for row in range(rows_at_once):
            total = total + partial[:, :, row]
        means.append(total.to(q.dtype).float())
    return torch.stack(means, 2)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x H / sqrt(dim), H the Hadamard matrix of Sylvester's order; float32 in and out.

    The butterflies go from the lowest bit of the channel's index to the highest, as in the kernels: their order decides
    about last bits.

    Args:
        x: [..., dim], dim a power of two.
    """
    dim = x.shape[-1]
    for bit in (1 << shift for shift in range(dim.bit_length() - 1)):
        low, high = x.unflatten(-1, (dim // (2 * bit), 2, bit)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
    return x * dim**-0.5


@dataclass(frozen=True, slots=True)
class DeltaS:
    """What smoothing Q takes from the scores.

    Attributes:
        means: of Q's spans, head by head of those that share a KV head, [batch, heads_kv, spans, dim].
        span: of each row, int64 [rows].
        keys: K less its mean, [batch, heads_kv, kv_len, dim], not quantized.
        factor: softmax scale in log2 units.
        is_half: kept in fp16 with a scale per span, a power of two.
    """

    means: torch.Tensor
    span: torch.Tensor
    keys: torch.Tensor
    factor: float
    is_half: bool

    def of(self, keys: slice) -> torch.Tensor:
        """Of some keys, in log2 units, float32 [batch, heads_kv, rows, keys]."""
        exact = self.means.double() @ self.keys[:, :, keys].double().transpose(-1, -2)
        delta = (exact * self.factor).float()
        if self.is_half:
            scale = delta.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            unit = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 12)
            delta = (delta / unit).half().float() * unit
        return delta[:, :, self.span]


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
