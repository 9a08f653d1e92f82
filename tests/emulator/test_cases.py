"""Reports of users of such kernels, as tests of the public API without a card, named as in the list of cases.

Each runs on the exact reference and on the default kernel of either family in the emulator, at lengths that this can
afford. tests/gpu/test_cases.py has them at their own.
"""

from __future__ import annotations

import math

import pytest
import torch

import sagegen
from sagegen.errors import ArgumentError, UnsupportedError
from sagegen.gpu import GPUS
from sagegen.runtime import choose, programs
from sagegen.runtime.dispatch import dispatcher

pytestmark = pytest.mark.emulator

FP16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(params=["reference", "mma", "wgmma"], autouse=True)
def backend(request, monkeypatch):
    """Who answers: the emulator runs the default kernel of an L20, of an H200, or of the GPU that a test names."""
    if request.param == "reference":
        return "reference"
    gpu = GPUS[{"mma": "l20", "wgmma": "h200"}.get(request.param, request.param)]
    for module in (choose, programs):
        monkeypatch.setattr(module, "EMULATED_GPU", gpu)
    dispatcher.cache_clear()  # it remembers the kernels of another GPU
    return "emulator"


@pytest.fixture
def run(backend):
    return lambda *inputs, **options: sagegen.attention(*inputs, backend=backend, **options)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = FP16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw_qkv(heads_q, heads_kv, q_len, kv_len, dim, dtype=FP16, batch=1):
    return (
        draw(batch, heads_q, q_len, dim, seed=1, dtype=dtype),
        draw(batch, heads_kv, kv_len, dim, seed=2, dtype=dtype),
        draw(batch, heads_kv, kv_len, dim, seed=3, dtype=dtype),
    )


