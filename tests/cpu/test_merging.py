"""Attention over parts of the keys, merged, is attention over all of them."""

from __future__ import annotations

import math

import pytest
import torch

import sagegen
from sagegen.errors import ArgumentError

KV_LEN = 40


@pytest.fixture
def make():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=generator).to(dtype)


def exact(q, k, v, visible=None):
    """Attention and log-sum-exp in FP64 by their definition; `visible` is [q_len, kv_len], True is seen."""
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True)
    return (weights @ v.double()) / total.clamp_min(1e-300), total.squeeze(-1).log()


def attend_parts(q, k, v, lengths, mask=None, **options):
    """Outputs and lses over consecutive parts of the keys, of these lengths."""
    assert sum(lengths) == k.shape[2]
    results, start = [], 0
    for length in lengths:
        keys = slice(start, start + length)
        part_mask = None if mask is None or length == 0 else mask[:, keys]
        results.append(
            sagegen.attention(q, k[:, :, keys], v[:, :, keys], attn_mask=part_mask, return_lse=True, **options)
        )
        start += length
    return [out for out, _ in results], [lse for _, lse in results]


@pytest.mark.parametrize(
    "lengths", [(10, 10, 10, 10), (1, 26, 6, 7), (17, 0, 20, 3), (0, 0, 0, 40)], ids=["even", "uneven", "empty", "one"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_four_parts_equal_the_whole(make, lengths, dtype):
    q, k, v = (make(2, 3, n, 64, dtype=dtype) for n in (9, KV_LEN, KV_LEN))
    out, lse = sagegen.merge_lse(*attend_parts(q, k, v, lengths))
    expected, expected_lse = exact(q, k, v)
    assert (out.dtype, lse.dtype, lse.shape) == (dtype, torch.float32, (2, 3, 9))
    # each part's output is rounded to the dtype, and the merged one once more
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


def test_a_causal_split_has_rows_that_see_nothing_in_a_part(make):
    """Bottom-right: 50 queries, 40 keys, so the first 10 rows see no key in any part."""
    q, k, v = (make(1, 2, n, 64) for n in (50, KV_LEN, KV_LEN))
    visible = torch.arange(KV_LEN)[None] <= torch.arange(50)[:, None] + KV_LEN - 50
    outputs, lses = attend_parts(q, k, v, (10, 10, 10, 10), visible)
    assert [int((lse == -math.inf).sum()) for lse in lses] == [2 * 10, 2 * 20, 2 * 30, 2 * 40]
    out, lse = sagegen.merge_lse(outputs, lses)
    expected, expected_lse = exact(q, k, v, visible)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)
    assert torch.equal(out[:, :, :10], torch.zeros(1, 2, 10, 64))
    assert torch.equal(lse[:, :, :10], torch.full((1, 2, 10), -math.inf))


def test_a_ring_of_causal_chunks(make):
    """As ring attention does it: chunk 2 of the queries with earlier chunks of keys whole, with its own causally."""
    q, k, v = (make(1, 2, 30, 64) for _ in range(3))
    mine = q[:, :, 20:]
    outputs, lses = attend_parts(mine, k[:, :, :20], v[:, :, :20], (10, 10))
    own = sagegen.attention(mine, k[:, :, 20:], v[:, :, 20:], is_causal=True, return_lse=True)
    out, lse = sagegen.merge_lse([*outputs, own[0]], [*lses, own[1]])
    expected, expected_lse = exact(q, k, v, torch.ones(30, 30).tril().bool())
    torch.testing.assert_close(out.double(), expected[:, :, 20:], rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse[:, :, 20:], rtol=0, atol=1e-5)


def test_nhd_outputs_keep_their_layout(make):
    q, k, v = (make(2, 3, n, 64) for n in (9, KV_LEN, KV_LEN))
    expected, _ = exact(q, k, v)
    outputs, lses = attend_parts(q, k, v, (10, 10, 10, 10))
    out, lse = sagegen.merge_lse([o.transpose(1, 2) for o in outputs], lses, layout="NHD")
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, rtol=0, atol=1e-6)
    assert lse.shape == (2, 3, 9)


