"""`sagegen probe` with a scripted worker, and what it says where it cannot run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import sagegen.build
import sagegen.gpu
import sagegen.measuring.worker
import sagegen.toolkit
from sagegen.cli.main import main
from sagegen.errors import ToolchainError
from sagegen.gpu import GPUS, DetectedGpu
from sagegen.measuring.jobs import Probe as ProbeJob
from sagegen.measuring.jobs import Reply, read_job
from sagegen.probing.accumulator import make_accumulators
from sagegen.probing.probes import PROBES
from sagegen.probing.result import parse_result

H200 = DetectedGpu(2, "NVIDIA H200", 132, "580.65", "sm_90", GPUS["h200"], "GPU-a")
STRANGER = DetectedGpu(0, "NVIDIA A30", 56, "580.65", "sm_80", None, "GPU-b")


@dataclass
class FakeWorker:
    """Answers every probe with plausible figures, but crashes on those in `crashing`."""

    gpu_index: int
    crashing: tuple[str, ...] = ()
    jobs: list[ProbeJob] = field(default_factory=list)

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *arguments: object) -> None:
        pass

    def run(self, job: ProbeJob, timeout_s: float) -> Reply:
        assert read_job({"job": "probe", "probe": job.probe, "cubin": job.cubin, "gpu_index": job.gpu_index}) == job
        self.jobs.append(job)
        if job.probe in self.crashing:
            return Reply("crash", "CUDA_ERROR_ILLEGAL_INSTRUCTION")
        return Reply("ok", data=answer(job.probe))


def answer(name: str) -> dict[str, Any]:
    probe = PROBES[name]
    if probe.kind == "accumulator":
        c = make_accumulators(probe.accumulators).astype(np.float64)
        alone, added = (np.trunc(x / unit) * unit for x, unit in ((c, 2.0**-13), (c + 1, 2.0**-12)))
        return {"alone": alone.tolist(), "with_products": added.tolist()}
    return {
        "figures": {
            "per_clock": 4096.0,
            "per_second": 1e15,
            "per_second_p20": 0.99e15,
            "per_second_p80": 1.01e15,
            "clock_mhz": 1755.0,
        },
        "nvml_mhz": 1750.0,
        "power_w": 600.0,
        "power_limit_w": 700.0,
    }


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, make_nvcc: Callable[..., Any]) -> Callable[..., list[FakeWorker]]:
    """Puts GPUs into this machine; returns the workers that were started."""

    def make(*present: DetectedGpu, crashing: tuple[str, ...] = ()) -> list[FakeWorker]:
        workers: list[FakeWorker] = []

        def start(gpu_index: int) -> FakeWorker:
            workers.append(FakeWorker(gpu_index, crashing))
            return workers[-1]

        toolkit = make_nvcc().toolkit
        for module in ("sagegen.gpu", "sagegen.measuring.subjects"):
            monkeypatch.setattr(f"{module}.detect_gpus", lambda: list(present))
        monkeypatch.setattr(sagegen.measuring.worker, "Worker", start)
        monkeypatch.setattr(sagegen.toolkit, "find_toolkit", lambda env: toolkit)
        return workers

    return make


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["probe", *arguments])


def test_all_probes_of_the_gpu_run_and_land_in_table_and_file(machine: Any, tmp_path: Path) -> None:
    workers = machine(H200)
    result = run("--gpu", "h200", "-o", str(tmp_path / "p.yaml"))
    assert result.exit_code == 0, result.output
    (worker,) = workers
    assert worker.gpu_index == 2
    assert [job.probe for job in worker.jobs] == list(PROBES)
    row = next(line for line in result.output.splitlines() if line.split()[:1] == ["mma_s8"])
    assert "4096" in row
    assert "1000 TOPS" in row
    assert "1148" in row
    assert "0.87" in row
    assert "13 mantissa bits alone" in result.output
    saved = parse_result((tmp_path / "p.yaml").read_text(), "p.yaml")
    assert saved.gpu == "h200"
    assert saved.rates["dram"].per_second == 1e6  # GB/s
    assert saved.machine.power_limit_w == 700.0
    assert not saved.absent


def test_json_is_what_the_file_has(machine: Any) -> None:
    machine(H200)
    result = run("--only", "ex2", "--only", "mma_e4m3f32_bits", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert list(values["rates"]) == ["ex2"]
    assert values["accumulators"]["mma_e4m3f32_bits"]["alone"] == 13


def test_a_gpu_that_the_table_lacks_is_probed_too(machine: Any) -> None:
    (workers, result) = (machine(STRANGER), run())
    assert result.exit_code == 0, result.output
    assert "NVIDIA A30" in result.output
    assert "not in the table" in result.output
    names = [job.probe for job in workers[0].jobs]
    assert "mma_s4" in names
    assert not any("e4m3" in name or "wgmma" in name for name in names)


def test_a_probe_that_crashes_is_named_and_the_others_are_kept(machine: Any, tmp_path: Path) -> None:
    machine(H200, crashing=("mma_s4",))
    result = run("-o", str(tmp_path / "p.yaml"))
    assert result.exit_code == 1
    assert "mma_s4: crash: CUDA_ERROR_ILLEGAL_INSTRUCTION" in result.output
    saved = parse_result((tmp_path / "p.yaml").read_text(), "p.yaml")
    assert list(saved.absent) == ["mma_s4"]
    assert "mma_s8" in saved.rates


def test_a_machine_without_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sagegen.gpu", "sagegen.measuring.subjects"):
        monkeypatch.setattr(f"{module}.detect_gpus", list)
    for arguments in ((), ("--gpu", "h200")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "no GPU that a driver reports" in result.output
        assert result.output.strip().endswith("sagegen doctor")


def test_another_gpu_than_the_named_one_is_refused(machine: Any) -> None:
    machine(STRANGER)
    result = run("--gpu", "h200")
    assert result.exit_code == 2
    assert "this machine has NVIDIA A30" in result.output
    assert "Remedy: " in result.output.strip().splitlines()[-1]


@pytest.mark.parametrize(("name", "said"), [("nope", "probes are: mma_s8"), ("mma_e4m3f32", "leave out --only")])
def test_a_probe_that_there_is_not_is_misuse(machine: Any, name: str, said: str) -> None:
    machine(STRANGER)
    result = run("--only", name)
    assert result.exit_code == 2
    assert said in result.output.strip().splitlines()[-1]


def test_without_nvcc_the_remedy_comes_last(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(H200)

    def fail(env: object) -> None:
        raise ToolchainError("nvcc was not found", "pip install 'sagegen[nvcc]'")

    monkeypatch.setattr(sagegen.toolkit, "find_toolkit", fail)
    result = run()
    assert result.exit_code == 2
    assert result.output.strip().endswith("pip install 'sagegen[nvcc]'")


@pytest.mark.parametrize(("content", "said"), [("schema: 1", "missing required field"), ("{", "not YAML")])
def test_tune_refuses_a_damaged_probe(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(content)
    result = CliRunner().invoke(main, ["tune", "--gpu", "l20", "--offline", "--probe", str(file)])
    assert result.exit_code == 2
    assert said in result.output
    assert result.output.strip().endswith("sagegen probe -o FILE")
