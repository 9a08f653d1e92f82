"""Heads narrower than a kernel's: padding them with zeros, and when that is worth its copies."""

from __future__ import annotations

import torch

from sagegen.entry import Entry
from sagegen.gpu import Gpu
from sagegen.problem import Problem, Shape

#: Share of a GPU's bandwidth, by its data sheet, that the copies reach; torch SDPA's time at a narrower head over that
#: at the kernel's width. Both from an H200, head dims 40, 80 and 96 (docs/gpu-runs/2026-11-30e-h200.md).
_COPY_EFFICIENCY = 0.4
_NARROW_SDPA = 0.9
_LEAST_GAIN = 1.05
_ELEMENT_BYTES = 2


def pad_channels(x: torch.Tensor, width: int) -> torch.Tensor:
    """`x` with zeros behind its channels, dense; torch's own pad may keep a layout whose channels lie apart."""
    padded = x.new_empty(*x.shape[:-1], width)
    padded[..., : x.shape[-1]].copy_(x)
    padded[..., x.shape[-1] :].zero_()
    return padded


def is_padding_worth_it(entry: Entry, gpu: Gpu, problem: Problem, shape: Shape, head_dim: int) -> bool:
    """Whether a padded call of the entry's kernel is likely faster than torch SDPA; True where its speed is not known.

    Args:
        problem: what the kernel is asked, of its own width.
        head_dim: of the call, less than that.
    """
    figures = entry.figures
    if figures.speed_vs_sdpa is None or not figures.full_tops:
        return True
    kernel_us = shape.flops(problem) / figures.full_tops * 1e-6
    copies_us = _copied_bytes(shape, head_dim, problem.head_dim) / (_COPY_EFFICIENCY * gpu.bandwidth_gbs) * 1e-3
    return figures.speed_vs_sdpa * _NARROW_SDPA * kernel_us >= _LEAST_GAIN * (kernel_us + copies_us)


def _copied_bytes(shape: Shape, head_dim: int, width: int) -> int:
    """q, k and v are read and written wider; the output's own channels are read and written."""
    rows_q = shape.batch * shape.heads_q * shape.q_len
    rows_kv = shape.batch * shape.heads_kv * shape.kv_len
    return _ELEMENT_BYTES * ((rows_q + 2 * rows_kv) * (head_dim + width) + rows_q * 2 * head_dim)
