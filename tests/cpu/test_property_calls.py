"""Drawn calls of the public API on the CPU against attention in FP64: the reference, torch SDPA, the emulator.

The same strategies draw for a card in tests/gpu/test_property_calls.py. `pytest -m slow` draws ten times as many.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_calls import ALL_DTYPES, BY_KERNELS, KERNEL_DTYPES, KERNEL_HEAD_DIMS, DrawnCall, drawn_calls
from drawn_checks import check_call
from drawn_varlen import DrawnSequences, check_sequences, drawn_sequences
from sagegen.runtime import fallback

ANY = drawn_calls(longest=40, head_dims=st.integers(1, 288), dtypes=ALL_DTYPES)
#: What a kernel answers: 24 problems, so as many compilations of a second; a block of queries takes a head 40 ms.
EMULATED = drawn_calls(
    longest=70,
    head_dims=st.sampled_from(KERNEL_HEAD_DIMS),
    dtypes=KERNEL_DTYPES,
    hides=BY_KERNELS,
    most_heads=4,
    most_batches=2,
)
ANY_SEQUENCES = drawn_sequences(longest=30, most=6, head_dims=st.integers(1, 256), dtypes=ALL_DTYPES, most_group=3)
#: Three problems of one type.
EMULATED_SEQUENCES = drawn_sequences(
    longest=140, most=5, head_dims=st.sampled_from((64, 64, 40)), dtypes=("float16",), most_group=2
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ANY, st.sampled_from((None, "reference", "sdpa")))
def test_drawn_calls_are_right(call: DrawnCall, backend: str | None) -> None:
    check_in_chunks(call, backend)


@pytest.mark.emulator
@settings(max_examples=60, deadline=None, derandomize=True)
@given(EMULATED)
def test_drawn_calls_of_kernels_are_right(call: DrawnCall) -> None:
    check_emulated(call)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ANY_SEQUENCES, st.sampled_from((None, "reference", "sdpa")))
def test_drawn_sequences_are_right(call: DrawnSequences, backend: str | None) -> None:
    check_sequences(call, "cpu", backend)


@pytest.mark.emulator
@settings(max_examples=20, deadline=None, derandomize=True)
@given(EMULATED_SEQUENCES)
def test_drawn_sequences_of_kernels_are_right(call: DrawnSequences) -> None:
    check_emulated_sequences(call)


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


@pytest.mark.slow
@pytest.mark.emulator
@settings(max_examples=300, deadline=None, derandomize=True)
@given(EMULATED_SEQUENCES)
def test_many_drawn_sequences_of_kernels_are_right(call: DrawnSequences) -> None:
    check_emulated_sequences(call)


def check_in_chunks(call: DrawnCall, backend: str | None) -> None:
    """On the CPU, with so little memory at once that most rows of scores are computed apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fallback, "_CHUNK_BYTES", 1000)
        check_call(call, "cpu", backend)


def check_emulated(call: DrawnCall) -> None:
    answer = check_call(call, "cpu", "emulator")
    is_empty = 0 in (call.batch, call.q_len, call.kv_len)
    assert answer == ("zeros" if is_empty else "emulator")


def check_emulated_sequences(call: DrawnSequences) -> None:
    answer = check_sequences(call, "cpu", "emulator")
    has_nothing = any(sum(lengths) == 0 for lengths in zip(*call.lengths, strict=True))
    assert answer == ("zeros" if has_nothing else "emulator")
