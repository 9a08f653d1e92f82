"""Interrupts that are held back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sagegen.cli.main import main
from sagegen.errors import SagegenError
from sagegen.interrupts import PromptInterrupts, deferred_interrupts

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)


@pytest.fixture(autouse=True)
def _heeds_interrupts() -> Iterator[None]:
    """A shell's background jobs, pytest among them, start with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_raised_after_the_block_and_not_in_it() -> None:
    done = []

    def work() -> None:
        with deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("the whole block")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the whole block"]


def test_the_handler_before_is_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_change_nothing() -> None:
    seen = []

    def work() -> None:
        with deferred_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_sigterm_is_held_too_and_an_ignored_interrupt_stays_ignored() -> None:
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            assert heard == []
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


# --- imports and finalizers, which lose exceptions: numpy's, from torch's C++ code, is one

#: A module that is interrupted while it is imported, and does what torch's C++ code does with an error: drops it.
_SLOW = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.{name})
    for _ in range(10):
        time.sleep(0.01)
except BaseException:
    raise SystemExit("an interrupt in the midst of an import")
"""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "planted_slow.py"
    sys.modules.pop("planted_slow", None)


@BOTH
def test_an_interrupt_during_an_import_comes_right_after_it(number: signal.Signals, slow: Path) -> None:
    slow.write_text(_SLOW.format(name=number.name))
    reached = []

    def work() -> None:
        with PromptInterrupts():
            import planted_slow  # type: ignore[import-not-found]

            reached.append(planted_slow)
            time.sleep(60)

    started = time.monotonic()
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached or "planted_slow" in sys.modules  # the import was whole
    assert time.monotonic() - started < 30
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == handlers


@BOTH
def test_an_interrupt_in_a_finalizer_comes_right_after_it(number: signal.Signals) -> None:
    finished = []

    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)
            time.sleep(0.001)
            finished.append(True)

    def work() -> None:
        with PromptInterrupts():
            Finalized()
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert finished == [True]


def test_one_that_is_held_back_elsewhere_does_not_come_in_that_block(slow: Path) -> None:
    slow.write_text(_SLOW.format(name="SIGINT"))
    done = []

    def work() -> None:
        with PromptInterrupts():
            with deferred_interrupts():
                import planted_slow  # noqa: F401

                time.sleep(0.1)
                done.append(True)
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]


def test_an_ignored_interrupt_stays_ignored_by_commands() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with PromptInterrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
    assert not interrupts.arrived


def test_a_command_whose_interrupt_a_library_swallowed_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def swallow() -> list[object]:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        return []

    monkeypatch.setattr("sagegen.cli.gpus.detect_gpus", swallow)
    result = CliRunner().invoke(main, ["gpus"])
    assert (result.exit_code, result.stderr) == (130, "Interrupted.\n")


@pytest.mark.parametrize("error", [SagegenError("no GPU", "find one"), click.ClickException("no GPU"), OSError("gone")])
def test_a_command_that_fails_after_its_interrupt_was_swallowed_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def swallow_and_fail() -> list[object]:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        raise error

    monkeypatch.setattr("sagegen.cli.gpus.detect_gpus", swallow_and_fail)
    result = CliRunner().invoke(main, ["gpus"])
    assert (result.exit_code, result.stderr) == (130, "Interrupted.\n")


#: `sagegen tune`, interrupted while it imports a module and by code that drops the error.
_TUNE = """
import os, signal, sys, time
number, module = int(sys.argv.pop(1)), sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)

class Planted:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            try:
                os.kill(os.getpid(), number)
                time.sleep(0.05)
            except BaseException:
                print("an interrupt in the midst of an import", file=sys.stderr)

sys.meta_path.insert(0, Planted())
from sagegen.cli.main import main
from sagegen.errors import SagegenError
main(prog_name="sagegen")
"""


@BOTH
@pytest.mark.parametrize("module", ["sagegen.cli.tune", "numpy", "sagegen.tuning.offline"])
def test_tune_ends_with_130_when_it_is_interrupted_while_it_imports(
    number: signal.Signals, module: str, tmp_path: Path
) -> None:
    folders = {"SAGEGEN_CACHE_DIR": str(tmp_path / "cache"), "SAGEGEN_TUNED_DIR": str(tmp_path / "tuned")}
    words = [str(int(number)), module, "tune", "--offline", "--gpu", "l20", "--budget", "5s", "--head-dim", "64"]
    environment = {**os.environ, **folders}
    command = [sys.executable, "-c", _TUNE, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    *before, last = done.stderr.splitlines()
    assert (done.returncode, last) == (130, "Interrupted.")
    assert all(line.startswith("l20: listing configs of ") for line in before)  # it may have come so far


def test_what_follows_an_interrupt_within_seconds_is_the_same_request_and_a_later_one_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("sagegen.interrupts.time.monotonic", lambda: now)
    with PromptInterrupts():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        now += 2.9
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        now += 0.2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
