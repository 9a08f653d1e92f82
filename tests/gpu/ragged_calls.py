"""Calls of kernels for sequences of their own lengths, on any device: what they are given and what they are held to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from drawn_checks import KERNEL_L2, KERNEL_LSE
from exact_attention import attend, seen_keys
from sagegen.counts import Ragged
from sagegen.measuring.inputs import DTYPES
from sagegen.plan import Launcher, Loaded, Plan, Strides, TensorStrides, make_plan
from sagegen.problem import Problem, Shape

#: What outputs hold before a call: nothing that attention gives.
UNTOUCHED = -7.25


@dataclass(frozen=True, slots=True)
class RaggedCall:
    """Sequences in one row of tokens, or each in memory of its own.

    Attributes:
        q, k, v: [tokens, heads, dim], or [sequences, tokens, heads, dim].
        table: int32 [sequences, 4]: first query, one past its last, first key, one past its last.
        rows: of q, by sequence, as an index of its first dims.
        keys: of k and v, likewise.
        window: of a windowed problem.
        longest: queries and keys that no sequence exceeds.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    rows: tuple[tuple[int | slice, ...], ...]
    keys: tuple[tuple[int | slice, ...], ...]
    window: tuple[int, int] | None
    longest: tuple[int, int]

    @property
    def is_packed(self) -> bool:
        return self.q.dim() == 3

    @property
    def blank(self) -> tuple[torch.Tensor, torch.Tensor]:
        """An output and an lse that nothing was written to."""
        lse_shape = (*self.q.shape[:-3], self.q.shape[-2], self.q.shape[-3])
        return torch.full_like(self.q, UNTOUCHED), torch.full(lse_shape, UNTOUCHED, device=self.q.device)

    def of_rows(self, out: torch.Tensor, lse: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, HND, and lse of a sequence."""
        return out[self.rows[i]].transpose(0, 1), lse[(*self.rows[i][:-1], slice(None), self.rows[i][-1])]


def draw_ragged(
    problem: Problem,
    q_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    heads: tuple[int, int] = (2, 1),
    *,
    window: tuple[int, int] | None = None,
    gap: int = 0,
    is_packed: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> RaggedCall:
    """Normal values, the same on every device; NaN in all memory that is no sequence's.

    Args:
        heads: of queries, and of keys and values.
        gap: tokens before, between and after sequences; of memory of their own, after them.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype, dim = DTYPES[problem.dtype], problem.head_dim
    ranges = []
    for lengths in (q_lengths, kv_lengths):
        ends = [*accumulate(length + gap for length in lengths)]
        starts = [end - length if is_packed else 0 for end, length in zip(ends, lengths, strict=True)]
        ranges.append([slice(start, start + length) for start, length in zip(starts, lengths, strict=True)])

    def draw(lengths: Sequence[int], own: Sequence[slice], heads: int) -> torch.Tensor:
        tokens = max(1, own[-1].stop if is_packed else max(lengths)) + gap
        x = torch.full((len(lengths), tokens, heads, dim)[is_packed:], math.nan)
        for i, part in enumerate(own):
            x[(part,) if is_packed else (i, part)] = torch.randn(lengths[i], heads, dim, generator=generator)
        return x.to(device=device, dtype=dtype)

    (q_ranges, k_ranges), (heads_q, heads_kv) = ranges, heads
    table = [[a.start, a.stop, b.start, b.stop] for a, b in zip(q_ranges, k_ranges, strict=True)]
    rows, keys = (
        tuple((part,) if is_packed else (i, part) for i, part in enumerate(own)) for own in (q_ranges, k_ranges)
    )
    return RaggedCall(
        draw(q_lengths, q_ranges, heads_q),
        draw(kv_lengths, k_ranges, heads_kv),
        draw(kv_lengths, k_ranges, heads_kv),
        torch.tensor(table, dtype=torch.int32, device=device),
        rows,
        keys,
        window,
        (max(1, *q_lengths), max(1, *kv_lengths)),
    )


def plan_ragged(program: Loaded, problem: Problem, call: RaggedCall, want_lse: bool) -> Plan:
    """The plan of a call whose output lies as its queries do."""
    strides = [
        Strides(0 if call.is_packed else x.stride(0), x.stride(-2), x.stride(-3)) for x in (call.q, call.k, call.v)
    ]
    shape = Shape(len(call.table), call.q.shape[-2], call.k.shape[-2], *call.longest)
    return make_plan(
        problem,
        program.config,
        shape,
        TensorStrides(*strides, strides[0]),
        problem.head_dim**-0.5,
        want_lse,
        window=call.window,
        ragged=Ragged(call.q.shape[-3], call.k.shape[-3], call.is_packed),
    )


@dataclass(slots=True)
class BoundRagged:
    """A planned call with its outputs and its scratch."""

    call: RaggedCall
    prepared: Launcher
    workspace: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    want_lse: bool

    def launch(self) -> None:
        """Launch all kernels on torch's current stream."""
        call, lse = self.call, self.lse.data_ptr() if self.want_lse else 0
        stream = torch.cuda.current_stream(call.q.device).cuda_stream if call.q.is_cuda else 0
        inputs = (call.q.data_ptr(), call.k.data_ptr(), call.v.data_ptr())
        self.prepared.launch(
            *inputs, self.out.data_ptr(), lse, self.workspace.data_ptr(), stream, call.table.data_ptr()
        )


def bind_ragged(program: Loaded, problem: Problem, call: RaggedCall, *, want_lse: bool = True) -> BoundRagged:
    plan = plan_ragged(program, problem, call, want_lse)
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=call.q.device)
    return BoundRagged(call, program.prepare(plan), workspace, *call.blank, want_lse)


