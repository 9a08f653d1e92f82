"""A race as the worker runs it, with a scripted timer: order, counts, clocks, absent peers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from msgspec import structs

from sagegen.errors import DriverError
from sagegen.measuring import bench, measure, rivals
from sagegen.measuring.inputs import draw_normal
from sagegen.measuring.jobs import (
    BURST_LAUNCHES,
    CUDNN_FP8,
    SDPA_CUDNN,
    SDPA_FLASH,
    Candidate,
    Finals,
    Gate,
    Race,
    Reply,
)
from sagegen.measuring.rivals import Rival, agreement, find_peers, own_rivals, run_race
from sagegen.measuring.telemetry import GpuState, Watch
from sagegen.problem import Shape, parse_problem

SHAPE = Shape(1, 2, 2, 64, 64)


class Stopwatch:
    """Launches take what their name says; keeps what it was asked."""

    def __init__(self, times: dict[str, float], seen: list[str]) -> None:
        self.times, self.seen, self.asked = times, seen, []

    def _take(self, launch: Callable[[], None]) -> str:
        launch()
        return self.seen[-1]

    def settled(self, launch: Callable[[], None], settle: int, count: int, look: Callable[[], None]) -> float:
        name = self._take(launch)
        look()
        self.asked.append((name, "sustained", settle, count))
        return self.times[name]

    def burst(self, launch: Callable[[], None], idle_s: float, count: int) -> float:
        name = self._take(launch)
        self.asked.append((name, "burst", idle_s, count))
        return self.times[name] / 2


def job(**changes: object) -> Race:
    return Race((), "d64_bf16_full_int8", SHAPE, 3, **changes)  # type: ignore[arg-type]


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict, Stopwatch, list[str]]]:
    monkeypatch.setattr(rivals, "read_state", lambda index: GpuState(clock_mhz=1000.0 + index))

    def run(times: dict[str, float], job: Race) -> tuple[dict, Stopwatch, list[str]]:
        seen, told = [], []
        timer = Stopwatch(times, seen)
        field = {name: Rival(name.upper(), lambda name=name: seen.append(name)) for name in times}
        return run_race(field, job, timer, told.append), timer, told

    return run


def test_every_round_has_everyone_once_and_bursts_come_after(race) -> None:
    data, timer, told = race(
        {"kernel 0": 2000.0, "call 0": 2500.0, "sdpa-cudnn": 4000.0}, job(rounds=3, burst_rounds=2)
    )
    order = [(name, mode) for name, mode, *_ in timer.asked]
    names = ["call 0", "kernel 0", "sdpa-cudnn"]
    assert [sorted(name for name, _ in order[i : i + 3]) for i in range(0, 18, 3)] == [names] * 6
    assert [mode for _, mode in order] == ["sustained"] * 12 + ["burst"] * 6
    assert len({tuple(order[i : i + 3]) for i in range(3, 12, 3)}) > 1  # in an order of its own
    assert data["sustained_us"]["kernel 0"] == [2000.0] * 3
    assert data["burst_us"]["sdpa-cudnn"] == [2000.0] * 2
    assert told[:4] == ["KERNEL 0", "CALL 0", "SDPA-CUDNN", timer.asked[3][0].upper()]


def test_samples_last_as_long_as_asked(race) -> None:
    _, timer, _ = race({"kernel 0": 2000.0}, job(rounds=2, sustained_s=0.3, idle_s=0.7))
    warm, *sustained = [asked for asked in timer.asked if asked[1] == "sustained"]
    assert warm[3] == 3
    for _, _, settle, count in sustained:
        assert settle * 2000e-6 >= 0.1
        assert 0.3 <= count * 2000e-6 <= 0.32
    bursts = [asked for asked in timer.asked if asked[1] == "burst"]
    assert {asked[2:] for asked in bursts} == {(0.7, BURST_LAUNCHES)}


def test_a_launch_longer_than_a_sample_runs_once(race) -> None:
    _, timer, _ = race({"sdpa-flash": 5e6}, job(rounds=2, burst_rounds=0))
    assert {asked[3] for asked in timer.asked[1:]} == {1}


def test_clocks_are_those_of_sustained_samples_on_the_named_gpu(race) -> None:
    data, _, _ = race({"kernel 0": 2000.0, "call 0": 2500.0}, job(rounds=4))
    assert data["clock_mhz"] == {"kernel 0": [1003.0] * 4, "call 0": [1003.0] * 4}


class FakeCall:
    def __init__(self, name: str, seen: list[str], out: torch.Tensor | None = None) -> None:
        self.name, self.seen, self.out = name, seen, out

    def launch(self) -> None:
        self.seen.append(f"{self.name} call")

    def launch_role(self, role: str) -> None:
        self.seen.append(f"{self.name} {role}")


def test_a_kernel_is_the_attention_role_alone() -> None:
    seen: list[str] = []
    own = own_rivals([FakeCall("a", seen), FakeCall("b", seen)], ["A", "B"], job())  # type: ignore[list-item]
    for rival in own.values():
        rival.launch()
    assert list(own) == ["kernel 0", "call 0", "kernel 1", "call 1"]
    assert seen == ["a attention", "a call", "b attention", "b call"]
    assert [rival.owner for rival in own.values()] == ["A", "A", "B", "B"]
    assert list(own_rivals([FakeCall("a", seen)], ["A"], job(parts=("call",)))) == ["call 0"]  # type: ignore[list-item]


@pytest.fixture
def inputs():
    return draw_normal(SHAPE, 64, torch.Generator().manual_seed(0), torch.bfloat16)


def test_peers_that_cannot_run_are_absent_with_the_reason(inputs, monkeypatch) -> None:
    monkeypatch.setattr(bench, "find_peers", lambda q, k, v, causal, names: ({names[0]: lambda: None}, {}))
    monkeypatch.setattr(rivals, "Fp8Attention", lambda *tensors: raise_(ImportError("No module named 'cudnn'")))
    told: list[str] = []
    found, absent, versions = find_peers(inputs, False, (SDPA_FLASH, CUDNN_FP8), told.append)
    assert list(found) == [SDPA_FLASH]
    assert absent == {CUDNN_FP8: "ImportError: No module named 'cudnn'"}
    assert (told, versions) == ([SDPA_FLASH, CUDNN_FP8], {})


def raise_(error: Exception) -> None:
    raise error


def test_fp8_takes_part_with_its_versions(inputs, monkeypatch) -> None:
    class Fp8:
        def __init__(self, q, k, v, is_causal) -> None:
            self.q, self.launched, self.versions = q, 0, {"cudnn": "9.19.0"}

        def launch(self) -> None:
            self.launched += 1

        def output(self) -> torch.Tensor:
            return self.q.float()

    monkeypatch.setattr(rivals, "Fp8Attention", Fp8)
    found, absent, versions = find_peers(inputs, True, (CUDNN_FP8,), lambda name: None)
    assert (absent, versions) == ({}, {"cudnn": "9.19.0"})
    assert torch.equal(found[CUDNN_FP8].output(), inputs.q.float())


def test_only_the_wanted_sdpa_backends_run(inputs) -> None:
    found, absent = bench.find_peers(inputs.q, inputs.k, inputs.v, False, (SDPA_CUDNN,))
    assert {*found, *absent} == {SDPA_CUDNN}
    found, absent = bench.find_peers(inputs.q, inputs.k, inputs.v, False)
    assert {*found, *absent} == {SDPA_FLASH, SDPA_CUDNN}


@pytest.fixture
def worker_bench(monkeypatch, inputs):
    """A worker's Bench whose programs are calls that note their launches; and what was launched, and told."""
    seen: list[str] = []
    told: list[str] = []
    monkeypatch.setattr(rivals, "read_state", lambda index: GpuState())
    monkeypatch.setattr(
        rivals, "find_peers", lambda *arguments: ({SDPA_FLASH: Rival(SDPA_FLASH, peer)}, {"x": "y"}, {})
    )
    monkeypatch.setattr(measure, "_loaded", lambda candidates, tell: nullcontext(candidates))
    own = measure.Bench()
    monkeypatch.setattr(own, "_bind", lambda candidate, shape: FakeCall(candidate.config, seen, inputs.q))
    monkeypatch.setattr(own, "_draw", lambda head_dim, dtype, shape: inputs)

    def peer() -> None:
        seen.append(SDPA_FLASH)

    times = {"a call": 2000.0, "a attention": 1000.0, "b call": 4000.0, "b attention": 3000.0, SDPA_FLASH: 5000.0}
    monkeypatch.setattr(own, "_event_timer", lambda: Stopwatch(times, seen))
    return own, told


