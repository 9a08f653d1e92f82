"""F1, F2, F7: `sagegen tune` with every planted fault at once, on a card that others use, and its finals repeated."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sagegen.tuning.journal import Record, read_journal
from sagegen.tuning.plant import EXPECTED, PLANTS
from sagegen.tuning.variants import Renderer

pytestmark = pytest.mark.gpu

BUDGET_S = 90
ASKED = ("--head-dim", "64", "--full", "--tokens", "1024")
#: Keeps a card busy until its stdin ends.
BUSY = """
import sys, threading, torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
done = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
torch.cuda.synchronize()
print("busy", flush=True)
while not done.is_set():
    for _ in range(50):
        y = x @ x
    torch.cuda.synchronize()
"""


@dataclass(frozen=True)
class TunedRun:
    """A finished `sagegen tune` and where its files are."""

    folder: Path
    seconds: float
    done: subprocess.CompletedProcess[str]

    @property
    def records(self) -> list[Record]:
        return read_journal(self.folder / "journal.jsonl")


def run_tune(gpu: Any, folder: Path, *arguments: str) -> TunedRun:
    environment = {**os.environ, "SAGEGEN_TUNED_DIR": str(folder / "tuned")}
    command = [sys.executable, "-m", "sagegen.cli.entry", "tune", "--gpu", gpu.name, *ASKED]
    start = time.monotonic()
    done = subprocess.run(
        [*command, "--journal", str(folder / "journal.jsonl"), *arguments],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return TunedRun(folder, time.monotonic() - start, done)


@pytest.fixture(scope="module")
def planted(gpu: Any, toolkit: Any, tmp_path_factory: pytest.TempPathFactory) -> TunedRun:
    """A run with all plants; --force, since the process of these tests may use the card itself."""
    plants = [word for plant in PLANTS for word in ("--plant", plant)]
    folder = tmp_path_factory.mktemp("planted")
    run = run_tune(gpu, folder, "--budget", f"{BUDGET_S}s", "--incumbent", "default", "--force", "--json", *plants)
    print(run.done.stderr)
    return run


def is_planted(record: Record, renderer: Renderer) -> bool:
    return record.text_sha256 != renderer.text_sha256(record.problem, record.config)


def test_f1_f2_every_planted_fault_is_recorded_as_what_it_is(planted: TunedRun) -> None:
    assert planted.done.returncode == 0, planted.done.stderr
    renderer = Renderer()
    found = [record for record in planted.records if is_planted(record, renderer)]
    wanted = Counter(EXPECTED[plant] for plant in PLANTS if plant != "bomb")
    ends = Counter(record.outcome for record in found)
    assert ends - wanted in (Counter(timeout=1), Counter(compile=1)), [(r.outcome, r.reason) for r in found]
    assert sum(ends.values()) == len(PLANTS)
    crashes = [record.reason for record in found if record.outcome == "crash"]
    assert any(reason.startswith("at 1024 tokens") for reason in crashes), crashes  # the 50th launch: not in the gate


def test_f1_the_run_ends_in_time_with_a_summary(planted: TunedRun) -> None:
    assert planted.seconds < BUDGET_S + 30
    answer = json.loads(planted.done.stdout)
    assert answer["interrupted"] is False
    assert answer["written"] >= 1
    assert answer["outcomes"]["crash"] == 2


def test_f1_later_candidates_are_measured_as_ever(planted: TunedRun) -> None:
    renderer = Renderer()
    records = planted.records
    last = max(i for i, record in enumerate(records) if is_planted(record, renderer) and record.phase == "screen")
    later = [record for record in records[last + 1 :] if record.phase == "screen"]
    assert later
    assert {record.outcome for record in later} <= {"ok", "accuracy"}
    assert not any(record.first_failure for record in later)
    assert any(record.phase == "final" and record.outcome == "ok" for record in records)


def test_what_nvml_said_and_warm_times_are_recorded(planted: TunedRun) -> None:
    for record in planted.records:
        for samples in record.samples if record.phase == "screen" and not record.shared_from else ():
            conditions = samples.conditions
            assert conditions is not None
            assert conditions.looks >= 1
            assert 100 < (conditions.clock_mhz or 0) < 4000
            assert 10 < (conditions.power_w or 0) < 2000
            assert 15 < (conditions.temperature_c or 0) < 110
            assert conditions.dropped <= conditions.throttled
            assert len(samples.warm_us) >= 1
            assert statistics.median(samples.warm_us) < 1.1 * samples.median_us


def test_finals_repeated_in_a_fresh_process_agree(planted: TunedRun, gpu: Any) -> None:
    run = run_tune(gpu, planted.folder, "--verify", "--force", "--json")
    answer = json.loads(run.done.stdout)
    print(json.dumps(answer, indent=1))
    assert run.done.returncode == (0 if answer["agrees"] else 1)
    assert answer["cases"]
    for case in answer["cases"]:
        assert all(c["again"]["low"] <= c["again"]["ratio"] <= c["again"]["high"] for c in case["comparisons"])
    assert answer["agrees"], answer


def test_f7_a_card_that_others_use_is_refused_and_measured_with_force(gpu: Any, toolkit: Any, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as busy:
        assert busy.stdout is not None
        assert busy.stdout.readline() == "busy\n"
        time.sleep(2)  # NVML's figure is of the last second
        refused = run_tune(gpu, tmp_path, "--trials", "1")
        forced = run_tune(gpu, tmp_path, "--trials", "1", "--incumbent", "default", "--force")
        busy.communicate("")
    assert refused.done.returncode == 2
    assert "--force" in refused.done.stderr
    assert "times will be off" in refused.done.stderr
    assert forced.done.returncode == 0, forced.done.stderr
    assert "Warning: GPU 0" in forced.done.stderr
