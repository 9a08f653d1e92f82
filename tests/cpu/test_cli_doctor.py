"""`sagegen doctor`."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from sagegen.cli.main import main
from sagegen.gpu import GPUS, DetectedGpu


@pytest.fixture
def healthy(nvcc: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has everything."""
    gpu = DetectedGpu(0, "NVIDIA L20", 92, "580.65", "sm_89", GPUS["l20"])
    monkeypatch.setattr("sagegen.launch.driver_problem", lambda: None)
    monkeypatch.setattr("sagegen.gpu.detect_gpus", lambda: [gpu])
    monkeypatch.setenv("SAGEGEN_NVCC", str(nvcc.toolkit.nvcc))


def run() -> tuple[int, dict[str, dict[str, object]]]:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    return result.exit_code, {check["name"]: check for check in json.loads(result.output)}


@pytest.mark.usefixtures("healthy")
def test_a_complete_machine_is_ok(nvcc: SimpleNamespace) -> None:
    code, checks = run()
    assert code == 0
    assert all(check["is_ok"] for check in checks.values()), checks
    assert set(checks) >= {"python", "torch", "cuda-bindings", "driver", "GPU", "nvcc", "g++", "ninja", "cache folder"}
    assert checks["torch"]["found"] == importlib.metadata.version("torch")
    assert checks["GPU"]["found"] == "NVIDIA L20 (l20), driver 580.65"
    assert str(nvcc.toolkit.nvcc) in str(checks["nvcc"]["found"])


@pytest.mark.usefixtures("healthy")
def test_a_missing_driver_is_found_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagegen.launch.driver_problem", lambda: "no NVIDIA driver: libcuda.so.1 was not found")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    at = next(i for i, line in enumerate(lines) if "driver" in line and line.startswith("missing"))
    assert "libcuda.so.1" in lines[at]
    assert "install the NVIDIA driver" in lines[at + 1]


@pytest.mark.usefixtures("healthy")
def test_a_missing_nvcc_is_reported_but_running_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEGEN_NVCC", str(tmp_path / "none"))
    code, checks = run()
    assert code == 0
    assert not checks["nvcc"]["is_ok"]
    assert checks["nvcc"]["needed_to"] == "build"
    assert str(tmp_path / "none") in str(checks["nvcc"]["found"])


@pytest.mark.usefixtures("healthy")
def test_a_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "cuda-bindings":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    code, checks = run()
    assert code == 1
    assert checks["cuda-bindings"]["remedy"] == "pip install cuda-bindings"


@pytest.mark.usefixtures("healthy")
def test_an_unwritable_registry_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAGEGEN_TUNED_DIR", str(tmp_path / "file" / "tuned"))
    _, checks = run()
    assert not checks["tuned folder"]["is_ok"]
    assert "SAGEGEN_TUNED_DIR" in str(checks["tuned folder"]["remedy"])


@pytest.mark.usefixtures("healthy")
def test_bundles_are_listed_and_a_path_that_is_none_is_found_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGEGEN_REGISTRY", str(tmp_path))
    code, checks = run()
    assert (code, str(checks["bundles"]["found"]).split("; ")[0]) == (0, str(tmp_path))
    monkeypatch.setenv("SAGEGEN_REGISTRY", str(tmp_path / "h200.tar.zst"))
    (tmp_path / "h200.tar.zst").write_text("")
    code, checks = run()
    assert code == 1
    assert "sagegen unpack" in str(checks["bundles"]["remedy"])


@pytest.mark.usefixtures("healthy")
def test_no_visible_gpu_is_found_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagegen.gpu.detect_gpus", list)
    code, checks = run()
    assert code == 1
    assert "CUDA_VISIBLE_DEVICES" in str(checks["GPU"]["remedy"])


@pytest.mark.usefixtures("healthy")
def test_a_driver_too_old_for_the_shipped_cubins_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    old = DetectedGpu(0, "NVIDIA L20", 92, "575.57.08", "sm_89", GPUS["l20"])
    monkeypatch.setattr("sagegen.gpu.detect_gpus", lambda: [old])
    code, checks = run()
    assert code == 1
    assert "575.57.08 is older than 580" in str(checks["GPU"]["found"])