def test_the_worker_answers_with_everyones_times(worker_bench) -> None:
    own, told = worker_bench
    field = (Candidate("a.cubin", "d64_bf16_full_int8", "a"), Candidate("b.cubin", "d64_bf16_full_int8", "b"))
    reply = own.do(structs.replace(job(), candidates=field), told.append)
    assert (reply.outcome, reply.reason) == ("ok", "")
    assert {name: times[0] for name, times in reply.data["sustained_us"].items()} == {
        "kernel 0": 1000.0, "call 0": 2000.0, "kernel 1": 3000.0, "call 1": 4000.0, SDPA_FLASH: 5000.0,
    }  # fmt: skip
    assert set(reply.data["agreement"]) == {"kernel 0", "call 0", "kernel 1", "call 1"}
    assert (reply.data["absent"], reply.data["clock_mhz"][SDPA_FLASH]) == ({"x": "y"}, [None] * 3)
    assert {"d64_bf16_full_int8_a", "d64_bf16_full_int8_b", SDPA_FLASH} == set(told)
    json.dumps(reply.data)


def test_times_outlive_a_check_that_has_no_memory(worker_bench, monkeypatch) -> None:
    own, told = worker_bench
    monkeypatch.setattr(rivals, "agreement", lambda *arguments: raise_(torch.OutOfMemoryError("CUDA out of memory")))
    reply = own.do(job(), told.append)
    assert (reply.outcome, reply.data["agreement"]) == ("ok", {})
    assert reply.data["sustained_us"][SDPA_FLASH] == [5000.0] * 3


