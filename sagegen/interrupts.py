"""Ctrl+C at the wrong moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold a SIGINT back until the block has ended, then raise KeyboardInterrupt.

    For starting a process: an interrupt between its fork and the assignment would leave it running with nobody to end
    it. Python delivers signals to the main thread, so other threads need nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if held:
        raise KeyboardInterrupt
