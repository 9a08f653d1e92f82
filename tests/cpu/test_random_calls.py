"""Random calls of tests/gpu/test_random_calls.py, without a card: what is drawn, and what is held against an answer."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from call_errors import LIMITS, Errors, Totals, find_fault, measure
from random_calls import INPUTS, LONGEST, MEMORIES, MOST_SCORES, RandomCall, draw_call, make_inputs
from sagegen.problem import Problem, Shape
from sagegen.reference import attention
from sagegen.runtime.arguments import is_readable

CALL = RandomCall(0, 0, Problem(64, "bf16", True), Shape(2, 4, 2, 33, 20), "gaps", "normal", True)


@given(st.integers(0, 1 << 40))
def test_drawn_calls_are_valid_and_follow_from_their_number(index: int) -> None:
    call = draw_call(index)
    assert call == draw_call(index)
    shape = call.shape
    assert shape.heads_q % shape.heads_kv == 0
    assert min(shape.q_len, shape.kv_len) >= 1
    assert max(shape.q_len, shape.kv_len) <= LONGEST
    assert shape.batch * shape.heads_q * shape.q_len * shape.kv_len <= MOST_SCORES


def test_ten_thousand_calls_have_everything_often() -> None:
    calls = [draw_call(index) for index in range(10_000)]
    for seen, wanted in (
        (Counter(call.problem for call in calls), 8),
        (Counter(call.memory for call in calls), len(MEMORIES)),
        (Counter(call.inputs for call in calls), len(INPUTS)),
        (Counter(call.want_lse for call in calls), 2),
        (Counter(call.pick(list("abcdefg")) for call in calls), 7),
    ):
        assert len(seen) == wanted
        assert min(seen.values()) > 500
    shapes = [call.shape for call in calls]
    assert sum(shape.q_len > shape.kv_len for shape in shapes) > 1000  # rows without keys, when causal
    assert sum(shape.heads_q > shape.heads_kv for shape in shapes) > 1000
    assert sum(shape.kv_len % 64 == 0 for shape in shapes) > 500
    assert sum(shape.kv_len % 64 in (1, 63) for shape in shapes) > 500
    assert sum(shape.kv_len > 1000 for shape in shapes) > 300
    scores = sum(shape.batch * shape.heads_q * shape.q_len * shape.kv_len for shape in shapes)
    assert scores < 10_000 * MOST_SCORES / 4  # what exact attention costs


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_inputs_are_finite_and_readable_without_a_copy(memory: str, inputs: str) -> None:
    call = replace(CALL, memory=memory, inputs=inputs)
    made, again = make_inputs(call, "cpu"), make_inputs(call, "cpu")
    assert made.shape == call.shape
    for x, same in ((made.q, again.q), (made.k, again.k), (made.v, again.v)):
        assert x.isfinite().all()
        assert x.dtype == torch.bfloat16
        assert is_readable(x)
        assert torch.equal(x, same)


def test_every_kind_of_inputs_has_limits() -> None:
    assert set(LIMITS) == set(INPUTS)


# --- what is held against an answer


def answer(call: RandomCall = CALL) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """An exact answer in the call's type, and the truth."""
    x = make_inputs(call, "cpu")
    ref, ref_lse = attention(x.q, x.k, x.v, is_causal=call.problem.is_causal, return_lse=True, out_dtype=torch.float64)
    return ref.bfloat16(), ref_lse.clone(), ref, ref_lse


def fault_of(out: torch.Tensor, lse: torch.Tensor | None, ref: torch.Tensor, ref_lse: torch.Tensor) -> str:
    return find_fault(CALL, Errors(*measure(out, lse, ref, ref_lse).tolist()))


def test_a_right_answer_has_no_fault() -> None:
    out, lse, ref, ref_lse = answer()
    assert (ref_lse == -math.inf).any()  # 33 queries on 20 keys
    assert fault_of(out, lse, ref, ref_lse) == ""
    assert fault_of(out, None, ref, ref_lse) == ""


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda out, lse: out[1, 3, 30].fill_(math.nan), "NaN"),
        (lambda out, lse: out[1, 3, 5, 7].fill_(math.nan), "NaN"),
        (lambda out, lse: lse[0, 0, 32].fill_(math.inf), "NaN or Inf"),
        (lambda out, lse: out[0, 2, 3, 1].fill_(0.01), "no key"),
        (lambda out, lse: lse[0, 2, 3].fill_(0), "no key"),
        (lambda out, lse: out[0, 2, 20].neg_(), "error of a row"),
        (lambda out, lse: out.mul_(1.1), "relative L2"),
        (lambda out, lse: lse[1, 1, 25].add_(0.1), "error of the lse"),
    ],
)
def test_a_wrong_answer_is_named(spoil, fault: str) -> None:
    out, lse, ref, ref_lse = answer()
    spoil(out, lse)
    assert fault in fault_of(out, lse, ref, ref_lse)


def test_totals_are_by_kernel_and_inputs() -> None:
    totals = Totals()
    right = Errors(0, 0, dot=4, out2=4, ref2=4, error2=0, row_error=0, lse_error=0)
    totals.add("mma", "normal", right)
    totals.add("mma", "normal", replace(right, dot=0, error2=8, row_error=2, lse_error=0.5))
    totals.add("wgmma", "normal", right)
    mma, wgmma = totals.rows()
    assert (mma.calls, mma.cosine, mma.worst_row_error, mma.worst_lse_error) == (2, 0.5, 2, 0.5)
    assert mma.worst_l2 == pytest.approx(math.sqrt(2))
    assert (wgmma.calls, wgmma.cosine) == (1, 1)
