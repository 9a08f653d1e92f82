"""The probe's file, the tables that it makes, and what the model takes from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from sagegen.errors import ProbeError
from sagegen.gpu import Gpu, Rates, find_gpu
from sagegen.probing.probes import PROBES
from sagegen.probing.report import accumulator_lines, make_rows
from sagegen.probing.result import SCHEMA, Bits, Machine, ProbeResult, Rate, dump_result, measured_gpu, parse_result
from sagegen.problem import Problem, Shape
from sagegen.rules import Target, default_config
from sagegen.space import parse_config
from sagegen.tuning.model import predict
from sagegen.tuning.tile_cost import matrix_rate
from sagegen.tuning.wgmma_cost import wgmma_rate
from sagegen.wgmma_rules import default_wgmma_config

H200, L20 = find_gpu("h200"), find_gpu("l20")
D128 = Problem(128, "bf16", False)
LONG = Shape(4, 32, 32, 4096, 4096)
SHORT = Shape(1, 32, 32, 1024, 1024)
MMA = default_config(Target(L20, D128))


def rate(per_second: float, per_clock: float, unit: str = "operations", emulated: bool = False) -> Rate:
    return Rate(
        unit=unit, per_clock=per_clock, per_second=per_second, low=0.99 * per_second, high=1.01 * per_second,
        clock_mhz=1755.5, nvml_mhz=1755.0, power_w=690.1, emulated=emulated,
        sass="32 HMMA, 48 F2FP" if emulated else "16 IMMA",
    )  # fmt: skip


RESULT = ProbeResult(
    schema=SCHEMA,
    gpu="h200",
    machine=Machine(
        product="NVIDIA H200", sms=132, driver="580.1", nvcc="V13.0.88", power_limit_w=700.0, date="2026-11-30"
    ),
    rates={
        "mma_s8": rate(1000.0, 4000.0),
        "mma_e4m3f32": rate(300.0, 1200.0, emulated=True),
        "wgmma_s8_ss_n128": rate(1900.0, 8000.0),
        "wgmma_e4m3f32_rs_n128": rate(1600.0, 7000.0),
        "ex2": rate(4.0, 15.5, "results"),
        "max": rate(16.0, 60.0, "results"),
        "dram": rate(4100.0, 15.0, "bytes"),
        "l2": rate(6000.0, 23.0, "bytes"),
    },
    accumulators={
        "wgmma_e4m3f32_ss_bits": Bits(
            alone=13, with_products=12, rounding="truncates", emulated=False, sass="1 QGMMA"
        ),
        "mma_e4m3f32_bits": Bits(alone=23, with_products=22, rounding="keeps all", emulated=True, sass="2 HMMA"),
    },
    absent={"l2": "crash: it did"},
)  # fmt: skip


def test_a_result_comes_back_from_its_file_as_it_was() -> None:
    assert parse_result(dump_result(RESULT), "r.yaml") == RESULT


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema: 1", "schema: 2", "schema 2, this sagegen reads 1"),
        ("per_clock: 15.5", "per_klock: 15.5", "per_klock"),
        ("per_clock: 15.5", "per_clock: .nan", "ex2"),
        ("per_clock: 15.5", "per_clock: -3.0", "ex2"),
        ("  ex2:", "  ex3:", "'ex3'"),
        ("sms: 132", "sms: many", "sms"),
        ("gpu: h200", "gpu: [h200", "r.yaml:"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong_and_the_command_that_mends_it(
    old: str, new: str, said: str
) -> None:
    text = dump_result(RESULT)
    assert old in text
    with pytest.raises(ProbeError) as caught:
        parse_result(text.replace(old, new), "r.yaml")
    assert said in str(caught.value)
    assert "sagegen probe -o FILE" in caught.value.remedy


@pytest.mark.parametrize("text", ["", "[]", "just words"])
def test_what_is_no_result_is_refused(text: str) -> None:
    with pytest.raises(ProbeError):
        parse_result(text, "r.yaml")


@pytest.fixture
def probed(tmp_path: Path) -> Gpu:
    file = tmp_path / "probe.yaml"
    file.write_text(dump_result(RESULT))
    return measured_gpu(H200, file)


def test_a_probed_gpu_is_the_same_gpu(probed: Gpu) -> None:
    assert probed == H200
    assert probed.measured.units == {"ex2": 15.5, "max": 60.0}
    assert (probed.measured.dram_gbs, probed.measured.l2_bytes) == (4100.0, 23.0)
    assert measured_gpu(H200, None) is H200


def test_a_probe_of_another_gpu_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "probe.yaml"
    file.write_text(dump_result(RESULT))
    with pytest.raises(ProbeError, match="a probe of h200, not of l20"):
        measured_gpu(L20, file)


def test_the_model_prefers_the_probe_to_the_table(probed: Gpu) -> None:
    assert matrix_rate(probed, "s8") == pytest.approx(1000.0e6 / (132 * 1980))
    assert matrix_rate(probed, "e4m3f32") == pytest.approx(300.0e6 / (132 * 1980))
    assert matrix_rate(probed, "bf16f32") == matrix_rate(H200, "bf16f32")  # not probed
    assert wgmma_rate(probed, "s8") == pytest.approx(1900.0e6 / (132 * 1980))
    assert wgmma_rate(probed, "e4m3f32") == pytest.approx(1600.0e6 / (132 * 1980))


@pytest.mark.parametrize("unit", ["ex2", "max", "i2f", "pack_e4m3"])
def test_a_slower_unit_makes_its_part_of_the_prediction_slower(unit: str) -> None:
    config = parse_config("mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qosmem_mb1")
    part = "mufu" if unit == "ex2" else "half_rate"
    slow = replace(L20, measured=Rates(units={unit: 4.0}))
    usual, slower = (predict(config, D128, LONG, gpu).units_us[part] for gpu in (L20, slow))
    assert slower > 1.2 * usual


def test_bandwidths_of_a_probe_go_into_quantizers_and_l2() -> None:
    slow = replace(L20, measured=Rates(dram_gbs=100.0, l2_bytes=1.0))
    usual, slower = (predict(MMA, D128, LONG, gpu) for gpu in (L20, slow))
    assert slower.quantize_us == pytest.approx(usual.quantize_us * 864 * 0.9 / 100)
    assert slower.l2_us == pytest.approx(18 * usual.l2_us)


def test_a_probe_that_says_what_the_model_assumes_changes_nothing() -> None:
    tops = {f"mma_{kind}": peak for kind, peak in H200.peaks.items()}
    tops |= {"wgmma_s8_ss_n128": 7380.0 * 132 * 1980 / 1e6, "wgmma_e4m3f32_rs_n128": 6535.0 * 132 * 1980 / 1e6}
    units = {"ex2": 16.0, "max": 64.0, "i2f": 64.0, "pack_half2": 64.0, "pack_e4m3": 32.0}
    same = replace(H200, measured=Rates(tops, units, l2_bytes=18.0))
    for config in (MMA, default_wgmma_config()):
        for shape in (LONG, SHORT):
            wanted = predict(config, D128, shape, H200)
            assert predict(config, D128, shape, same).call_us == pytest.approx(wanted.call_us)


def test_rows_stand_beside_the_table_with_the_ratio() -> None:
    rows = {row.name: row for row in make_rows(RESULT, H200)}
    assert list(rows) == [name for name in PROBES if name in RESULT.rates]
    assert (rows["mma_s8"].table, rows["mma_s8"].ratio) == ("1148", "0.87")
    assert (rows["dram"].table, rows["dram"].ratio) == ("4800", "0.85")
    assert (rows["ex2"].table, rows["ex2"].ratio) == ("-", "-")
    assert rows["mma_s8"].spread == "±1.0%"
    assert rows["mma_e4m3f32"].note == "emulated: 32 HMMA, 48 F2FP"
    assert make_rows(RESULT, None)[0].table == "-"


def test_a_figure_that_nvml_does_not_tell_is_a_dash() -> None:
    silent = msgspec.structs.replace(RESULT.rates["ex2"], power_w=None, nvml_mhz=None)
    (row,) = make_rows(msgspec.structs.replace(RESULT, rates={"ex2": silent}), H200)
    assert row.power == "-"


def test_accumulators_are_sentences() -> None:
    hopper, emulated = accumulator_lines(RESULT)
    assert "13 mantissa bits alone, 12 of them with products that sum to 1, truncates" in hopper
    assert "(emulated: 2 HMMA)" in emulated
