"""Exact attention against hand-worked cases and torch's own SDPA in FP64; quantized attention against the paper."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagegen import quantizing, reference
from sagegen.errors import ArgumentError
from sagegen.problem import Problem
from sagegen.reference import attention, quantized_attention
from sagegen.space import MmaConfig
from sagegen.wgmma_rules import default_wgmma_config

CONFIG = MmaConfig(
    block_q=128,
    block_k=64,
    warps=8,
    stages=2,
    pv="e4m3f32",
    accum_depth=64,
    conversion="i2f",
    granularity="thread",
    q_span=32,
    k_span=64,
    rescale="always",
    q_operand="reg",
    min_blocks=1,
)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tokens(*values):
    """One head with one channel per token."""
    return torch.tensor(values, dtype=torch.float64).reshape(1, 1, -1, 1)


def torch_attention(q, k, v, is_causal, scale=None):
    """torch's SDPA with an explicit bottom-right mask."""
    mask = None
    if is_causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


# --- exact attention


def test_weights_are_the_softmax_of_the_scores():
    # scores ln 3 and 0: weights 3/4 and 1/4, sum of exponentials 4
    out, lse = attention(tokens(1), tokens(math.log(3), 0), tokens(8, 4), scale=1.0, return_lse=True)
    assert out.item() == pytest.approx(0.75 * 8 + 0.25 * 4)
    assert lse.dtype == torch.float32
    assert lse.item() == pytest.approx(math.log(4))


def test_scale_defaults_to_the_root_of_the_head_dim():
    q, k, v = (normal(1, 1, 5, 16, seed=s) for s in range(3))
    assert torch.equal(attention(q, k, v), attention(q, k, v, scale=0.25))


def test_causal_mask_is_aligned_bottom_right():
    # equal scores, so a row is the mean of the values it sees: 2 of 4, 3 of 4, all
    out = attention(tokens(0, 0, 0), tokens(0, 0, 0, 0), tokens(0, 1, 2, 9), is_causal=True)
    assert out.flatten().tolist() == pytest.approx([0.5, 1, 3])


def test_decode_sees_every_key():
    out = attention(tokens(0), torch.zeros(1, 1, 300, 1), torch.arange(300.0).reshape(1, 1, 300, 1), is_causal=True)
    assert out.item() == pytest.approx(149.5)


def test_rows_without_keys_give_zero_and_minus_infinity():
    out, lse = attention(tokens(1, 1, 1), tokens(1), tokens(7), is_causal=True, return_lse=True, scale=1.0)
    assert out.flatten().tolist() == [0, 0, 7]
    assert lse.flatten().tolist() == [-math.inf, -math.inf, 1]


def test_no_keys_at_all_give_zero_and_minus_infinity():
    empty = torch.zeros(1, 1, 0, 8)
    out, lse = attention(normal(1, 1, 3, 8), empty, empty, return_lse=True)
    assert out.tolist() == torch.zeros(1, 1, 3, 8).tolist()
    assert lse.flatten().tolist() == [-math.inf] * 3


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    heads_kv=st.integers(1, 3),
    group=st.integers(1, 3),
    q_len=st.integers(1, 40),
    kv_len=st.integers(1, 40),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.3, 0.0, -0.4]),
)
def test_agrees_with_torch(batch, heads_kv, group, q_len, kv_len, is_causal, scale):
    q = normal(batch, heads_kv * group, q_len, 8, seed=1)
    k, v = (normal(batch, heads_kv, kv_len, 8, seed=s) for s in (2, 3))
    out = attention(q, k, v, is_causal=is_causal, scale=scale)
    wanted = torch_attention(q, k, v, is_causal, scale)
    seen = slice(max(0, q_len - kv_len) if is_causal else 0, None)  # torch gives NaN or 0 for rows without keys
    torch.testing.assert_close(out[:, :, seen], wanted[:, :, seen], rtol=1e-10, atol=1e-12)


# --- windows


