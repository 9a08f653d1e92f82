"""Reports of users of such kernels, as in test_cases.py: what the host decides, whichever kernel the registry names."""

import math
from dataclasses import replace

import pytest
import torch

import sagegen
from public_calls import BF16, assert_close, assert_right, draw, draw_qkv, errors, kernel
from sagegen.env import read_env
from sagegen.errors import ArgumentError, UnsupportedError
from sagegen.reference import attention as exact
from sagegen.runtime.dispatch import Dispatcher
from sagegen.runtime.fallback import warn_once
from sagegen.runtime.machine import CudaRuntime
from sagegen.runtime.options import Options

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]


def test_a7_a10_mask_goes_to_sdpa_with_rows_that_hide_all():
    q, k, v = draw_qkv(1, 4, 4, 4, 200, 64)
    mask = torch.ones(4, 200, dtype=torch.bool, device="cuda")
    mask[2] = False
    mask[:, 100:] = False
    out, lse = sagegen.attention(q, k, v, attn_mask=mask, return_lse=True)
    assert sagegen.last_dispatch().answer == "sdpa"
    assert (out[:, :, 2] == 0).all()
    assert (lse[:, :, 2] == -math.inf).all()
    seen = torch.tensor([0, 1, 3], device="cuda")
    assert_close(out[:, :, seen], exact(q, k[:, :, :100], v[:, :, :100], rows=seen))
    with pytest.raises(UnsupportedError, match="attn_mask"):
        kernel(q, k, v, attn_mask=mask)
    with pytest.raises(TypeError, match="foo"):
        sagegen.attention(q, k, v, foo=1)


def test_a14_heads_that_do_not_divide():
    with pytest.raises(ArgumentError, match="10 heads"):
        kernel(*draw_qkv(1, 10, 4, 64, 64, 64))


def test_a18_gradients_are_torchs():
    q, k, v = (x.requires_grad_() for x in draw_qkv(1, 4, 4, 96, 96, 64))
    with pytest.raises(UnsupportedError, match="gradient"):
        kernel(q, k, v)
    sagegen.attention(q, k, v, is_causal=True).float().pow(2).sum().backward()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True).pow(2).sum().backward()
    for x, ref in zip((q, k, v), wide, strict=True):
        assert errors(x.grad, ref.grad)[0] < 0.01
    with torch.no_grad():
        assert_right(q, k, v)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [160, 200, 256])
def test_a12_head_dims_above_128(head_dim, is_causal):
    q, k, v = draw_qkv(1, 1, 1, 1024, 1024, head_dim)
    out = assert_right(q, k, v, is_causal=is_causal)
    assert out.is_contiguous()


@pytest.mark.parametrize("head_dim", [384, 512])
def test_a12_head_dims_above_those_of_kernels(head_dim, caplog):
    warn_once.cache_clear()
    q, k, v = draw_qkv(1, 1, 1, 1024, 1024, head_dim)
    for _ in range(2):
        assert_close(sagegen.attention(q, k, v), exact(q, k, v, out_dtype=torch.float64))
    assert sagegen.last_dispatch().answer == "sdpa"
    assert sum("head_dim" in record.getMessage() for record in caplog.records) == 1
    strict = Dispatcher(CudaRuntime(), lambda: replace(read_env(), strict=True))
    values = [getattr(Options(), name) for name in Options.__slots__]
    with pytest.raises(UnsupportedError, match=f"head_dim {head_dim}"):
        strict.attention(q, k, v, None, None, *values)


def test_a13_a_v_of_another_width():
    q, k, v = draw(1, 8, 4, 32), draw(1, 8, 4, 32), draw(1, 8, 4, 64)
    with pytest.raises(ArgumentError, match="v: width 64 does not match"):
        kernel(q, k, v)


def test_a15_q_and_k_in_float32_are_cast_and_other_mixtures_named():
    q, k, v = draw_qkv(1, 4, 4, 64, 64, 64, BF16)
    out = kernel(q.float(), k.float(), v)
    assert torch.equal(out, kernel(q, k, v))
    assert out.dtype == BF16
    for given, named in (((q, k.half(), v), "k: dtype"), ((q, k, v.float()), "v: dtype")):
        with pytest.raises(ArgumentError, match=named):
            kernel(*given)
    wide = [x.float() for x in (q, k, v)]
    torch.testing.assert_close(sagegen.attention(*wide), exact(*wide), rtol=1e-3, atol=1e-3)
    assert sagegen.last_dispatch().answer == "sdpa"


def test_d4_tensors_on_two_devices():
    q, k, v = draw_qkv(1, 4, 4, 64, 64, 64)
    with pytest.raises(ArgumentError, match="k: on cpu, but q is on cuda"):
        kernel(q, k.cpu(), v)
    assert_right(q, k, v)  # the context is usable
