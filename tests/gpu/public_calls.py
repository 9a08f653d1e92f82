"""Calls of the public API on a card, held to our kernel, and what "close" means for them.

Close, as the list of cases has it: relative L2 error <= 0.05, cosine >= 0.998, no NaN or Inf where the exact result has
none.
"""

from __future__ import annotations

from typing import Any

import torch

import sagegen
from sagegen.reference import attention as exact

FP16, BF16 = torch.float16, torch.bfloat16


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = FP16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def draw_qkv(
    batch: int,
    heads_q: int,
    heads_kv: int,
    q_len: int,
    kv_len: int,
    dim: int,
    dtype: torch.dtype = FP16,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """HND."""
    q = draw(batch, heads_q, q_len, dim, seed=3 * seed, dtype=dtype)
    k = draw(batch, heads_kv, kv_len, dim, seed=3 * seed + 1, dtype=dtype)
    v = draw(batch, heads_kv, kv_len, dim, seed=3 * seed + 2, dtype=dtype)
    return q, k, v


def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """The public API, held to our kernel."""
    return sagegen.attention(q, k, v, backend="kernel", **options)


def errors(out: torch.Tensor, ref: torch.Tensor) -> tuple[float, float]:
    """Relative L2 error and cosine."""
    out, ref = out.double(), ref.double()
    l2 = ((out - ref).norm() / ref.norm()).item()
    return l2, ((out * ref).sum() / (out.norm() * ref.norm())).item()


def assert_close(out: torch.Tensor, ref: torch.Tensor, l2: float = 0.05, cosine: float = 0.998) -> None:
    assert out.shape == ref.shape
    assert out.isfinite().all()
    found_l2, found_cosine = errors(out, ref)
    assert found_l2 <= l2
    assert found_cosine >= cosine


def assert_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Run a call and compare it with exact attention; the output comes back."""
    out = kernel(q, k, v, **options)
    assert_close(out, exact(q, k, v, out_dtype=torch.float64, **options))
    return out