def naive(q, k, v, is_causal, window):
    """Output and lse, one row at a time, from the keys that it sees alone; what is not finite is NaN there."""
    q, k, v = (torch.where(x.isfinite(), x, math.nan) for x in (q, k, v))
    q_len, kv_len, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    for head, row in itertools.product(range(q.shape[1]), range(q_len)):
        at = row + kv_len - q_len
        seen = [
            key
            for key in range(kv_len)
            if (window[0] == -1 or key >= at - window[0])
            and (window[1] == -1 or key <= at + window[1])
            and (not is_causal or key <= at)
        ]
        if seen:
            scores = k[:, head // group, seen] @ q[:, head, row, :, None] * q.shape[3] ** -0.5
            lse[:, head, row] = scores.squeeze(-1).logsumexp(-1)
            out[:, head, row] = (scores.softmax(1) * v[:, head // group, seen]).sum(1)
    return out, lse


SIDES = st.sampled_from((-1, 0, 1, 2, 5, 2**62)) | st.integers(0, 20)


@settings(max_examples=60)
@given(
    window=st.tuples(SIDES, SIDES),
    is_causal=st.booleans(),
    q_len=st.integers(1, 14),
    kv_len=st.integers(1, 14),
    bad=st.lists(
        st.tuples(st.sampled_from("qkv"), st.integers(0, 13), st.sampled_from((math.nan, math.inf, -math.inf))),
        max_size=3,
    ),
)
def test_windows_are_those_of_a_naive_loop(window, is_causal, q_len, kv_len, bad):
    x = {"q": normal(1, 4, q_len, 8), "k": normal(1, 2, kv_len, 8, seed=1), "v": normal(1, 2, kv_len, 8, seed=2)}
    for name, token, value in bad:
        x[name][0, token % x[name].shape[1], token % x[name].shape[2], token % 8] = value
    out, lse = attention(x["q"], x["k"], x["v"], is_causal=is_causal, window=window, return_lse=True)
    wanted, wanted_lse = naive(x["q"], x["k"], x["v"], is_causal, window)
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_rows_and_pieces_have_their_own_windows(monkeypatch):
    q, k, v = normal(1, 4, 50, 8), normal(1, 2, 60, 8, seed=1), normal(1, 2, 60, 8, seed=2)
    wanted, wanted_lse = naive(q, k, v, False, (7, 3))
    monkeypatch.setattr(reference, "_CHUNK_BYTES", 4 * 60 * 8 * 7)  # seven rows at a time
    rows = torch.tensor([49, 0, *range(20)])
    out, lse = attention(q, k, v, window=(7, 3), rows=rows, return_lse=True)
    torch.testing.assert_close(out, wanted[:, :, rows])
    torch.testing.assert_close(lse.double(), wanted_lse[:, :, rows], rtol=1e-6, atol=1e-6)


def test_layout_nhd_is_hnd_transposed():
    q, k, v = normal(2, 6, 9, 8), normal(2, 2, 11, 8, seed=1), normal(2, 2, 11, 8, seed=2)
    out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    out_nhd, lse_nhd = attention(*swapped, is_causal=True, layout="NHD", return_lse=True)
    assert torch.equal(out_nhd.transpose(1, 2), out)
    assert torch.equal(lse_nhd, lse)


def test_long_inputs_are_done_in_pieces_with_the_same_result(monkeypatch):
    q, k, v = normal(1, 4, 50, 8), normal(1, 2, 60, 8, seed=1), normal(1, 2, 60, 8, seed=2)
    whole = attention(q, k, v, is_causal=True, return_lse=True)
    monkeypatch.setattr(reference, "_CHUNK_BYTES", 4 * 60 * 8 * 7)  # seven rows at a time
    pieces = attention(q, k, v, is_causal=True, return_lse=True)
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_rows_picks_query_rows_under_the_same_mask():
    q, k, v = normal(1, 4, 50, 8), normal(1, 2, 60, 8, seed=1), normal(1, 2, 60, 8, seed=2)
    rows = torch.tensor([49, 0, 7])
    out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    some, some_lse = attention(q, k, v, is_causal=True, return_lse=True, rows=rows)
    torch.testing.assert_close(some, out[:, :, rows], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(some_lse, lse[:, :, rows])


def test_output_has_the_type_of_q_unless_asked():
    q, k, v = (normal(1, 1, 4, 8, seed=s, dtype=torch.bfloat16) for s in range(3))
    assert attention(q, k, v).dtype == torch.bfloat16
    assert attention(q, k, v, out_dtype=torch.float64).dtype == torch.float64


def test_inputs_stay_as_they_are():
    inputs = [normal(1, 2, 9, 8, seed=s) for s in range(3)]
    inputs[0][0, 0, 3, 2] = math.nan
    copies = [x.clone() for x in inputs]
    attention(*inputs, is_causal=True)
    assert all(torch.equal(a.nan_to_num(5), b.nan_to_num(5)) for a, b in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_query_spoils_its_own_row(bad):
    q, k, v = (normal(1, 2, 6, 8, seed=s) for s in range(3))
    clean = attention(q, k, v)
    q[0, 1, 4, 0] = bad
    out, lse = attention(q, k, v, return_lse=True)
    assert out[0, 1, 4].isnan().all()
    assert lse[0, 1, 4].isnan()
    out[0, 1, 4] = clean[0, 1, 4]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_bad_key_or_value_spoils_the_rows_that_see_it(bad, which):
    q, k, v = (normal(1, 2, 6, 8, seed=s) for s in range(3))
    clean, clean_lse = attention(q, k, v, is_causal=True, return_lse=True)
    (k if which == "k" else v)[0, 1, 4, 3] = bad
    out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    assert out[0, 1, 4:, 3].isnan().all()
    others = [channel for channel in range(8) if channel != 3]
    assert out[0, 1, 4:, others].isnan().all() == (which == "k")  # a bad value stays in its channel
    torch.testing.assert_close(out[0, 1, :4], clean[0, 1, :4])
    assert torch.equal(out[0, 0], clean[0, 0])
    assert lse[0, 1, 4:].isnan().all() == (which == "k")
    torch.testing.assert_close(lse[0, 1, :4], clean_lse[0, 1, :4])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2, 4, 8), (1, 2, 4, 16), (1, 2, 4, 16)), "do not fit"),
        (((1, 2, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8)), "do not fit"),
        (((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 5, 8)), "do not fit"),
        (((1, 10, 4, 8), (1, 4, 4, 8), (1, 4, 4, 8)), "10 heads"),
        (((2, 4, 8), (2, 4, 8), (2, 4, 8)), "dimensions"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, message):
    with pytest.raises(ArgumentError, match=message):
        attention(*(torch.zeros(shape) for shape in shapes))


def test_unknown_layout_is_named():
    with pytest.raises(ArgumentError, match="layout 'DHN'"):
        attention(*(torch.zeros(1, 1, 1, 1) for _ in range(3)), layout="DHN")


# --- the steps of quantized attention


def test_int8_rounds_to_even_with_scale_of_the_largest():
    x = torch.tensor([127.0, 0.5, 1.5, -2.5, -127.0, 126.4]).reshape(1, 1, 1, -1)
    q8, scale = quantizing.quantize_queries(x, CONFIG)
    assert scale.item() == 1
    assert q8.flatten().tolist() == [127, 0, 2, -2, -127, 126]


def test_int4_rounds_to_even_with_scale_of_the_largest_over_7():
    x = torch.tensor([7.0, 0.5, 1.5, -2.5, -7.0, 6.4]).reshape(1, 1, 1, -1)
    q4, scale = quantizing.quantize_queries(x, CONFIG, "int4")
    assert scale.item() == 1
    assert q4.flatten().tolist() == [7, 0, 2, -2, -7, 6]


def test_an_int4_element_14_times_below_the_largest_is_lost():
    x = torch.tensor([14.0, 1.01, 1.0, -0.99]).reshape(1, 1, 1, -1)  # paper: 14x below becomes 0
    k4, scale = quantizing.quantize_keys(x, CONFIG, "int4")
    assert scale.item() == 2
    assert k4.flatten().tolist() == [7, 1, 0, 0]


def test_an_int4_group_of_zeros_has_scale_one():
    q4, scale = quantizing.quantize_queries(torch.zeros(1, 1, 8, 4), CONFIG, "int4")
    assert scale.flatten().tolist() == [1] * 8
    assert q4.abs().max() == 0


def test_group_of_zeros_has_scale_one():
    q8, scale = quantizing.quantize_keys(torch.zeros(1, 1, 8, 4), CONFIG)
    assert scale.flatten().tolist() == [1] * 8
    assert q8.abs().max() == 0


def sharers(quantize, config, token, length=300):
    """The tokens whose scale grows when `token` grows."""
    x = torch.ones(1, 1, length, 4)
    before = quantize(x, config)[1].flatten()
    x[0, 0, token] = 1000
    return (quantize(x, config)[1].flatten() > before).nonzero().flatten().tolist()


def test_query_rows_share_scales_by_granularity():
    # row 45: span 32..63, 45 % 8 == 5
    assert sharers(quantizing.quantize_queries, CONFIG, 45) == [37, 45, 53, 61]
    assert sharers(quantizing.quantize_queries, replace(CONFIG, q_span=16), 45) == [37, 45]
    assert sharers(quantizing.quantize_queries, replace(CONFIG, granularity="warp"), 45) == list(range(32, 64))
    assert sharers(quantizing.quantize_queries, replace(CONFIG, granularity="block"), 45) == list(range(128))
    assert sharers(quantizing.quantize_queries, replace(CONFIG, granularity="block"), 290) == list(range(256, 300))


def test_keys_share_scales_by_granularity():
    # key 75: span 64..127, columns 2 and 3 of every eight
    pairs = [c for c in range(64, 128) if c % 8 in (2, 3)]
    assert sharers(quantizing.quantize_keys, CONFIG, 75) == pairs
    wide = replace(CONFIG, block_k=128, k_span=128)
    assert sharers(quantizing.quantize_keys, wide, 75) == [c for c in range(128) if c % 8 in (2, 3)]
    assert sharers(quantizing.quantize_keys, replace(CONFIG, granularity="warp"), 75) == list(range(64, 128))
    assert sharers(quantizing.quantize_keys, replace(CONFIG, granularity="block"), 75) == list(range(64, 128))


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.3, 0.3125),  # steps of 1/32 below 0.5
        (17.0, 16.0),  # a tie goes to the even mantissa: 16, 18, 20
        (19.0, 20.0),
        (-19.0, -20.0),
        (460.0, 448.0),  # clamped, not NaN
        (1e9, 448.0),
        (2.0**-9, 2.0**-9),  # the smallest subnormal
        (2.0**-10, 0.0),
    ],
)
def test_e4m3_rounds_to_nearest_and_saturates(value, rounded):
    assert quantizing.round_e4m3(torch.tensor([value])).item() == rounded


