"""The model's orderings are those of the papers and of the hardware notes; its absolute times are not tested."""

from __future__ import annotations

import gzip
import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagegen.gpu import Gpu, find_gpu
from sagegen.problem import Problem, Shape, parse_problem
from sagegen.space import Config, MmaConfig, parse_config
from sagegen.tuning.model import Measured, estimate_occupancy, predict
from sagegen.tuning.wgmma_cost import wgmma_rate
from sagegen.wgmma_rules import default_wgmma_config

D128 = Problem(128, "fp16", False)
D64 = Problem(64, "fp16", False)
CONFIG: Config = MmaConfig(128, 64, 8, 2, "e4m3f32", 64, "i2f", "thread", 32, 64, "always", "reg", 1)
F16 = replace(CONFIG, pv="f16f32", accum_depth=0)
LONG = Shape(4, 32, 32, 4096, 4096)
ADA = [find_gpu("rtx4090"), find_gpu("l20")]
H200 = find_gpu("h200")
WGMMA = default_wgmma_config()
RUNS = Path(__file__).parents[2] / "docs" / "gpu-runs"


def wgmma_rates() -> Gpu:
    """An H200 whose matrix units run at wgmma's measured rates: what hardware.md's balance of units speaks of."""
    return replace(H200, peaks=MappingProxyType({"s8": 1929.0, "e4m3f32": 1708.0, "f16f32": 873.0}))


def test_at_d128_matrix_units_and_mufu_saturate_together_and_at_d64_mufu_is_the_limit() -> None:
    at_128 = predict(CONFIG, D128, LONG, wgmma_rates()).units_us
    at_64 = predict(CONFIG, D64, LONG, wgmma_rates()).units_us
    assert at_128["matrix"] == pytest.approx(at_128["mufu"], rel=0.2)
    assert at_64["mufu"] > 1.6 * at_64["matrix"]


