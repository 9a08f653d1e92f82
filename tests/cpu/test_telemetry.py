"""What NVML says, and where it says nothing."""

from __future__ import annotations

import types

import msgspec
import pytest

from sagegen.measuring import telemetry
from sagegen.measuring.telemetry import (
    Conditions,
    GpuState,
    Watch,
    describe_others,
    find_loss,
    find_others,
    kept_slowdowns,
    name_slowdowns,
    read_state,
)


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert read_state(0) == GpuState()


def test_figures_that_the_driver_refuses_are_none_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def refuse(*arguments: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name, answer in (
        ("nvmlInit", lambda: None),
        ("nvmlShutdown", lambda: None),
        ("nvmlDeviceGetHandleByIndex", lambda index: index),
        ("nvmlDeviceGetClockInfo", refuse),
        ("nvmlDeviceGetEnforcedPowerLimit", lambda handle: 700_000),
        ("nvmlDeviceGetPowerUsage", lambda handle: 543_210),
        ("nvmlDeviceGetComputeRunningProcesses", lambda handle: [types.SimpleNamespace(pid=4711)]),
        ("nvmlDeviceGetUtilizationRates", lambda handle: types.SimpleNamespace(gpu=98)),
    ):
        monkeypatch.setattr(pynvml, name, answer)
    assert read_state(0) == GpuState(None, 700.0, (4711,), 98, 543.21)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (GpuState(processes=(10, 11)), "11"),
        (GpuState(processes=(10,), busy_percent=99), None),
        (GpuState(busy_percent=60), "60 %"),
        (GpuState(busy_percent=0), None),
        (GpuState(busy_percent=4), None),
        (GpuState(), None),
    ],
    ids=["another process", "only our own", "busy by what is hidden", "idle", "nearly idle", "unknown"],
)
def test_only_others_are_warned_of(state: GpuState, said: str | None) -> None:
    sentence = describe_others(state, own=(10,))
    assert (sentence is None) == (said is None)
    assert said is None or said in (sentence or "")


@pytest.mark.parametrize(
    ("reasons", "names"),
    [
        (0x0, ()),
        (0x1 | 0x2 | 0x4 | 0x10 | 0x100, ()),  # idle, clocks that were set, the power cap, sync boost, display clock
        (0x4 | 0x8 | 0x80, ("hardware slowdown", "power brake")),
        (0x20 | 0x40, ("thermal slowdown", "hardware thermal slowdown")),
    ],
)
def test_a_power_cap_is_normal_and_protection_is_a_slowdown(reasons: int, names: tuple[str, ...]) -> None:
    assert name_slowdowns(reasons) == names


def test_the_bits_are_those_of_nvml() -> None:
    import pynvml

    for name, words in (
        ("HwSlowdown", "hardware slowdown"),
        ("HwThermalSlowdown", "hardware thermal slowdown"),
        ("HwPowerBrakeSlowdown", "power brake"),
        ("SwThermalSlowdown", "thermal slowdown"),
    ):
        assert name_slowdowns(getattr(pynvml, f"nvmlClocksThrottleReason{name}")) == (words,)


def test_conditions_are_of_the_rounds_that_count() -> None:
    states = iter(
        [
            GpuState(clock_mhz=1980.0, power_w=300.0, temperature_c=60),
            GpuState(clock_mhz=1200.0, power_w=200.0, temperature_c=91, slowdowns=("thermal slowdown",)),
            GpuState(clock_mhz=1950.0, power_w=310.0, temperature_c=70),
        ]
    )
    watch = Watch(lambda: next(states), every_s=0, rest_s=0)
    assert [watch.is_throttled() for _ in range(3)] == [False, True, False]
    assert msgspec.convert(watch.conditions(kept=2), Conditions) == Conditions(
        looks=3, clock_mhz=1965.0, least_clock_mhz=1950.0, power_w=300.0, temperature_c=91,
        throttled=1, dropped=1, slowdowns=("thermal slowdown",),
    )  # fmt: skip


def test_throttled_times_that_count_are_told_and_dropped_ones_are_not() -> None:
    assert kept_slowdowns({"throttled": 5, "dropped": 3, "slowdowns": ["power brake"]}) == "power brake"
    assert kept_slowdowns({"throttled": 3, "dropped": 3, "slowdowns": ["power brake"]}) == ""
    assert kept_slowdowns({}) == ""


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        ([GpuState(busy_percent=90)] * 4, "90 %"),
        ([GpuState(busy_percent=90), GpuState(busy_percent=40), GpuState(busy_percent=0)], None),  # it just ended
        ([GpuState(processes=(11,))], "11"),
        ([GpuState(busy_percent=0)], None),
    ],
    ids=["busy for long", "the end of something", "a process", "idle"],
)
def test_a_gpu_whose_processes_are_hidden_is_in_use_when_it_stays_busy(
    monkeypatch: pytest.MonkeyPatch, looks: list[GpuState], said: str | None
) -> None:
    states = iter(looks)
    monkeypatch.setattr(telemetry, "read_state", lambda index: next(states))
    monkeypatch.setattr(telemetry, "_LOOK_EVERY_S", 0.0)
    sentence = find_others(0)
    assert (sentence is None) == (said is None)
    assert said is None or said in (sentence or "")
    assert next(states, None) is None


def test_a_gpu_that_nvml_does_not_find_any_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def lose(index: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda handle: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    assert find_loss(0) is None
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lose)
    assert "lost" in (find_loss(0) or "").lower()


def test_short_rounds_have_the_state_of_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10.0]
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: clock[0])
    states = iter([GpuState(clock_mhz=1980.0), GpuState(slowdowns=("power brake",)), GpuState(clock_mhz=1950.0)])
    watch = Watch(lambda: next(states), every_s=0.02, rest_s=0)
    seen = []
    for _ in range(7):
        seen.append(watch.is_throttled())
        clock[0] += 0.009
    assert seen == [False] * 3 + [True] * 3 + [False]  # looks at 0, 27 and 54 ms
    conditions = watch.conditions(kept=4)
    assert (conditions["looks"], conditions["throttled"], conditions["dropped"]) == (3, 3, 3)
