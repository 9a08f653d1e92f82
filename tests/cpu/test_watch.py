"""The lines that a tuning run leaves on stderr."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sagegen.cli.watch import Watcher
from sagegen.tuning.events import Attempted, Decided, FinalsStarted, GateStarted, Preparing, Started, Warned
from sagegen.tuning.journal import Outcome, Record


def attempted(
    n: int, speed: float | None, outcome: Outcome = "ok", reason: str = "", left_s: float | None = None
) -> Attempted:
    record = Record("d64_fp16_full_int8", f"config{n}", "screen", outcome, "l20", 1, "aa", reason)
    return Attempted(record, f"config{n}", speed, {"ok": n, "crash": 2}, n / 10, left_s)


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    return lambda: capsys.readouterr().err.splitlines()


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)


def test_a_run_that_is_not_watched_leaves_plain_lines(lines) -> None:  # type: ignore[no-untyped-def]
    now = [0.0]
    with Watcher(plain_console(), clock=lambda: now[0]) as watch:
        watch(Started("l20", ("d64_fp16_full_int8",), 7592, 12, offline=False))
        watch(attempted(1, 1.0))
        watch(attempted(2, 1.25))
        watch(attempted(3, 1.25))  # no better: no line
        now[0] = 20.0
        watch(attempted(4, 1.25, left_s=185.0))
        watch(Decided("d64_fp16_full_int8", "kv1-2047", "sdpa", "config2", 1.2471, 0.981))
    assert lines() == [
        "l20: measuring; 1 problem, 7592 configs to choose from, 12 attempts known from the journal",
        "d64_fp16_full_int8: best so far 1.000x the default: config1",
        "d64_fp16_full_int8: best so far 1.250x the default: config2",
        " 40%  best 1.25x, 4 ok, 2 crash, 3:05 left",
        "d64_fp16_full_int8 kv1-2047: sdpa: config2 (1.247x the default, 0.981x SDPA)",
    ]


def test_failures_are_named_once_per_kind_and_constraints_not_at_all(lines) -> None:  # type: ignore[no-untyped-def]
    with Watcher(plain_console(), clock=lambda: 1.0) as watch:
        for n in range(1, 4):
            watch(attempted(n, None, "compile", "kernel.cu(3): error: x"))
        watch(attempted(4, None, "constraint", "spills 999 bytes"))
        watch(attempted(5, None, "crash", "illegal address"))
    assert lines() == [
        "compile: d64_fp16_full_int8 config1: kernel.cu(3): error: x",
        "crash: d64_fp16_full_int8 config5: illegal address",
    ]


def test_an_offline_run_says_so_and_warnings_stand_out(lines) -> None:  # type: ignore[no-untyped-def]
    with Watcher(plain_console(), clock=lambda: 1.0) as watch:
        watch(Started("l20", ("a", "b"), 9, 0, offline=True))
        watch(Warned("GPU 0: other processes use the GPU (7)"))
        watch(Decided("a", "kv1-2047", "kernel", None, None, None))
    assert lines() == [
        "l20: compiling and ranking, nothing is measured; 2 problems, 9 configs to choose from",
        "Warning: GPU 0: other processes use the GPU (7)",
        "a kv1-2047: no config finished",
    ]


def test_a_terminal_gets_one_live_line() -> None:
    screen = io.StringIO()
    with Watcher(Console(file=screen, force_terminal=True, width=150), clock=lambda: 1.0) as watch:
        watch(attempted(2, 1.25, left_s=61.0))
        watch(FinalsStarted("d64_fp16_full_int8", 1024, ("a", "b"), 0, 3))
        watch._progress.refresh()
    assert "best so far 1.250x" in screen.getvalue()
    assert "finals 1 of 3" in screen.getvalue()


def test_the_gate_of_an_offline_run_is_told_now_and_then(lines) -> None:  # type: ignore[no-untyped-def]
    now = [0.0]
    with Watcher(plain_console(), clock=lambda: now[0]) as watch:
        watch(GateStarted("d64_fp16_full_int8", "config1"))
        now[0] = 20.0
        watch(GateStarted("d64_fp16_full_int8", "config2"))
    assert lines() == ["100%  accuracy gate in the emulator: d64_fp16_full_int8 config2"]


def test_what_takes_a_while_before_the_search_is_told_at_once(lines) -> None:  # type: ignore[no-untyped-def]
    watch = Watcher(plain_console())
    watch(Preparing("l20"))
    watch(Preparing("rtx4090", "d64_bf16_full_int8"))
    assert lines() == [
        "l20: listing configs, starting workers, compiling the default configs",
        "rtx4090: listing configs of d64_bf16_full_int8",
    ]
