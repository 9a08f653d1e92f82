"""What a call's arguments may be, and which one is named when it may not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exact_attention import seen_keys
from sagegen.errors import ArgumentError
from sagegen.plan import Strides
from sagegen.problem import Problem, Shape
from sagegen.runtime.arguments import check_call, check_out, is_readable, read_strides
from sagegen.runtime.options import Options, narrow


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """A tensor of one stored element: shapes and dtypes are all that these tests look at."""
    return torch.zeros(1, dtype=dtype).expand(shape)


def check(q=None, k=None, v=None, attn_mask=None, **options):
    q = zeros(1, 4, 300, 128) if q is None else q
    k = q if k is None else k
    return check_call(q, k, k if v is None else v, Options(**options), attn_mask)


@pytest.mark.parametrize("shape", [(1, 300), (1, 1, 300), (1, 1, 1, 300), (300, 300), (4, 1, 300), (1, 4, 300, 300)])
def test_a_mask_of_keys_is_one_that_rows_and_heads_share(shape):
    """By its shape, or because it is expanded: one stored element, or row."""
    row = torch.zeros(300, dtype=torch.bool)
    for mask in (zeros(*shape, dtype=torch.bool), row.expand(shape)):
        checked = check(attn_mask=mask)
        assert (checked.obstacle, checked.hides_keys) == (None, True)
        assert checked.problem == Problem(128, "fp16", False, is_ragged=True)


def test_hnd_shapes_are_read():
    checked = check(torch.zeros(2, 8, 5, 64, dtype=torch.bfloat16), torch.zeros(2, 4, 7, 64, dtype=torch.bfloat16))
    assert checked.shape == Shape(batch=2, heads_q=8, heads_kv=4, q_len=5, kv_len=7)
    assert checked.problem == Problem(64, "bf16", False)
    assert checked.scale == 0.125
    assert (checked.obstacle, checked.copies, checked.is_empty) == (None, (), False)


def test_nhd_shapes_are_read():
    q, k = torch.zeros(2, 5, 8, 128, dtype=torch.float16), torch.zeros(2, 7, 4, 128, dtype=torch.float16)
    checked = check(q, k, layout="NHD", is_causal=True, scale=-3)
    assert checked.shape == Shape(batch=2, heads_q=8, heads_kv=4, q_len=5, kv_len=7)
    assert checked.problem == Problem(128, "fp16", True)
    assert checked.scale == -3.0


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"q": zeros(4, 300, 128)}, "q: has 3 dimensions"),
        ({"k": zeros(1, 4, 3, 3, 128)}, "k: has 5 dimensions"),
        ({"k": zeros(2, 4, 300, 128)}, "k: batch 2 does not match q's 1"),
        ({"v": zeros(2, 4, 300, 128)}, "v: batch 2 does not match q's 1"),
        ({"k": zeros(1, 4, 300, 64)}, "k: width 64 does not match q's 128"),
        # A13: q, k of width 32 and v of 64
        ({"q": zeros(1, 8, 4, 32), "v": zeros(1, 8, 4, 64)}, "v: width 64 does not match q's 32"),
        ({"v": zeros(1, 4, 299, 128)}, "v: length 299 does not match k's 300"),
        ({"v": zeros(1, 2, 300, 128)}, "v: head count 2 does not match k's 4"),
        # A14: 10 query heads on 4 KV heads
        ({"q": zeros(1, 10, 5, 128), "k": zeros(1, 4, 5, 128)}, "q: 10 heads are no multiple of k's 4"),
        ({"q": zeros(1, 4, 5, 128), "k": zeros(1, 0, 5, 128)}, "q: 4 heads are no multiple of k's 0"),
        ({"q": zeros(1, 4, 5, 0)}, "q: width 0"),
        # A15: mixed dtypes
        ({"k": zeros(1, 4, 300, 128, dtype=torch.bfloat16)}, "k: dtype torch.bfloat16 is not q's torch.float16"),
        ({"v": zeros(1, 4, 300, 128, dtype=torch.float32)}, "v: dtype torch.float32 is not q's torch.float16"),
        ({"q": zeros(1, 4, 5, 128, dtype=torch.int8)}, "q: dtype torch.int8 is not supported"),
        ({"q": zeros(1, 4, 5, 128, dtype=torch.float8_e4m3fn)}, "q: dtype torch.float8_e4m3fn is not supported"),
        ({"q": torch.zeros(1, 1, 1, 64, dtype=torch.float16).to_sparse()}, "q: only plain strided"),
        # D4: tensors on two devices
        ({"v": torch.zeros(1, 4, 300, 128, dtype=torch.float16, device="meta")}, "v: on meta, but q is on cpu"),
        ({"layout": "BHND"}, "layout='BHND' does not exist; use one of HND, NHD"),
        ({"precision": "fp8"}, "precision='fp8' does not exist"),
        ({"backend": "cudnn"}, "backend='cudnn' does not exist"),
        ({"scale": math.nan}, "scale=nan is not finite"),
        ({"scale": -math.inf}, "scale=-inf is not finite"),
        ({"scale": 10**400}, "scale=inf is not finite"),
        ({"min_cosine": 10**400}, "min_cosine=inf is not finite"),
        ({"min_cosine": 1.5}, "min_cosine=1.5"),
        ({"min_cosine": math.nan}, "min_cosine=nan"),
        ({"window": (-2, 0)}, "window=(-2, 0)"),
        ({"attn_mask": zeros(300, 299, dtype=torch.bool)}, "attn_mask: shape (300, 299) does not broadcast"),
        ({"attn_mask": zeros(300, dtype=torch.bool)}, "attn_mask: shape (300,)"),
        ({"attn_mask": zeros(2, 1, 1, 300, dtype=torch.bool)}, "attn_mask: shape (2, 1, 1, 300)"),
        ({"attn_mask": zeros(300, 300, dtype=torch.int32)}, "attn_mask: dtype torch.int32"),
        ({"attn_mask": torch.ones(300, 300, device="meta")}, "attn_mask: on meta"),
    ],
)
def test_a_wrong_value_is_named(arguments, names):
    with pytest.raises(ArgumentError) as caught:
        check(**arguments)
    assert str(caught.value).startswith(names)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"q": np.zeros((1, 1, 1, 64), np.float16)}, "q must be a torch.Tensor"),
        ({"v": [1.0]}, "v must be a torch.Tensor"),
        ({"attn_mask": [[True]]}, "attn_mask must be a torch.Tensor"),
        ({"is_causal": 1}, "is_causal must be a bool"),
        ({"return_lse": None}, "return_lse must be a bool"),
        ({"smooth_k": 1}, "smooth_k must be a bool or None"),
        ({"rotate": "yes"}, "rotate must be a bool or None"),
        ({"scale": "1"}, "scale must be a number"),
        ({"scale": True}, "scale must be a number"),
        ({"scale": torch.ones(())}, "scale must be a number"),
        ({"min_cosine": None}, "min_cosine must be a number"),
        ({"window": 128}, "window must be a pair"),
        ({"window": [1, 2]}, "window must be a pair"),
        ({"window": (1.0, 2)}, "window must be a pair"),
    ],
)
def test_a_wrong_type_is_named(arguments, names):
    with pytest.raises(TypeError) as caught:
        check(**arguments)
    assert str(caught.value).startswith(names)


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        # A11, A12: other head dims
        *(({"q": zeros(1, 8, 5, d)}, f"head_dim {d}") for d in (257, 384, 512)),
        ({"q": zeros(1, 8, 5, 64, dtype=torch.float32)}, "torch.float32"),
        ({"q": zeros(1, 8, 5, 64, dtype=torch.float64)}, "torch.float64"),
        ({"attn_mask": zeros(1, 300, dtype=torch.bool), "is_causal": True}, "attn_mask"),
        ({"attn_mask": zeros(1, 300, dtype=torch.bool), "window": (5, 5)}, "attn_mask"),
        ({"attn_mask": zeros(1, 300, dtype=torch.float32)}, "attn_mask"),
        ({"attn_mask": torch.zeros(4, 1, 300, dtype=torch.bool)}, "attn_mask"),
        ({"attn_mask": torch.zeros(300, 300, dtype=torch.bool)}, "attn_mask"),
        ({"attn_mask": zeros(1, 4, 300, 300, dtype=torch.float32)}, "attn_mask"),
        ({"smooth_k": False}, "smooth_k=False"),
    ],
)
def test_what_no_kernel_does_is_an_obstacle_not_an_error(arguments, because):
    checked = check(**arguments)
    assert checked.obstacle.startswith(because)
    assert checked.problem is None


@pytest.mark.parametrize(
    "options",
    [
        {"smooth_k": True},
        {"smooth_q": False, "smooth_v": False, "rotate": False},
        {"smooth_q": True, "smooth_v": True, "rotate": True},
        {"precision": "auto"},
        {"precision": "int8"},
        {"scale": 0},
        {"scale": np.float32(0.5)},
        {"min_cosine": 1},
        {"backend": "kernel"},
    ],
)
def test_what_kernels_do_is_no_obstacle(options):
    assert check(**options).problem == Problem(128, "fp16", False)


@pytest.mark.parametrize(
    ("head_dim", "kernels", "padded"),
    [(1, 64, 64), (63, 64, 64), (64, 64, None), (65, 128, 128), (127, 128, 128), (128, 128, None)],
)
def test_a_head_dim_is_padded_to_the_next_that_kernels_have(head_dim, kernels, padded):
    checked = check(zeros(1, 8, 5, head_dim))
    assert checked.problem.head_dim == kernels
    assert checked.padded_width == padded
    assert checked.head_dim == head_dim
    assert checked.scale == head_dim**-0.5
    # padding copies everything anyway
    apart = torch.zeros(1, 8, head_dim, 6, dtype=torch.float16)[..., :5].transpose(2, 3)
    assert check(apart).copies == (("q", "k", "v") if padded is None and head_dim > 1 else ())


@pytest.mark.parametrize(
    ("q", "k", "empty"),
    [
        ((1, 4, 0, 64), (1, 4, 5, 64), True),
        ((1, 4, 5, 64), (1, 4, 0, 64), True),
        ((0, 4, 5, 64), (0, 4, 5, 64), True),
        ((1, 0, 5, 64), (1, 0, 5, 64), True),
        ((1, 1, 1, 64), (1, 1, 1, 64), False),
    ],
)
def test_empty_calls_are_recognized(q, k, empty):
    assert check(zeros(*q), zeros(*k)).is_empty is empty


# --- memory layout


def test_slices_of_one_buffer_are_read_in_place():
    """C1: q, k, v interleaved in (1, 2048, 3 * 8 * 128), NHD and HND by transpose."""
    buffer = torch.zeros(1, 2048, 3 * 8 * 128, dtype=torch.float16)
    q, k, v = (part.view(1, 2048, 8, 128) for part in buffer.chunk(3, -1))
    assert check(q, k, v, layout="NHD").copies == ()
    assert read_strides(q, k, v, q, "NHD").k == Strides(batch=0, head=128, token=3072)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert check(q, k, v).copies == ()
    assert read_strides(q, k, v, q, "HND").v == Strides(batch=0, head=128, token=3072)


def test_strides_of_size_one_dims_do_not_count():
    """C4: a batch stride beyond int32, and an odd one, where batch and heads are 1."""
    x = torch.zeros(1 << 16, dtype=torch.float16).as_strided((1, 1, 200, 64), (2**40 + 1, 3, 64, 1))
    assert is_readable(x)
    assert read_strides(x, x, x, x, "HND").q == Strides(0, 0, 64)


def test_expanded_heads_and_batches_are_read_in_place():
    """C7."""
    k = torch.zeros(1, 1, 33, 64, dtype=torch.float16).expand(2, 4, 33, 64)
    assert check(torch.zeros(2, 4, 5, 64, dtype=torch.float16), k).copies == ()
    assert read_strides(k, k, k, k, "HND").k == Strides(0, 0, 64)


def test_strides_beyond_32_bits_are_kept():
    """C3: 257 rows 16,777,216 elements apart."""
    v = torch.empty_strided((1, 2, 257, 64), (2**34, 2**33, 2**24, 1), dtype=torch.float16, device="meta")
    assert read_strides(v, v, v, v, "HND").v == Strides(0, 2**33, 2**24)


@pytest.mark.parametrize(
    ("shape", "strides", "readable"),
    [
        ((1, 2, 3, 64), (384, 192, 64, 1), True),
        ((1, 2, 3, 64), (384, 192, 72, 1), True),
        ((1, 2, 3, 64), (384, 192, 68, 1), False),  # rows 136 bytes apart
        ((1, 2, 3, 64), (384, 196, 64, 1), False),
        ((2, 2, 3, 64), (388, 192, 64, 1), False),
        ((1, 2, 3, 64), (384, 192, 1, 3), False),  # transposed: dim not contiguous
        ((1, 2, 3, 64), (384, 192, 64, 0), False),  # expanded dim
    ],
)
def test_strides_that_kernels_can_read(shape, strides, readable):
    x = torch.zeros(4096, dtype=torch.float16).as_strided(shape, strides)
    assert is_readable(x) is readable
    q = torch.zeros(shape, dtype=torch.float16)
    assert check(q, q, x).copies == (() if readable else ("v",))


@given(
    shape=st.tuples(*[st.integers(1, 3)] * 3),
    order=st.permutations([0, 1, 2]),
    spread=st.tuples(*[st.integers(1, 3)] * 3),
    layout=st.sampled_from(["HND", "NHD"]),
)
def test_strides_reach_every_element_that_torch_reaches(shape, order, spread, layout):
    """Address arithmetic with the read strides gives the element that indexing gives."""
    strides, size = [0, 0, 0], 64
    for axis in order:
        strides[axis] = size
        size *= shape[axis] * spread[axis]
    buffer = torch.arange(size)
    x = buffer.as_strided((*shape, 64), (*strides, 1))
    own = read_strides(x, x, x, x, layout).q
    for index in np.ndindex(*shape):
        batch, head, token = index if layout == "HND" else (index[0], index[2], index[1])
        at = batch * own.batch + head * own.head + token * own.token
        assert buffer[at + 5] == x[index][5]


# --- out=


def test_a_fitting_out_is_accepted():
    q = torch.zeros(2, 3, 5, 64, dtype=torch.float16)
    check_out(torch.empty_like(q), q)
    check_out(torch.empty(2, 5, 3, 64, dtype=torch.float16).transpose(1, 2), q)
    check_out(torch.empty(2, 3, 64, 5, dtype=torch.float16).transpose(2, 3), q)


@pytest.mark.parametrize(
    ("out", "names"),
    [
        (zeros(2, 3, 5, 128), "out: shape is (2, 3, 5, 128)"),
        (torch.zeros(2, 3, 5, 64), "out: dtype is torch.float32"),
        (torch.zeros(2, 3, 5, 64, dtype=torch.float16, device="meta"), "out: device is meta"),
        (torch.zeros(1, 3, 5, 64, dtype=torch.float16).expand(2, 3, 5, 64), "out: strides"),
        (torch.zeros(4000, dtype=torch.float16).as_strided((2, 3, 5, 64), (960, 320, 8, 1)), "out: strides"),
        (torch.zeros(4000, dtype=torch.float16).as_strided((2, 3, 5, 64), (320, 320, 64, 1)), "out: strides"),
        (torch.zeros(2, 3, 5, 64, dtype=torch.float16, requires_grad=True), "out: requires a gradient"),
    ],
)
def test_an_unfitting_out_is_named(out, names):
    with pytest.raises(ArgumentError) as caught:
        check_out(out, torch.zeros(2, 3, 5, 64, dtype=torch.float16))
    assert str(caught.value).startswith(names)


def test_out_must_be_a_tensor():
    with pytest.raises(TypeError, match="out must be a torch"):
        check_out(np.zeros(1), torch.zeros(1, 1, 1, 64))


@given(
    st.booleans(),
    st.none() | st.tuples(*[st.integers(-1, 9) | st.just(2**40)] * 2),
    st.integers(1, 8),
    st.integers(1, 8),
)
def test_narrowing_leaves_every_query_the_same_keys(is_causal, window, q_len, kv_len):
    """And says it by causality alone where that can, never by both."""
    narrowed, own = narrow(is_causal, window)
    assert torch.equal(seen_keys(q_len, kv_len, narrowed, own), seen_keys(q_len, kv_len, is_causal, window))
    assert not (narrowed and own is not None)
    assert own not in ((-1, -1), (-1, 0))


def test_narrowing_by_hand():
    assert narrow(False, (-1, 0)) == narrow(True, (-1, 5)) == narrow(True, None) == (True, None)
    assert narrow(False, (-1, -1)) == narrow(False, None) == (False, None)
    assert narrow(True, (3, 5)) == (False, (3, 0))
    assert narrow(False, (0, -1)) == (False, (0, -1))
