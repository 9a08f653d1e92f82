"""Running nvcc over many sources side by side, under ninja: what each printed and how long it took."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sagegen.errors import BuildError, ToolchainError
from sagegen.interrupts import deferred_interrupts
from sagegen.store import CUBIN_FILE, SOURCE_FILE
from sagegen.toolkit import Toolkit, find_ninja

FLAGS = ("-cubin", "-std=c++17", "-O3", "-lineinfo", "-Xptxas=-v,--warn-on-spills")
#: First line of what nvcc reads. Without it the line table holds the build folder's path, and no two builds are equal.
LINE_MARK = '#line 1 "/sagegen/{name}.cu"\n'
#: Variables that add options behind the key's back.
_UNWANTED_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")

#: What a compiler printed, in its folder.
LOG_FILE = "nvcc.log"
_NINJA_OUTPUT = "ninja.out"
_KILL_AFTER_S = 5
#: Of each process of a compiler: many times what an honest kernel takes, so that one cannot take the whole machine.
_MOST_MEMORY_KIB = 16 << 20
_POLL_S = 0.01


class Source(Protocol):
    """What is compiled: `render.Source`, or one with other kernels.

    Attributes:
        name: identity of the source.
        text: one self-contained .cu.
        sha256: of the text.
        roles: its kernels; the last one is the one that counts.
    """

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def roles(self) -> tuple[str, ...]: ...

    def entry(self, role: str) -> str:
        """The extern "C" name of one of its kernels."""

    def target(self, arch: str) -> str:
        """What it is compiled for, to run on a GPU of `arch`."""


def raise_if_stopped(stop: threading.Event | None) -> None:
    """Raise BuildError once another thread has set `stop`."""
    if stop is not None and stop.is_set():
        raise BuildError("the build was stopped")


def compile_sources(
    folder: Path,
    sources: Sequence[Source],
    arch: str,
    toolkit: Toolkit,
    *,
    jobs: int,
    timeout_s: float,
    stop: threading.Event | None,
) -> dict[int, float]:
    """Compile each source in `folder`/<its index>, where its text, its log and its cubin then are.

    Args:
        arch: of the GPU; each source is compiled for its own `Source.target` of it.
        jobs: compilers at a time.
        timeout_s: for each compiler.
        stop: set it to end the compilers early from another thread.

    Returns:
        The seconds that each one took which compiled, by its index.

    Raises:
        BuildError: `stop` was set, or a signal ended the compilers.
        ToolchainError: ninja is missing or failed by itself.
    """
    _write_ninja_file(folder, sources, arch, toolkit, timeout_s)
    _run_ninja(folder, jobs, stop)
    seconds = _read_seconds(folder)
    outputs = (f"{index}/{CUBIN_FILE}" for index in range(len(sources)))
    return {index: seconds[output] for index, output in enumerate(outputs) if output in seconds}


def _write_ninja_file(folder: Path, sources: Sequence[Source], arch: str, toolkit: Toolkit, timeout_s: float) -> None:
    # exec: the shell's process group then is timeout's, so that a killed ninja takes nvcc's own children along.
    # stdout stays with ninja: a command that closes its pipes makes ninja wait, deaf to signals and other commands
    limited = f"exec timeout -v -k {_KILL_AFTER_S} {timeout_s:g}"
    nvcc = shlex.quote(str(toolkit.nvcc)).replace("$", "$$")
    options = f"-arch=$arch {' '.join(FLAGS)} -o {CUBIN_FILE} {SOURCE_FILE}"
    memory = f"ulimit -v {_MOST_MEMORY_KIB} 2> /dev/null"  # fails where the limit is lower already, and that will do
    lines = ["rule nvcc", f"  command = cd $dir && {{ {memory}; {limited} {nvcc} {options} 2> {LOG_FILE}; }}"]
    for index, source in enumerate(sources):
        edge = folder / str(index)
        edge.mkdir()
        (edge / SOURCE_FILE).write_text(LINE_MARK.format(name=source.name) + source.text)
        lines += [f"build {index}/{CUBIN_FILE}: nvcc {index}/{SOURCE_FILE}", f"  dir = {index}"]
        lines.append(f"  arch = {source.target(arch)}")
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")


def _run_ninja(folder: Path, jobs: int, stop: threading.Event | None) -> None:
    program = find_ninja()
    if program is None:
        raise ToolchainError("ninja is missing", "pip install ninja")
    temporary = folder / "tmp"
    temporary.mkdir()
    environ = {name: value for name, value in os.environ.items() if name not in _UNWANTED_VARIABLES}
    environ.update(TMPDIR=str(temporary), LC_ALL="C")
    with (folder / _NINJA_OUTPUT).open("wb") as output:
        process: subprocess.Popen[bytes] | None = None
        try:
            with deferred_interrupts():
                process = subprocess.Popen(
                    [program, "-k", "0", "-j", str(jobs)],
                    cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True,  # a terminal's Ctrl+C is ours to answer: compilers end when we say so
                )  # fmt: skip
            while process.poll() is None:
                raise_if_stopped(stop)
                time.sleep(_POLL_S)
        finally:
            if process is not None:
                _end(process)
    said = (folder / _NINJA_OUTPUT).read_text(errors="replace")
    if "interrupted by user" in said:
        raise BuildError("a signal ended the compilers")
    if process.returncode != 0 and "FAILED: " not in said:
        raise ToolchainError(f"ninja failed: {said.strip()[-500:]}", "pip install --force-reinstall ninja")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End ninja, which ends its compilers; does nothing when it has ended."""
    process.terminate()
    try:
        process.wait(_KILL_AFTER_S + 1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read_seconds(folder: Path) -> dict[str, float]:
    """How long every edge that succeeded took, by its output, from ninja's own log."""
    log = folder / ".ninja_log"
    if not log.exists():  # none succeeded
        return {}
    rows = (line.split("\t") for line in log.read_text().splitlines() if not line.startswith("#"))
    return {output: (int(end) - int(start)) / 1000 for start, end, _, output, _ in rows}
