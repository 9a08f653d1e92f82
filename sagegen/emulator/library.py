"""A compiled kernel's shared library: the structs of runtime/interface.hpp, loading it, running its launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from sagegen.errors import EmulatorError
from sagegen.interrupts import deferred_interrupts

_MAX_DIMS = 4


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p),
        ("base", c_uint64),
        ("item_bytes", c_int32),
        ("dims", c_int32),
        ("sizes", c_int64 * _MAX_DIMS),
        ("strides", c_int64 * _MAX_DIMS),
        ("is_writable", c_int32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", c_char_p),
        ("function", c_void_p),
        ("grid", c_uint32),
        ("threads", c_uint32),
        ("smem_bytes", c_uint32),
        ("params_bytes", c_uint32),
        ("params", c_char_p),
        ("architecture", c_int32),
        ("is_programmatic", c_int32),
        ("workers", c_int32),
        ("count_banks", c_int32),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("kind", c_char * 32),
        ("block", c_int32),
        ("thread", c_int32),
        ("line", c_int32),
        ("site", c_uint64),
        ("message", c_char * 6144),
    )


class _BankCount(ctypes.Structure):
    _fields_ = (
        ("site", c_uint64),
        ("line", c_int32),
        ("bytes", c_int32),
        ("is_write", c_int32),
        ("accesses", c_uint64),
        ("wavefronts", c_uint64),
        ("ideal", c_uint64),
    )


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a call may touch: the elements of one strided tensor.

    Attributes:
        name: for messages.
        address: of the first element.
        item_bytes: of one element.
        sizes, strides: at most four dims, in elements.
        is_writable: outputs and scratch, which hold nothing before they are written.
    """

    name: str
    address: int
    item_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    is_writable: bool = False


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One launch of a 1-D grid.

    Attributes:
        name: of the kernel, for messages.
        function: its address.
        params: the launch ABI's struct.
        architecture: compute capability, e.g. 89.
        workers: operating system threads that share the blocks.
        count_banks: count shared-memory wavefronts by access site.
        is_programmatic: it starts before its predecessor has ended (programmatic dependent launch).
    """

    name: str
    function: int
    grid: int
    threads: int
    smem_bytes: int
    params: bytes
    architecture: int
    workers: int
    count_banks: bool
    is_programmatic: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What went wrong, as the runtime says it: `{0x1234}` in the message are return addresses in the library.

    Attributes:
        line: of the kernel's text, where a wrapper of the device layer was called; 0: look up `site`.
        site: return address; 0 when there is none.
    """

    kind: str
    block: int
    thread: int
    line: int
    site: int
    message: str


class Site(NamedTuple):
    """Where shared memory is accessed: a return address in the library or a line of the text (the other is 0), and how.

    Attributes:
        bytes: of one lane's access.
    """

    address: int
    line: int
    bytes: int
    is_write: bool


@dataclass(frozen=True, slots=True)
class BankCount:
    """Shared-memory traffic of one site.

    Attributes:
        sums: accesses by whole warps, wavefronts that they took, wavefronts that they would take without conflicts.
    """

    site: Site
    sums: tuple[int, int, int]