def run_ragged(
    program: Loaded, problem: Problem, call: RaggedCall, *, want_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse; what no kernel wrote is UNTOUCHED."""
    bound = bind_ragged(program, problem, call, want_lse=want_lse)
    bound.launch()
    return bound.out, bound.lse


def exact_items(problem: Problem, call: RaggedCall) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Output, HND, and lse of every sequence by itself, in FP64."""
    for rows, keys in zip(call.rows, call.keys, strict=True):
        q, k, v = call.q[rows].transpose(0, 1), call.k[keys].transpose(0, 1), call.v[keys].transpose(0, 1)
        seen = seen_keys(q.shape[1], k.shape[1], problem.is_causal, call.window, q.device)
        yield attend(q, k, v, seen, problem.head_dim**-0.5)


def check_ragged(
    program: Loaded, problem: Problem, call: RaggedCall, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Every sequence is what it is by itself, and nothing else was written; `lse` None where none was wanted."""
    left, blank_lse = out.clone(), call.blank[1]
    left_lse = blank_lse if lse is None else lse.clone()
    for i, (expected, expected_lse) in enumerate(exact_items(problem, call)):
        found, found_lse = call.of_rows(out, left_lse, i)
        v = None if program.config.quantizes_v else call.v[call.keys[i]].transpose(0, 1)
        check_close(found, None if lse is None else found_lse, expected, expected_lse, v)
        for x in call.of_rows(left, left_lse, i):
            x.fill_(UNTOUCHED)
    assert (left == UNTOUCHED).all(), "rows of no sequence were written"
    assert (left_lse == UNTOUCHED).all(), "an lse of no sequence was written"


def check_close(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    expected: torch.Tensor,
    expected_lse: torch.Tensor,
    v: torch.Tensor | None = None,
) -> None:
    """As near to exact attention as kernels are; 0 and -inf where no key is seen; NaN as docs/numerics.md has it.

    Args:
        v: of the call, where P V takes it as it is; None where it is quantized.
    """
    must = may = expected.isnan()
    lse_is_nan = expected_lse.isnan()
    if v is None:  # a bad value spoils all channels, and the lse
        must = may = must.any(-1, keepdim=True).expand_as(must)
        lse_is_nan = must.any(-1)
    else:  # a hidden one is multiplied by 0 where a row's tile reads it
        channels = (~v.isfinite()).any(-2, keepdim=True).repeat_interleave(out.shape[-3] // v.shape[-3], -3)
        may = must | channels & (expected_lse != -math.inf)[..., None]
    assert (out.isnan() | ~must).all(), "a value that should be NaN is not"
    assert (may | ~out.isnan()).all(), "NaN reaches other values"
    assert not out[expected_lse == -math.inf].any(), "a row that sees no key is not 0"
    is_number = ~(out.isnan() | expected.isnan())
    error = torch.where(is_number, out.double() - expected, 0).norm().item()
    assert error <= KERNEL_L2 * torch.where(is_number, expected, 0).norm().item() + 1e-6
    if lse is not None:
        assert torch.equal(lse.isnan(), lse_is_nan), "NaN reaches other values of the lse"
        assert torch.equal(lse == -math.inf, expected_lse == -math.inf)
        off = (lse.double() - expected_lse)[expected_lse.isfinite() & ~lse_is_nan].abs()
        assert not off.numel() or off.max() <= KERNEL_LSE, off.max().item()
