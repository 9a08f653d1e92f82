"""`sagegen probe` on a card: what it takes, and on an H200 what the hardware notes say.

With OUT set, the result, the printed table and the seconds go to $OUT/probe.yaml, probe.txt and probe.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from sagegen.gpu import Gpu
from sagegen.probing.probes import probes_for
from sagegen.probing.report import table_value
from sagegen.probing.result import ProbeResult, parse_result

pytestmark = pytest.mark.gpu

MOST_SECONDS = 60.0
#: Measured on an H200 before there was a probe, dense TOPS of the whole chip with random operands.
H200_TOPS = {
    "wgmma_s8_ss_n128": 1929,
    "wgmma_s8_ss_n256": 1956,
    "wgmma_e4m3f32_ss_n128": 1822,
    "wgmma_e4m3f32_ss_n256": 1714,
    "wgmma_e4m3f32_rs_n128": 1708,
    "wgmma_e4m3f16_ss_n128": 1709,
    "wgmma_bf16f32_ss_n256": 873,
    "mma_s8": 1148,
    "mma_bf16f32": 629,
    "mma_s4": 48,
}
#: Likewise, results per clock and SM. The notes have 32 for e4m3, of one conversion to 16 bits: an F2FP and a LOP3 on
#: one pipe. The probe packs two into a word, as kernels do, without a LOP3: an F2FP has the rate of `pack_half2`.
#: (`half2_to_e4m3` has as many HFMA2 beside its F2FP and reaches the issue limit first.)
H200_PER_CLOCK = {
    "fma": 128,
    "fma_half2": 128,
    "max": 64,
    "i2f": 64,
    "pack_half2": 64,
    "pack_e4m3": 64,
    "ex2": 16,
}
H200_COPY_GBS = 4280
WITHIN = 0.10


@dataclass(frozen=True)
class Ran:
    """One run of the command."""

    result: ProbeResult
    output: str
    seconds: float


@pytest.fixture(scope="module")
def ran(gpu: Gpu, toolkit: object, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The command, builds included: its store is empty."""
    folder = Path(os.environ.get("OUT") or tmp_path_factory.mktemp("probe"))
    file = folder / "probe.yaml"
    script = "from sagegen.cli.main import main; main()"
    command = [sys.executable, "-c", script, "probe", "--gpu", gpu.name, "-o", str(file)]
    environment = {**os.environ, "SAGEGEN_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    seconds = time.monotonic() - start
    (folder / "probe.txt").write_text(done.stdout)
    (folder / "probe.json").write_text(json.dumps({"seconds": seconds, "status": done.returncode}) + "\n")
    assert done.returncode == 0, done.stderr
    return Ran(parse_result(file.read_text(), str(file)), done.stdout, seconds)


def test_everything_that_the_gpu_has_is_measured(ran: Ran, gpu: Gpu) -> None:
    assert ran.result.gpu == gpu.name
    assert not ran.result.absent
    names = [probe.name for probe in probes_for(gpu.compute_capability)]
    assert sorted([*ran.result.rates, *ran.result.accumulators]) == sorted(names)
    for name in ran.result.rates:
        assert name in ran.output


def test_it_takes_less_than_a_minute(ran: Ran) -> None:
    assert ran.seconds < MOST_SECONDS


def test_clocks_by_cycle_counters_are_those_of_the_gpu(ran: Ran, gpu: Gpu) -> None:
    for name, rate in ran.result.rates.items():
        assert 0.3 * gpu.boost_mhz < rate.clock_mhz < 1.1 * gpu.boost_mhz, name


def test_no_rate_is_far_above_the_table(ran: Ran, gpu: Gpu) -> None:
    for name, rate in ran.result.rates.items():
        if table := table_value(name, gpu):
            assert rate.per_second < (1 + WITHIN) * table, name


@pytest.mark.parametrize("name", H200_TOPS)
def test_matrix_rates_are_those_of_the_hardware_notes(ran: Ran, gpu: Gpu, name: str) -> None:
    _need_h200(gpu)
    assert ran.result.rates[name].per_second == pytest.approx(H200_TOPS[name], rel=WITHIN)


@pytest.mark.parametrize("name", H200_PER_CLOCK)
def test_scalar_rates_are_those_of_the_hardware_notes(ran: Ran, gpu: Gpu, name: str) -> None:
    _need_h200(gpu)
    assert ran.result.rates[name].per_clock == pytest.approx(H200_PER_CLOCK[name], rel=WITHIN)


def test_two_half_conversions_in_a_word_are_faster_than_single_ones(ran: Ran, gpu: Gpu) -> None:
    """The notes have 32 for single ones; HFMA2 beside these take issue slots, of which 128 make 64 of each."""
    _need_h200(gpu)
    assert 1.5 * 32 < ran.result.rates["half2_to_e4m3"].per_clock < 64


def test_the_copy_bandwidth_is_that_of_the_hardware_notes(ran: Ran, gpu: Gpu) -> None:
    _need_h200(gpu)
    assert ran.result.rates["dram"].per_second == pytest.approx(H200_COPY_GBS, rel=WITHIN)


def test_what_hopper_emulates_is_flagged_and_slower_than_bf16(ran: Ran, gpu: Gpu) -> None:
    _need_h200(gpu)
    rates = ran.result.rates
    assert {name for name, rate in rates.items() if rate.emulated} == {"mma_s4", "mma_e4m3f32", "mma_e4m3f16"}
    for name in ("mma_e4m3f32", "mma_e4m3f16"):
        assert rates[name].per_second < rates["mma_bf16f32"].per_second


def test_hoppers_fp8_accumulator_keeps_13_bits_and_its_emulation_all(ran: Ran, gpu: Gpu) -> None:
    _need_h200(gpu)
    found = ran.result.accumulators
    for name in ("wgmma_e4m3f32_ss_bits", "wgmma_e4m3f32_rs_bits"):
        assert (found[name].alone, found[name].with_products, found[name].rounding) == (13, 12, "truncates")
        assert not found[name].emulated
    assert (found["mma_e4m3f32_bits"].alone, found["mma_e4m3f32_bits"].emulated) == (23, True)


def _need_h200(gpu: Gpu) -> None:
    if gpu.name != "h200":
        pytest.skip(f"the notes are of an H200, this is {gpu.name}")
