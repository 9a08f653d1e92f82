"""Draws a tuning run: one live line on a terminal, plain lines elsewhere. Both go to stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from sagegen.entry import PredictedRatio
from sagegen.tuning.events import (
    Attempted,
    Decided,
    Event,
    FinalsStarted,
    GateStarted,
    Heard,
    Preparing,
    Started,
    Warned,
)

_STATUS_EVERY_S = 15.0


class Watcher:
    """Listens to a run; a context manager, so that the live line is taken down whatever happens.

    Args:
        console: of stderr; decides by itself whether it is a terminal.
        clock: seconds, for tests.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._last_status = clock()
        self._best: dict[str, float | PredictedRatio] = {}
        self._reported: set[tuple[str, str]] = set()
        self._task: TaskID | None = None
        self._progress = Progress(
            BarColumn(20), TaskProgressColumn(), TextColumn("{task.description}"), console=self._console, transient=True
        )

    def __enter__(self) -> Watcher:
        if self._console.is_terminal:
            self._progress.start()
            self._task = self._progress.add_task("starting", total=1.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:  # of one that never started rich prints an empty line
            self._progress.stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Preparing):
            what = f" of {event.problem}" if event.problem else ", starting workers, compiling the default configs"
            self._say(f"{event.gpu}: listing configs{what}")
        elif isinstance(event, Started):
            self._say(_describe_start(event))
        elif isinstance(event, Warned):
            self._say(f"Warning: {event.message}")
        elif isinstance(event, Attempted):
            self._attempted(event)
        elif isinstance(event, Heard):
            self._say(f"{event.problem}: {event.speed:.3f}x the default on {event.machine}: {event.config}")
        elif isinstance(event, FinalsStarted):
            self._update(
                event.index / event.count,
                f"finals {event.index + 1} of {event.count}: {event.problem} at {event.tokens}",
            )
        elif isinstance(event, GateStarted):
            self._update(1.0, f"accuracy gate in the emulator: {event.problem} {event.config}")
        elif isinstance(event, Decided):
            self._say(_describe_decision(event))

    def _attempted(self, event: Attempted) -> None:
        record = event.record
        if record.outcome not in ("ok", "constraint"):
            # a template error fails a hundred configs alike: one line says it
            kind = (record.outcome, record.reason)
            if kind not in self._reported:
                self._reported.add(kind)
                self._say(f"{record.outcome}: {record.problem} {record.config}: {record.reason}")
        if event.best_speed is not None and _plain(event.best_speed) > _plain(self._best.get(record.problem, 0.0)):
            self._best[record.problem] = event.best_speed
            self._say(f"{record.problem}: best so far {event.best_speed:.3f}x the default: {event.best_config}")
        self._update(event.progress, describe_status(self._best, event))

    def _say(self, line: str) -> None:
        if self._task is None:
            click.echo(line, err=True)
        else:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _update(self, progress: float, status: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=progress, description=status)
        elif self._clock() - self._last_status >= _STATUS_EVERY_S or progress == 0:
            self._last_status = self._clock()
            click.echo(f"{progress:4.0%}  {status}", err=True)


def _plain(speed: float | PredictedRatio) -> float:
    """To compare; what is shown keeps its mark."""
    return speed.ratio if isinstance(speed, PredictedRatio) else speed


def describe_status(best: Mapping[str, float | PredictedRatio], event: Attempted) -> str:
    """`best 1.31x, 57 ok, 2 crash, 3:05 left`."""
    counts = [
        f"{count} {outcome}" for outcome, count in sorted(event.counts.items(), key=lambda c: (c[0] != "ok", c[0]))
    ]
    left = [] if event.left_s is None else [f"{int(event.left_s) // 60}:{int(event.left_s) % 60:02} left"]
    top = [f"best {max(best.values(), key=_plain):.2f}x"] if best else []
    return ", ".join([*top, *counts, *left])


def _describe_start(event: Started) -> str:
    how = "compiling and ranking, nothing is measured" if event.offline else "measuring"
    known = f", {event.known} attempts known from the journal" if event.known else ""
    count = len(event.problems)
    problems = "1 problem" if count == 1 else f"{count} problems"
    return f"{event.gpu}: {how}; {problems}, {event.configs} configs to choose from{known}"


def _describe_decision(event: Decided) -> str:
    if event.config is None:
        return f"{event.problem} {event.bucket}: no config finished"
    speeds = [
        f"{ratio:.3f}x {name}"
        for name, ratio in (("the default", event.speed_vs_default), ("SDPA", event.speed_vs_sdpa))
        if ratio is not None
    ]
    return f"{event.problem} {event.bucket}: {event.answer}: {event.config} ({', '.join(speeds) or 'alone'})"
