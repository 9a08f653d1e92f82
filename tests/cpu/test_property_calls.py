"""Drawn calls of `sagegen.attention` on the CPU against attention in FP64: the reference, torch SDPA, the emulator.

The same strategies draw for a card in tests/gpu/test_property_calls.py. `pytest -m slow` draws ten times as many.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_calls import ALL_DTYPES, KERNEL_DTYPES, KERNEL_HEAD_DIMS, DrawnCall, drawn_calls
from drawn_checks import check_call
from sagegen.runtime import fallback

ANY = drawn_calls(longest=40, head_dims=st.integers(1, 288), dtypes=ALL_DTYPES)
#: What a kernel answers: twelve problems, so as many compilations of a second; a block of queries takes a head 40 ms.
EMULATED = drawn_calls(
    longest=70,
    head_dims=st.sampled_from(KERNEL_HEAD_DIMS),
    dtypes=KERNEL_DTYPES,
    hides=False,
    most_heads=4,
    most_batches=2,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ANY, st.sampled_from((None, "reference", "sdpa")))
def test_drawn_calls_are_right(call: DrawnCall, backend: str | None) -> None:
    check_in_chunks(call, backend)


@pytest.mark.emulator
@settings(max_examples=50, deadline=None, derandomize=True)
@given(EMULATED)
def test_drawn_calls_of_kernels_are_right(call: DrawnCall) -> None:
    check_emulated(call)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, derandomize=True)
@given(ANY, st.sampled_from((None, "reference", "sdpa")))
def test_many_drawn_calls_are_right(call: DrawnCall, backend: str | None) -> None:
    check_in_chunks(call, backend)


@pytest.mark.slow
@pytest.mark.emulator
@settings(max_examples=600, deadline=None, derandomize=True)
@given(EMULATED)
def test_many_drawn_calls_of_kernels_are_right(call: DrawnCall) -> None:
    check_emulated(call)


def check_in_chunks(call: DrawnCall, backend: str | None) -> None:
    """On the CPU, with so little memory at once that most rows of scores are computed apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fallback, "_CHUNK_BYTES", 1000)
        check_call(call, "cpu", backend)


def check_emulated(call: DrawnCall) -> None:
    answer = check_call(call, "cpu", "emulator")
    is_empty = 0 in (call.batch, call.q_len, call.kv_len)
    assert answer == ("zeros" if is_empty else "emulator")
