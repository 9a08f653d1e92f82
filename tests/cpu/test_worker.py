"""The measuring worker: whatever a candidate does to its process, the parent gets an outcome and goes on."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from sagegen.errors import WorkerError
from sagegen.measuring.jobs import Candidate, Finals, Gate, Ping, Screen, read_job
from sagegen.measuring.worker import Worker
from sagegen.problem import Shape

CHILD = (sys.executable, str(Path(__file__).with_name("worker_child.py")))


def act(name):
    return Gate(Candidate(cubin="", problem="d64_fp16_full_int8", config=name))


@pytest.fixture
def worker():
    with Worker(0, command=CHILD, start_timeout_s=60) as worker:
        yield worker


def wait_until_gone(pid, seconds=10):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":  # nobody reaps it in a container
            return True
        time.sleep(0.02)
    return False


def test_jobs_share_one_process(worker):
    first = worker.run(Ping(), 10)
    second = worker.run({"job": "ping"}, 10)
    assert first.outcome == second.outcome == "ok"
    assert first.data["pid"] == second.data["pid"] == worker.pid


def test_worker_has_its_own_process_group(worker):
    worker.run(Ping(), 10)
    assert os.getpgid(worker.pid) == worker.pid != os.getpgid(0)


def test_hang_is_killed_in_time_and_the_next_job_works(worker):
    worker.run(Ping(), 10)
    hung = worker.pid
    start = time.monotonic()
    reply = worker.run(act("sleep"), 1)
    assert time.monotonic() - start < 5
    assert (reply.outcome, reply.reason) == ("timeout", "no answer within 1 s")
    assert reply.data == {"running": "d64_fp16_full_int8_sleep"}
    assert wait_until_gone(hung)
    assert worker.run(Ping(), 10).outcome == "ok"
    assert worker.pid != hung


def test_segfault_is_a_crash_with_its_last_words(worker):
    reply = worker.run(act("segfault"), 10)
    assert reply.outcome == "crash"
    assert reply.reason == "worker killed by SIGSEGV: about to fall"
    assert reply.data == {"running": "d64_fp16_full_int8_segfault"}
    assert worker.run(Ping(), 10).outcome == "ok"


def test_exit_is_a_crash(worker):
    assert worker.run(act("exit"), 10).reason == "worker ended with status 3"
    assert worker.run(Ping(), 10).outcome == "ok"


def test_cuda_error_costs_the_process_its_life(worker):
    worker.run(Ping(), 10)
    spoiled = worker.pid
    reply = worker.run(act("cuda-error"), 10)
    assert (reply.outcome, reply.reason) == ("crash", "CUDA error: an illegal memory access was encountered")
    assert worker.pid is None
    assert wait_until_gone(spoiled)
    assert worker.run(Ping(), 10).outcome == "ok"


def test_failed_gate_keeps_the_process(worker):
    worker.run(Ping(), 10)
    pid = worker.pid
    reply = worker.run(act("inaccurate"), 10)
    assert (reply.outcome, reply.reason) == ("accuracy", "normal: cosine 0.97 is below 0.9993")
    assert worker.pid == pid


def test_prints_do_not_reach_the_pipe(worker):
    assert worker.run(act("print"), 10).outcome == "ok"
    assert worker.run(Ping(), 10).outcome == "ok"


def test_bug_of_the_worker_is_not_held_against_the_candidate(worker):
    with pytest.raises(WorkerError, match="a bug of the worker"):
        worker.run(act("raise"), 10)
    assert worker.run(Ping(), 10).outcome == "ok"


def test_garbage_on_the_pipe_is_an_error(worker):
    with pytest.raises(WorkerError, match="not json"):
        worker.run(act("garbage"), 10)
    assert worker.pid is None


def test_worker_that_cannot_start_says_why():
    ends = Worker(0, command=(sys.executable, "-c", "raise SystemExit('no torch here')"))
    with pytest.raises(WorkerError, match="did not start: worker ended with status 1: no torch here"):
        ends.run(Ping(), 10)
    assert ends.pid is None
    with pytest.raises(WorkerError, match="cannot be started"):
        Worker(0, command=("/nowhere/python",)).run(Ping(), 10)


def test_real_worker_without_a_gpu_says_so():
    with pytest.raises(WorkerError, match=r"did not start: worker ended with status 1: .*(no NVIDIA driver|no GPU)"):
        Worker(99).run(Ping(), 60)  # no machine has that many


def test_worker_that_is_not_ready_in_time_is_an_error():
    with Worker(0, command=(sys.executable, "-c", "import time; time.sleep(600)"), start_timeout_s=0.3) as worker:
        with pytest.raises(WorkerError, match=r"not ready within 0\.3 s"):
            worker.run(Ping(), 10)
        assert worker.pid is None


def test_close_from_another_thread_ends_the_job(worker):
    worker.run(Ping(), 10)
    pid = worker.pid
    closer = threading.Timer(0.2, worker.close)
    closer.start()
    with pytest.raises(WorkerError, match="closed in the middle of a job"):
        worker.run(act("sleep"), 60)
    closer.join()
    assert wait_until_gone(pid)


PARENT = """
import sys
from sagegen.measuring.jobs import Candidate, Gate, Ping
from sagegen.measuring.worker import Worker
worker = Worker(0, command={child!r})
worker.run(Ping(), 60)
print(worker.pid, flush=True)
if {busy!r}:
    worker.run(Gate(Candidate(cubin="", problem="d64_fp16_full_int8", config="sleep")), 600)
else:
    sys.stdin.read()
"""


@pytest.mark.parametrize("busy", [True, False])
def test_worker_dies_with_its_parent(busy):
    script = PARENT.format(child=CHILD, busy=busy)
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.send_signal(signal.SIGKILL)
    assert wait_until_gone(child)


def test_gpu_is_chosen_by_pci_order(tmp_path):
    seen = tmp_path / "environment"
    script = (
        "import os, pathlib; "
        f"pathlib.Path({str(seen)!r}).write_text(os.environ['CUDA_DEVICE_ORDER'] + os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    with Worker(3, command=(sys.executable, "-c", script)) as worker, pytest.raises(WorkerError):
        worker.run(Ping(), 10)
    assert seen.read_text() == "PCI_BUS_ID3"


CANDIDATE = Candidate("k.cubin", "d64_fp16_full_int8", "mma_x")


@pytest.mark.parametrize(
    "job",
    [
        Ping(),
        Gate(CANDIDATE, kinds=("normal",), captured="x.safetensors"),
        Screen(CANDIDATE, Shape(1, 4, 2, 100, 200), launches=7, sustained_s=0.5),
        Finals((CANDIDATE, CANDIDATE), Shape(1, 4, 4, 64, 64), rounds=3, seed=9, peers=True),
    ],
)
def test_job_survives_its_json_form(job):
    assert read_job(msgspec.json.decode(msgspec.json.encode(job))) == job


def test_misspelled_job_is_refused_before_anything_starts(worker):
    with pytest.raises(msgspec.ValidationError, match="launchs"):
        worker.run({"job": "screen", "candidate": {"cubin": "", "problem": "", "config": ""}, "launchs": 3}, 10)
    assert worker.pid is None