def test_fp22_keeps_thirteen_mantissa_bits_and_cuts_toward_zero():
    kept, cut = 1 + 2.0**-13, 1 + 2.0**-13 + 2.0**-14
    x = torch.tensor([kept, cut, -cut, 3.0, 0.0])
    assert quantizing.truncate_fp22(x).tolist() == [kept, kept, -kept, 3.0, 0.0]


@pytest.mark.parametrize(
    ("total", "factors", "result"),
    [
        (1.0, [(2.0**-7, 2.0**-7)] * 16, 1.0),  # each is below the last bit that counts beside 1
        (-1.0, [(2.0**-7, 2.0**-6)] * 16, -1 + 2.0**-9),  # each is that bit
        (0.0, [(1.5, 1.5), *[(2.0**-7, 2.0**-6)] * 2], 2.25 + 2.0**-12),  # the exponent of 1.5 * 1.5 counts as 0
        (2.0**-20, [(0.0, 448.0)], 2.0**-20),
        (0.0, [(0.0, 1.0), (-1.0, 0.0)], 0.0),
        (0.0, [(448.0, 448.0)] * 32, 32 * 448.0**2),
    ],
)
def test_fp8_products_are_cut_before_they_are_added(total, factors, result):
    p, v = torch.tensor(factors).unbind(1)
    assert quantizing.add_fp8_products(torch.tensor([[total]]), p[None], v[:, None]).item() == result


