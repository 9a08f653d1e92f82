"""What NVML says, and where it says nothing."""

from __future__ import annotations

import types

import pytest

from sagegen.measuring.telemetry import GpuState, describe_others, read_state


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
        (GpuState(), None),
    ],
    ids=["another process", "only our own", "busy by what is hidden", "idle", "unknown"],
)
def test_only_others_are_warned_of(state: GpuState, said: str | None) -> None:
    sentence = describe_others(state, own=(10,))
    assert (sentence is None) == (said is None)
    assert said is None or said in (sentence or "")
