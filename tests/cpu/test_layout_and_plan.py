"""Byte sizes of tiles, and the launches of a call."""

import struct
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagegen.abi import (
    CONSTANT_STRUCT,
    FIELDS,
    NO_LIMIT,
    PARAMS_BYTES,
    POINTERS,
    SEQUENCES_FROM_END,
    fields_of,
    pack_constants,
    unpack_constants,
)
from sagegen.counts import Ragged
from sagegen.errors import ArgumentError
from sagegen.layout import make_layout, row_unit, slots_of
from sagegen.plan import Plan, Strides, TensorStrides, make_plan
from sagegen.problem import Problem, Shape
from sagegen.space import parse_config

FP8 = parse_config("mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qoreg_mb1")
BF16 = replace(FP8, pv="bf16f32", accum_depth=0, q_operand="smem", stages=3)
PROBLEM = Problem(128, "bf16", is_causal=True)


def plan(
    shape: Shape, config: object = FP8, want_lse: bool = True, problem: Problem = PROBLEM, **masks: object
) -> Plan:
    own = Strides(1, 2, 3)
    return make_plan(problem, config, shape, TensorStrides(own, own, own, own), 0.125, want_lse, **masks)  # type: ignore[arg-type]


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


# --- windows and sequences of their own lengths

WINDOWED = replace(PROBLEM, is_causal=False, is_windowed=True)
RAGGED = replace(PROBLEM, is_ragged=True)
BOTH = replace(WINDOWED, is_ragged=True)
SMOOTH_Q = replace(FP8, mean_span=128)
BALANCED = replace(SMOOTH_Q, balance="yes")
#: Query tiles of 192 rows, which no quantizer's tile of 128 divides.
WGMMA = parse_config("wgmma_c3_bk128_st3_scplain_acone_ks64_rsskip_suones_exmufu_laearly")
CONFIGS = (FP8, BF16, WGMMA)


