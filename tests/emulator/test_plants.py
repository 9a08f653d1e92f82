"""F1 on the CPU: planted faults that mean something to a kernel, in the rendered text of both families."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from sagegen.emulator.program import load_source
from sagegen.env import read_env
from sagegen.errors import EmulatorError
from sagegen.gpu import find_gpu
from sagegen.measuring.emulated import small_cases
from sagegen.measuring.gate import GateResult, run_gate
from sagegen.measuring.jobs import Candidate, Gate, Ping
from sagegen.measuring.worker import Worker
from sagegen.problem import Problem
from sagegen.render import render
from sagegen.rules import Target, default_config
from sagegen.tuning.plant import Plant, plant_variant
from sagegen.tuning.variants import Variant

pytestmark = pytest.mark.emulator

PROBLEM = Problem(64, "bf16", False)


WORKER = (sys.executable, str(Path(__file__).with_name("emulated_worker.py")))


def gate(gpu_name: str, plant: Plant) -> GateResult:
    gpu = find_gpu(gpu_name)
    honest = Variant(render(PROBLEM, default_config(Target(gpu, PROBLEM)), "host"))
    program = load_source(plant_variant(honest, plant).source, gpu.compute_capability, read_env())
    return run_gate(program, PROBLEM, honest.config, small_cases(), kinds=("normal",))


# One family each: that a fault is in the text of both, tests/cpu/test_plant.py holds.


def test_f1_an_illegal_address_is_named_on_hopper_too() -> None:
    with pytest.raises(EmulatorError, match=r"out_of_bounds in kernel attention.*null pointer"):
        gate("h200", "crash")


def test_f1_an_output_that_is_3_percent_too_large_fails_the_gate_by_its_scale() -> None:
    result = gate("l20", "wrong")
    ratio = re.fullmatch(r"normal: scale ratio ([\d.]+) is further than 0.01 from 1", result.reason)
    assert ratio is not None
    assert float(ratio[1]) == pytest.approx(1.03, abs=0.003)


def test_f1_an_output_that_is_written_by_half_fails_the_gate() -> None:
    assert gate("h200", "half").reason == "normal: 16384 of 32768 outputs are NaN or Inf"


def test_f1_an_endless_loop_costs_the_worker_its_life_and_the_next_job_works(tmp_path: Path) -> None:
    gpu = find_gpu("l20")
    honest = Variant(render(PROBLEM, default_config(Target(gpu, PROBLEM)), "host"))
    jobs = {}
    for name, variant in (("honest", honest), ("hang", plant_variant(honest, "hang"))):
        load_source(variant.source, gpu.compute_capability, read_env())  # compiles: not on the worker's time
        file = tmp_path / f"{name}.cu"
        file.write_text(variant.source.text)
        jobs[name] = Gate(Candidate(str(file), PROBLEM.name, honest.config.name), kinds=("normal",))
    with Worker(0, command=WORKER, start_timeout_s=120) as worker:
        assert worker.run(Ping(), 60).outcome == "ok"
        start, pid = time.monotonic(), worker.pid
        reply = worker.run(jobs["hang"], 2)
        assert (reply.outcome, reply.data["running"]) == ("timeout", honest.name)
        assert time.monotonic() - start < 30
        assert (worker.pid, Path(f"/proc/{pid}").exists()) == (None, False)
        assert worker.run(jobs["honest"], 60).outcome == "ok"
