"""Byte sizes of tiles, and the launches of a call."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagegen.abi import CONSTANT_STRUCT, FIELDS, PARAMS_BYTES, POINTERS, pack_constants
from sagegen.errors import ArgumentError
from sagegen.layout import make_layout
from sagegen.plan import Plan, Strides, TensorStrides, make_plan
from sagegen.problem import Problem, Shape
from sagegen.space import parse_config

FP8 = parse_config("mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qoreg_mb1")
BF16 = replace(FP8, pv="bf16f32", accum_depth=0, q_operand="smem", stages=3)
PROBLEM = Problem(128, "bf16", is_causal=True)


def plan(shape: Shape, config: object = FP8, want_lse: bool = True, problem: Problem = PROBLEM) -> Plan:
    own = Strides(1, 2, 3)
    return make_plan(problem, config, shape, TensorStrides(own, own, own, own), 0.125, want_lse)  # type: ignore[arg-type]


def constants(made: Plan) -> dict[str, float]:
    return dict(zip((f.name for f in FIELDS[len(POINTERS) :]), CONSTANT_STRUCT.unpack(made.constants), strict=True))


def test_fp8_tiles_by_hand() -> None:
    layout = make_layout(FP8, PROBLEM)
    assert layout.k_tile_bytes == 64 * 128
    assert layout.k_record_bytes == 64 * 128 + 16 + 8 + 8  # four scales, 64 bits, up to a multiple of 16
    assert layout.v_record_bytes == 64 * 128 + 8 + 8
    assert layout.smem_bytes == 2 * (8448 + 8448)


def test_packed_int4_tiles_by_hand() -> None:
    layout = make_layout(replace(FP8, qk="s4", q_operand="smem"), replace(PROBLEM, precision="int4"))
    assert layout.q_tile_bytes == 128 * 64
    assert layout.k_record_bytes == 64 * 64 + 16 + 8 + 8
    assert layout.smem_bytes == 2 * (64 * 64 + 256 + 8448) + 128 * 64  # records round up to 256


def test_16_bit_tiles_by_hand() -> None:
    layout = make_layout(BF16, PROBLEM)
    assert layout.v_tile_bytes == 64 * 128 * 2
    assert layout.v_record_bytes == 0
    assert layout.smem_bytes == 3 * (8448 + 16384) + 128 * 128


def test_a_block_scale_is_one_span_whatever_the_tile() -> None:
    wide = replace(FP8, block_k=128)
    assert make_layout(wide, PROBLEM).k_spans == 2
    assert make_layout(replace(wide, granularity="block"), PROBLEM).k_spans == 1


def test_grids_by_hand() -> None:
    # 300 rows are 3 query tiles of 128; 417 keys are 7 tiles of 64 and 4 splits of 128
    made = plan(Shape(batch=2, heads_q=6, heads_kv=2, q_len=300, kv_len=417))
    assert [(launch.role, launch.grid) for launch in made.launches] == [
        ("stats", 4 * 4),
        ("quantize", 12 * 3 + 4 * 7 * 2),
        ("attention", 12 * 3),
    ]


def test_16_bit_values_are_not_quantized() -> None:
    made = plan(Shape(1, 1, 1, 128, 128), BF16)
    assert made.launches[1].grid == 1 + 2


@given(st.integers(1, 200_000))
def test_splits_cover_all_keys_without_an_empty_one(kv_len: int) -> None:
    values = constants(plan(Shape(1, 1, 1, 1, kv_len)))
    assert 1 <= values["splits"] <= 16
    assert (values["splits"] - 1) * values["split_tokens"] < kv_len <= values["splits"] * values["split_tokens"]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3000), st.integers(1, 3000), st.booleans())
def test_workspace_regions_are_ordered_aligned_and_inside(batch: int, heads: int, q: int, kv: int, lse: bool) -> None:
    made = plan(Shape(batch, heads, heads, q, kv), want_lse=lse)
    offsets = [value for name, value in constants(made).items() if name.endswith("_offset")]
    assert offsets == sorted(offsets)
    assert all(offset % 256 == 0 for offset in offsets)
    assert offsets[-1] <= made.workspace_bytes


def test_the_workspace_of_one_tile_by_hand() -> None:
    made = plan(Shape(1, 1, 1, 1, 1), want_lse=False)
    # query tile, scales, K record, V record, sums, peaks, V scales; the records round up to 256
    assert made.workspace_bytes == 128 * 128 + 512 + 0 + 8448 + 8448 + 512 + 512 + 512


def test_the_workspace_of_one_packed_int4_tile_by_hand() -> None:
    made = plan(Shape(1, 1, 1, 1, 1), replace(FP8, qk="s4"), False, replace(PROBLEM, precision="int4"))
    # as above with half the bytes in the query tile and in the K record's tile, whose trailer takes 256 more
    assert made.workspace_bytes == 128 * 64 + 512 + 0 + (64 * 64 + 256) + 8448 + 512 + 512 + 512


def test_long_offsets_keep_64_bits() -> None:
    made = plan(Shape(1, 64, 64, 2**20, 2**20))
    assert constants(made)["v_records_offset"] > 2**32


@pytest.mark.parametrize(("q_len", "kv_len"), [(2**30 + 1, 1), (1, 2**30 + 1)])
def test_lengths_that_32_bits_cannot_count_are_refused(q_len: int, kv_len: int) -> None:
    with pytest.raises(ArgumentError, match="tokens"):
        plan(Shape(1, 1, 1, q_len, kv_len))


def test_grids_beyond_cudas_limit_are_refused() -> None:
    with pytest.raises(ArgumentError, match="thread blocks"):
        plan(Shape(4096, 4096, 4096, 2**20, 1))


def test_the_struct_has_cpps_size_and_no_hidden_padding() -> None:
    sizes = {"int64_t": 8, "int32_t": 4, "float": 4}
    position = 0
    for field in FIELDS:
        size = sizes.get(field.c_type, 8)
        assert position % size == 0, f"{field.name} would be padded by a C++ compiler"
        position += size
    assert position == PARAMS_BYTES == 6 * 8 + 20 * 8 + 12 * 4
    assert struct.calcsize("<6Q") == 48


def test_a_forgotten_parameter_is_named() -> None:
    with pytest.raises(KeyError, match="heads_q"):
        pack_constants({"q_len": 1})