def test_values_have_one_scale_per_channel():
    v = torch.tensor([[[[4.48, 0.0, 1.0], [2.0, 0.0, -2.0]]]])
    v8, scale, _ = quantizing.quantize_values(v, CONFIG)
    assert scale.flatten().tolist() == pytest.approx([0.01, 1, 2 / 448])
    assert v8[0, 0, :, 1].tolist() == [0, 0]
    assert v8[0, 0, :, 2].tolist() == [224, -448]


def test_sixteen_bit_values_are_left_alone():
    v = torch.tensor([[[[1e5, -3.0]]]], dtype=torch.bfloat16)
    v16, scale, _ = quantizing.quantize_values(v, replace(CONFIG, pv="bf16f32", accum_depth=0))
    assert torch.equal(v16, v.float())
    assert scale.flatten().tolist() == [1, 1]


# --- quantized attention as a whole


def relative_l2(out, ref):
    return ((out - ref).norm() / ref.norm()).item()


def cosine(out, ref):
    return ((out * ref).sum() / (out.norm() * ref.norm())).item()


def make_inputs(head_dim, length=2048, heads=4):
    return [normal(1, heads, length, head_dim, seed=s, dtype=torch.float16) for s in range(3)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_accuracy_is_the_papers(head_dim, is_causal):
    # SageAttention2 measured on normal inputs, 2K tokens, d 128: cosine 0.99930, relative L1 0.0375
    q, k, v = make_inputs(head_dim)
    out, _ = quantized_attention(q, k, v, Problem(head_dim, "fp16", is_causal), CONFIG)
    ref = attention(q, k, v, is_causal=is_causal, out_dtype=torch.float64)
    assert round(cosine(out, ref), 4) >= 0.9993
    assert ((out - ref).abs().sum() / ref.abs().sum()).item() == pytest.approx(0.0375, abs=0.002)


def test_sixteen_bit_p_leaves_only_the_error_of_int8():
    q, k, v = make_inputs(128)
    ref = attention(q, k, v, out_dtype=torch.float64)
    config = replace(CONFIG, pv="f16f32", accum_depth=0)
    assert relative_l2(quantized_attention(q, k, v, Problem(128, "fp16", False), config)[0], ref) < 0.012


def test_finer_scales_are_more_accurate():
    q, k, v = make_inputs(64)
    ref = attention(q, k, v, out_dtype=torch.float64)
    sixteen_bit = replace(CONFIG, pv="f16f32", accum_depth=0)
    errors = [
        relative_l2(quantized_attention(q, k, v, Problem(64, "fp16", False), config)[0], ref)
        for config in (sixteen_bit, replace(sixteen_bit, granularity="warp"), replace(sixteen_bit, granularity="block"))
    ]
    assert errors[0] < errors[1] < errors[2]


def test_magic_takes_at_most_three_half_steps_off_a_score():
    q, k, v = make_inputs(64, 512)
    problem = Problem(64, "fp16", False)
    _, plain = quantized_attention(q, k, v, problem, CONFIG)
    _, magic = quantized_attention(q, k, v, problem, replace(CONFIG, conversion="magic"))
    _, q_scale = quantizing.quantize_queries(q.float(), CONFIG)
    _, k_scale = quantizing.quantize_keys(k.float() - k.float().mean(2, keepdim=True), CONFIG)
    # of a score, in natural log units; an lse loses no more than the scores it sums
    step = (q_scale.max() * k_scale.max()).item() / 8
    assert 0 < (plain - magic).max() <= 1.5 * step
    assert (plain - magic).min() > -1e-5  # FP32 sums round


def test_offset_of_keys_costs_nothing():
    q, k, v = make_inputs(64, 512)
    problem = Problem(64, "fp16", False)
    config = replace(CONFIG, pv="f16f32", accum_depth=0)
    ref, lse = attention(q, k + 16, v, out_dtype=torch.float64, return_lse=True)
    out, quantized_lse = quantized_attention(q, k + 16, v, problem, config)
    assert relative_l2(out, ref) < 0.02
    assert (quantized_lse - lse).abs().max().item() < 0.01


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 300), (77, 200), (200, 77), (129, 127)])
@pytest.mark.parametrize("block_k", [64, 128])
def test_tails_groups_and_empty_rows(q_len, kv_len, block_k):
    q = normal(2, 6, q_len, 64, dtype=torch.float16)
    k, v = (normal(2, 2, kv_len, 64, seed=s, dtype=torch.float16) for s in (1, 2))
    config = replace(CONFIG, block_k=block_k, pv="f16f32", accum_depth=0)
    for is_causal in (False, True):
        out, lse = quantized_attention(q, k, v, Problem(64, "fp16", is_causal), config)
        ref, ref_lse = attention(q, k, v, is_causal=is_causal, out_dtype=torch.float64, return_lse=True)
        assert relative_l2(out, ref) < 0.02
        blind = ref_lse == -math.inf
        assert torch.equal(lse == -math.inf, blind)
        assert (out[blind] == 0).all()
        torch.testing.assert_close(lse[~blind], ref_lse[~blind], atol=0.1, rtol=0)


