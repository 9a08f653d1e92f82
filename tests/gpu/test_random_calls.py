"""Thousands of random calls, spread over the kinds of kernels, each compared with exact attention on the card.

The calls of a batch are launched and measured without waiting; the host then waits for all of them at once, and ends
the process if they do not come to an end. `--random-calls N` says how many, `--first-call I` where to begin: a call
follows from its number, so `--random-calls 1 --first-call I` runs a failed one again. `--wait-limit N` turns a deadlock
into a trap.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from call_errors import LIMITS, Errors, Totals, find_fault, measure
from kernel_kinds import KINDS
from random_calls import PoisonedAllocator, RandomCall, draw_call, make_inputs
from sagegen.launch import Program
from sagegen.measuring.call import bind_call
from sagegen.problem import Problem
from sagegen.reference import attention as exact

pytestmark = pytest.mark.gpu

BATCH = 64
#: A batch takes tenths of a second.
PATIENCE_S = 60
MOST_FAILURES = 20

Programs = Mapping[tuple[str, Problem], Program]


@pytest.fixture
def programs(kind_kernels: Mapping[Any, Any]) -> Iterator[Programs]:
    loaded = {(kind.name, problem): kernel.load() for (kind, problem), kernel in kind_kernels.items()}
    yield loaded
    torch.cuda.synchronize()
    for program in loaded.values():
        program.unload()


def test_random_calls(programs: Programs, pytestconfig: pytest.Config) -> None:
    count, first = pytestconfig.getoption("random_calls"), pytestconfig.getoption("first_call")
    totals = Totals()
    failures: list[str] = []
    for start in range(first, first + count, BATCH):
        calls = [draw_call(index) for index in range(start, min(start + BATCH, first + count))]
        for call, errors in zip(calls, run_batch(programs, calls), strict=True):
            kind = pick_kind(programs, call)
            totals.add(kind, call.inputs, errors)
            if fault := find_fault(call, errors):
                failures.append(describe(call, kind, fault, errors))
        if len(failures) >= MOST_FAILURES:
            break
    figures = totals.rows()
    print(*figures, sep="\n")
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "random_calls.json").write_text(json.dumps([asdict(row) for row in figures], indent=1))
    assert not failures, "\n".join(failures)
    if count >= 1000:  # a few calls are no average
        low = [row for row in figures if row.cosine < LIMITS[row.inputs].mean_cosine]
        assert not low, "\n".join(map(str, low))


def pick_kind(programs: Programs, call: RandomCall) -> str:
    """Of the kinds that the card has in the call's problem."""
    return call.pick([kind.name for kind in KINDS if (kind.name, call.problem) in programs])


def run_batch(programs: Programs, calls: list[RandomCall]) -> list[Errors]:
    named = [f"{pick_kind(programs, call)} {call}" for call in calls]
    try:
        with watched(named):
            rows = torch.stack([launch(programs, call) for call in calls]).tolist()
    except RuntimeError as error:  # the context is lost, and with it which call it was
        pytest.fail("\n".join([f"{error}, in one of these calls:", *named]))
    return [Errors(*row) for row in rows]


def launch(programs: Programs, call: RandomCall) -> torch.Tensor:
    """Run a call and exact attention; how they differ, once the stream has got there."""
    program = programs[pick_kind(programs, call), call.problem]
    x = make_inputs(call, "cuda")
    bound = bind_call(
        program, call.problem, program.config, x.q, x.k, x.v, want_lse=call.want_lse, allocator=PoisonedAllocator()
    )
    bound.launch()
    ref, ref_lse = exact(x.q, x.k, x.v, is_causal=call.problem.is_causal, return_lse=True, out_dtype=torch.float64)
    return measure(bound.out, bound.lse, ref, ref_lse)


@contextmanager
def watched(named: list[str]) -> Iterator[None]:
    """Nothing ends a kernel that waits for ever but the end of its process."""

    def end() -> None:
        lines = [f"no end after {PATIENCE_S} s: one of these calls hangs", *named, "see --wait-limit"]
        os.write(2, ("\n".join(lines) + "\n").encode())
        os._exit(1)

    timer = threading.Timer(PATIENCE_S, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def describe(call: RandomCall, kind: str, fault: str, errors: Errors) -> str:
    replay = f"pytest tests/gpu/test_random_calls.py --random-calls 1 --first-call {call.index}"
    return f"{fault}: {kind} {call} {errors}; again: {replay}"
