"""Reports of users of such kernels, as in test_cases.py: what the host decides, whichever kernel the registry names."""

import math

import pytest
import torch

import sagegen
from public_calls import BF16, assert_close, assert_right, draw, draw_qkv, errors, kernel
from sagegen.errors import ArgumentError, UnsupportedError
from sagegen.reference import attention as exact

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


def test_b8_lse_of_a_width_that_no_kernel_has():
    q, k, v = (draw(1, 5, 1, 5, seed=s, dtype=BF16) for s in range(3))
    out, lse = sagegen.attention(q, k, v, layout="NHD", return_lse=True)
    assert sagegen.last_dispatch().answer == "sdpa"
    ref, ref_lse = exact(q, k, v, layout="NHD", return_lse=True, out_dtype=torch.float64)
    torch.testing.assert_close(lse, ref_lse, atol=0.01, rtol=0)
    assert_close(out, ref)


def test_d4_tensors_on_two_devices():
    q, k, v = draw_qkv(1, 4, 4, 64, 64, 64)
    with pytest.raises(ArgumentError, match="k: on cpu, but q is on cuda"):
        kernel(q, k.cpu(), v)
    assert_right(q, k, v)  # the context is usable
