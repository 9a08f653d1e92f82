"""What a call of `attention_varlen` may be, and which argument is named when it may not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sagegen
from sagegen.errors import ArgumentError
from sagegen.problem import Problem, Shape
from sagegen.runtime.options import Options
from sagegen.runtime.varlen_arguments import Sequences, check_varlen


def zeros(*shape: int, dtype: torch.dtype = torch.float16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def starts(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


FITTING = {
    "q": zeros(8, 4, 64),
    "k": zeros(11, 2, 64),
    "v": zeros(11, 2, 64),
    "cu_seqlens_q": starts(0, 5, 8),
    "cu_seqlens_k": starts(0, 7, 11),
    "max_seqlen_q": 5,
    "max_seqlen_k": 7,
}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"q": zeros(1, 8, 4, 64)}, "q: has 4 dimensions, not 3"),
        ({"k": zeros(11, 64)}, "k: has 2 dimensions, not 3"),
        ({"k": zeros(11, 2, 32)}, "k: width 32 does not match q's 64"),
        ({"v": zeros(11, 2, 32)}, "v: width 32 does not match q's 64"),
        ({"v": zeros(10, 2, 64)}, "v: length 10 does not match k's 11"),
        ({"v": zeros(11, 1, 64)}, "v: head count 1 does not match k's 2"),
        ({"q": zeros(8, 5, 64)}, "q: 5 heads are no multiple of k's 2"),
        ({"q": zeros(8, 4, 0), "k": zeros(11, 2, 0), "v": zeros(11, 2, 0)}, "q: width 0"),
        ({"k": zeros(11, 2, 64, dtype=torch.bfloat16)}, "k: dtype torch.bfloat16 is not q's torch.float16"),
        ({"q": zeros(8, 4, 64, dtype=torch.int8)}, "q: dtype torch.int8 is not supported"),
        ({"q": zeros(8, 4, 64).to_sparse()}, "q: only plain strided"),
        ({"v": zeros(11, 2, 64, device="meta")}, "v: on meta, but q is on cpu"),
        ({"cu_seqlens_q": starts(0, 5, 8, dtype=torch.int64)}, "cu_seqlens_q: dtype torch.int64 is not torch.int32"),
        ({"cu_seqlens_k": torch.zeros(3)}, "cu_seqlens_k: dtype torch.float32 is not torch.int32"),
        ({"cu_seqlens_q": starts(0, 5, 8)[None]}, "cu_seqlens_q: shape (1, 3) is not [sequences + 1]"),
        ({"cu_seqlens_k": starts()}, "cu_seqlens_k: shape (0,) is not [sequences + 1]"),
        ({"cu_seqlens_k": starts(0, 11)}, "cu_seqlens_k: 1 sequences, but cu_seqlens_q has 2"),
        ({"cu_seqlens_q": starts(0, 5, 8).to("meta")}, "cu_seqlens_q: on meta, but q is on cpu"),
        ({"cu_seqlens_q": starts(1, 5, 8)}, "cu_seqlens_q: begins with 1, not 0"),
        ({"cu_seqlens_q": starts(0, 5, 7)}, "cu_seqlens_q: ends with 7, but q has 8 rows"),
        ({"cu_seqlens_k": starts(0, 7, 12)}, "cu_seqlens_k: ends with 12, but k has 11 rows"),
        ({"cu_seqlens_k": starts(0, 12, 11)}, "max_seqlen_k=7: cu_seqlens_k has a sequence of 12"),
        ({"cu_seqlens_k": starts(0, 12, 11), "max_seqlen_k": 12}, "cu_seqlens_k: falls from 12 to 11"),
        ({"max_seqlen_q": 4}, "max_seqlen_q=4: cu_seqlens_q has a sequence of 5"),
        ({"max_seqlen_q": 3}, "max_seqlen_q=3: 8 rows of q do not fit 2 sequences of at most 3 rows"),
        ({"max_seqlen_k": -1}, "max_seqlen_k=-1 is negative"),
        ({"cu_seqlens_q": starts(0), "cu_seqlens_k": starts(0)}, "max_seqlen_q=5: 8 rows of q do not fit 0 sequences"),
        ({"precision": "fp8"}, "precision='fp8' does not exist"),
        ({"window": (-2, 0)}, "window=(-2, 0)"),
        ({"out": zeros(8, 4, 32)}, "out: shape is (8, 4, 32), q's is (8, 4, 64)"),
        ({"out": zeros(1, 4, 64).expand(8, 4, 64)}, "out: strides"),
    ],
)
def test_a_wrong_value_is_named(change, names):
    with pytest.raises(ArgumentError) as caught:
        sagegen.attention_varlen(**{**FITTING, **change})
    assert str(caught.value).startswith(names)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"q": np.zeros((8, 4, 64), np.float16)}, "q must be a torch.Tensor, not ndarray"),
        ({"v": None}, "v must be a torch.Tensor, not NoneType"),
        ({"cu_seqlens_q": [0, 5, 8]}, "cu_seqlens_q must be a torch.Tensor, not list"),
        ({"cu_seqlens_k": None}, "cu_seqlens_k must be a torch.Tensor, not NoneType"),
        ({"max_seqlen_q": 5.0}, "max_seqlen_q must be an int, not float"),
        ({"max_seqlen_k": torch.tensor(7)}, "max_seqlen_k must be an int, not Tensor"),
        ({"max_seqlen_k": True}, "max_seqlen_k must be an int, not bool"),
        ({"is_causal": 1}, "is_causal must be a bool"),
        ({"window": [1, 2]}, "window must be a pair"),
        ({"out": np.zeros(1)}, "out must be a torch.Tensor"),
    ],
)
def test_a_wrong_type_is_named(change, names):
    with pytest.raises(TypeError) as caught:
        sagegen.attention_varlen(**{**FITTING, **change})
    assert str(caught.value).startswith(names)


def test_a_wrong_type_is_named_after_a_right_call_too():
    sagegen.attention_varlen(**FITTING)
    with pytest.raises(TypeError, match="max_seqlen_k must be an int"):
        sagegen.attention_varlen(**{**FITTING, "max_seqlen_k": 7.0})


@pytest.mark.parametrize("keyword", ["layout", "attn_mask", "foo"])
def test_an_unknown_keyword_is_a_type_error(keyword):
    with pytest.raises(TypeError, match=keyword):
        sagegen.attention_varlen(**FITTING, **{keyword: None})


def check(q=None, *, longest=(5, 7), **options):
    """What is known of a call on a device whose values are not read."""
    q, k = (x.to("meta") for x in (FITTING["q"] if q is None else q, FITTING["k"]))
    k = k.to(q.dtype)[..., : q.shape[2]]
    return check_varlen(q, k, k, Sequences(*[starts(0, 5, 8).to("meta")] * 2, *longest), Options("NHD", **options))


def test_a_call_is_a_batch_of_its_longest_sequence():
    checked = check()
    assert checked.shape == Shape(batch=2, heads_q=4, heads_kv=2, q_len=5, kv_len=7)
    assert (checked.scale, checked.is_empty, checked.is_masked) == (0.125, False, False)
    assert check(longest=(1 << 40, 1 << 40)).shape == Shape(batch=2, heads_q=4, heads_kv=2, q_len=8, kv_len=11)


@pytest.mark.parametrize(
    ("options", "problem", "window"),
    [
        ({}, Problem(64, "fp16", False, is_ragged=True), None),
        ({"is_causal": True}, Problem(64, "fp16", True, is_ragged=True), None),
        ({"window": (-1, 0)}, Problem(64, "fp16", True, is_ragged=True), None),
        ({"window": (3, 4)}, Problem(64, "fp16", False, is_windowed=True, is_ragged=True), (3, 4)),
        ({"window": (3, 4), "is_causal": True}, Problem(64, "fp16", False, is_windowed=True, is_ragged=True), (3, 0)),
    ],
)
def test_a_kernel_is_asked_for_sequences_of_any_lengths(options, problem, window):
    checked = check(**options)
    assert (checked.obstacle, checked.problem, checked.window) == (None, problem, window)


@pytest.mark.parametrize(
    ("arguments", "obstacle"),
    [
        ({"q": zeros(8, 4, 64, dtype=torch.float32)}, "torch.float32 has no kernel"),
        ({"smooth_k": False}, "smooth_k=False has no kernel"),
    ],
)
def test_what_no_kernel_does_is_an_obstacle_not_an_error(arguments, obstacle):
    checked = check(**arguments)
    assert checked.obstacle.startswith(obstacle)
    assert checked.problem is None
