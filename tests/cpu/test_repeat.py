"""`tune --verify`: finals that are repeated, beside what was decided."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sagegen.cli.repeat import repeat_and_report
from sagegen.errors import ArgumentError, GpuBusyError
from sagegen.gpu import DetectedGpu
from sagegen.measuring import telemetry
from sagegen.measuring.jobs import Finals, Job, Reply
from sagegen.measuring.telemetry import GpuState
from sagegen.measuring.verdict import Verdict
from sagegen.problem import TUNED_LENGTHS
from sagegen.space import Config, parse_config
from sagegen.store import Store
from sagegen.toolkit import Toolkit
from sagegen.tuning.events import FinalsStarted
from sagegen.tuning.journal import Journal
from sagegen.tuning.repeat import Comparison, Repetition, repeat_finals
from sagegen.tuning.request import Request, Tools

sys.path.insert(0, str(Path(__file__).parent))
import test_tune as tuning

BEST, DEFAULT, PROBLEM = tuning.BEST, tuning.DEFAULT, tuning.PROBLEM
RUNNER_UP = replace(BEST, min_blocks=2)  # 1 % slower


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = tuning.make_bench(tmp_path, monkeypatch)
    made.tune(trials=100)
    made.worker.jobs.clear()
    return made


def make_tools(bench: Any, journal: Journal) -> Tools:
    device = DetectedGpu(0, "NVIDIA L20", tuning.GPU.sms, "580.1", "sm_89", tuning.GPU)
    toolkit = Toolkit(Path("/nvcc"), (13, 0), "V13.0.88")
    return Tools([bench.worker], [device], journal, Store(bench.folder / "kernels"), toolkit)


def repeat(bench: Any, journal: Path | None = None, **changes: Any) -> list[Repetition]:
    bench.events = []
    request = Request(tuning.GPU, (PROBLEM,), **changes)
    with Journal(journal or bench.journal) as opened:
        return repeat_finals(request, make_tools(bench, opened), bench.listen)


def slow_down(bench: Any, slower: Config, by: float) -> None:
    """Have the worker find a config slower than it was."""
    real = bench.worker.run

    def run(job: Job, timeout_s: float) -> Reply:
        reply = real(job, timeout_s)
        if isinstance(job, Finals):
            for candidate, times in zip(job.candidates, reply.data["call_us"], strict=True):
                if parse_config(candidate.config) == slower:
                    times[:] = [by * us for us in times]
        return reply

    bench.worker.run = run


def test_finals_that_come_out_as_before_agree_with_ratio_and_interval(bench: Any) -> None:
    repetitions = repeat(bench)
    assert [(r.problem, r.tokens, r.winner) for r in repetitions] == [
        (PROBLEM.name, length.tokens, BEST.name) for length in TUNED_LENGTHS
    ]
    assert all(r.disagreements == () for r in repetitions)
    first = {c.config: c for c in repetitions[0].comparisons}
    assert set(first) == {RUNNER_UP.name, DEFAULT.name}
    # 1,024 tokens: a kernel of 128 us, the default's takes 1.875 times as long, and each call 10 us more
    over_default = (1.875 * 128 + 10) / (128 + 10)
    assert first[DEFAULT.name].recorded == pytest.approx(over_default, rel=1e-6)
    assert first[DEFAULT.name].again.ratio == pytest.approx(over_default, rel=1e-6)
    matches = [job for job in bench.worker.jobs if isinstance(job, Finals)]
    assert [len(match.candidates) for match in matches] == [3] * 5
    assert [event.index for event in bench.events if isinstance(event, FinalsStarted)] == [0, 1, 2, 3, 4]


def test_nothing_is_written(bench: Any) -> None:
    before = bench.journal.read_bytes()
    repeat(bench)
    assert bench.journal.read_bytes() == before


def test_a_rival_that_is_faster_now_disagrees(bench: Any) -> None:
    slow_down(bench, BEST, 1.10)
    repetition = repeat(bench)[0]
    # calls of 138 us x 1.1 and 139.28 us; 250 us of the default's over 138 us before, over 151.8 us now
    assert f"{RUNNER_UP.name} is 1.090x as fast as the winner" in repetition.disagreements
    assert f"1.812x over {DEFAULT.name} then, 1.647x now" in repetition.disagreements


def test_a_lead_that_has_changed_disagrees_though_the_winner_still_wins(bench: Any) -> None:
    slow_down(bench, DEFAULT, 0.9)
    reasons = repeat(bench, lengths=TUNED_LENGTHS[:1])[0].disagreements
    assert reasons == (f"1.812x over {DEFAULT.name} then, 1.630x now",)  # 225 us over 138 us


def test_the_registrys_winner_goes_before_the_journals(bench: Any) -> None:
    held = dict.fromkeys(((PROBLEM, length) for length in TUNED_LENGTHS[:2]), RUNNER_UP)
    repetitions = repeat(bench, incumbents=held)
    assert [r.winner for r in repetitions] == [RUNNER_UP.name] * 2 + [BEST.name] * 3
    (over_default,) = repetitions[0].comparisons
    assert (over_default.config, over_default.recorded) == (DEFAULT.name, None)
    assert repetitions[0].disagreements == ()


def test_a_winner_that_fails_disagrees(bench: Any) -> None:
    bench.worker.final_faults = {BEST: "crash"}
    (repetition,) = repeat(bench, lengths=TUNED_LENGTHS[:1])
    assert repetition.disagreements == (f"{BEST.name}: crash: scripted crash",)


def test_without_any_winner_there_is_nothing_to_repeat(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="tune first: sagegen tune --gpu l20"):
        repeat(bench, journal=tmp_path / "empty.jsonl")


def test_f7_a_busy_gpu_is_refused_here_too(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "read_state", lambda index: GpuState(processes=(4711,)))
    with pytest.raises(GpuBusyError, match="4711"):
        repeat(bench)
    assert repeat(bench, force=True)


@pytest.mark.parametrize(
    ("recorded", "again", "agrees"),
    [
        (1.10, Verdict(1.10, 1.09, 1.11), True),
        (1.10, Verdict(1.08, 1.079, 1.081), True),  # 2 % are the same
        (1.10, Verdict(1.06, 1.05, 1.07), False),
        (1.10, Verdict(1.06, 1.00, 1.12), True),  # the noise of now does not tell them apart
        (None, Verdict(1.50, 1.49, 1.51), True),
        (None, Verdict(0.97, 0.96, 0.98), False),
        (None, Verdict(0.985, 0.98, 0.99), True),
        (1.00, Verdict(0.97, 0.90, 1.01), True),  # slower, but not beyond doubt
    ],
)
def test_what_agrees(recorded: float | None, again: Verdict, agrees: bool) -> None:
    assert (Comparison("other", recorded, again).disagreement == "") == agrees


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("slower", [None, BEST], ids=["agree", "disagree"])
def test_the_command_ends_with_1_where_they_disagree(
    bench: Any, capsys: pytest.CaptureFixture[str], slower: Config | None, as_json: bool
) -> None:
    if slower:
        slow_down(bench, slower, 1.10)
    request = Request(tuning.GPU, (PROBLEM,), lengths=TUNED_LENGTHS[:1])
    with Journal(bench.journal) as journal, pytest.raises(SystemExit) as ended:
        repeat_and_report(request, make_tools(bench, journal), bench.listen, as_json)
    assert ended.value.code == (1 if slower else 0)
    said = capsys.readouterr().out
    if as_json:
        answer = json.loads(said)
        assert answer["agrees"] is (slower is None)
        (case,) = answer["cases"]
        assert (case["problem"], case["tokens"], case["agrees"]) == (PROBLEM.name, 1024, slower is None)
        assert case["comparisons"][0]["again"]["low"] <= case["comparisons"][0]["again"]["ratio"]
    else:
        assert BEST.name in said
        assert ("1 of 1 finals agree" if slower is None else "0 of 1 finals agree") in said
