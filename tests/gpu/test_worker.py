"""The measuring worker on a card: real gates and times, and candidates that fault or hang."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sagegen.build import build_batch
from sagegen.env import read_env
from sagegen.measuring.jobs import Candidate, Finals, Gate, Ping, Screen
from sagegen.measuring.verdict import compare
from sagegen.measuring.worker import Worker
from sagegen.problem import Problem, Shape
from sagegen.render import render
from sagegen.store import open_store
from sagegen.tuning.plant import plant_variant
from sagegen.tuning.variants import Variant

pytestmark = pytest.mark.gpu

PROBLEM = Problem(64, "fp16", True)
SHAPE = Shape(1, 8, 8, 1024, 1024)
CAPTURED = Path(__file__).parents[1] / "data" / "smollm2_qkv.safetensors"


@pytest.fixture(scope="module")
def worker():
    with Worker(0) as worker:
        yield worker


@pytest.fixture(scope="module")
def candidates(kernels):
    return [Candidate(str(k.cubin), k.problem.name, k.config.name) for k in kernels[PROBLEM]]


@pytest.fixture(scope="module")
def planted(kernels, gpu, toolkit):
    """Candidates of the default config that write to an illegal address, and that spin."""
    variant = Variant(render(PROBLEM, kernels[PROBLEM][0].config))

    def build(plant):
        source = plant_variant(variant, plant).source
        built = build_batch([source], gpu.arch, open_store(read_env()), toolkit)[source.name]
        return Candidate(str(built.cubin), PROBLEM.name, source.config.name)

    plants = ("crash", "hang")
    with ThreadPoolExecutor() as threads:  # two batches: both carry the same kernel's name
        return dict(zip(plants, threads.map(build, plants), strict=True))


def test_ping_names_the_card(worker, gpu):
    reply = worker.run(Ping(), 120)
    assert reply.data["sms"] == gpu.sms
    assert reply.data["product"] in gpu.products


def test_gate_gives_figures_and_is_fast_once_warm(worker, candidates):
    first = worker.run(Gate(candidates[0], captured=str(CAPTURED)), 180)
    assert (first.outcome, first.reason) == ("ok", "")
    assert first.data["figures"]["normal"]["cosine"] > 0.9992
    assert "captured:layer15" in first.data["figures"]
    again = worker.run(Gate(candidates[0]), 60)
    assert again.data["figures"]["normal"] == first.data["figures"]["normal"]


def test_screen_and_finals_give_times(worker, candidates):
    screen = worker.run(Screen(candidates[0], SHAPE, launches=10, sustained_s=0.05), 60)
    assert screen.outcome == "ok", screen.reason
    assert len(screen.data["kernel_us"]) == len(screen.data["call_us"]) == 10
    assert min(screen.data["kernel_us"]) > 1
    assert screen.data["sustained_us"] > 1
    finals = worker.run(Finals(tuple(candidates), SHAPE, rounds=8, peers=True), 60)
    assert finals.outcome == "ok", finals.reason
    assert [len(times) for times in finals.data["kernel_us"]] == [8] * len(candidates)
    assert finals.data["peers"] or finals.data["absent"]
    assert compare(finals.data["call_us"][0], finals.data["kernel_us"][0]).ratio > 1  # quantizers take time


def test_cubin_of_another_kernel_is_a_launch_failure(worker, candidates):
    wrong = Candidate(candidates[0].cubin, PROBLEM.name, candidates[1].config)
    reply = worker.run(Gate(wrong), 60)
    assert reply.outcome == "launch"
    assert reply.data["running"] == wrong.name
    assert worker.run(Ping(), 60).outcome == "ok"


def test_f1_illegal_address_is_a_crash_and_the_next_job_works(worker, planted, candidates):
    reply = worker.run(Gate(planted["crash"]), 120)
    assert reply.outcome == "crash"
    assert "illegal" in reply.reason.lower()
    assert reply.data["running"] == planted["crash"].name
    assert worker.pid is None
    assert worker.run(Gate(candidates[0], kinds=("gqa",)), 120).outcome == "ok"


def test_f1_endless_loop_is_killed_in_time_and_the_next_job_works(worker, planted, candidates):
    worker.run(Ping(), 120)
    start = time.monotonic()
    reply = worker.run(Gate(planted["hang"], kinds=("few_keys",)), 10)
    assert reply.outcome == "timeout"
    assert time.monotonic() - start < 30
    assert worker.run(Gate(candidates[0], kinds=("gqa",)), 120).outcome == "ok"


def test_finals_name_the_candidate_at_fault(worker, planted, candidates):
    reply = worker.run(Finals((candidates[1], planted["crash"]), SHAPE, rounds=4), 120)
    assert reply.outcome == "crash"
    assert reply.data["running"] == planted["crash"].name
