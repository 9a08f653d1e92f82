"""Inputs of the gate: the same on every machine, and each of the kind its name says."""

import json
import math
from pathlib import Path

import pytest
import torch

from sagegen.errors import ArgumentError
from sagegen.measuring.inputs import (
    EMULATED_KINDS,
    INPUT_KINDS,
    ZERO_CHANNEL,
    fitting_names,
    load_captured,
    make_inputs,
)
from sagegen.problem import Problem
from sagegen.reference import attention

CAPTURED = Path(__file__).parents[1] / "data" / "smollm2_qkv.safetensors"
PROBLEM = Problem(64, "fp16", False)
CAUSAL = Problem(64, "fp16", True)


def make(name, problem=PROBLEM):
    return make_inputs(INPUT_KINDS[name], problem, "cpu")


@pytest.mark.parametrize("name", INPUT_KINDS)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "fp16"), (128, "bf16")])
def test_shape_and_type_are_the_problems(name, head_dim, dtype):
    kind = INPUT_KINDS[name]
    inputs = make(name, Problem(head_dim, dtype, True))
    assert inputs.shape == kind.shape
    assert {x.shape[-1] for x in (inputs.q, inputs.k, inputs.v)} == {head_dim}
    assert {x.dtype for x in (inputs.q, inputs.k, inputs.v)} == {torch.float16 if dtype == "fp16" else torch.bfloat16}
    assert {x.stride(-1) for x in (inputs.q, inputs.k, inputs.v)} == {1}


def test_draws_are_the_same_on_every_machine():
    inputs = make("normal")
    # torch's CPU generator (mt19937) with seed 0, drawn at [1, 8, 2048, 64]
    wanted = torch.randn(1, 8, 2048, 64, generator=torch.Generator().manual_seed(0)).half()
    assert torch.equal(inputs.q, wanted)
    assert torch.equal(make("normal").v, inputs.v)
    assert not torch.equal(inputs.k, inputs.v)


def test_normal_is_unit_normal():
    for x in (make("normal").q, make("normal").k, make("normal").v):
        assert x.float().mean().item() == pytest.approx(0, abs=0.01)
        assert x.float().std().item() == pytest.approx(1, abs=0.01)


def test_k_offset_is_common_to_all_keys():
    k = make("k_offset").k.double()
    means = k.mean(2)
    assert means.abs().max().item() > 9
    assert (k - means.unsqueeze(2)).std().item() == pytest.approx(1, abs=0.02)


def test_channel_offsets_and_outliers_touch_one_channel_in_64():
    offset = make("channel_offsets", Problem(128, "fp16", False))
    wide = make("outliers", Problem(128, "fp16", False))
    for x in (offset.q, offset.k):
        assert (x.float().mean((0, 1, 2)).abs() > 9).nonzero().flatten().tolist() == [5, 69]
    for x in (wide.q, wide.k):
        assert (x.float().std((0, 1, 2)) > 9).nonzero().flatten().tolist() == [5, 69]
    for x in (offset.v, wide.v):
        assert x.float().std((0, 1, 2)).max().item() == pytest.approx(1, abs=0.05)


def test_kinds_of_v():
    assert (make("v_constant").v == make("v_constant").v[:, :, :1]).all()
    assert (make("v_one_long").v == 1).all()
    assert make("v_offset_long").v.float().mean().item() == pytest.approx(1, abs=0.01)
    zero = make("v_zero_channel").v
    assert (zero == 0).all((0, 1, 2)).nonzero().flatten().tolist() == [ZERO_CHANNEL]
    for name in ("v_offset_long", "v_one_long"):
        assert INPUT_KINDS[name].shape.kv_len == 16384