@pytest.mark.parametrize("gpu", ADA, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("problem", [D64, D128], ids=lambda problem: problem.name)
def test_fp8_pv_beats_fp16_pv_where_the_gpu_has_fp8_units(gpu: Gpu, problem: Problem) -> None:
    assert predict(CONFIG, problem, LONG, gpu).kernel_us < predict(F16, problem, LONG, gpu).kernel_us


def test_fp16_sums_are_twice_as_fast_on_geforce_alone() -> None:
    sums = replace(CONFIG, pv="e4m3f16", p_max=224, v_max=4.5)
    rtx4090, l20 = ([predict(c, D128, LONG, gpu) for c in (CONFIG, sums)] for gpu in ADA)
    # Ada whitepaper: INT8 660.6, FP8 330.3 with FP32 and 660.6 with FP16 accumulator
    assert rtx4090[1].units_us["matrix"] == pytest.approx(LONG.flops(D128) / 660.6e12 * 1e6)
    assert rtx4090[1].kernel_us < rtx4090[0].kernel_us
    assert l20[1].units_us["matrix"] == l20[0].units_us["matrix"]
    # 128 x 128 outputs are unpacked once a tile, 32 of a warp at once
    visits = LONG.batch * LONG.heads_q * (LONG.q_len // 128) * (LONG.kv_len // 64)
    unpacked_us = visits * 128 * 128 / 32 / 4 / ADA[1].sms / ADA[1].boost_mhz
    assert l20[1].units_us["issue"] - l20[0].units_us["issue"] == pytest.approx(unpacked_us)


def test_a_sum_that_is_never_promoted_saves_instructions_where_the_rescale_is_skipped() -> None:
    never = replace(CONFIG, accum_depth=0, smooth_v="yes", rescale="skip")
    assert predict(never, D128, LONG, ADA[1]).units_us["issue"] < predict(CONFIG, D128, LONG, ADA[1]).units_us["issue"]


def test_fp8_pv_is_slower_where_it_is_emulated() -> None:
    assert "e4m3f32" not in H200.peaks
    assert predict(CONFIG, D128, LONG, H200).kernel_us > predict(F16, D128, LONG, H200).kernel_us


def test_the_rtx4090_is_faster_than_the_l20() -> None:
    rtx4090, l20 = (predict(CONFIG, D128, LONG, gpu).kernel_us for gpu in ADA)
    assert rtx4090 < l20


def test_no_prediction_beats_the_matrix_units() -> None:
    prediction = predict(CONFIG, D128, LONG, ADA[0])
    bound = LONG.flops(D128) / 2 * (1 / 660.6e12 + 1 / 330.3e12) * 1e6  # Ada whitepaper's peaks
    assert prediction.units_us["matrix"] == pytest.approx(bound)
    assert prediction.kernel_us >= bound


def test_packed_int4_has_the_rate_of_its_units_and_half_the_bytes() -> None:
    problem = replace(D128, precision="int4")
    container, packed = (predict(replace(CONFIG, qk=qk), problem, LONG, ADA[0]) for qk in ("s8", "s4"))
    bound = LONG.flops(D128) / 2 * (1 / 1321.2e12 + 1 / 330.3e12) * 1e6  # Ada whitepaper's peaks
    assert packed.units_us["matrix"] == pytest.approx(bound)
    assert container.units_us == predict(CONFIG, D128, LONG, ADA[0]).units_us
    assert packed.units_us["shared"] < container.units_us["shared"]
    assert packed.units_us["issue"] < container.units_us["issue"]
    assert packed.kernel_us < container.kernel_us


def test_e4m3_scores_have_the_rate_of_fp8_units_and_need_no_conversion() -> None:
    int8, e4m3 = (predict(replace(CONFIG, qk=qk), D128, LONG, ADA[0]) for qk in ("s8", "e4m3"))
    assert e4m3.units_us["matrix"] == pytest.approx(LONG.flops(D128) / 330.3e12 * 1e6)  # Ada whitepaper's peak
    # the row maximum takes the unit as long as the conversion does, and packing P half a value a clock and lane of 32
    maxima, conversions, packing = 1 / 64, 1 / 64, 1 / 2 / 32
    share = (maxima + packing) / (maxima + conversions + packing)
    assert e4m3.units_us["half_rate"] / int8.units_us["half_rate"] == pytest.approx(share)
    assert e4m3.units_us["shared"] == int8.units_us["shared"]


def test_e4m3_scores_of_wgmma_have_the_rate_of_its_fp8_products() -> None:
    int8, e4m3 = (predict(replace(WGMMA, qk=qk), D128, LONG_H200, H200) for qk in ("s8", "e4m3"))
    # measured on an H200: 1929 TOPS of INT8 and 1708 of FP8, with 136 columns of P V for 128 of V
    share = (1 + 136 / 128) / 1708 / (1 / 1929 + 136 / 128 / 1708)
    assert e4m3.units_us["matrix"] / int8.units_us["matrix"] == pytest.approx(share, rel=1e-3)
    assert e4m3.kernel_us > int8.kernel_us


def test_spills_cost_time() -> None:
    clean, spilling = (predict(CONFIG, D128, LONG, ADA[0], Measured(168, spill)).kernel_us for spill in (0, 400))
    assert spilling > clean


def test_more_resident_blocks_are_no_better_when_they_make_the_kernel_spill() -> None:
    alone = predict(CONFIG, D64, LONG, ADA[0], Measured(255, 0))
    crowded = predict(replace(CONFIG, min_blocks=2), D64, LONG, ADA[0], Measured(128, 3000))
    assert crowded.occupancy.blocks_per_sm > alone.occupancy.blocks_per_sm
    assert crowded.kernel_us > alone.kernel_us


def test_more_resident_blocks_are_better_when_they_cost_nothing() -> None:
    alone = predict(CONFIG, D64, LONG, ADA[0], Measured(255))
    crowded = predict(CONFIG, D64, LONG, ADA[0], Measured(128))
    assert crowded.kernel_us < alone.kernel_us


def test_promoting_more_often_costs_instructions() -> None:
    deep, shallow = (
        predict(replace(CONFIG, accum_depth=depth), D128, LONG, ADA[0]).units_us["issue"] for depth in (64, 32)
    )
    assert shallow > deep


def test_the_magic_bias_takes_the_conversions_off_the_half_rate_pipe() -> None:
    i2f, magic = (predict(replace(CONFIG, conversion=c), D128, LONG, ADA[0]).units_us for c in ("i2f", "magic"))
    assert magic["half_rate"] < i2f["half_rate"]
    # the SASS has one instruction per score less: the bias is the first MMA's constant operand
    scores_per_warp = CONFIG.block_q * CONFIG.block_k / 32
    visits = LONG.batch * LONG.heads_q * (LONG.q_len // CONFIG.block_q) * (LONG.kv_len // CONFIG.block_k)
    saved_us = visits * scores_per_warp / 4 / ADA[0].sms / ADA[0].boost_mhz
    assert i2f["issue"] - magic["issue"] == pytest.approx(saved_us)


def test_skipping_the_rescale_saves_instructions_only_without_promotions() -> None:
    def issue(config: Config) -> float:
        return predict(config, D128, LONG, ADA[0]).units_us["issue"]

    assert issue(replace(F16, rescale="skip")) < issue(F16)
    assert issue(replace(CONFIG, rescale="skip")) == issue(CONFIG)


def test_warps_with_fewer_rows_read_the_tiles_from_shared_memory_more_often() -> None:
    eight, four = (predict(replace(CONFIG, warps=w), D64, LONG, ADA[0]).units_us["shared"] for w in (8, 4))
    assert eight > 1.5 * four


@given(length=st.integers(min_value=1, max_value=20000), causal=st.booleans(), head_dim=st.sampled_from([64, 128]))
def test_a_longer_call_takes_longer(length: int, causal: bool, head_dim: int) -> None:
    problem = Problem(head_dim, "fp16", causal)
    shapes = [Shape(2, 8, 8, tokens, tokens) for tokens in (length, 2 * length + 256)]
    short, long = (predict(CONFIG, problem, shape, ADA[1]) for shape in shapes)
    assert 0 < short.kernel_us < long.kernel_us
    assert short.call_us < long.call_us


def test_causal_takes_about_half() -> None:
    full, causal = (predict(CONFIG, replace(D128, is_causal=c), LONG, ADA[0]).kernel_us for c in (False, True))
    assert 0.45 * full < causal < 0.65 * full


def test_causal_with_hardly_any_keys_is_left_with_moving_queries_and_output() -> None:
    prediction = predict(CONFIG, replace(D128, is_causal=True), Shape(4, 32, 32, 4096, 128), ADA[0])
    assert prediction.limit == "dram"
    assert prediction.kernel_us == prediction.dram_us


def test_one_block_too_many_costs_a_wave() -> None:
    gpu = ADA[0]
    slots = gpu.sms * estimate_occupancy(CONFIG, D128, gpu).blocks_per_sm
    fits, spills_over = (predict(CONFIG, D128, Shape(1, heads, heads, 128, 4096), gpu) for heads in (slots, slots + 1))
    assert fits.waves == 1.0
    assert spills_over.kernel_us > 1.3 * fits.kernel_us


def test_occupancy_is_limited_by_registers_shared_memory_and_threads() -> None:
    gpu = ADA[0]
    # 65536 registers / (168 x 256 threads) = 1.5; d128: two stages of 16.5 KiB leave room for 2; 1536 threads for 6
    assert estimate_occupancy(CONFIG, D128, gpu, Measured(168)).blocks_per_sm == 1
    # 65536 / (64 x 256) = 4; shared memory: 100 KiB / (2 x (8.25 + 8.25) KiB + 1 KiB) = 2
    assert estimate_occupancy(CONFIG, D128, gpu, Measured(64)).blocks_per_sm == 2


@pytest.mark.parametrize(("tokens", "milliseconds"), [(32768, 1.6), (2048, 0.10)])
def test_quantizing_takes_what_was_measured_on_the_h200(tokens: int, milliseconds: float) -> None:
    """hardware.md, "Byte and time floors": d128, batch 4, 32 heads."""
    prediction = predict(CONFIG, D128, Shape(4, 32, 32, tokens, tokens), H200)
    assert prediction.quantize_us / 1e3 == pytest.approx(milliseconds, rel=0.05)


def test_v_that_is_not_quantized_moves_fewer_bytes() -> None:
    quantized, plain = (predict(c, D128, LONG, H200).quantize_us for c in (CONFIG, F16))
    assert plain / quantized == pytest.approx(8 / 13)


def test_grouped_heads_quantize_fewer_keys() -> None:
    grouped = predict(CONFIG, D128, replace(LONG, heads_kv=8), H200)
    assert grouped.quantize_us < predict(CONFIG, D128, LONG, H200).quantize_us
    assert grouped.dram_us < predict(CONFIG, D128, LONG, H200).dram_us


def spearman(x: list[float], y: list[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_ranking_agrees_with_what_was_measured_on_an_h200(dtype: str) -> None:
    """Journals of the tuning runs of docs/gpu-runs: what a user loses who takes the model's pick unmeasured."""
    cases: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with gzip.open(RUNS / f"2026-11-29-h200-{dtype}-journal.jsonl.gz", "rt") as journal:
        for record in map(json.loads, journal):
            if record["phase"] != "screen" or record["outcome"] != "ok":
                continue
            problem, config = parse_problem(record["problem"]), parse_config(record["config"])
            used = record["resources"]["attention"]
            measured = Measured(used["registers"], used["spill_store_bytes"] + used["spill_load_bytes"])
            for samples in record["samples"]:
                shape = Shape(
                    samples["batch"], samples["heads_q"], samples["heads_kv"], samples["tokens"], samples["tokens"]
                )
                predicted = predict(config, problem, shape, H200, measured).kernel_us
                case = cases.setdefault((problem.name, samples["tokens"]), [])
                case.append((predicted, statistics.median(samples["times_us"])))
    assert len(cases) == 12
    for name, pairs in cases.items():
        predicted, times = (list(column) for column in zip(*pairs, strict=True))
        assert spearman(predicted, times) > 0.5, name
        assert times[predicted.index(min(predicted))] < 1.2 * min(times), name


# --- wgmma


LONG_H200 = Shape(4, 32, 32, 16384, 16384)
#: TOPS of the attention kernel on an H200, sustained: head_dim, causal, config, measured.
SUSTAINED = (
    (128, False, "c3_bk128_st3_scplain_acone_ks64_rsskip_suones_exmufu", 1009),
    (128, False, "c3_bk128_st3_scplain_acone_ks64_rsskip_sufadd_exmufu", 957),
    (128, False, "c3_bk128_st3_scplain_acone_ks128_rsskip_suones_expacked", 1150),
    (128, False, "c3_bk128_st3_scplain_acone_ks128_rsskip_suones_exmixed2", 1089),
    (128, False, "c2_bk256_st2_scplain_acone_ks256_rsskip_suones_expacked", 1217),
    (128, False, "c2_bk256_st2_scplain_acone_ks256_rsskip_suones_exmixed4", 1175),
    (128, False, "c2_bk192_st3_scoverlap_acone_ks192_rsskip_suones_expacked", 1191),
    (128, True, "c3_bk128_st3_scplain_acone_ks64_rsskip_suones_exmufu", 937),
    (128, True, "c2_bk256_st2_scplain_acone_ks256_rsskip_suones_expacked", 1160),
    (64, False, "c3_bk128_st3_scplain_acone_ks128_rsskip_suones_expacked", 808),
    (64, False, "c3_bk128_st3_scplain_acone_ks64_rsskip_suones_exmufu", 616),
    (64, False, "c2_bk256_st2_scplain_acone_ks256_rsskip_suones_expacked", 887),
)


@pytest.mark.parametrize(("head_dim", "is_causal", "config", "tops"), SUSTAINED)
def test_wgmma_is_predicted_as_measured(head_dim: int, is_causal: bool, config: str, tops: float) -> None:
    problem = Problem(head_dim, "bf16", is_causal)
    prediction = predict(parse_config(f"wgmma_{config}"), problem, LONG_H200, H200)
    assert LONG_H200.flops(problem) / prediction.kernel_us / 1e6 == pytest.approx(tops, rel=0.07)


def test_a_wgmma_block_has_an_sm_for_itself() -> None:
    for consumers, registers in ((2, 168), (3, 128)):
        config = replace(WGMMA, consumers=consumers)
        occupancy = estimate_occupancy(config, D128, H200)
        assert (occupancy.blocks_per_sm, occupancy.registers) == (1, registers)
        assert estimate_occupancy(config, D128, H200, Measured(registers)).blocks_per_sm == 1


@pytest.mark.parametrize(
    "change",
    [
        {"row_sum": "fadd"},
        {"rescale": "always"},
        {"consumers": 2},
        {"consumers": 2, "accumulation": "two"},
        {"block_k": 64},
    ],
)
def test_what_costs_wgmma_instructions_costs_time(change: dict[str, int | str]) -> None:
    fast, slow = (predict(config, D128, LONG_H200, H200).kernel_us for config in (WGMMA, replace(WGMMA, **change)))
    assert slow > fast
    assert predict(WGMMA, D128, LONG_H200, H200, Measured(128, 400)).kernel_us > fast


def test_a_chip_with_capped_units_has_wgmma_at_its_cap() -> None:
    assert wgmma_rate(H200, "s8") > wgmma_rate(H200, "e4m3f32") > 6000
    assert wgmma_rate(find_gpu("h20"), "s8") * 78 * 1980 / 1e6 == pytest.approx(296)


@pytest.mark.parametrize("tokens", [2048, 4096, 16384])
def test_queries_in_the_prologue_take_kernel_time_and_save_more_before_it(tokens: int) -> None:
    """On an H200 at 2048 tokens: quantizers 36 us less, attention 13 us more (docs/gpu-runs/2026-11-30c-h200.md)."""
    apart = replace(default_wgmma_config(), stages=2)
    inside = replace(apart, q_quantizer="prologue")
    shape = Shape(4, 32, 32, tokens, tokens)
    before, after = predict(apart, D128, shape, H200), predict(inside, D128, shape, H200)
    share = tokens / 2048
    assert after.kernel_us - before.kernel_us == pytest.approx(13 * share, rel=0.5)
    assert before.quantize_us - after.quantize_us == pytest.approx(36 * share, rel=0.4)


@pytest.mark.parametrize("config", [F16, WGMMA], ids=["mma", "wgmma"])
def test_delta_s_costs_the_attention_kernel_and_the_quantizers(config: Config) -> None:
    plain = predict(config, D128, LONG, H200)
    smoothed = predict(replace(config, mean_span=config.block_q), D128, LONG, H200)
    assert smoothed.kernel_us > plain.kernel_us
    # 4 bytes per span of queries and key are written, at most at the data sheet's bandwidth
    spans = LONG.batch * LONG.heads_q * -(-LONG.q_len // config.block_q)
    least = 4 * spans * LONG.kv_len / (H200.bandwidth_gbs * 1e3)
    assert smoothed.quantize_us - plain.quantize_us >= least
