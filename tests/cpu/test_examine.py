"""Timeouts, second chances and lanes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from sagegen.errors import WorkerError
from sagegen.gpu import find_gpu
from sagegen.measuring.jobs import Gate, Job, Ping, Reply
from sagegen.problem import TUNED_LENGTHS, Problem, Shape
from sagegen.render import render
from sagegen.rules import Target, default_config
from sagegen.tuning import examine
from sagegen.tuning.examine import Examiner, Lanes, screen_launches, tuned_shape
from sagegen.tuning.variants import Variant

PROBLEM = Problem(128, "bf16", False)
VARIANT = Variant(render(PROBLEM, default_config(Target(find_gpu("l20"), PROBLEM))))
LAUNCHES = {length.tokens: 5 for length in TUNED_LENGTHS}


class Clock:
    """A worker and the clock it works against: a job costs `cost` seconds, the next ones raise `faults`."""

    gpu_index = 0

    def __init__(self) -> None:
        self.now, self.cost, self.processes = 0.0, 1.0, 0
        self.pid: int | None = None
        self.limits: list[float] = []
        self.faults: list[WorkerError] = []

    def run(self, job: Job, timeout_s: float) -> Reply:
        if self.pid is None:
            self.processes += 1
            self.pid = self.processes
        self.limits.append(timeout_s)
        self.now += self.cost
        if self.faults:
            raise self.faults.pop()
        if isinstance(job, Gate):
            return Reply("ok", data={"figures": {}})
        return Reply("ok", data={"kernel_us": [1.0], "call_us": [2.0]})

    def close(self) -> None:
        self.pid = None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(examine.time, "monotonic", lambda: made.now)
    return made


@pytest.mark.parametrize("length", TUNED_LENGTHS, ids=lambda length: str(length.tokens))
def test_every_tuned_shape_has_the_same_number_of_tokens(length) -> None:  # type: ignore[no-untyped-def]
    shape = tuned_shape(length)
    assert shape == Shape(16384 // length.tokens, 32, 32, length.tokens, length.tokens)


@pytest.mark.parametrize(("default_us", "launches"), [(None, 20), (100.0, 20), (4000.0, 10), (20000.0, 5)])
def test_slow_kernels_are_launched_less_often(default_us: float | None, launches: int) -> None:
    assert screen_launches(default_us) == launches


def test_timeouts_follow_the_slowest_step_seen(clock: Clock) -> None:
    examiner = Examiner(clock, TUNED_LENGTHS)
    examiner.examine(VARIANT, Path("k"), LAUNCHES)
    assert set(clock.limits) == {180.0}  # nothing is known of any step
    clock.limits.clear()
    examiner.examine(VARIANT, Path("k"), LAUNCHES)  # warm, but no warm step was seen yet
    assert set(clock.limits) == {180.0}
    clock.limits.clear()
    clock.cost = 3.0
    examiner.examine(VARIANT, Path("k"), LAUNCHES)
    assert set(clock.limits) == {10.0}  # 8 x 1 s, but at least 10 s
    clock.limits.clear()
    examiner.examine(VARIANT, Path("k"), LAUNCHES)
    assert set(clock.limits) == {24.0}


def test_a_fresh_process_gets_the_time_that_first_steps_take(clock: Clock) -> None:
    examiner = Examiner(clock, TUNED_LENGTHS)
    clock.cost = 5.0
    examiner.examine(VARIANT, Path("k"), LAUNCHES)
    clock.close()
    clock.limits.clear()
    examiner.examine(VARIANT, Path("k"), LAUNCHES)
    assert set(clock.limits) == {40.0}


def test_a_fault_of_the_workers_own_code_is_tried_again_once(clock: Clock) -> None:
    examiner = Examiner(clock, TUNED_LENGTHS)
    clock.faults = [WorkerError("out of memory")]
    assert examiner.run(Ping(), 1.0).outcome == "ok"
    clock.faults = [WorkerError("again"), WorkerError("out of memory")]
    with pytest.raises(WorkerError, match="again"):
        examiner.run(Ping(), 1.0)


class Dying(Clock):
    """A worker whose process ends in the first jobs of a kind that are left in `deaths`, of these reasons."""

    def __init__(self, *deaths: str) -> None:
        super().__init__()
        self.deaths = list(deaths)
        self.gates = 0

    def run(self, job: Job, timeout_s: float) -> Reply:
        reply = super().run(job, timeout_s)
        if isinstance(job, Gate):
            self.gates += 1
            if self.deaths:
                self.pid = None
                return Reply("crash", self.deaths.pop(0))
        return reply


@pytest.mark.parametrize(
    ("reason", "outcome", "gates"),
    [("worker killed by SIGKILL", "ok", 2), ("worker killed by SIGSEGV", "crash", 1)],
)
def test_a_first_guest_that_dies_by_itself_is_guilty_and_one_that_is_killed_from_outside_is_run_again(
    reason: str, outcome: str, gates: int
) -> None:
    worker = Dying(reason)
    attempt = Examiner(worker, TUNED_LENGTHS).examine(VARIANT, Path("k"), LAUNCHES)
    assert (attempt.outcome, worker.gates) == (outcome, gates)
    assert attempt.first_failure == (f"crash: {reason}" if outcome == "ok" else "")


def test_a_fresh_process_runs_a_proven_config_before_anyone_else() -> None:
    worker = Dying()
    examiner = Examiner(worker, TUNED_LENGTHS)
    examiner.examine(VARIANT, Path("proven"), LAUNCHES)
    worker.deaths = ["illegal address"]
    other = Variant(render(PROBLEM, replace(VARIANT.config, stages=3)))
    assert examiner.examine(other, Path("other"), LAUNCHES).outcome == "crash"
    assert worker.gates == 1 + 1 + 1  # itself, the other, itself again
    assert worker.processes == 2


def test_equal_code_takes_the_times_of_the_other_but_is_gated_itself(clock: Clock) -> None:
    examiner = Examiner(clock, TUNED_LENGTHS)
    samples = examiner.examine(VARIANT, Path("k"), LAUNCHES).samples
    clock.limits.clear()
    attempt = examiner.examine(VARIANT, Path("k"), LAUNCHES, samples)
    assert attempt.samples == samples
    assert len(clock.limits) == 1


def test_lanes_work_side_by_side_and_take_items_only_when_free() -> None:
    lanes = Lanes([Examiner(Clock(), TUNED_LENGTHS) for _ in range(2)])
    meeting = threading.Barrier(2, timeout=30)  # both lanes must be in it at once
    taken: list[int] = []

    def items():  # type: ignore[no-untyped-def]
        for item in range(6):
            taken.append(item)
            yield item

    def work(examiner: Examiner, item: int) -> int:
        meeting.wait()
        return item * item

    answers = lanes.map(work, items())
    first = next(answers)
    assert len(taken) <= 4
    assert dict([first, *answers]) == {n: n * n for n in range(6)}
    lanes.close()


def test_closing_lanes_ends_a_job_that_hangs() -> None:
    class Hanging(Clock):
        def __init__(self) -> None:
            super().__init__()
            self.killed = threading.Event()

        def run(self, job: Job, timeout_s: float) -> Reply:
            assert self.killed.wait(30)
            raise WorkerError("closed")

        def close(self) -> None:
            self.killed.set()

    lanes = Lanes([Examiner(Hanging(), TUNED_LENGTHS)])
    (future,) = lanes.each(lambda examiner: examiner.run(Ping(), 600))
    lanes.close()
    assert isinstance(future.exception(timeout=30), WorkerError)
