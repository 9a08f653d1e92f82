"""A race on a card: sustained samples, bursts, and peers that compute the same as torch."""

from __future__ import annotations

import pytest

from sagegen.measuring.jobs import CUDNN_FP8, PEERS, SDPA_FLASH, Candidate, Race
from sagegen.measuring.worker import Worker
from sagegen.problem import Problem, Shape

pytestmark = pytest.mark.gpu

SHAPE = Shape(2, 8, 8, 4096, 4096)  # a quarter of a millisecond: what the host does after a rest is little beside it


@pytest.fixture(scope="module")
def worker():
    with Worker(0) as worker:
        yield worker


@pytest.mark.parametrize("problem", [Problem(128, "bf16", False), Problem(64, "bf16", True)], ids=lambda p: p.name)
def test_everyone_is_timed_and_agrees_with_torch(worker, kernels, problem) -> None:
    own = tuple(Candidate(str(k.cubin), k.problem.name, k.config.name) for k in kernels[problem][:2])
    job = Race(own, problem.name, SHAPE, 0, rounds=2, sustained_s=0.05, burst_rounds=1, idle_s=0.1)
    reply = worker.run(job, 120)
    assert reply.outcome == "ok", reply.reason
    data = reply.data
    assert {*data["sustained_us"]} >= {"kernel 0", "call 0", "kernel 1", "call 1", SDPA_FLASH}
    assert {*data["sustained_us"], *data["absent"]} >= set(PEERS)
    for rival, times in data["sustained_us"].items():
        assert len(times) == 2
        assert min(times) > 1
        # a burst is at most a little slower, and no sample is of another work
        assert data["burst_us"][rival][0] < 2 * min(times)
    for part in (0, 1):
        assert min(data["sustained_us"][f"call {part}"]) > min(data["sustained_us"][f"kernel {part}"])
    assert all(cosine > 0.99 for cosine in data["agreement"].values()), data["agreement"]


def test_cudnn_fp8_runs_where_its_package_is(worker) -> None:
    pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend: pip install 'sagegen[peers]'")
    problem = Problem(128, "bf16", True)
    reply = worker.run(Race((), problem.name, SHAPE, 0, rounds=1, sustained_s=0.05, burst_rounds=0), 120)
    assert reply.outcome == "ok", reply.reason
    assert CUDNN_FP8 not in reply.data["absent"], reply.data["absent"]
    # e4m3 in, between and out: a wrong mask or scale gives far less
    assert reply.data["agreement"][CUDNN_FP8] > 0.99
    assert reply.data["versions"]["cudnn"]