class Library:
    """A loaded library; it stays loaded as long as the process lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = ctypes.CDLL(str(path))  # its calls release the GIL
        self._open = self._handle.emulator_open
        self._open.argtypes, self._open.restype = (POINTER(_Buffer), c_int32), c_void_p
        self._close = self._handle.emulator_close
        self._close.argtypes, self._close.restype = (c_void_p,), None
        self._run = self._handle.emulator_run
        self._run.argtypes, self._run.restype = (c_void_p, POINTER(_Launch), POINTER(_Report)), c_int32
        self._stop = self._handle.emulator_stop
        self._stop.argtypes, self._stop.restype = (c_void_p,), None
        self._writer = self._handle.emulator_writer_of
        self._writer.argtypes, self._writer.restype = (c_void_p, c_uint64, POINTER(_Report)), c_int32
        self._counts = self._handle.emulator_bank_counts
        self._counts.argtypes, self._counts.restype = (c_void_p, POINTER(_BankCount), c_int32), c_int32

    def function(self, name: str) -> int:
        """Address of an extern "C" function; AttributeError when the library has none of that name."""
        address = ctypes.cast(getattr(self._handle, name), c_void_p).value
        assert address is not None
        return address

    def open(self, buffers: Sequence[Buffer]) -> Session:
        """A session on the memory of one call; a context manager.

        Raises:
            EmulatorError: memory is short.
        """
        array = (_Buffer * len(buffers))(*map(_pack_buffer, buffers))
        handle = self._open(array, len(buffers))
        if not handle:
            raise EmulatorError("the emulator could not get the memory that it notes writes in", "use smaller inputs")
        return Session(self, handle)


class Session:
    """One call: its memory, and what its launches have written so far. Not for concurrent use."""

    def __init__(self, library: Library, handle: int) -> None:
        self._library = library
        self._handle = handle
        self._runner: threading.Thread | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with deferred_interrupts():
            self._end_run()
            self._library._close(self._handle)

    def run(self, run: KernelRun) -> Report | None:
        """Run one launch to its end, or until Ctrl+C; what went wrong, or None."""
        launch = _Launch(
            kernel=run.name.encode(),
            function=run.function,
            grid=run.grid,
            threads=run.threads,
            smem_bytes=run.smem_bytes,
            params_bytes=len(run.params),
            params=run.params,
            architecture=run.architecture,
            is_programmatic=run.is_programmatic,
            workers=run.workers,
            count_banks=run.count_banks,
        )
        report = _Report()
        self._call(launch, report)
        if not report.kind:
            return None
        kind, message = (text.decode(errors="replace") for text in (report.kind, report.message))
        return Report(kind, report.block, report.thread, report.line, report.site, message)

    def _call(self, launch: _Launch, report: _Report) -> None:
        """Run a launch in a thread of its own: Python cannot be interrupted inside of a foreign function."""
        ended = threading.Event()

        def work() -> None:
            try:
                self._library._run(self._handle, byref(launch), byref(report))
            finally:
                ended.set()

        self._runner = threading.Thread(target=work, name="emulator_run")
        try:
            with deferred_interrupts():
                self._runner.start()
            ended.wait()
        except BaseException:
            self._end_run()
            raise

    def _end_run(self) -> None:
        """Stop the launch that still runs, if one does: it must not outlive the memory that it works on."""
        with deferred_interrupts():
            if self._runner is not None and self._runner.is_alive():
                self._library._stop(self._handle)
                self._runner.join()

    def writer_of(self, address: int) -> Report | None:
        """Who wrote the word at `address` of an output or scratch last: block, thread and site; None: nobody did."""
        report = _Report()
        if not self._library._writer(self._handle, address, byref(report)):
            return None
        return Report("", report.block, report.thread, 0, report.site, "")

    def bank_counts(self) -> list[BankCount]:
        """Counts of all launches of this session that were run with `count_banks`."""
        count = self._library._counts(self._handle, None, 0)
        found = (_BankCount * count)()
        self._library._counts(self._handle, found, count)
        return [
            BankCount(Site(c.site, c.line, c.bytes, bool(c.is_write)), (c.accesses, c.wavefronts, c.ideal))
            for c in found
        ]


def _pack_buffer(buffer: Buffer) -> _Buffer:
    return _Buffer(
        name=buffer.name.encode(),
        base=buffer.address,
        item_bytes=buffer.item_bytes,
        dims=len(buffer.sizes),
        sizes=(c_int64 * _MAX_DIMS)(*buffer.sizes),
        strides=(c_int64 * _MAX_DIMS)(*buffer.strides),
        is_writable=buffer.is_writable,
    )