def test_merging_merged_parts_equals_merging_all(make):
    q, k, v = (make(1, 2, n, 64) for n in (9, KV_LEN, KV_LEN))
    outputs, lses = attend_parts(q, k, v, (10, 10, 10, 10))
    pairs = [sagegen.merge_lse(outputs[i : i + 2], lses[i : i + 2]) for i in (0, 2)]
    out, lse = sagegen.merge_lse(*zip(*pairs, strict=True))
    expected, expected_lse = exact(q, k, v)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


def test_weights_far_apart_neither_overflow_nor_vanish_together():
    """exp of these alone is 0 or inf in FP32; one part outweighs the other by 1, by e, and by all."""
    outputs = [torch.full((1, 1, 3, 64), 1.0), torch.full((1, 1, 3, 64), 2.0)]
    lses = [torch.tensor([[[1e4, -1e4, 500.0]]]), torch.tensor([[[1e4, -1e4 + 1, -500.0]]])]
    out, lse = sagegen.merge_lse(outputs, lses)
    sigmoid = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([1.5, 1 + sigmoid, 1.0]))
    expected = torch.tensor([1e4 + math.log(2), -1e4 + math.log(1 + math.e), 500.0])
    torch.testing.assert_close(lse[0, 0], expected)


def test_a_part_without_keys_counts_for_nothing_whatever_its_output_holds():
    outputs = [torch.full((1, 1, 2, 64), 3.0), torch.full((1, 1, 2, 64), math.nan)]
    lses = [torch.tensor([[[1.25, -math.inf]]]), torch.full((1, 1, 2), -math.inf)]
    out, lse = sagegen.merge_lse(outputs, lses)
    assert torch.equal(out[0, 0], torch.tensor([[3.0], [0.0]]).expand(2, 64))
    assert torch.equal(lse[0, 0], torch.tensor([1.25, -math.inf]))


@pytest.mark.parametrize("where", ["output", "lse", "infinite lse"])
def test_nan_stays_in_its_row(make, where):
    q, k, v = (make(1, 1, n, 64) for n in (3, KV_LEN, KV_LEN))
    outputs, lses = attend_parts(q, k, v, (20, 20))
    if where == "output":
        outputs[1][0, 0, 1] = math.nan
        lses[1][0, 0, 1] = -1e4  # its weight is 0 in FP32, and it is NaN all the same
    else:
        lses[1][0, 0, 1] = math.nan if where == "lse" else math.inf
    out, lse = sagegen.merge_lse(outputs, lses)
    assert out.isnan().all(-1).tolist() == [[[False, True, False]]]
    assert lse.isnan().tolist() == [[[False, where != "output", False]]]


def test_gradients_are_those_of_the_whole(make):
    """Of parts made by torch operations; rows that see nothing give 0, not NaN."""
    q, k, v = (make(1, 1, n, 8).requires_grad_() for n in (6, 4, 4))
    visible = torch.arange(4)[None] <= torch.arange(6)[:, None] - 2

    def part(keys):
        scores = (q @ k[:, :, keys].mT / math.sqrt(8)).masked_fill(~visible[:, keys], -1e9)
        seen = visible[:, keys].any(-1)
        out = scores.softmax(-1) @ v[:, :, keys] * seen[:, None]
        return out, scores.logsumexp(-1).masked_fill(~seen, -math.inf)

    parts = [part(slice(0, 2)), part(slice(2, 4))]
    out, lse = sagegen.merge_lse(*zip(*parts, strict=True))
    (out.square().sum() + lse[:, :, 2:].sum()).backward()
    found = [x.grad for x in (q, k, v)]
    others = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = exact(*others, visible)
    (expected[:, :, 2:].square().sum() + expected_lse[:, :, 2:].sum()).backward()
    for ours, other in zip(found, others, strict=True):
        torch.testing.assert_close(ours.double(), other.grad, rtol=0, atol=1e-5)