@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_scale_may_be_zero_or_negative(scale):
    q, k, v = make_inputs(64, 300)
    out, _ = quantized_attention(q, k, v, Problem(64, "fp16", True), CONFIG, scale=scale)
    assert relative_l2(out, attention(q, k, v, is_causal=True, scale=scale, out_dtype=torch.float64)) < 0.05


def chain_loss(depth):
    """What FP22 loses of the sum of 16,384 positive weights that is promoted every `depth` keys."""
    weights = quantizing.round_e4m3(normal(16384).exp().float() * 10) * 448
    total = partial = torch.zeros(1)
    for step, products in enumerate(weights.split(32), 1):
        partial = quantizing.truncate_fp22(partial + products.sum())
        if step * 32 % depth == 0:
            total, partial = total + partial, torch.zeros(1)
    return 1 - ((total + partial).double() / weights.double().sum()).item()


def test_only_a_promoted_chain_keeps_its_sum():
    # 512 cuts of half of 2^-13 on average, at sums that are half of the last on average: about 1 %
    assert 0 < chain_loss(depth=64) < 1e-4
    assert chain_loss(depth=16384) == pytest.approx(0.01, rel=0.3)


def test_fp22_accumulator_is_harmless_when_promoted():
    q, k = (normal(1, 1, 2048, 64, seed=s, dtype=torch.float16) for s in range(2))
    v = normal(1, 1, 2048, 64, seed=2, dtype=torch.float16) + 1
    problem = Problem(64, "fp16", False)
    exact, _ = quantized_attention(q, k, v, problem, CONFIG)
    cut, _ = quantized_attention(q, k, v, problem, CONFIG, accumulator="fp22")
    assert 0 < relative_l2(cut, exact) < 1e-3


