"""Ctrl+C and SIGTERM at the wrong moment."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: What ends a run with its best so far: Ctrl+C, and what batch systems send.
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
#: Python's own importer: a frame of it on the stack is an import that has not ended.
_IMPORTER = "<frozen importlib._bootstrap>"
#: How soon an interrupt that came during an import is tried again.
_RETRY_S = 0.02
#: Batch systems and shells send a signal more than once: what follows so soon says the same, and must not disturb what
#: the first one began.
_SAME_REQUEST_S = 3.0


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block has ended, then deliver them to the handlers from before.

    For starting a process: an interrupt between its fork and the assignment would leave it running with nobody to end
    it. Python delivers signals to the main thread, so other threads need nothing. One that was ignored stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    previous = {number: signal.signal(number, lambda number, frame: held.append(number)) for number in _replaceable()}
    try:
        yield
    finally:
        for replaced, handler in previous.items():
            signal.signal(replaced, handler)
    for number in dict.fromkeys(held):
        signal.raise_signal(number)


def _replaceable() -> list[signal.Signals]:
    """Those whose handler can be put back: not one that was set from outside Python."""
    return [number for number in _INTERRUPTS if signal.getsignal(number) is not None]


class PromptInterrupts:
    """SIGINT and SIGTERM raise KeyboardInterrupt in the block, but never inside an import or a finalizer.

    An exception there does not end the program: numpy, loaded by torch's C++ code, is left half made, the error is
    dropped or the process aborts. Such an interrupt is raised as soon as the import has ended. Others that follow
    within three seconds are the same request and raise nothing; a later one raises again. A signal that the process
    ignores, as a shell's background jobs do SIGINT, stays ignored. Outside the main thread nothing changes.

    Attributes:
        arrived: whether one came, even if a library swallowed the exception since.
    """

    def __init__(self) -> None:
        self.arrived = False
        self._outermost: FrameType | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._held: int | None = None
        self._raised_at = -math.inf

    def __enter__(self) -> PromptInterrupts:
        if threading.current_thread() is threading.main_thread():
            self._outermost = sys._getframe(1)
            heeded = [number for number in _replaceable() if signal.getsignal(number) != signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._interrupt) for number in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._outermost = None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.arrived = True
        if time.monotonic() - self._raised_at < _SAME_REQUEST_S:
            return
        if self._may_raise(frame):
            self._raised_at = time.monotonic()
            raise KeyboardInterrupt
        if signal.SIGALRM not in self._previous:
            self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._try_again)
            signal.siginterrupt(signal.SIGALRM, False)  # what is being imported need not know of it
        self._held = number
        signal.setitimer(signal.ITIMER_REAL, _RETRY_S)

    def _try_again(self, number: int, frame: FrameType | None) -> None:
        held, self._held = self._held, None
        if held is not None:  # to the handler of now: `deferred_interrupts` holds this one too
            signal.raise_signal(held)

    def _may_raise(self, frame: FrameType | None) -> bool:
        """Whether nothing between the block and `frame` is an import or a finalizer."""
        while frame is not None and frame is not self._outermost:
            if frame.f_code.co_filename == _IMPORTER or frame.f_code.co_name == "__del__":
                return False
            frame = frame.f_back
        return True
