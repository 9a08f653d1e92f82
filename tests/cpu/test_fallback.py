"""torch SDPA with this package's semantics, against attention written out in FP64 here."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from sagegen import reference
from sagegen.errors import UnsupportedError
from sagegen.runtime import fallback


def exact(q, k, v, visible=None, bias=None, scale=None):
    """HND; `visible` and `bias` broadcast to [batch, heads, q_len, kv_len]. Returns output and lse in FP64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    scores = scores if visible is None else torch.where(visible, scores, -math.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, -1).nan_to_num(0), v), lse


def seen(q_len, kv_len, *, is_causal=False, left=-1, right=-1):
    """Row by row from the definition: query i stands at key i + kv_len - q_len."""
    rows = []
    for i in range(q_len):
        at = i + kv_len - q_len
        rows.append(
            [
                (not is_causal or j <= at) and (left < 0 or j >= at - left) and (right < 0 or j <= at + right)
                for j in range(kv_len)
            ]
        )
    return torch.tensor(rows, dtype=torch.bool)


@pytest.fixture
def make():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def close(result, expected):
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (1, 9), (3, 9), (9, 3), (64, 65)])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_causal_is_bottom_right_and_heads_may_share(make, is_causal, q_len, kv_len, heads, layout):
    q, k, v = make(2, heads[0], q_len, 16), make(2, heads[1], kv_len, 16), make(2, heads[1], kv_len, 16)
    expected, expected_lse = exact(q, k, v, seen(q_len, kv_len, is_causal=is_causal))
    if layout == "NHD":
        q, k, v, expected = (x.transpose(1, 2) for x in (q, k, v, expected))
    out, lse = fallback.attend(q, k, v, layout=layout, is_causal=is_causal, return_lse=True)
    close(out, expected)
    close(lse, expected_lse)
    assert lse.dtype == torch.float32
    close(fallback.attend(q, k, v, layout=layout, is_causal=is_causal), expected)


def test_decode_sees_every_key():
    """A4: q length 1, kv length 300, causal, v[j] = j: the mean of 0..299."""
    q, k = torch.zeros(1, 16, 1, 64), torch.zeros(1, 16, 300, 64)
    v = torch.arange(300.0)[None, None, :, None].expand(1, 16, 300, 64)
    torch.testing.assert_close(fallback.attend(q, k, v, is_causal=True), torch.full_like(q, 149.5))


def test_queries_before_the_first_key_give_zero(make):
    """A5: q length 300, kv length 100, causal."""
    q, k, v = make(1, 2, 300, 64), make(1, 2, 100, 64), make(1, 2, 100, 64)
    out, lse = fallback.attend(q, k, v, is_causal=True, return_lse=True)
    assert (out[:, :, :200] == 0).all()
    assert (lse[:, :, :200] == -math.inf).all()
    close(out, exact(q, k, v, seen(300, 100, is_causal=True))[0])


@pytest.mark.parametrize("window", [(0, 0), (2, -1), (-1, 1), (3, 4)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(6, 6), (1, 8), (3, 8), (8, 3)])
def test_windows(make, window, is_causal, q_len, kv_len):
    q, k, v = make(1, 2, q_len, 8), make(1, 2, kv_len, 8), make(1, 2, kv_len, 8)
    visible = seen(q_len, kv_len, is_causal=is_causal, left=window[0], right=window[1])
    expected, expected_lse = exact(q, k, v, visible)
    out, lse = fallback.attend(q, k, v, is_causal=is_causal, window=window, return_lse=True)
    close(out, expected)
    close(lse, expected_lse)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 5, 7), (3, 1, 5, 7), (1, 2, 1, 7), (3, 2, 5, 1)])
def test_bool_masks_in_every_broadcast(make, shape):
    q, k, v = make(3, 2, 5, 8), make(3, 2, 7, 8), make(3, 2, 7, 8)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    expected, expected_lse = exact(q, k, v, mask)
    out, lse = fallback.attend(q, k, v, attn_mask=mask, return_lse=True)
    close(out, expected)
    close(lse, expected_lse)


def test_a_row_that_a_mask_hides_is_zero(make):
    """A10: bool mask, row 2 of 4 hides every key; 200 keys."""
    q, k, v = make(1, 2, 4, 64).half(), make(1, 2, 200, 64).half(), make(1, 2, 200, 64).half()
    mask = torch.ones(4, 200, dtype=torch.bool)
    mask[2] = False
    out, lse = fallback.attend(q, k, v, attn_mask=mask, return_lse=True)
    assert (out[:, :, 2] == 0).all()
    assert (lse[:, :, 2] == -math.inf).all()
    torch.testing.assert_close(out.double(), exact(q, k, v, mask)[0], rtol=1e-2, atol=1e-3)


