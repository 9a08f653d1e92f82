"""Reports of users of such kernels, as tests of the public API on a card; the names are the rows of the list of cases.

Shapes, masks and values here, memory and streams in test_cases_memory.py: each case runs on every main kind of kernel,
which is all that the registry names meanwhile. What no kernel takes part in is in test_cases_host.py.
"""

import math
from itertools import accumulate

import pytest
import torch

import sagegen
from public_calls import BF16, FP16, assert_close, assert_right, draw, draw_qkv, errors, kernel
from sagegen.reference import attention as exact

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("pinned")]

#: Who answers calls of many sequences.
VARLEN_BACKENDS = ("kernel", None)


# --- A: shapes, masks, call forms


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 9, 12, 63, 65, 127, 129])
def test_a1_short_lengths_amid_stale_nan(length, is_causal, poison):
    q, k, v = draw_qkv(1, 20, 20, length, length, 128, BF16)
    poison()
    first = assert_right(q, k, v, is_causal=is_causal)
    poison()
    assert torch.equal(kernel(q, k, v, is_causal=is_causal), first)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1001, 503), (503, 1001), (1, 64), (64, 1), (65, 63)])
@pytest.mark.parametrize("dim", [64, 128])
def test_a2_lengths_that_differ(q_len, kv_len, dim):
    assert_right(*draw_qkv(1, 8, 8, q_len, kv_len, dim))


@pytest.mark.parametrize("kv_len", [191, 192, 193, 255, 256, 257])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a3_remainders_of_a_tile_in_nhd(kv_len, dtype):
    q, k, v = (draw(1, kv_len, 4, 128, seed=s, dtype=dtype) for s in range(3))
    assert_right(q, k, v, layout="NHD")


@pytest.mark.parametrize("kv_len", [1, 63, 300, 1000])
def test_a4_causal_decode_sees_every_key(kv_len):
    q, k = (torch.zeros(1, 16, length, 64, device="cuda", dtype=FP16) for length in (1, kv_len))
    v = torch.arange(kv_len, device="cuda", dtype=FP16)[:, None].expand(1, 16, kv_len, 64)
    out = kernel(q, k, v, is_causal=True)
    torch.testing.assert_close(out, torch.full_like(out, (kv_len - 1) / 2), rtol=0.01, atol=0)


@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 100), (129, 1), (128, 64), (70, 69)])
def test_a5_rows_without_keys(q_len, kv_len):
    q, k, v = draw_qkv(1, 4, 4, q_len, kv_len, 64)
    out, lse = kernel(q, k, v, is_causal=True, return_lse=True)
    blind = q_len - kv_len
    assert (out[:, :, :blind] == 0).all()
    assert (lse[:, :, :blind] == -math.inf).all()
    ref, ref_lse = exact(q, k, v, is_causal=True, return_lse=True, out_dtype=torch.float64)
    assert_close(out, ref)
    torch.testing.assert_close(lse[:, :, blind:], ref_lse[:, :, blind:], atol=0.1, rtol=0)


@pytest.mark.parametrize("head_dim", [40, 72, 80, 96, 120])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a11_head_dims_between_those_of_kernels(head_dim, is_causal):
    q, k, v = draw_qkv(1, 8, 8, 1024, 1024, head_dim)
    out = assert_right(q, k, v, is_causal=is_causal)
    assert out.is_contiguous()


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(28, 4), (6, 1)])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a14_gqa(heads_q, heads_kv, layout, is_causal):
    q, k, v = draw_qkv(2, heads_q, heads_kv, 777, 777, 128)
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    assert_right(q, k, v, layout=layout, is_causal=is_causal)


