"""The GPU table against independent facts, and detection against a stand-in NVML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from sagegen.errors import UnknownNameError
from sagegen.gpu import GPUS, DetectedGpu, detect_gpus, find_gpu, is_visible, match_gpu

#: Multiply-adds count as two. Operations per clock and SM of the tensor cores, from the architecture whitepapers
#: (GA100: 1024 FP16 FMA per SM; GA10x, AD10x, GB20x: 512, halved with FP32 accumulator on GeForce, doubled for 8 bits
#: and once more for 4, which GB20x has no units for); L40 and L20 have half of that throughout by their data sheets.
#: Only those of GeForce tell FP8's accumulators apart.
OPS_PER_CLOCK_AND_SM = {
    "a100": {"s8": 4096, "s4": 8192, "f16f32": 2048},
    "rtx3090": {"s8": 2048, "s4": 4096, "f16f32": 512},
    "l20": {"s8": 1024, "s4": 2048, "e4m3f32": 1024, "e4m3f16": 1024, "f16f32": 512},
    "l40": {"s8": 1024, "s4": 2048, "e4m3f32": 1024, "e4m3f16": 1024, "f16f32": 512},
    "l40s": {"s8": 2048, "s4": 4096, "e4m3f32": 2048, "e4m3f16": 2048, "f16f32": 1024},
    "rtx4090": {"s8": 2048, "s4": 4096, "e4m3f32": 1024, "e4m3f16": 2048, "f16f32": 512},
    "rtx5090": {"s8": 2048, "e4m3f32": 1024, "e4m3f16": 2048, "f16f32": 512},
}


@pytest.mark.parametrize("name", OPS_PER_CLOCK_AND_SM)
def test_peaks_follow_from_clock_sms_and_the_architecture(name: str) -> None:
    gpu = GPUS[name]
    for kind, per_clock in OPS_PER_CLOCK_AND_SM[name].items():
        assert gpu.peaks[kind] == pytest.approx(per_clock * gpu.sms * gpu.boost_mhz / 1e6, rel=0.015), kind


def test_h200_has_the_measured_rates() -> None:
    assert dict(GPUS["h200"].peaks) == {"s8": 1148, "f16f32": 629, "bf16f32": 629}


def test_int4_peaks_are_listed_only_where_mma_sync_has_int4_units() -> None:
    with_int4 = {gpu.name for gpu in GPUS.values() if "s4" in gpu.peaks}
    assert with_int4 == {gpu.name for gpu in GPUS.values() if gpu.arch in ("sm_80", "sm_86", "sm_89")}


def test_fp8_peaks_are_listed_only_where_mma_sync_has_fp8_units() -> None:
    for kind in ("e4m3f32", "e4m3f16"):
        with_fp8 = {gpu.name for gpu in GPUS.values() if kind in gpu.peaks}
        assert with_fp8 == {gpu.name for gpu in GPUS.values() if gpu.arch in ("sm_89", "sm_120")}


@pytest.mark.parametrize(
    ("name", "per_block", "per_sm", "threads"),
    [("a100", 166912, 167936, 2048), ("l20", 101376, 102400, 1536), ("h200", 232448, 233472, 2048)],
)
def test_sm_limits_are_those_of_the_programming_guide(name: str, per_block: int, per_sm: int, threads: int) -> None:
    gpu = GPUS[name]
    assert (gpu.smem_per_block, gpu.smem_per_sm, gpu.threads_per_sm) == (per_block, per_sm, threads)


def test_compute_capability_is_a_number() -> None:
    assert [GPUS[name].compute_capability for name in ("l20", "h200", "rtx5090")] == [89, 90, 120]


def test_siblings_are_other_known_gpus_of_the_same_architecture() -> None:
    for gpu in GPUS.values():
        for sibling in gpu.siblings:
            assert sibling != gpu.name
            assert GPUS[sibling].arch == gpu.arch


def test_every_row_names_its_source_and_no_product_twice() -> None:
    products = [product for gpu in GPUS.values() for product in gpu.products]
    assert len(products) == len(set(products))
    assert all(gpu.source for gpu in GPUS.values())


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        GPUS["l20"] = GPUS["l40"]  # type: ignore[index]
    with pytest.raises(TypeError):
        GPUS["l20"].peaks["s8"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("asked", "suggested"),
    [
        ("4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("L20", "l20"),
        ("rtx490", "rtx4090"),
        ("h20O", "h20"),
    ],
)
def test_an_unknown_gpu_suggests_the_nearest(asked: str, suggested: str) -> None:
    with pytest.raises(UnknownNameError, match=f"{asked}.*did you mean .*{suggested}"):
        find_gpu(asked)


@pytest.mark.parametrize("asked", ["", "tpu", "../../etc/passwd"])
def test_a_name_like_no_other_lists_all(asked: str) -> None:
    with pytest.raises(UnknownNameError, match=r"known ones: a100, .*rtx5090"):
        find_gpu(asked)


def test_a_product_with_fewer_sms_is_another_gpu() -> None:
    assert match_gpu("NVIDIA H200", 132) is GPUS["h200"]
    assert match_gpu("NVIDIA H200", 16) is None
    assert match_gpu("NVIDIA GeForce GTX 1080", 20) is None


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """NVML of a machine with an H200, a slice of one, and a GPU that the table lacks."""
    gpus = [
        ("NVIDIA H200", (9, 0), 16896, "GPU-aaaa"),
        ("NVIDIA H200", (9, 0), 2048, "GPU-bbbb"),
        ("NVIDIA A30", (8, 0), 3584, "GPU-cccc"),
    ]
    state = SimpleNamespace(open=0)

    def shift(by: int) -> Any:
        def call() -> None:
            state.open += by

        return call

    monkeypatch.setattr(pynvml, "nvmlInit", shift(1))
    monkeypatch.setattr(pynvml, "nvmlShutdown", shift(-1))
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.65")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(gpus))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: gpus[index])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: handle[0])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda handle: handle[1])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNumGpuCores", lambda handle: handle[2])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: handle[3])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return state


def test_detection_names_known_gpus_and_counts_sms(nvml: SimpleNamespace) -> None:
    assert detect_gpus() == [
        DetectedGpu(0, "NVIDIA H200", 132, "580.65", "sm_90", GPUS["h200"], "GPU-aaaa"),
        DetectedGpu(1, "NVIDIA H200", 16, "580.65", "sm_90", None, "GPU-bbbb"),
        DetectedGpu(2, "NVIDIA A30", 56, "580.65", "sm_80", None, "GPU-cccc"),
    ]
    assert nvml.open == 0


def test_detection_respects_cuda_visible_devices(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-bb")
    assert [gpu.index for gpu in detect_gpus()] == [1, 2]


@pytest.mark.parametrize(
    ("visible", "shown"),
    [(None, True), ("", False), ("1", True), ("0,1", True), ("-1,1", False), ("0", False), ("GPU-b", True)],
)
def test_visibility_follows_cudas_rules(visible: str | None, shown: bool) -> None:
    assert is_visible(DetectedGpu(1, "NVIDIA H200", 132, "580", "sm_90", None, "GPU-bbbb"), visible) is shown


def test_without_a_driver_nothing_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert detect_gpus() == []
