"""Signals at the edges of the `sagegen` command: before it has imported anything, and in bursts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)

#: The command, signalled as soon as it imports click.
_EARLY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from sagegen.cli.entry import run

class Planted:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), int(sys.argv[1]))

assert "click" not in sys.modules
sys.meta_path.insert(0, Planted())
run()
"""

#: A command that waits, and takes its time to clean up.
_WAITING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import sagegen.cli.gpus
from sagegen.cli.entry import run

def wait():
    try:
        print("waiting", flush=True)
        time.sleep(60)
    finally:
        time.sleep(0.1)
        print("cleaned up", flush=True)

sagegen.cli.gpus.detect_gpus = wait
sys.argv = ["sagegen", "gpus"]
run()
"""


@BOTH
def test_a_signal_before_anything_is_imported_ends_the_command_as_later_ones_do(number: signal.Signals) -> None:
    done = subprocess.run([sys.executable, "-c", _EARLY, str(int(number))], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")


def interrupt_twice(number: signal.Signals, pause_s: float) -> tuple[int, str, str]:
    with subprocess.Popen(
        [sys.executable, "-c", _WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "waiting\n"
        for _ in range(2):
            run.send_signal(number)
            time.sleep(pause_s)
        out, err = run.communicate(timeout=60)
        return run.returncode, out, err


@BOTH
def test_a_burst_of_signals_is_one_request(number: signal.Signals) -> None:
    """The second may come while the first one's cleaning up goes on, or as the process ends."""
    with ThreadPoolExecutor(2) as threads:
        ends = list(threads.map(lambda pause_s: interrupt_twice(number, pause_s), (0.0, 0.02, 0.1, 0.15)))
    assert set(ends) == {(130, "cleaned up\n", "Interrupted.\n")}
