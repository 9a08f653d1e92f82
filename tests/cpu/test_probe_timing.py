"""Loops of a probe and the rates that its runs give, with a scripted GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from sagegen.measuring.telemetry import GpuState
from sagegen.probing.probes import PROBES
from sagegen.probing.run import work_per_loop
from sagegen.probing.timing import Run, find_loops, make_figures, sample

SMS = 132
MHZ = 1755.0


@dataclass
class FakeGpu:
    """Takes `cycles_per_loop` a turn at MHZ, and `launch_s` for the launch."""

    cycles_per_loop: float
    launch_s: float = 5e-6
    asked: list[int] = field(default_factory=list)

    def run(self, loops: int) -> Run:
        self.asked.append(loops)
        cycles = self.cycles_per_loop * loops
        return Run(self.launch_s + cycles / (MHZ * 1e6), (int(cycles),) * SMS)

    def look(self, loops: int) -> GpuState:
        self.asked.append(loops)
        return GpuState(clock_mhz=MHZ, power_w=650.0, power_limit_w=700.0)


@pytest.mark.parametrize("cycles_per_loop", [20, 512, 40_000, 4_000_000])
def test_a_loop_is_sized_to_take_the_wanted_time_and_not_much_more(cycles_per_loop: float) -> None:
    gpu = FakeGpu(cycles_per_loop)
    seconds = gpu.run(find_loops(gpu.run, 0.05)).seconds
    one = gpu.run(64).seconds
    assert 0.05 <= seconds <= max(0.06, one)
    assert len(gpu.asked) < 10


def test_no_loop_is_longer_than_its_counter() -> None:
    gpu = FakeGpu(1e-9, launch_s=1e-9)
    assert find_loops(gpu.run, 0.05) == 2**31 - 1


def test_clocks_settle_before_the_runs_that_count_and_the_gpu_is_looked_at_while_it_runs() -> None:
    gpu = FakeGpu(1000)
    sampled = sample(gpu, sample_s=0.02, settle_s=0.1, count=4)
    assert len(sampled.runs) == 4
    assert sampled.state.power_w == 650.0
    settling = gpu.asked[gpu.asked.index(sampled.loops) + 1 : -5]
    assert sum(gpu.run(loops).seconds for loops in settling) >= 0.1
    assert set(gpu.asked[-9:]) == {sampled.loops}


def test_rates_come_from_cycles_and_from_times() -> None:
    loops, cycles = 1000, 512 * 1000
    work = loops * 4194304 * SMS  # 16 m64n128k32 of two warpgroups are that many operations per 512 clocks
    runs = [Run(cycles / (mhz * 1e6), (cycles,) * SMS) for mhz in (1700, 1750, 1800, 1850, 1900)]
    figures = make_figures(runs, work, SMS)
    assert figures.per_clock == pytest.approx(8192)
    assert figures.per_second == pytest.approx(8192 * SMS * 1800e6)
    assert figures.clock_mhz == pytest.approx(1800)
    assert figures.per_second_p20 < figures.per_second < figures.per_second_p80


def test_one_slow_sm_does_not_change_the_cycles_that_count() -> None:
    runs = [Run(1e-3, (1000,) * (SMS - 1) + (5000,))]
    assert make_figures(runs, SMS * 1000, SMS).per_clock == pytest.approx(1)


@pytest.mark.parametrize("runs", [[], [Run(1e-3, ())], [Run(0.0, (1,))]])
def test_runs_without_cycles_or_time_are_refused(runs: list[Run]) -> None:
    with pytest.raises(ValueError, match="cycles and times"):
        make_figures(runs, 1.0, SMS)


def test_work_of_a_loop() -> None:
    # 8 warps, 4 passes over 4 x 8 tiles, 16 x 8 x 32 multiply-adds; of e4m3 one pass
    assert work_per_loop(PROBES["mma_s8"], SMS, 0) == SMS * 8 * 4 * 4 * 8 * 2 * 16 * 8 * 32
    assert work_per_loop(PROBES["mma_e4m3f32"], SMS, 0) == SMS * 8 * 4 * 8 * 2 * 16 * 8 * 32
    # 2 warpgroups, 4 stages of 4 products each
    assert work_per_loop(PROBES["wgmma_s8_ss_n128"], SMS, 0) == SMS * 2 * 16 * 2 * 64 * 128 * 32
    assert work_per_loop(PROBES["wgmma_bf16f32_ss_n256"], 1, 0) == 2 * 16 * 2 * 64 * 256 * 16
    # 512 threads, 8 chains of 64 steps, two instructions a step of the packing of four values
    assert work_per_loop(PROBES["ex2"], SMS, 0) == SMS * 512 * 8 * 64
    assert work_per_loop(PROBES["pack_e4m3"], SMS, 0) == SMS * 512 * 8 * 64 * 2
    # read and written; a block reads 4 times 16 bytes a thread
    assert work_per_loop(PROBES["dram"], 3 * SMS, 1000) == 2 * 16 * 1000
    assert work_per_loop(PROBES["l2"], 3 * SMS, 1000) == 3 * SMS * 512 * 4 * 16


def test_percentiles_are_of_rates_not_of_times() -> None:
    seconds = np.array([1.0, 2.0, 4.0])
    figures = make_figures([Run(s, (1000,)) for s in seconds], 8.0, 1)
    assert figures.per_second == pytest.approx(4.0)
    assert figures.per_second_p20 == pytest.approx(np.percentile(8.0 / seconds, 20))
