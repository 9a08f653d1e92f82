"""Sequences of their own lengths, windows and masks of keys on a card: kernels of both families, and the public API."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import pytest
import torch

import sagegen
from exact_attention import attend, seen_keys
from kernel_kinds import KINDS, MAIN_KINDS, RELATIVES, KernelKind
from public_calls import BF16, FP16, draw, draw_qkv
from ragged_calls import bind_ragged, check_close, check_ragged, draw_ragged, run_ragged
from sagegen.launch import Program
from sagegen.measuring.call import call_program
from sagegen.measuring.inputs import DTYPES
from sagegen.problem import Problem

pytestmark = pytest.mark.gpu

WINDOW = (200, 50)
REPEATS = 200
#: Queries and keys: one key, nothing on either side, tile edges, long ones; many short ones; A16, rows without keys.
LENGTHS = {
    "long": ((1, 0, 3000, 129, 777, 64, 1500, 33), (700, 65, 3000, 2047, 0, 64, 1333, 1)),
    "short": ((5, 64, 65, 1, 7, 30, 191, 193), (5, 64, 65, 300, 1, 30, 255, 257)),
    "a16": ((76, 34, 146), (1, 1, 1)),
}
RAGGED = [problem for problem in RELATIVES if problem.is_ragged]


@pytest.fixture
def program(relative_kernels: Mapping[Any, Any], kind: KernelKind, problem: Problem) -> Iterator[Program]:
    if (kind, problem) not in relative_kernels:
        pytest.skip(f"{kind.needs()} for {problem.name}")
    program = relative_kernels[kind, problem].load()
    yield program
    torch.cuda.synchronize()
    program.unload()


def window_of(problem: Problem) -> tuple[int, int] | None:
    return WINDOW if problem.is_windowed else None


# --- kernels


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("problem", RAGGED, ids=lambda problem: problem.name)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_sequences_are_each_what_they_are_alone(program: Program, problem: Problem, lengths: str) -> None:
    """NaN before, between and after them; and the same with memory of its own for each, NaN behind it."""
    for is_packed in (True, False):
        call = draw_ragged(
            problem, *LENGTHS[lengths], (8, 2), window=window_of(problem), gap=5, is_packed=is_packed, device="cuda"
        )
        check_ragged(program, problem, call, *run_ragged(program, problem, call))
        without, _ = run_ragged(program, problem, call, want_lse=False)
        check_ragged(program, problem, call, without, None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("problem", [p for p in RELATIVES if p.is_windowed and not p.is_ragged], ids=lambda p: p.name)
@pytest.mark.parametrize("window", [(200, 50), (-1, 9), (64, -1), (0, 0), (5000, 5000)], ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1333, 3001), (2000, 700), (1, 4096)])
def test_windows(program: Program, problem: Problem, window: tuple[int, int], q_len: int, kv_len: int) -> None:
    q, k, v = draw_qkv(2, 8, 2, q_len, kv_len, problem.head_dim, DTYPES[problem.dtype])
    out, lse = call_program(program, problem, program.config, q, k, v, want_lse=True, window=window)
    seen = seen_keys(q_len, kv_len, window=window, device="cuda")
    check_close(out, lse, *attend(q, k, v, seen, problem.head_dim**-0.5))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("problem", RAGGED, ids=lambda problem: problem.name)
def test_repeats_give_the_same_bits(program: Program, problem: Problem) -> None:
    """Whatever outputs and scratch held before."""
    call = draw_ragged(problem, *LENGTHS["long"], (8, 2), window=window_of(problem), device="cuda")
    bound = bind_ragged(program, problem, call)
    bound.launch()
    results = (bound.out, bound.lse)
    first = [x.view(torch.uint8).clone() for x in results]
    check_ragged(program, problem, call, *results)
    sequences = [(call.of_rows(*results, i)) for i in range(len(call.rows))]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for repeat in range(REPEATS):
        for x in (*results, bound.workspace):
            x.view(torch.uint8).fill_((0xFF, 0x00, 0x7F, 0xA5)[repeat % 4])
        bound.launch()
        for x, wanted in zip(results, first, strict=True):
            different += (x.view(torch.uint8) != wanted).sum()
    assert different.item() == 0
    assert all(out.isfinite().all() for out, _ in sequences)


@pytest.mark.parametrize("kind", MAIN_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("problem", RAGGED, ids=lambda problem: problem.name)
def test_a_table_of_nonsense_leaves_memory_outside_alone(program: Program, problem: Problem) -> None:
    """Outputs lie between guards; a sanitizer would tell the rest."""
    call = draw_ragged(problem, (300, 300, 300), (300, 300, 300), (8, 2), window=window_of(problem), device="cuda")
    bound = bind_ragged(program, problem, call)
    guarded = torch.full((3, *call.q.shape), 3.5, dtype=call.q.dtype, device="cuda")
    bound.out = guarded[1]
    for table in (
        [[0, 500, 0, 600], [500, 200, 600, 100], [200, 900, 100, 900]],
        [[-(2**31), 2**31 - 1] * 2] * 3,
        [[800, 2**31 - 1, 2**30, 2**31 - 1], [-5, 40, -5, 40], [600, 0, 900, 0]],
    ):
        call.table.copy_(torch.tensor(table))
        bound.launch()
        torch.cuda.synchronize()
    assert (guarded[0] == 3.5).all()
    assert (guarded[2] == 3.5).all()


# --- the public API


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")


def check_packed(
    call: tuple[Any, ...],
    q_lengths: tuple[int, ...],
    kv_lengths: tuple[int, ...],
    out: torch.Tensor,
    lse: torch.Tensor,
    **mask: Any,
) -> None:
    """Every sequence against FP64; values are finite, so whether V is quantized makes no difference."""
    parts = zip(*(x.split(n) for x, n in zip(call, (q_lengths, kv_lengths, kv_lengths), strict=False)), strict=True)
    for i, part in enumerate(parts):
        q, k, v = (x.transpose(0, 1) for x in part)
        seen = seen_keys(q.shape[1], k.shape[1], device="cuda", **mask)
        own, own_lse = out.split(q_lengths)[i].transpose(0, 1), lse.split(q_lengths, 1)[i]
        check_close(own, own_lse, *attend(q, k, v, seen, q.shape[2] ** -0.5))


@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"window": (100, 20)}], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 80])
def test_attention_varlen_by_kernels(mask: dict[str, Any], dim: int) -> None:
    q_lengths, kv_lengths = (300, 1, 0, 1500, 64), (300, 2000, 7, 1500, 0)
    q, k, v = (
        draw(sum(n), h, dim, seed=s, dtype=BF16) for s, (n, h) in enumerate(((q_lengths, 8), *[(kv_lengths, 2)] * 2))
    )
    call = (q, k, v, starts(q_lengths), starts(kv_lengths), max(q_lengths), max(kv_lengths))
    out, lse = sagegen.attention_varlen(*call, return_lse=True, backend="kernel", **mask)
    assert sagegen.last_dispatch().answer == "kernel"
    check_packed(call, q_lengths, kv_lengths, out, lse, **mask)


def masked(dtype: torch.dtype = FP16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """NaN in keys that a mask hides; of the last item all."""
    q, k, v = draw_qkv(4, 8, 2, 500, 777, 64, dtype)
    mask = torch.rand(4, 1, 1, 777, device="cuda", generator=torch.Generator("cuda").manual_seed(5)) > 0.4
    mask[3] = False
    hidden = ~mask.squeeze(1).mT
    return q, k.masked_fill(hidden[:, None], math.nan), v.masked_fill(hidden[:, None], math.nan), mask


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_keys_that_a_mask_hides_leave_no_trace(layout: str, dtype: torch.dtype) -> None:
    q, k, v, mask = masked(dtype)
    inputs = [x.transpose(1, 2).contiguous() if layout == "NHD" else x for x in (q, k, v)]
    out, lse = sagegen.attention(*inputs, attn_mask=mask, layout=layout, return_lse=True, backend="kernel")
    assert sagegen.last_dispatch().problem.is_ragged
    out = out.transpose(1, 2) if layout == "NHD" else out
    expected, expected_lse = attend(q, k, v, mask, 0.125)
    for i in range(4):
        check_close(out[i], lse[i], expected[i], expected_lse[i])


Calls = dict[str, Callable[[], Any]]


@pytest.fixture
def calls() -> Calls:
    """Calls that must not wait for the device, warm."""
    q, k, v = draw(700, 8, 64), draw(900, 2, 64, seed=1), draw(900, 2, 64, seed=2)
    packed = (q, k, v, starts((300, 400)), starts((500, 400)), 400, 500)
    *inputs, mask = masked()
    found: Calls = {
        "varlen": lambda: sagegen.attention_varlen(*packed, is_causal=True, return_lse=True, backend="kernel"),
        "varlen_window": lambda: sagegen.attention_varlen(*packed, window=(50, 5), backend="kernel"),
        "key_mask": lambda: sagegen.attention(*inputs, attn_mask=mask, return_lse=True, backend="kernel"),
        "window": lambda: sagegen.attention(*inputs[:1] * 3, window=(50, 5), backend="kernel"),
    }
    for call in found.values():
        call()
        assert sagegen.last_dispatch().answer == "kernel"
    torch.cuda.synchronize()
    return found


def test_the_host_never_waits_for_the_device(calls: Calls) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls.values():
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"window": (60, 10)}], ids=str)
def test_a_graph_takes_new_lengths_with_every_replay(mask: dict[str, Any]) -> None:
    q, k, v = draw(700, 8, 64), draw(900, 2, 64, seed=1), draw(900, 2, 64, seed=2)
    starts_q, starts_k = starts((300, 400, 0)), starts((500, 400, 0))
    call = (q, k, v, starts_q, starts_k, 700, 900)
    graph, (out, lse) = capture(lambda: sagegen.attention_varlen(*call, return_lse=True, backend="kernel", **mask))
    for q_lengths, kv_lengths in (
        ((300, 400, 0), (500, 400, 0)),
        ((1, 0, 699), (0, 899, 1)),
        ((700, 0, 0), (10, 20, 870)),
    ):
        starts_q.copy_(starts(q_lengths))
        starts_k.copy_(starts(kv_lengths))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        check_packed(call, q_lengths, kv_lengths, out, lse, **mask)


def test_a_graph_takes_a_new_mask_of_keys_with_every_replay() -> None:
    q, k, v = draw_qkv(2, 8, 2, 300, 400, 64)
    mask = torch.ones(2, 1, 1, 400, dtype=torch.bool, device="cuda")
    graph, (out, lse) = capture(lambda: sagegen.attention(q, k, v, attn_mask=mask, return_lse=True, backend="kernel"))
    for share in (1.1, 0.5, 0.1, -1):
        mask.copy_(torch.rand(2, 1, 1, 400, device="cuda") < share)
        graph.replay()
        torch.cuda.synchronize()
        expected, expected_lse = attend(q, k, v, mask, 0.125)
        for i in range(2):
            check_close(out[i], lse[i], expected[i], expected_lse[i])