@given(
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=8),
    gaps=st.lists(st.integers(0, 300), min_size=8, max_size=8),
    config=st.sampled_from(CONFIGS),
)
def test_slots_of_sequences_hold_their_tiles_and_never_overlap(lengths, gaps, config) -> None:
    """Whatever lies between them, and whether a unit of rows or a tile of either kernel is counted."""
    for block in (config.block_q, config.block_k, row_unit(config)):
        free, first = 0, 0
        for item, (length, gap) in enumerate(zip(lengths, gaps, strict=False)):
            first += gap
            slot = first // block + item
            assert slot >= free
            free = slot + -(-length // block)
            first += length
        assert free <= slots_of(first, len(lengths), block)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_unit_of_rows_is_whole_tiles_of_both_kernels(config) -> None:
    assert row_unit(config) % config.block_q == row_unit(config) % config.quantize_rows == 0
    assert row_unit(config) == min(n for n in range(1, 2000) if not (n % config.block_q or n % config.quantize_rows))


def test_windows_are_packed_with_open_sides_beyond_all_tokens() -> None:
    for window, packed in (((3, 5), (3, 5)), ((-1, 0), (NO_LIMIT, 0)), ((2**62, -1), (NO_LIMIT, NO_LIMIT))):
        made = plan(Shape(1, 2, 1, 300, 417), problem=WINDOWED, window=window)
        values = unpack_constants(made.constants, fields_of(FP8, WINDOWED))
        assert (values["window_left"], values["window_right"]) == packed
        assert values["kv_len"] == 417


def test_a_window_costs_neither_scratch_nor_blocks() -> None:
    shape = Shape(2, 4, 2, 300, 417)
    dense, windowed = plan(shape), plan(shape, problem=WINDOWED, window=(3, 5))
    assert (windowed.launches, windowed.workspace_bytes) == (dense.launches, dense.workspace_bytes)
    assert windowed.constants[: len(dense.constants)] == dense.constants


@pytest.mark.parametrize("is_packed", [True, False])
def test_grids_of_sequences_by_hand(is_packed: bool) -> None:
    """Four that together have 300 rows, 2 tiles of 128 and one more each; 417 keys, 6 tiles of 64 and one each."""
    ragged = Ragged(300, 417, True) if is_packed else Ragged(75, 105, False)  # 4 * 105 are 6 tiles too
    made = plan(Shape(4, 6, 2, 75, 105), problem=RAGGED, ragged=ragged)
    assert [(launch.role, launch.grid) for launch in made.launches] == [
        ("stats", 8),  # of one range of tokens each
        ("quantize", 6 * (2 + 4) + 2 * (6 + 4) * 2),
        ("attention", 6 * (2 + 4)),
    ]
    values = unpack_constants(made.constants, fields_of(FP8, RAGGED))
    assert (values["q_heads_total"], values["kv_heads_total"], values["heads_q"], values["heads_kv"]) == (24, 8, 6, 2)
    assert (values["q_tiles"], values["k_tiles"]) == (2 + 4, 6 + 4)
    assert (values["q_tokens"], values["kv_tokens"]) == ((300, 417) if is_packed else (75, 105))
    assert (values["q_item_tokens"], values["kv_item_tokens"]) == ((0, 0) if is_packed else (75, 105))
    assert values["sequences"] == 0


def test_rows_of_wgmma_are_quantized_in_units_of_both_tiles() -> None:
    unit = row_unit(WGMMA)
    made = plan(Shape(4, 2, 2, 700, 10), WGMMA, problem=RAGGED, ragged=Ragged(700, 10, True))
    rows = 2 * (700 // unit + 4) * unit
    assert made.launches[1].grid == rows // WGMMA.quantize_rows + 2 * 2 * (10 // 128 + 4)
    assert made.launches[2].grid == 2 * (700 // 192 + 4)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        *((config, problem) for config in CONFIGS for problem in (RAGGED, BOTH)),
        *((config, WINDOWED) for config in (FP8, SMOOTH_Q, BALANCED)),
    ],
    ids=lambda value: value.name,
)
def test_members_lie_where_a_cpp_compiler_puts_them(config, problem) -> None:
    """Each at a multiple of its size, without holes, so that the address of `sequences` goes where it belongs."""
    sizes = {"int64_t": 8, "int32_t": 4, "float": 4}
    at, places = 0, {}
    for member in fields_of(config, problem):
        size = sizes.get(member.c_type, 8)  # others are pointers
        assert at % size == 0, f"{member.name} would be padded by a C++ compiler"
        places[member.name] = at
        at += size
    assert len(places) == len(fields_of(config, problem))
    masks = {"window": (3, 5)} if problem.is_windowed else {}
    masks |= {"ragged": Ragged(30, 40, True)} if problem.is_ragged else {}
    constants_of = plan(Shape(2, 2, 1, 30, 40), config, problem=problem, **masks).constants
    assert 48 + len(constants_of) == at
    if problem.is_ragged:
        assert at - SEQUENCES_FROM_END == places["sequences"]
        assert struct.unpack_from("<2i", constants_of, places["q_tokens"] - 48) == (30, 40)
    if problem.is_windowed:
        assert struct.unpack_from("<2i", constants_of, places["window_left"] - 48) == (3, 5)


@pytest.mark.parametrize("q_len", [2**29, 2**29 + 1])
def test_windowed_lengths_whose_sums_32_bits_cannot_hold_are_refused(q_len: int) -> None:
    shapes = Shape(1, 1, 1, q_len, 1), Shape(1, 1, 1, 1, q_len)
    for shape in shapes:
        assert plan(shape).launches
        if q_len == 2**29:
            assert plan(shape, problem=WINDOWED, window=(3, 5)).launches
            continue
        with pytest.raises(ArgumentError, match="tokens are more than 536870912"):
            plan(shape, problem=WINDOWED, window=(3, 5))


@pytest.mark.parametrize(
    ("ragged", "batch", "problem", "fits"),
    [
        (Ragged(2**30, 1, True), 4, RAGGED, True),
        (Ragged(2**30 + 1, 1, True), 4, RAGGED, False),
        (Ragged(1, 2**30 + 1, True), 4, RAGGED, False),
        (Ragged(2**28, 1, False), 4, RAGGED, True),
        (Ragged(1, 2**28 + 1, False), 4, RAGGED, False),
        (Ragged(2**29, 1, True), 4, BOTH, True),
        (Ragged(1, 2**29 + 1, True), 4, BOTH, False),
    ],
    ids=str,
)
def test_tokens_of_all_sequences_together_are_counted(ragged, batch, problem, fits) -> None:
    window = {"window": (3, 5)} if problem.is_windowed else {}
    refused = nullcontext() if fits else pytest.raises(ArgumentError, match="tokens are more than")
    with refused:
        plan(Shape(batch, 1, 1, 1, 1), problem=problem, ragged=ragged, **window)


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