def test_a_hidden_row_has_gradient_zero_not_nan(make):
    q, k, v = (make(1, 1, 3, 8).requires_grad_() for _ in range(3))
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    fallback.attend(q, k, v, attn_mask=mask).sum().backward()
    assert q.grad.isfinite().all()
    assert (q.grad[:, :, 1] == 0).all()
    assert v.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_float_masks_add_to_scores(make, dtype):
    q, k, v = (make(1, 2, 4, 8).to(dtype) for _ in range(3))
    bias = make(4, 4)
    bias[1] = -math.inf
    bias[2, :2] = -1e9  # beyond fp16: far down, but not hidden
    bias[3] = -1e9
    expected, expected_lse = exact(q, k, v, seen(4, 4, is_causal=True), bias)
    out, lse = fallback.attend(q, k, v, attn_mask=bias, is_causal=True, return_lse=True)
    assert out.dtype == dtype
    torch.testing.assert_close(out[:, :, :3].double(), expected[:, :, :3], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-2)
    assert out[:, :, 3].isfinite().all()


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "window": (2, 0)}], ids=str)
def test_batch_items_of_their_own_lengths(make, options, with_mask):
    """Each is aligned by its own, and what lies behind it is nothing."""
    q, k, v = make(4, 4, 9, 8), make(4, 2, 7, 8), make(4, 2, 7, 8)
    q_lengths, kv_lengths = (9, 4, 0, 5), (7, 6, 3, 0)
    mask = torch.rand(4, 1, 9, 7, generator=torch.Generator().manual_seed(1)) > 0.3 if with_mask else None
    lengths = fallback.Lengths(torch.tensor(q_lengths), torch.tensor(kv_lengths))
    out, lse = fallback.attend(q, k, v, attn_mask=mask, lengths=lengths, return_lse=True, **options)
    left, right = options.get("window", (-1, -1))
    for item, (rows, keys) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        visible = torch.zeros(9, 7, dtype=torch.bool)
        own = seen(rows, keys, is_causal="is_causal" in options, left=left, right=right)
        visible[:rows, :keys] = own if rows else False
        if with_mask:
            visible &= mask[item, 0]
        expected, expected_lse = exact(q[item, None], k[item, None], v[item, None], visible)
        close(out[item], expected[0])
        close(lse[item], expected_lse[0])


def test_many_chunks_give_what_one_gives(make, monkeypatch):
    q, k, v = make(1, 2, 50, 8), make(1, 2, 60, 8), make(1, 2, 60, 8)
    whole = fallback.attend(q, k, v, is_causal=True, window=(9, -1), return_lse=True)
    monkeypatch.setattr(fallback, "_CHUNK_BYTES", 500)
    chunks = fallback.attend(q, k, v, is_causal=True, window=(9, -1), return_lse=True)
    torch.testing.assert_close(chunks, whole)


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.7, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_len", [6, 9])
def test_any_scale(make, scale, is_causal, kv_len):
    """Torch's own causal answer is NaN on the CPU where the scale is not above 0."""
    q, k, v = make(1, 2, 6, 8), make(1, 2, kv_len, 8), make(1, 2, kv_len, 8)
    out, lse = fallback.attend(q, k, v, scale=scale, is_causal=is_causal, return_lse=True)
    expected, expected_lse = exact(q, k, v, seen(6, kv_len, is_causal=is_causal), scale=scale)
    close(out, expected)
    close(lse, expected_lse)


@pytest.mark.parametrize("scale", [0.0, -0.7])
@pytest.mark.parametrize("window", [None, (2, -1)])
def test_any_scale_has_gradients(make, scale, window):
    inputs = [make(1, 2, 5, 8).double().requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(
        lambda *x: fallback.attend(*x, scale=scale, is_causal=True, window=window, return_lse=True)[0], inputs
    )


def test_gradients_are_torch_gradients(make):
    """A18: what falls back because it needs a gradient gets the right one."""
    q, k, v = (make(1, 2, 5, 8).double().requires_grad_() for _ in range(3))
    assert torch.autograd.gradcheck(lambda *x: fallback.attend(*x, is_causal=True), (q, k, v))


def test_each_reason_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING, logger="sagegen"):
        for _ in range(3):
            fallback.fall_back("test reason one", strict=False)
            fallback.fall_back("test reason two", strict=False)
    assert [record.getMessage() for record in caplog.records] == [
        "torch SDPA answers: test reason one",
        "torch SDPA answers: test reason two",
    ]


def test_strict_raises_instead():
    with pytest.raises(UnsupportedError, match="head_dim 96 has no kernel"):
        fallback.fall_back("head_dim 96 has no kernel", strict=True)