@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_equal_weights_give_the_mean_of_v_although_v_is_rounded(offset):
    q, k, v = (normal(1, 2, 300, 64, seed=seed, dtype=torch.float16) for seed in (1, 2, 3))
    v = v + offset
    config = replace(default_wgmma_config(), accumulation="one")
    mean = v.double().mean(2, keepdim=True).expand(q.shape)
    for want_lse in (True, False):
        out, _ = quantized_attention(q * 0, k, v, Problem(64, "fp16", False), config, want_lse=want_lse)
        assert relative_l2(out, mean) < 1e-5
    # E4M3 alone: 300 values that are 2.6 % off each
    unsmoothed = replace(config, consumers=2, accumulation="two")
    assert relative_l2(quantized_attention(q * 0, k, v, Problem(64, "fp16", False), unsmoothed)[0], mean) > 1e-3


def test_what_rounding_adds_to_the_mean_of_v_is_taken_out_of_uneven_weights_too():
    q, k, v = (normal(1, 2, 512, 64, seed=seed, dtype=torch.float16) for seed in (1, 2, 3))
    ref = attention(q, k, v, out_dtype=torch.float64)
    smoothed = default_wgmma_config()
    out, _ = quantized_attention(q, k, v, Problem(64, "fp16", False), smoothed)
    unsmoothed = replace(smoothed, consumers=2, accumulation="two")
    other, _ = quantized_attention(q, k, v, Problem(64, "fp16", False), unsmoothed)
    # of e^2 sum(w^2) the part e^2 / N of V's rounding is gone; P's own rounding stays
    assert relative_l2(out, ref) < 0.93 * relative_l2(other, ref)