@pytest.mark.parametrize("problem", [PROBLEM, CAUSAL])
def test_large_logits_pick_one_key_that_is_visible(problem):
    inputs = make("large_logits", problem)
    assert inputs.q.abs().unique().tolist() == [200]
    out = attention(inputs.q, inputs.k, inputs.v, is_causal=problem.is_causal)
    picked = (out.unsqueeze(3) == inputs.v.unsqueeze(2)[:, :, :, :64]).all(-1).sum()
    assert picked > 0
    # every output is exactly one of the values
    assert torch.isin(out, inputs.v).all()


def test_causal_kinds_leave_rows_without_keys():
    shape = INPUT_KINDS["few_keys"].shape
    assert shape.q_len > shape.kv_len
    assert any(k.shape.q_len < k.shape.kv_len and k.shape.kv_len % 64 for k in INPUT_KINDS.values())


def test_gqa_lies_in_memory_as_nhd():
    inputs = make("gqa")
    assert inputs.shape.heads_q > inputs.shape.heads_kv > 1
    assert inputs.q.stride(1) < inputs.q.stride(2)


def test_non_finite_spoils_some_rows_and_spares_others():
    inputs = make("non_finite", CAUSAL)
    out = attention(inputs.q, inputs.k, inputs.v, is_causal=True)
    spoiled = out.isnan().any(-1).sum(-1).flatten().tolist()
    assert spoiled == [1, 100, 144, 0]  # row 40; rows from 300 and from 256 of 400


def test_captured_inputs_are_read_as_stored():
    captured = load_captured(CAPTURED)
    assert list(captured) == [f"layer{n}" for n in ("00", "07", "15", "22", "29")]
    for inputs in captured.values():
        assert inputs.q.shape == (1, 3, 1024, 64)
        assert inputs.k.shape == inputs.v.shape == (1, 1, 1024, 64)
        assert inputs.q.isfinite().all()
    # the trait that the data is kept for: keys with a large common offset
    means = [inputs.k.float().mean(2).abs().max().item() for inputs in captured.values()]
    assert means == pytest.approx([2.7, 8.9, 11.2, 13.1, 9.6], abs=0.05)


def safetensors(header, data=b""):
    text = header.encode()
    return len(text).to_bytes(8, "little") + text + data


Q = '"a.q":{"dtype":"F16","shape":[1,1,1,2],"data_offsets":[0,4]}'
K, V = Q.replace("a.q", "a.k"), Q.replace("a.q", "a.v")


def test_smallest_file(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(safetensors(f'{{"__metadata__":{{"made":"by hand"}},{Q},{K},{V}}}', b"\x00\x3c\x00\xc0"))
    assert load_captured(file)["a"].k.flatten().tolist() == [1, -2]  # fp16 bits 3c00 and c000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not safetensors at all",
        safetensors("{" + Q + "}", b"\x00" * 4),  # k and v are missing
        safetensors("{" + ",".join((Q, K, V)) + "}", b"\x00" * 2),  # cut short
        safetensors(("{" + ",".join((Q, K, V)) + "}").replace("F16", "F32"), b"\x00" * 4),
        safetensors(("{" + ",".join((Q, K, V)) + "}").replace("[1,1,1,2]", "[1,1,1,3]"), b"\x00" * 4),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, content):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(ArgumentError, match="not a safetensors file of captured inputs"):
        load_captured(file)


def write_layer(file, q=(1, 2, 64, 64), k=(1, 2, 64, 64), v=(1, 2, 64, 64), *, spoil="", value=math.nan, fill=1.0):
    """A file of one layer in BF16, `layer3`; one value of the tensor `spoil` is `value`."""
    tensors = {f"layer3.{name}": torch.full(shape, fill).bfloat16() for name, shape in (("q", q), ("k", k), ("v", v))}
    if spoil:
        tensors[f"layer3.{spoil}"].view(-1)[5] = value
    header, data = {}, b""
    for name, x in tensors.items():
        raw = bytes(x.view(torch.uint8).flatten().tolist())
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": list(x.shape), "data_offsets": offsets}
        data += raw
    file.write_bytes(safetensors(json.dumps(header), data))
    return file