@pytest.mark.parametrize("mask_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float_masks_of_every_type_for_inputs_of_every_type(make, dtype, mask_dtype):
    q, k, v = (make(1, 2, 4, 8).to(dtype) for _ in range(3))
    bias = torch.tensor([[0, 0.5, -0.25, 1], [-math.inf] * 4, [2, -math.inf, 0, 0], [-3e4, 0, 0, 0]])
    expected, expected_lse = exact(q, k, v, bias=bias)
    out, lse = fallback.attend(q, k, v, attn_mask=bias.to(mask_dtype), return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 1, 1, 9), (1, 9), (6, 9), (4, 6, 9), (3, 4, 6, 9)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_what_padding_holds_leaves_no_trace(make, shape, dtype):
    """Keys that no query of a batch item sees: the last three of nine, and one in the middle."""
    q, k, v = make(3, 4, 6, 16), make(3, 2, 9, 16), make(3, 2, 9, 16)
    seen = torch.ones(shape, dtype=torch.bool)
    seen[..., 6:] = seen[..., 2] = False
    mask = seen if dtype == torch.bool else torch.zeros(shape).masked_fill(~seen, -math.inf)
    kept = [0, 1, 3, 4, 5]
    expected, lse = fallback.attend(q, k[:, :, kept], v[:, :, kept], return_lse=True)
    for x in (k, v):
        x[:, :, 2], x[:, :, 6:] = math.nan, math.inf
    out, found = fallback.attend(q, k, v, attn_mask=mask, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found, lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("base", [-1000.0, -1e6])
def test_a_mask_counts_in_its_own_precision(make, dtype, mask_dtype, base):
    """Steps of 1.5 between large biases: 16 bits hold neither those steps nor, in FP16, the biases."""
    q, k, v = (make(1, 2, 5, 32).to(dtype) for _ in range(3))
    bias = (base + 1.5 * torch.arange(5)).to(mask_dtype).expand(5, 5)
    expected, expected_lse = exact(q, k, v, bias=bias.double())
    out, lse = fallback.attend(q, k, v, attn_mask=bias, return_lse=True)
    assert out.dtype == dtype
    assert (out - expected).norm() <= 0.01 * expected.norm()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("side", [2**62, 2**63 - 1, 2**63, 10**30])
@pytest.mark.parametrize("lengths", [(3, 9), (9, 3)])
def test_sides_of_a_window_beyond_64_bits_are_open(make, side, lengths):
    q, k, v = make(1, 2, lengths[0], 16), make(1, 2, lengths[1], 16), make(1, 2, lengths[1], 16)
    for window, limits in (
        ((-1, side), {}),
        ((side, -1), {}),
        ((0, side), {"left": 0}),
        ((side, 0), {"right": 0}),
        ((side, side), {}),
    ):
        expected = exact(q, k, v, seen(*lengths, **limits))[0]
        close(fallback.attend(q, k, v, window=window), expected)
        close(reference.attention(q, k, v, window=window), expected)


# --- what torch's fused kernels cannot read


class OnCuda(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "is_copied"),
    [
        ((1, 2, 5, 64), (640, 320, 64, 1), 0, False),
        ((1, 2, 5, 64), (640, 320, 64, 1), 8, False),
        ((1, 2, 5, 64), (640, 320, 64, 1), 1, True),  # two bytes past a vector
        ((1, 2, 5, 64), (650, 325, 65, 1), 0, True),  # rows of 130 bytes
        ((1, 2, 5, 64), (0, 0, 64, 1), 0, False),
        ((1, 1, 1, 64), (3, 3, 3, 1), 0, False),  # dims of one are never stepped over
        ((1, 2, 5, 5), (50, 25, 5, 1), 0, False),  # a copy would have such rows too
        ((1, 2, 5, 5), (50, 25, 5, 1), 3, True),
    ],
)
def test_torch_gets_copies_of_what_it_would_fault_on(shape, strides, offset, is_copied):
    base = torch.zeros(4096, dtype=torch.float16)
    base = base[-(base.data_ptr() // 2) % 8 :]  # from a whole vector on
    x = base.as_strided(shape, strides, base.storage_offset() + offset)
    read = fallback.as_torch_reads(x.as_subclass(OnCuda))
    assert (read.data_ptr() != x.data_ptr()) == is_copied
    assert read.is_contiguous() or not is_copied
    assert fallback.as_torch_reads(x) is x  # on the CPU torch reads all


@pytest.mark.parametrize(("shape", "given"), [((33, 1), (33, 70)), ((2, 1, 1, 1), (2, 1, 1, 70)), ((1, 70), (1, 70))])
def test_torch_gets_a_column_of_the_mask_for_every_key(shape, given):
    mask = (torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)) % 2 == 0).expand(shape)
    read = fallback.as_torch_masks(mask.contiguous().as_subclass(OnCuda), 70)
    assert read.shape == given
    assert read.is_contiguous()
    assert torch.equal(read.as_subclass(torch.Tensor), mask.expand(given))
    assert fallback.as_torch_masks(None, 70) is None