def test_inputs_are_not_written(make):
    outputs, lses = [make(1, 2, 3, 64) for _ in range(2)], [make(1, 2, 3) for _ in range(2)]
    before = [x.clone() for x in (*outputs, *lses)]
    sagegen.merge_lse(outputs, lses)
    assert all(torch.equal(x, y) for x, y in zip((*outputs, *lses), before, strict=True))


def test_compiled_it_is_one_graph(make):
    torch._dynamo.reset()
    outputs, lses = [make(1, 2, 3, 64) for _ in range(2)], [make(1, 2, 3) for _ in range(2)]
    compiled = torch.compile(sagegen.merge_lse, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(outputs, lses), sagegen.merge_lse(outputs, lses))


OUT, LSE = torch.zeros(1, 2, 3, 64), torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    ("outputs", "lses", "error", "says"),
    [
        (OUT, [LSE], TypeError, "outputs must be a list or tuple of tensors, not Tensor"),
        ([OUT], LSE, TypeError, "lses must be a list or tuple"),
        ([OUT, None], [LSE, LSE], TypeError, r"outputs\[1\] must be a torch.Tensor, not NoneType"),
        ([], [], ArgumentError, "outputs: there are none"),
        ([OUT, OUT], [LSE], ArgumentError, "lses: there are 1 for 2 outputs"),
        ([OUT[0]], [LSE], ArgumentError, r"outputs\[0\]: has 3 dimensions"),
        ([OUT, OUT[:, :, :2]], [LSE, LSE], ArgumentError, r"outputs\[1\]: shape \(1, 2, 2, 64\)"),
        ([OUT, OUT], [LSE, LSE.mT], ArgumentError, r"lses\[1\]: shape \(1, 3, 2\) is not \(1, 2, 3\)"),
        ([OUT.double()], [LSE], ArgumentError, r"outputs\[0\]: dtype torch.float64"),
        ([OUT, OUT.half()], [LSE, LSE], ArgumentError, r"outputs\[1\]: dtype torch.float16 is not torch.float32"),
        ([OUT.half()], [LSE.half()], ArgumentError, r"lses\[0\]: dtype torch.float16 is not torch.float32; cast it"),
        ([OUT], [LSE.to("meta")], ArgumentError, r"lses\[0\]: on meta, but outputs\[0\] is on cpu; move it"),
    ],
)
def test_what_does_not_fit_is_named(outputs, lses, error, says):
    with pytest.raises(error, match=says):
        sagegen.merge_lse(outputs, lses)


def test_a_layout_that_does_not_exist_is_named():
    with pytest.raises(ArgumentError, match="layout='NDH'"):
        sagegen.merge_lse([OUT], [LSE], layout="NDH")


def test_heads_and_tokens_are_told_apart_by_the_layout():
    with pytest.raises(ArgumentError, match=r"lses\[0\]: shape \(1, 2, 3\) is not \(1, 3, 2\)"):
        sagegen.merge_lse([OUT], [LSE], layout="NHD")


def test_packed_sequences_merge_by_their_own_layout():
    """The keys of each of two sequences, in two halves."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 8, 2, 16, generator=generator).unbind()
    whole, half = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (4, 2))
    expected = sagegen.attention_varlen(q, k, v, whole, whole, 4, 4, return_lse=True)
    parts = [
        sagegen.attention_varlen(q, k[keys], v[keys], whole, half, 4, 2, return_lse=True)
        for keys in (torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7]))
    ]
    outputs, lses = zip(*parts, strict=True)
    for found, one in zip(sagegen.merge_lse(outputs, lses, layout="THD"), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-5)
    with pytest.raises(ArgumentError, match="give layout='THD'"):
        sagegen.merge_lse(outputs, lses)
