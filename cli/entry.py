"""The first and the last lines of the `sagegen` command: signals have their meaning before anything is imported.

Python's own handling ends a process by SIGTERM without a word, and prints a traceback for Ctrl+C. Until a command runs
nothing can be lost, so the process just ends with 130, as commands do.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(130)  # an exception could be dropped by what is being imported


def run() -> None:
    """`sagegen`: see `main`."""
    heeded = [number for number in _INTERRUPTS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    for number in heeded:
        signal.signal(number, _leave)
    from sagegen.cli.main import main

    try:
        main()
    finally:  # the command has said how it ended: what the rest of a burst of signals asks for is done
        for number in heeded:
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    run()