def exact(q, k, v, is_causal=False):
    """Output and natural-log lse in FP64, HND; rows that see nothing are 0 and -inf."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        seen = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1).nan_to_num(0) @ v, scores.logsumexp(-1)


def assert_close(out: torch.Tensor, ref: torch.Tensor) -> None:
    """As the list of cases has it."""
    assert out.shape == ref.shape
    assert out.isfinite().all()
    out, ref = out.double(), ref.double()
    assert (out - ref).norm() <= 0.05 * ref.norm()
    assert (out * ref).sum() >= 0.998 * out.norm() * ref.norm()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 9, 63, 65, 129])
def test_a1_short_lengths(run, length, is_causal):
    q, k, v = draw_qkv(2, 2, length, length, 128, BF16)
    out = run(q, k, v, is_causal=is_causal)
    assert_close(out, exact(q, k, v, is_causal)[0])
    assert torch.equal(run(q, k, v, is_causal=is_causal), out)


@pytest.mark.parametrize(("q_len", "kv_len"), [(401, 203), (1, 64), (64, 1), (65, 63)])
def test_a2_lengths_that_differ(run, q_len, kv_len):
    q, k, v = draw_qkv(2, 2, q_len, kv_len, 64)
    assert_close(run(q, k, v), exact(q, k, v)[0])


@pytest.mark.parametrize("kv_len", [193, 255])
def test_a3_remainders_of_a_tile_in_nhd(run, kv_len):
    q, k, v = draw_qkv(1, 1, 40, kv_len, 128)
    out = run(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), layout="NHD")
    assert_close(out.transpose(1, 2), exact(q, k, v)[0])


def test_a4_causal_decode_sees_every_key(run):
    q, k = torch.zeros(1, 4, 1, 64, dtype=FP16), torch.zeros(1, 4, 300, 64, dtype=FP16)
    v = torch.arange(300, dtype=FP16)[:, None].expand(1, 4, 300, 64)
    out = run(q, k, v, is_causal=True)
    torch.testing.assert_close(out, torch.full_like(out, 149.5), rtol=0.01, atol=0)


@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 100), (129, 1)])
def test_a5_rows_without_keys(run, q_len, kv_len):
    q, k, v = draw_qkv(1, 1, q_len, kv_len, 64)
    out, lse = run(q, k, v, is_causal=True, return_lse=True)
    blind = q_len - kv_len
    assert (out[:, :, :blind] == 0).all()
    assert (lse[:, :, :blind] == -math.inf).all()
    ref, ref_lse = exact(q, k, v, True)
    assert_close(out, ref)
    torch.testing.assert_close(lse[:, :, blind:].double(), ref_lse[:, :, blind:], atol=0.1, rtol=0)


@pytest.mark.parametrize("head_dim", [40, 72, 80, 96, 120])
def test_a11_head_dims_between_those_of_kernels(run, head_dim):
    q, k, v = draw_qkv(2, 2, 100, 150, head_dim)
    out = run(q, k, v)
    assert_close(out, exact(q, k, v)[0])
    assert out.is_contiguous()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [160, 200, 256])
@pytest.mark.parametrize("backend", ["reference", "l20", "rtx3090", "a100", "h200"], indirect=True)
def test_a12_head_dims_above_128(run, head_dim, is_causal):
    q, k, v = draw_qkv(4, 2, 131, 150, head_dim)
    out, lse = run(q, k, v, is_causal=is_causal, return_lse=True)
    ref, ref_lse = exact(q, k, v, is_causal)
    assert_close(out, ref)
    torch.testing.assert_close(lse.double(), ref_lse, atol=0.1, rtol=0)
    assert out.is_contiguous()


@pytest.mark.parametrize("head_dim", [384, 512])
def test_a12_head_dims_above_those_of_kernels(run, backend, head_dim):
    q, k, v = draw_qkv(1, 1, 64, 64, head_dim)
    if backend == "reference":
        assert_close(run(q, k, v), exact(q, k, v)[0])
        return
    with pytest.raises(UnsupportedError, match=f"head_dim {head_dim} has no kernel, 256 is the widest"):
        run(q, k, v)


def test_a13_a_v_of_another_width(run):
    q, k, v = draw(1, 8, 4, 32), draw(1, 8, 4, 32), draw(1, 8, 4, 64)
    with pytest.raises(ArgumentError, match="v: width 64 does not match"):
        run(q, k, v)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(28, 4), (6, 1)])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a14_gqa(run, heads_q, heads_kv, layout):
    q, k, v = draw_qkv(heads_q, heads_kv, 33, 77, 128)
    expected, _ = exact(q, k, v)
    if layout == "NHD":
        q, k, v, expected = (x.transpose(1, 2).contiguous() for x in (q, k, v, expected))
    assert_close(run(q, k, v, layout=layout), expected)
    with pytest.raises(ArgumentError, match="10 heads"):
        run(*draw_qkv(10, 4, 8, 8, 128))


def test_a15_q_and_k_in_float32_beside_a_16_bit_v(run):
    q, k, v = draw_qkv(2, 2, 64, 64, 64, BF16)
    out = run(q.float(), k.float(), v)
    assert torch.equal(out, run(q, k, v))
    with pytest.raises(ArgumentError, match="k: dtype"):
        run(q.half(), k, v)


@pytest.mark.parametrize("channel", [0, 3, 63])
def test_b1_channel_of_zeros_stays_zero(run, channel):
    q, k, v = draw_qkv(2, 2, 60, 256, 64)
    v[..., channel] = 0
    out = run(q, k, v)
    assert (out[..., channel] == 0).all()
    assert_close(out, exact(q, k, v)[0])


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("value", [0.001, -300.0])
def test_b2_constant_v(run, value, dtype):
    q, k, v = draw_qkv(1, 1, 60, 256, 64, dtype)
    v.fill_(value)
    out = run(q, k, v)
    torch.testing.assert_close(out, v[:, :, :1].expand(out.shape), rtol=0.01, atol=0)
    v[:, :, 77] = 40 * value
    assert_close(run(q, k, v), exact(q, k, v)[0])


def test_b3_equal_keys_give_the_mean_of_v(run):
    q, k, v = draw_qkv(2, 2, 60, 300, 64)
    out = run(q, k[:, :, :1].expand(k.shape), v)
    assert_close(out, v.double().mean(2, keepdim=True).expand(out.shape))


def test_b5_bf16_values_beyond_fp16(run):
    q, k, v = draw_qkv(2, 2, 100, 150, 64, BF16)
    v *= 1e5 / v.abs().max()
    v[:, :, 5] = 1e5
    assert_close(run(q, k, v), exact(q, k, v)[0])


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_b6_lse_with_a_large_common_offset_of_k(run, layout):
    q = (1 + draw(1, 3, 60, 128, seed=0, dtype=torch.float32) * 0.1).to(BF16)
    k, v = (16 + draw(1, 1, 300, 128, seed=1, dtype=torch.float32)).to(BF16), draw(1, 1, 300, 128, seed=2, dtype=BF16)
    expected, expected_lse = exact(q, k, v)
    if layout == "NHD":
        q, k, v, expected = (x.transpose(1, 2).contiguous() for x in (q, k, v, expected))
    out, lse = run(q, k, v, layout=layout, return_lse=True)
    assert (lse.dtype, lse.shape) == (torch.float32, (1, 3, 60))
    torch.testing.assert_close(lse.double(), expected_lse, atol=0.01, rtol=0)
    assert_close(out, expected)


def test_b8_lse_of_a_tiny_call(run):
    q, k, v = draw_qkv(1, 1, 5, 5, 5, BF16)
    out, lse = run(*(x.transpose(1, 2) for x in (q, k, v)), layout="NHD", return_lse=True)
    expected, expected_lse = exact(q, k, v)
    torch.testing.assert_close(lse.double(), expected_lse, atol=0.1, rtol=0)
    assert_close(out.transpose(1, 2), expected)


def test_b10_no_dip_at_the_edge_of_a_tile(run):
    cosines = []
    for kv_len in (127, 128, 129):
        q, k, v = draw_qkv(6, 1, 1, kv_len, 128, batch=4)
        out, ref = run(q, k, v).double(), exact(q, k, v)[0]
        cosines.append(((out * ref).sum() / (out.norm() * ref.norm())).item())
    assert min(cosines) >= 0.999
    assert max(cosines) - min(cosines) < 5e-4


def test_b11_large_logits_pick_one_key(run):
    _, k, v = draw_qkv(1, 1, 1, 256, 128)
    k = k.sign() * 200
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    assert_close(run(k[:, :, order], k, v), v[:, :, order])


def test_b12_inputs_are_not_written(run):
    inputs = draw_qkv(3, 1, 60, 80, 64)
    copies = [x.clone() for x in inputs]
    run(*inputs, is_causal=True)
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_c1_slices_of_one_buffer(run, layout):
    q, k, v = draw(1, 100, 3 * 2 * 128).view(1, 100, 3, 2, 128).unbind(2)
    if layout == "HND":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert torch.equal(run(q, k, v, layout=layout), run(*(x.contiguous() for x in (q, k, v)), layout=layout))


def test_c4_stride_of_a_dim_of_one_is_ignored(run):
    inputs = draw_qkv(1, 1, 60, 60, 64)
    odd = [x.as_strided((1, 1, 60, 64), (1 << 40, 12345, 64, 1)) for x in inputs]
    assert torch.equal(run(*odd), run(*inputs))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_c6_half_of_a_gathered_buffer(run, dim):
    shape = [2, 2, 50, 64]
    shape[dim] *= 2
    q, (k, v) = draw(2, 2, 40, 64), (draw(*shape, seed=s).chunk(2, dim)[1] for s in (1, 2))
    assert k.storage_offset() > 0
    assert torch.equal(run(q, k, v), run(q, k.contiguous(), v.contiguous()))


@pytest.mark.parametrize("kv_len", [33, 65])
@pytest.mark.parametrize("over", ["heads", "batch"])
def test_c7_expanded_keys_and_values(run, kv_len, over):
    small = (3, 1, kv_len, 64) if over == "heads" else (1, 4, kv_len, 64)
    q, (k, v) = draw(3, 4, 50, 64), (draw(*small, seed=s).expand(3, 4, kv_len, 64) for s in (1, 2))
    out = run(q, k, v)
    assert_close(out, exact(q, k, v)[0])
    assert torch.equal(out, run(q, k.contiguous(), v.contiguous()))


def test_c8_v_in_another_order(run):
    q, k, v = draw_qkv(4, 4, 62, 62, 128, BF16)
    moved = v.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(run(q, k, moved), run(q, k, v))