def pack(lengths):
    """int32 [sequences + 1] of these lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).cuda()


@pytest.mark.parametrize("backend", VARLEN_BACKENDS)
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a16_sequences_with_rows_without_keys(backend, dtype):
    q, k, v = (draw(rows, 1, 32, seed=s, dtype=dtype) for s, rows in enumerate((256, 3, 3)))
    call = (q, k, v, pack((76, 34, 146)), pack((1, 1, 1)), 146, 1)
    out, lse = sagegen.attention_varlen(*call, is_causal=True, return_lse=True, backend=backend)
    seeing = torch.tensor([75, 109, 255], device="cuda")  # the last row of each sequence alone
    blind = torch.ones(256, dtype=torch.bool, device="cuda").index_fill(0, seeing, False)
    assert (out[blind] == 0).all()
    assert (lse[:, blind] == -math.inf).all()
    assert_close(out[seeing], v)
    torch.testing.assert_close(lse[0, seeing], (q[seeing] * k).float().sum((1, 2)) / math.sqrt(32), atol=0.1, rtol=0)


@pytest.mark.parametrize("backend", VARLEN_BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dim", [40, 64, 128])
def test_a16_packed_sequences_are_each_alone(backend, dim, is_causal):
    q_lengths, k_lengths = (300, 1, 0, 129, 64, 33), (300, 777, 65, 63, 0, 1)
    q, k, v = (draw(sum(n), h, dim, seed=s) for s, (n, h) in enumerate(((q_lengths, 6), *[(k_lengths, 2)] * 2)))
    call = (q, k, v, pack(q_lengths), pack(k_lengths), max(q_lengths), max(k_lengths))
    options = {"is_causal": is_causal, "return_lse": True}
    sagegen.attention_varlen(*call, backend=backend, **options)
    torch.cuda.set_sync_debug_mode("error")  # the host never waits for the device
    try:
        out, lse = sagegen.attention_varlen(*call, backend=backend, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    parts = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    alone = [exact(*(x[None] for x in part), layout="NHD", out_dtype=torch.float64, **options) for part in parts]
    assert_close(out, torch.cat([part[0] for part, _ in alone]))
    torch.testing.assert_close(lse, torch.cat([part[0] for _, part in alone], 1), atol=0.1, rtol=0)


# --- B: values


@pytest.mark.parametrize("channel", [0, 3, 63])
@pytest.mark.parametrize("is_causal", [False, True])
def test_b1_channel_of_zeros_stays_zero(channel, is_causal):
    q, k, v = draw_qkv(1, 2, 2, 512, 512, 64)
    v[..., channel] = 0
    assert (assert_right(q, k, v, is_causal=is_causal)[..., channel] == 0).all()


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("value", [0.001, 1.0, -300.0])
def test_b2_constant_v(value, dtype):
    q, k, v = draw_qkv(1, 4, 4, 512, 512, 64, dtype)
    v.fill_(value)
    out = kernel(q, k, v)
    torch.testing.assert_close(out, v, rtol=0.01, atol=0)
    v[:, :, 77] = 40 * value
    assert_right(q, k, v)


def test_b3_equal_keys_give_the_mean_of_v():
    q, k, v = draw_qkv(1, 4, 4, 300, 500, 64)
    k.copy_(k[:, :, :1].clone())
    out = kernel(q, k, v)
    assert_close(out, v.double().mean(2, keepdim=True).expand(out.shape))


@pytest.mark.parametrize("is_causal", [False, True])
def test_b5_bf16_values_beyond_fp16(is_causal):
    q, k, v = draw_qkv(1, 4, 4, 300, 300, 64, BF16)
    v *= 1e5 / v.abs().max()
    v[:, :, 5] = 1e5
    assert_right(q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_b6_lse_with_a_large_common_offset_of_k(dtype, layout):
    q = 1 + draw(2, 6, 512, 128, seed=0) * 0.1
    k = 16 + draw(2, 2, 512, 128, seed=1)
    q, k, v = q.to(dtype), k.to(dtype), draw(2, 2, 512, 128, seed=2, dtype=dtype)
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out, lse = kernel(q, k, v, layout=layout, return_lse=True)
    ref, ref_lse = exact(q, k, v, layout=layout, return_lse=True, out_dtype=torch.float64)
    assert (lse.dtype, lse.shape) == (torch.float32, (2, 6, 512))
    torch.testing.assert_close(lse, ref_lse, atol=0.01, rtol=0)
    assert_close(out, ref)


@pytest.mark.parametrize("dim", [5, 64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_b8_lse_of_a_tiny_call(dim, is_causal):
    """Of few keys, whose INT8 steps do not average out: the gate's limit. 5 is the case's own."""
    q, k, v = (draw(1, 5, 1, dim, seed=s, dtype=BF16) for s in range(3))
    out, lse = kernel(q, k, v, layout="NHD", is_causal=is_causal, return_lse=True)
    ref, ref_lse = exact(q, k, v, layout="NHD", is_causal=is_causal, return_lse=True, out_dtype=torch.float64)
    torch.testing.assert_close(lse, ref_lse, atol=0.1, rtol=0)
    assert_close(out, ref)


def test_b9_channel_outliers_are_finite_and_their_error_is_stated(record_property):
    q, k, v = draw_qkv(1, 4, 4, 512, 8192, 128)
    k[..., :4] *= 50
    q[..., :4] /= 5
    out = kernel(q, k, v)
    assert out.isfinite().all()
    l2, cosine = errors(out, exact(q, k, v, out_dtype=torch.float64))
    record_property("relative_l2", l2)
    print(f"relative L2 {l2:.4f}, cosine {cosine:.5f}")
    assert cosine > 0.9  # scales by group take in four wide channels: the others have few steps, but are no garbage


def test_b10_no_dip_at_the_edge_of_a_tile():
    found = []
    for kv_len in range(120, 137):
        q, k, v = draw_qkv(64, 6, 1, 1, kv_len, 128, seed=kv_len)
        found.append(errors(kernel(q, k, v), exact(q, k, v, out_dtype=torch.float64))[1])
    assert min(found) >= 0.999
    assert max(found) - min(found) < 3e-4


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_b11_large_logits_pick_one_key(dtype):
    _, k, v = draw_qkv(1, 4, 4, 1024, 1024, 128, dtype)
    k = k.sign() * 200
    order = torch.randperm(1024, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    assert_close(kernel(k[:, :, order].contiguous(), k, v), v[:, :, order])
    random_signs = draw(1, 4, 1024, 128, seed=9, dtype=dtype).sign() * 200  # ties among keys: any of them is right
    assert kernel(random_signs, k, v).isfinite().all()


def test_b12_inputs_are_not_written():
    q, k, v = draw_qkv(2, 6, 2, 300, 400, 64)
    copies = [x.clone() for x in (q, k, v)]
    for _ in range(100):
        kernel(q, k, v, is_causal=True)
    assert all(torch.equal(x, copy) for x, copy in zip((q, k, v), copies, strict=True))


def test_b13_same_bits_beside_a_busy_stream():
    q, k, v = draw_qkv(2, 8, 8, 1500, 1500, 128, BF16)
    first = kernel(q, k, v, is_causal=True)
    busy = torch.cuda.Stream()
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(busy):
            matrix @ matrix
        assert torch.equal(kernel(q, k, v, is_causal=True), first)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_bad_values_reach_their_rows_and_no_others(is_causal, dim):
    q, k, v = draw_qkv(2, 8, 4, 333, 333, dim)
    q[0, 0, 100, 3] = math.nan  # spoils one row of one head
    k[0, 1, 200, 0] = math.inf  # spoils rows from 200 on of two heads, or all of them without a mask
    k[0, 2, 300, 0] = -math.inf
    v[1, 3, 256, 5] = math.nan  # the first key of a tile, see docs/numerics.md
    out = kernel(q, k, v, is_causal=is_causal)
    ref = exact(q, k, v, is_causal=is_causal, out_dtype=torch.float64)
    assert out[ref.isnan()].isnan().all()
    assert torch.equal(out.isnan().any(-1), ref.isnan().any(-1))
    assert_close(torch.where(ref.isnan(), 0, out).nan_to_num(), torch.where(out.isnan(), 0, ref).nan_to_num())


@pytest.mark.parametrize("scale", [-0.125, -1.0, 0.01, 0.5])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scale_may_be_negative(scale, is_causal):
    q, k, v = draw_qkv(1, 4, 2, 200, 300, 64)
    q /= max(1, 8 * abs(scale))  # logits as at the usual scale
    out, lse = kernel(q, k, v, scale=scale, is_causal=is_causal, return_lse=True)
    ref, ref_lse = exact(q, k, v, scale=scale, is_causal=is_causal, return_lse=True, out_dtype=torch.float64)
    assert_close(out, ref)
    torch.testing.assert_close(lse, ref_lse, atol=0.05, rtol=0)


def test_scale_zero_gives_the_mean_of_v():
    q, k, v = draw_qkv(1, 4, 4, 200, 300, 64)
    out, lse = kernel(q, k, v, scale=0.0, return_lse=True)
    assert_close(out, v.double().mean(2, keepdim=True).expand(out.shape))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(300)))