def test_a_context_that_a_peer_spoiled_is_a_crash(worker_bench, monkeypatch) -> None:
    own, told = worker_bench
    error = getattr(torch, "AcceleratorError", RuntimeError)
    monkeypatch.setattr(rivals, "find_peers", lambda *arguments: raise_(error("CUDA error: misaligned address\nmore")))
    monkeypatch.setattr(measure, "_context_is_alive", lambda: False)
    reply = own.do(job(), told.append)
    assert (reply.outcome, reply.reason) == ("crash", "CUDA error: misaligned address")


@pytest.mark.parametrize("is_causal", [False, True])
def test_agreement_shows_who_computes_something_else(inputs, is_causal: bool) -> None:
    truth = torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=is_causal)
    other = torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=not is_causal)
    launched: list[str] = []
    field = {
        "right": Rival("right", lambda: launched.append("right"), lambda: truth),
        "wrong mask": Rival("wrong", lambda: None, lambda: other),
        "zeros": Rival("zeros", lambda: None, lambda: torch.zeros_like(truth)),
        "unseen": Rival("unseen", lambda: launched.append("unseen")),
    }
    found = agreement(field, inputs, is_causal)
    assert found["right"] == pytest.approx(1)
    assert found["wrong mask"] < 0.9
    assert found["zeros"] == 0
    assert "unseen" not in found
    assert launched == ["right"]


class FailingTimer:
    """Times nothing; fails at the launch of that number."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def cold(self, launch) -> float:
        self.count += 1
        if self.count == self.at:
            raise DriverError("illegal memory access")
        return 1.0

    def sustained(self, launch, seconds: float) -> float:
        return 1.0


@pytest.mark.parametrize("at", range(1, 9))
def test_finals_that_fail_name_who_ran_and_not_who_was_loaded_last(worker_bench, monkeypatch, at: int) -> None:
    own, told = worker_bench
    orders: list[str] = []
    real = bench.interleave

    def interleave(rivals, sample, *rest):
        def noted(rival):
            orders.append(rival[0])
            return sample(rival)

        return real(rivals, noted, *rest)

    monkeypatch.setattr(bench, "interleave", interleave)
    monkeypatch.setattr(own, "_event_timer", lambda: FailingTimer(at))
    monkeypatch.setattr(own, "_watch", lambda: Watch(GpuState))
    monkeypatch.setattr(measure, "_context_is_alive", lambda: False)
    field = (Candidate("a.cubin", "d64_bf16_full_int8", "a"), Candidate("b.cubin", "d64_bf16_full_int8", "b"))
    monkeypatch.setattr(measure, "_loaded", lambda candidates, tell: nullcontext([Named(c) for c in candidates]))
    reply = own.do(Finals(field, Shape(1, 1, 1, 64, 64), rounds=2), told.append)
    assert (reply.outcome, reply.reason) == ("crash", "illegal memory access")
    assert told[-1] == orders[-1]
    assert len(orders) == at


class Named:
    """A program as far as finals look at it."""

    def __init__(self, candidate: Candidate) -> None:
        self.name, self.config, self.problem = candidate.name, candidate.config, parse_problem(candidate.problem)


def test_a_job_that_runs_out_of_memory_is_done_again_with_all_of_it(monkeypatch) -> None:
    own = measure.Bench()
    monkeypatch.setattr(measure, "_context_is_alive", lambda: True)
    forgotten: list[bool] = []
    monkeypatch.setattr(own, "_drop_memory", lambda: forgotten.append(True))
    answers = iter([torch.OutOfMemoryError("CUDA out of memory"), Reply("ok")] + [torch.OutOfMemoryError("again")] * 2)

    def gate(job, tell):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(own, "_gate", gate)
    candidate = Gate(Candidate("a.cubin", "d64_bf16_full_int8", "a"))
    assert own.do(candidate, print).outcome == "ok"
    assert forgotten == [True]
    assert own.do(candidate, print) == Reply("launch", "again")  # it asks for more than there is
