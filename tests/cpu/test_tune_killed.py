"""F5 with real processes: the tuner is killed, its worker dies with it, and the next run repeats nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from sagegen.tuning.journal import read_journal

CHILD = Path(__file__).with_name("tune_child.py")


def worker_ids(folder: Path) -> set[int]:
    """Workers of the run in `folder`."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if b"worker" in words and str(folder).encode() in words:
            found.add(int(entry.parent.name))
    return found


def wait_until(condition, seconds: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_f5_a_killed_run_leaves_no_worker_and_resumes_where_it_was(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    run = subprocess.Popen([sys.executable, str(CHILD), str(tmp_path)])
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 10)
    assert worker_ids(tmp_path)
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_until(lambda: not worker_ids(tmp_path), 10)
    known = read_journal(journal)

    done = subprocess.run([sys.executable, str(CHILD), str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["32", "5"]
    records = [r for r in read_journal(journal) if r.phase == "screen"]
    assert records[: len(known)] == known
    assert max(Counter(r.config for r in records).values()) == 1
    assert Counter(r.outcome for r in records) == {"ok": 31, "crash": 1}
    assert next(r.reason for r in records if r.outcome == "crash").startswith("worker killed by SIGABRT")


def test_f5_a_worker_that_is_killed_from_outside_costs_nobody_an_outcome(tmp_path: Path) -> None:
    """Whoever it was running is run again alone; the record says what happened, the journal lacks nothing."""
    journal = tmp_path / "journal.jsonl"
    with subprocess.Popen([sys.executable, str(CHILD), str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
        killed = set()
        for count in (1, 6):
            wait_until(lambda count=count: journal.exists() and journal.read_bytes().count(b"\n") >= count)  # type: ignore[misc]
            wait_until(lambda: bool(worker_ids(tmp_path) - killed))
            for pid in worker_ids(tmp_path) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        out, _ = run.communicate(timeout=120)
    assert run.returncode == 0
    assert out.split() == ["32", "5"]
    records = [r for r in read_journal(journal) if r.phase == "screen"]
    assert Counter(r.outcome for r in records) == {"ok": 31, "crash": 1}
    assert next(r for r in records if r.outcome == "crash").reason.startswith("worker killed by SIGABRT")
    first = [r.first_failure for r in records if r.first_failure]
    assert 1 <= len(first) <= 2  # a worker may have been between two jobs
    assert all("worker killed by SIGKILL" in failure for failure in first)
