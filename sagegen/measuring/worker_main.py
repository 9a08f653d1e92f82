"""The worker's own process, `python -m sagegen.measuring.worker_main`: started by `worker.Worker`, by nothing else.

Reads one job per line from stdin and answers on the pipe that was its stdout; whatever libraries print goes to stderr.
A CUDA error ends the process, for its context is spoiled.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from sagegen.measuring.jobs import Done, Fault, Job, Message, Progress, Ready, Reply, Tell

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent's thread ends, even while a GPU job hangs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["SAGEGEN_WORKER_PARENT"]):  # it ended before the call above
        sys.exit(1)


def claim_stdout() -> BinaryIO:
    """The pipe to the parent; from now on everything that is printed, from C too, goes to stderr."""
    pipe = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return pipe


def serve(lines: BinaryIO, pipe: BinaryIO, do: Callable[[Job, Tell], Reply]) -> None:
    """Answer jobs until stdin ends or a crash spoils the process.

    Args:
        do: does one job; gets a function that says which candidate is about to run.
    """

    def send(message: Message) -> None:
        pipe.write(msgspec.json.encode(message) + b"\n")

    send(Ready())
    for line in iter(lines.readline, b""):
        try:
            job: Job = msgspec.json.decode(line, type=Job)
            reply = do(job, lambda name: send(Progress(name)))
        except Exception:  # not the candidate's fault: the parent raises it as its own error
            send(Fault(traceback.format_exc(limit=-8)))
            return
        send(Done(reply))
        if reply.outcome == "crash":
            return


def main() -> None:
    die_with_parent()
    pipe = claim_stdout()
    # imports torch: before `ready`, so that no job pays for it
    from sagegen.launch import driver_problem
    from sagegen.measuring.measure import Bench

    if problem := driver_problem():
        sys.exit(problem)
    serve(sys.stdin.buffer, pipe, Bench().do)
    sys.stderr.flush()
    os._exit(0)  # a spoiled CUDA context can hang in its destructors


if __name__ == "__main__":
    main()
