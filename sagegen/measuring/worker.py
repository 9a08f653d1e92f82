"""The parent's side of a measuring worker: a process of its own in which candidates may hang or crash.

The parent never creates a CUDA context. A worker sits in its own process group, dies with its parent, and is killed and
started anew when a job does not answer in time, when it dies, or when a CUDA error has spoiled its context.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from sagegen.errors import WorkerError
from sagegen.measuring.jobs import Done, Fault, Job, Message, Progress, Ready, Reply, read_job

#: Importing torch from a cold disk takes most of a minute on some machines.
START_TIMEOUT_S = 180.0
_COMMAND = (sys.executable, "-m", "sagegen.measuring.worker_main")
_READ_BYTES = 1 << 16
_STDERR_TAIL_BYTES = 4096
#: A killed process is not waited for any longer: the driver may hold it until the GPU is reset.
_END_TIMEOUT_S = 30.0


class Worker:
    """A worker process for one GPU, started by the first job.

    The process dies with the *thread* that started it (Linux PR_SET_PDEATHSIG), so run jobs from a thread that lives as
    long as the worker shall.

    Args:
        gpu_index: the GPU's index in PCI bus order, as NVML counts.
        command: what to start instead of `python -m sagegen.measuring.worker_main`; for tests.
        start_timeout_s: seconds until the process must be ready; not counted against a job's own limit.
    """

    def __init__(
        self, gpu_index: int, *, command: Sequence[str] = _COMMAND, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        self.gpu_index = gpu_index
        self._command = tuple(command)
        self._start_timeout_s = start_timeout_s
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """Process id, or None while no process runs."""
        return None if self._child is None else self._child.process.pid

    def run(self, job: Job | Mapping[str, Any], timeout_s: float) -> Reply:
        """Do one job.

        A process that hung, died or lost its CUDA context is gone when this returns; the next job starts a fresh one.

        Args:
            job: one of `sagegen.measuring.jobs`, or its JSON form.
            timeout_s: seconds until the process is killed and the outcome is `timeout`.

        Raises:
            WorkerError: the process cannot start, or its own code failed: that says nothing about the candidate.
            msgspec.ValidationError: `job` in JSON form has a wrong member.
        """
        line = msgspec.json.encode(read_job(job)) + b"\n"
        child = self._child
        if child is None or child.process.poll() is not None:
            self.close()
            child = self._child = _start(self._command, self.gpu_index, self._start_timeout_s)
        try:
            reply = _converse(child, line, timeout_s)
        except BaseException:  # Ctrl+C among them: a job half done must not answer the next one
            self.close()
            raise
        if reply.outcome in ("timeout", "crash"):
            self.close()
        return reply

    def close(self) -> None:
        """Kill the process and all that it started; from any thread. A closed worker may be used again.

        A job that another thread is running ends with WorkerError.
        """
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Child:
    """A running process and its pipes."""

    def __init__(self, command: Sequence[str], gpu_index: int) -> None:
        # a file, not a pipe: nobody has to drain it while a job runs
        self.stderr = tempfile.TemporaryFile(prefix="sagegen-worker-")  # noqa: SIM115 - kill() closes it
        self.buffer = b""
        self.closing = False
        self.in_use = threading.RLock()  # held during a job: its pipes must not be closed under it by another thread
        environment = {
            **os.environ,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": str(gpu_index),
            "SAGEGEN_WORKER_PARENT": str(os.getpid()),
        }
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.stderr, bufsize=0, env=environment, start_new_session=True
        )

    def send(self, line: bytes) -> None:
        """Raises EOFError when the process is gone."""
        if self.closing:
            raise EOFError
        try:
            self.process.stdin.write(line)  # type: ignore[union-attr]
        except BrokenPipeError as error:
            raise EOFError from error

    def receive(self, deadline: float) -> Message:
        """The next message; raises TimeoutError past the deadline and EOFError when the process is gone."""
        pipe = self.process.stdout.fileno()  # type: ignore[union-attr]
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise TimeoutError
            chunk = os.read(pipe, _READ_BYTES)
            if not chunk:
                raise EOFError
            self.buffer += chunk
        line, self.buffer = self.buffer.split(b"\n", 1)
        try:
            message: Message = msgspec.json.decode(line, type=Message)
        except msgspec.DecodeError as error:
            raise WorkerError(f"the worker sent {line[:200]!r}: {error}", "report this as a bug") from error
        return message

    def obituary(self) -> str:
        """How the process ended, with the last line that it wrote to stderr."""
        try:
            code = self.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "worker is gone but does not end"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        size = self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return f"worker {how}: {lines[-1].strip()}" if lines else f"worker {how}"

    def kill(self) -> None:
        self.closing = True
        with contextlib.suppress(ProcessLookupError):  # it ended by itself and left no children
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # whether the GPU still works, the next process shows
            self.process.wait(_END_TIMEOUT_S)
        with self.in_use:
            for stream in (self.process.stdin, self.process.stdout, self.stderr):
                stream.close()  # type: ignore[union-attr]


def _start(command: Sequence[str], gpu_index: int, timeout_s: float) -> _Child:
    try:
        child = _Child(command, gpu_index)
    except OSError as error:
        raise WorkerError(f"the worker {command[0]} cannot be started: {error}") from error
    try:
        message = child.receive(time.monotonic() + timeout_s)
        if not isinstance(message, Ready):
            raise WorkerError(f"the worker began with {message!r}", "report this as a bug")
    except TimeoutError as error:
        child.kill()
        raise WorkerError(f"the worker was not ready within {timeout_s:g} s", "see sagegen doctor") from error
    except EOFError as error:
        reason = child.obituary()
        child.kill()
        raise WorkerError(f"the worker did not start: {reason}", "see sagegen doctor") from error
    except BaseException:
        child.kill()
        raise
    return child


def _converse(child: _Child, line: bytes, timeout_s: float) -> Reply:
    """Send one job and wait for its reply; the end of the process or of the time is a reply too."""
    running = ""
    deadline = time.monotonic() + timeout_s
    with child.in_use:
        try:
            child.send(line)
            while isinstance(message := child.receive(deadline), Progress):
                running = message.name
            reply = _read_reply(message)
        except TimeoutError:
            reply = Reply("timeout", f"no answer within {timeout_s:g} s")
        except EOFError:
            if child.closing:
                raise WorkerError("the worker was closed in the middle of a job") from None
            reply = Reply("crash", child.obituary())
    if reply.outcome == "ok" or not running:
        return reply
    return Reply(reply.outcome, reply.reason, {"running": running, **reply.data})


def _read_reply(message: Message) -> Reply:
    if isinstance(message, Done):
        return message.reply
    if isinstance(message, Fault):
        raise WorkerError(f"the worker's own code failed:\n{message.trace}", "report this as a bug")
    raise WorkerError(f"the worker sent {message!r} in the middle of a job", "report this as a bug")
