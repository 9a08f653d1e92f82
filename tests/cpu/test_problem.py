"""Problems, shapes and buckets."""

import math
from itertools import product

import pytest

from sagegen.errors import UnknownNameError
from sagegen.problem import DTYPES, HEAD_DIMS, PRECISIONS, TUNED_LENGTHS, Bucket, Problem, Shape, parse_problem

ALL = [
    Problem(dim, dtype, mask == "causal", precision, mask == "window", is_ragged)
    for dim, dtype, mask, precision, is_ragged in product(
        HEAD_DIMS, DTYPES, ("full", "causal", "window"), PRECISIONS, (False, True)
    )
]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("d64_fp16_full_int8", Problem(64, "fp16", False)),
        ("d128_bf16_causal_int4", Problem(128, "bf16", True, "int4")),
        ("d64_bf16_window_int8", Problem(64, "bf16", False, is_windowed=True)),
        ("d64_bf16_causal_int8_ragged", Problem(64, "bf16", True, is_ragged=True)),
        ("d128_fp16_window_int4_ragged", Problem(128, "fp16", False, "int4", is_windowed=True, is_ragged=True)),
    ],
)
def test_a_problem_is_what_its_name_spells(name: str, problem: Problem) -> None:
    assert parse_problem(name) == problem
    assert problem.name == name


def test_every_problem_has_a_name_of_its_own() -> None:
    assert len({problem.name for problem in ALL}) == len(ALL) == 72
    assert [parse_problem(problem.name) for problem in ALL] == ALL


def test_windows_and_ragged_batches_have_the_dense_problem_tuned_for_them() -> None:
    for problem in ALL:
        tuned = problem.tuned
        assert (tuned.is_windowed, tuned.is_ragged) == (False, False)
        assert tuned.mask == ("causal" if problem.is_causal else "full")
        assert (tuned == problem) == (problem.mask != "window" and not problem.is_ragged)
        assert (tuned.head_dim, tuned.dtype, tuned.precision) == (problem.head_dim, problem.dtype, problem.precision)


def test_causality_and_a_window_at_once_are_no_problem() -> None:
    with pytest.raises(UnknownNameError, match="window whose right side is 0"):
        Problem(64, "fp16", True, is_windowed=True)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "d96_bf16_causal_int8",
        "d128_bf16_causal_int2",
        "d128_bf16_causal_int8\n",
        "d128_fp32_full_int8",
        "../d64",
        "d64_bf16_causal_int8_rugged",
        "d64_bf16_causal_ragged_int8",
        "d64_bf16_window_causal_int8",
        "d64_bf16_full_int8_ragged_ragged",
    ],
)
def test_a_name_that_spells_no_problem_is_refused(name: str) -> None:
    with pytest.raises(UnknownNameError):
        parse_problem(name)


def test_a_problem_without_kernel_names_the_field_and_what_exists() -> None:
    with pytest.raises(UnknownNameError, match=r"head_dim=80.*64, 128, 256"):
        Problem(80, "bf16", is_causal=False)


def test_flops_are_the_papers_4bhnnd_and_half_of_it_for_causal() -> None:
    # SageAttention2, table of speeds: batch 4, 32 heads, 32K tokens, head dim 128
    shape = Shape(4, 32, 32, 32768, 32768)
    assert shape.flops(Problem(128, "bf16", is_causal=False)) == 4 * 4 * 32 * 32768**2 * 128
    assert shape.flops(Problem(128, "bf16", is_causal=True)) == 2 * 4 * 32 * 32768**2 * 128


def test_the_tuned_buckets_cover_every_length_once() -> None:
    edges = [1, 1024, 1448, 1449, 2048, 2896, 2897, 4096, 5792, 5793, 8192, 11585, 11586, 16384, 10**6]
    for length in edges:
        assert sum(tuned.bucket.holds(length) for tuned in TUNED_LENGTHS) == 1
    assert all(tuned.bucket.holds(tuned.tokens) for tuned in TUNED_LENGTHS)
    assert [tuned.tokens for tuned in TUNED_LENGTHS] == [1024, 2048, 4096, 8192, 16384]


def test_a_length_belongs_to_the_tuned_one_that_is_nearest_by_ratio() -> None:
    for length in (1, 700, 1400, 1500, 2800, 3000, 5700, 6000, 11500, 11700, 40000):
        nearest = min(TUNED_LENGTHS, key=lambda tuned: abs(math.log(tuned.tokens / length)))
        assert nearest.bucket.holds(length)


def test_a_bucket_holds_both_of_its_ends() -> None:
    bucket = Bucket(10, 20)
    assert [bucket.holds(n) for n in (9, 10, 20, 21)] == [False, True, True, False]
    assert Bucket(10, None).holds(10**9)
