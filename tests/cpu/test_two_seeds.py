"""The race of two seeds' winners, as tests/gpu/two_seeds.py runs it: who takes part, and what it says of them."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

import two_seeds
from sagegen.gpu import DetectedGpu, find_gpu
from sagegen.measuring.jobs import Finals, Gate, Job, Reply
from sagegen.problem import parse_problem
from sagegen.rules import Target, default_config
from sagegen.space import Config, parse_config
from sagegen.toolkit import Toolkit
from two_seeds import Race, contestants, length_of, race, report

RUNS = Path(__file__).parents[2] / "docs" / "gpu-runs"
PROBLEM = parse_problem("d128_bf16_full_int8")
DEFAULT = default_config(Target(find_gpu("h200"), PROBLEM))
SLOWER, BEST = (replace(DEFAULT, stages=stages) for stages in (2, 4))


def make_race(first_us: float, second_us: float, best_us: float) -> Race:
    calls = {DEFAULT: [first_us] * 8, SLOWER: [second_us] * 8, BEST: [best_us] * 8}
    origins = {DEFAULT: ["seed 1"], SLOWER: ["seed 2"], BEST: ["measured entry"]}
    return Race("d128 at 16K", calls, origins, dict.fromkeys(calls, True))


@pytest.mark.parametrize(
    ("first_us", "second_us", "best_us", "holds"),
    [
        (100.0, 101.9, 99.0, True),
        (100.0, 102.1, 102.0, False),
        (100.0, 100.0, 97.0, False),
        (102.1, 100.0, 100.0, False),
    ],
)
def test_seeds_agree_within_two_percent_and_are_near_the_best_within_three(
    first_us: float, second_us: float, best_us: float, holds: bool
) -> None:
    text, found = report(make_race(first_us, second_us, best_us), [1, 2])
    assert found is holds
    assert f"seed 1 takes {first_us / second_us:.4f}" in text


def test_a_seed_without_a_winner_does_not_pass() -> None:
    text, holds = report(make_race(100.0, 100.0, 100.0), [1, 3])
    assert not holds
    assert "seed 3 found nothing" in text


def test_journals_of_seeds_and_recorded_runs_and_the_registry_name_who_races(tmp_path: Path) -> None:
    packed = RUNS / "2026-11-30c-h200-bf16-journal.jsonl.gz"
    (tmp_path / two_seeds.journal_name("h200", PROBLEM, 1)).write_bytes(gzip.decompress(packed.read_bytes()))
    named = list(contestants("h200", PROBLEM, length_of(16384), [1, 2], tmp_path, RUNS))
    by_origin = {origin: {config for config, other in named if other == origin} for _, origin in named}
    assert by_origin["seed 1"] == by_origin["2026-11-30c-h200-bf16"] != set()
    assert by_origin["measured entry"]
    assert {"2026-11-29-h200-bf16", "2026-11-30b-h200-bf16"} <= set(by_origin)
    assert "seed 2" not in by_origin
    assert not any("fp16" in origin for origin in by_origin)


def test_everyone_that_passes_the_gate_races_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    class FakeWorker:
        def __init__(self, index: int) -> None:
            pass

        def __enter__(self) -> FakeWorker:
            return self

        def __exit__(self, *what: object) -> None:
            pass

        def run(self, job: Job, timeout_s: float) -> Reply:
            jobs.append(job)
            if isinstance(job, Gate):
                wrong = job.candidate.config == SLOWER.name
                figures = {"normal": {"cosine": 0.9999, "relative_l1": 0.01}}
                return Reply("accuracy", "wrong") if wrong else Reply("ok", data={"figures": figures})
            assert isinstance(job, Finals)
            times = {DEFAULT.name: 100.0, BEST.name: 99.0}
            return Reply("ok", data={"call_us": [[times[c.config]] * job.rounds for c in job.candidates]})

    gpu = find_gpu("h200")

    def build(gpu: object, pairs: list[tuple[object, Config]], env: object) -> dict[tuple[object, Config], Path]:
        return {pair: tmp_path / pair[1].name for pair in pairs}

    named = [(DEFAULT.name, "seed 1"), (SLOWER.name, "seed 2"), (BEST.name, "seed 2"), (BEST.name, "measured entry")]
    monkeypatch.setattr("two_seeds.Worker", FakeWorker)
    monkeypatch.setattr("two_seeds.build_pairs", build)
    monkeypatch.setattr("two_seeds.find_toolkit", lambda env: Toolkit(Path("/nvcc"), (13, 0), "V13"))
    device = DetectedGpu(0, "NVIDIA H200", 132, "580.1", "sm_90a", gpu)
    monkeypatch.setattr("two_seeds.require_gpu", lambda gpu, purpose: device)
    monkeypatch.setattr("two_seeds.contestants", lambda *asked: iter(named))
    found = race("h200", PROBLEM, length_of(16384), [1, 2], tmp_path, tmp_path)
    assert found.ranked == [BEST, DEFAULT]
    assert found.best_of(2) == BEST
    assert [len(times) for times in found.calls.values()] == [120, 120]
    finals = [job for job in jobs if isinstance(job, Finals)]
    assert [[parse_config(c.config) for c in job.candidates] for job in finals] == [[DEFAULT, BEST]] * 2
    assert len({job.seed for job in finals}) == 2