@pytest.mark.parametrize(
    ("layer", "says", "remedy"),
    [
        ({"v": (1, 2, 64, 32)}, "layer3: q (1, 2, 64, 64), k (1, 2, 64, 64) and v (1, 2, 64, 32) do not fit", "store"),
        ({"v": (1, 2, 63, 64)}, "do not fit each other", "store one batch"),
        ({"k": (1, 2, 64, 32), "v": (1, 2, 64, 32)}, "do not fit each other", "store one batch"),
        ({"q": (2, 2, 64, 64)}, "do not fit each other", "store one batch"),
        ({"q": (1, 3, 64, 64)}, "layer3: q has 3 heads, not a multiple of the 2 of k and v", "whole groups"),
        ({"k": (1, 0, 64, 64), "v": (1, 0, 64, 64)}, "layer3.k is empty", "leave that layer out"),
        ({"q": (1, 2, 0, 64)}, "layer3.q is empty", "leave that layer out"),
        ({"spoil": "k"}, "layer3.k has 1 values that are NaN or Inf", "capture it again"),
        ({"spoil": "v", "value": math.inf}, "layer3.v has 1 values that are NaN or Inf", "capture it again"),
    ],
)
def test_layers_that_no_call_takes_are_refused_by_name(tmp_path, layer, says, remedy):
    file = write_layer(tmp_path / "x.safetensors", **layer)
    with pytest.raises(ArgumentError) as caught:
        load_captured(file)
    assert str(file) in caught.value.message
    assert says in caught.value.message
    assert remedy in caught.value.remedy


def test_a_file_without_tensors_is_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    for header in ("{}", '{"__metadata__":{"made":"by hand"}}'):
        file.write_bytes(safetensors(header))
        with pytest.raises(ArgumentError, match="has no tensors; store fp16 or bf16 tensors"):
            load_captured(file)


def test_captured_inputs_fit_a_problem_by_head_dim_and_range(tmp_path):
    small = load_captured(write_layer(tmp_path / "small.safetensors"))
    large = load_captured(write_layer(tmp_path / "large.safetensors", fill=131072.0))  # fp16 ends at 65504
    found = {
        (name, dim, dtype): fitting_names(captured, Problem(dim, dtype, False))
        for name, captured in (("small", small), ("large", large))
        for dim in (64, 128)
        for dtype in ("fp16", "bf16")
    }
    fits = {case for case, names in found.items() if names == ["layer3"]}
    assert fits == {("small", 64, "fp16"), ("small", 64, "bf16"), ("large", 64, "bf16")}


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="No such file"):
        load_captured(tmp_path / "absent.safetensors")


def test_bad_values_are_where_the_kind_says():
    inputs = make("non_finite")
    assert math.isnan(inputs.q[0, 0, 40, 3])
    assert math.isinf(inputs.k[0, 1, 300, 0])
    assert math.isnan(inputs.v[0, 2, 256, 7])


# --- the emulator's sizes


@pytest.mark.parametrize("name", EMULATED_KINDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_small_kinds_are_small_and_can_be_made(name, is_causal):
    kind = EMULATED_KINDS[name]
    inputs = make_inputs(kind, Problem(64, "bf16", is_causal), "cpu")
    assert inputs.shape == kind.shape
    shape = kind.shape
    assert shape.batch * shape.heads_q * shape.q_len * shape.kv_len < 260_000


def test_every_fault_that_needs_no_length_has_a_small_kind():
    assert set(INPUT_KINDS) - set(EMULATED_KINDS) == {"v_offset_long", "v_one_long"}
    spoiled = make_inputs(EMULATED_KINDS["non_finite"], PROBLEM, "cpu")
    assert [int((~x.isfinite()).sum()) for x in (spoiled.q, spoiled.k, spoiled.v)] == [1, 1, 1]
