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
from sagegen.reference import quantized_attention

pytestmark = pytest.mark.gpu

BATCH = 64
#: A batch takes tenths of a second.
PATIENCE_S = 60
MOST_FAILURES = 20
#: Inputs whose scores are so wide that INT8 itself is now and then beyond the limits; how many calls may be, and how
#: far such a call is from the same steps in PyTorch at most: a mean's last bit moves a wide score by a step.
WIDE_INPUTS = ("outliers_x8", "outliers_x16", "q_x16")
MOST_INEXACT = 0.001
NUMERICS_L2, NUMERICS_LSE = 0.02, 0.05

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
    inexact: list[str] = []
    for start in range(first, first + count, BATCH):
        calls = [draw_call(index) for index in range(start, min(start + BATCH, first + count))]
        for call, errors in zip(calls, run_batch(programs, calls), strict=True):
            kind = pick_kind(programs, call)
            totals.add(kind, call.inputs, errors)
            if fault := find_fault(call, errors):
                found = inexact if has_its_numerics(programs[kind, call.problem], call, errors) else failures
                found.append(describe(call, kind, fault, errors))
        if len(failures) >= MOST_FAILURES:
            break
    figures = totals.rows()
    print(*figures, sep="\n")
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "random_calls.json").write_text(json.dumps([asdict(row) for row in figures], indent=1))
    print("beyond the limits, as their numerics are:", *inexact, sep="\n  ")
    assert not failures, "\n".join(failures)
    assert len(inexact) <= MOST_INEXACT * count + 1, "\n".join(inexact)
    if count >= 1000:  # a few calls are no average
        low = [row for row in figures if row.cosine < LIMITS[row.inputs].mean_cosine]
        assert not low, "\n".join(map(str, low))


def has_its_numerics(program: Program, call: RandomCall, errors: Errors) -> bool:
    """Whether only INT8 is to blame: the same steps in PyTorch are as far from exact attention as the kernel.

    Of scores as wide as these a rounded query can lose half of its weight, in one of some thousand calls.
    """
    if call.inputs not in WIDE_INPUTS or errors.not_finite or errors.blind_wrong:
        return False
    x = make_inputs(call, "cuda")
    bound = bind_call(program, call.problem, program.config, x.q, x.k, x.v, want_lse=call.want_lse)
    bound.launch()
    wanted, wanted_lse = quantized_attention(x.q, x.k, x.v, call.problem, program.config, want_lse=call.want_lse)
    distance = (bound.out.float() - wanted).norm() / wanted.norm()
    lse_distance = 0.0
    if bound.lse is not None:  # -inf less -inf is NaN
        lse_distance = torch.where(bound.lse == wanted_lse, 0, (bound.lse - wanted_lse).abs()).max()
    return bool(distance < NUMERICS_L2 and lse_distance < NUMERICS_LSE)


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
