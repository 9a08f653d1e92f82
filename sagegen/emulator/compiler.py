"""The host C++ compiler: a kernel's host text and the emulator's runtime become one shared library.

Kernels are compiled with the sanitizers' instrumentation but linked without their libraries: the runtime defines the
functions that instrumented code calls, so every load and store of a kernel is checked before it happens.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sagegen.env import Env
from sagegen.errors import BuildError, StoreError, ToolchainError
from sagegen.interrupts import deferred_interrupts
from sagegen.render import Source
from sagegen.store import SOURCE_FILE, Files, Key, Store, make_key, mark_used

# fmt: off
#: Both: nothing of one library may be shared with another, which -fno-gnu-unique sees to.
_COMMON_FLAGS = ("-O2", "-g1", "-std=c++17", "-fPIC", "-fno-gnu-unique")
KERNEL_FLAGS = (
    *_COMMON_FLAGS, "-fsanitize=thread", "-fsanitize=bounds,integer-divide-by-zero", "-fsanitize-coverage=trace-pc",
    "-fno-exceptions", "-fno-strict-aliasing", "-fno-extern-tls-init", "-ffp-contract=off", "-Wno-unknown-pragmas",
)
#: _FORTIFY_SOURCE would take the fibers' longjmp for a smashed stack.
RUNTIME_FLAGS = (*_COMMON_FLAGS, "-pthread", "-U_FORTIFY_SOURCE")
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-z,defs", "-Wl,-Bsymbolic")
# fmt: on

LIBRARIES = Files(SOURCE_FILE, "kernel.so", "library_sha256")
_OBJECTS = Files("runtime.cpp", "runtime.o", "object_sha256")
#: How the names of those host includes begin that declare the runtime's functions.
_DECLARATIONS = "emulator"
#: What the debug information says instead of the build folder, so that equal text gives equal libraries.
_FOLDER_IN_DEBUG = "/sagegen"

_OLDEST_GCC = 10
_GCC_WITH_LEVELS = 11  # -march=x86-64-v3
_V3_FEATURES = frozenset(("avx2", "fma", "bmi2", "f16c"))
_REMEDY = "apt-get install g++"
_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class HostCompiler:
    """A g++.

    Attributes:
        command: how it is called; CXX may hold options.
        build: what tells it from any other.
        machine_flags: for this processor.
    """

    command: tuple[str, ...]
    build: str
    machine_flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostLibrary:
    """A kernel's host text, compiled.

    Attributes:
        folder: in the store.
        seconds: what it took; 0 when it was in the store already.
    """

    folder: Path
    seconds: float

    @property
    def path(self) -> Path:
        return self.folder / LIBRARIES.binary


def find_compiler(environ: Mapping[str, str] = os.environ) -> HostCompiler:
    """The compiler that CXX names, else g++.

    Raises:
        ToolchainError: there is none, it cannot be run, or it is no GCC of version 10 or later.
    """
    try:
        asked = shlex.split(environ.get("CXX", ""))
    except ValueError as error:
        raise ToolchainError(f"CXX={environ['CXX']!r} is no command: {error}", "set it to a g++") from error
    command = asked or ["g++"]
    name = f"CXX={shlex.join(asked)}" if asked else "g++"
    program = shutil.which(command[0], path=environ.get("PATH", os.defpath))
    if program is None:
        raise ToolchainError(f"the emulator compiles kernels with g++, and {name} was not found", _REMEDY)
    macros = _read_macros([program, *command[1:]], name)
    version = macros.get("__GNUC__", "0")
    if "__clang__" in macros or int(version) < _OLDEST_GCC:
        what = "clang" if "__clang__" in macros else f"GCC {macros.get('__VERSION__', version)}"
        raise ToolchainError(f"the emulator needs GCC {_OLDEST_GCC} or later, and {name} is {what}", _REMEDY)
    build = f"{macros.get('__VERSION__', version)} {platform.machine()} {shlex.join(command[1:])}".strip()
    return HostCompiler((program, *command[1:]), build, _machine_flags(int(version)))


def build_library(
    source: Source, store: Store, compiler: HostCompiler, *, timeout_s: float = _TIMEOUT_S
) -> HostLibrary:
    """Compile a source that was rendered for the host, unless the store has it.

    Safe to call from many threads and processes: of those that want the same library one compiles it.

    Args:
        store: of LIBRARIES, see `open_libraries`.
        timeout_s: for each compiler.

    Raises:
        BuildError: it does not compile; the message has the compiler's first error.
        StoreError: the store cannot be written.
    """
    runtime = _read_runtime()
    flags = (*compiler.machine_flags, *KERNEL_FLAGS, *RUNTIME_FLAGS, *LINK_FLAGS, _digest(runtime))
    key = make_key(source.name, source.text, "host", compiler.build, flags)
    if folder := store.find(key):
        mark_used(folder)
        return HostLibrary(folder, 0.0)
    try:
        with store.lock(key):
            if folder := store.find(key):
                return HostLibrary(folder, 0.0)
            start = time.monotonic()
            runtime_object = _build_runtime(runtime, store, compiler, timeout_s)
            folder = _compile(source, key, runtime_object, store, compiler, timeout_s)
            return HostLibrary(folder, time.monotonic() - start)
    except OSError as error:  # a full disk, a cache folder that was removed
        raise StoreError(
            f"building in {store.root} failed: {error}", "free its disk or set SAGEGEN_CACHE_DIR"
        ) from error


def open_libraries(env: Env) -> Store:
    """The store of the emulator's libraries that the environment names."""
    # absolute: compilers run in folders of their own
    return Store(env.cache_dir.absolute() / "emulator", LIBRARIES)


def _read_macros(command: list[str], name: str) -> dict[str, str]:
    """What the compiler predefines."""
    try:
        done = subprocess.run(
            [*command, "-dM", "-E", "-x", "c++", os.devnull],
            capture_output=True, text=True, errors="replace", timeout=60, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{name} cannot be run: {error}", _REMEDY) from error
    return {key: value.strip('"') for key, value in re.findall(r"^#define (\w+) (.*)$", done.stdout, re.MULTILINE)}


def _machine_flags(gcc: int) -> tuple[str, ...]:
    if platform.machine() != "x86_64" or gcc < _GCC_WITH_LEVELS:
        return ()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    has_level = flags is not None and _V3_FEATURES.issubset(flags[1].split())
    return ("-march=x86-64-v3",) if has_level else ()


def _read_runtime() -> dict[str, bytes]:
    """The runtime's files by name."""
    runtime = importlib.resources.files("sagegen.emulator") / "runtime"
    host = importlib.resources.files("sagegen.templates") / "include" / "host"
    entries = [entry for entry in runtime.iterdir() if entry.name.endswith((".cpp", ".hpp"))]
    entries += [entry for entry in host.iterdir() if entry.name.startswith(_DECLARATIONS)]
    return {entry.name: entry.read_bytes() for entry in sorted(entries, key=lambda entry: entry.name)}


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def _build_runtime(files: Mapping[str, bytes], libraries: Store, compiler: HostCompiler, timeout_s: float) -> Path:
    """The runtime's object file, compiled once per compiler and flags."""
    store = Store(libraries.root, _OBJECTS)
    flags = (*compiler.machine_flags, *RUNTIME_FLAGS)
    key = make_key("runtime", _digest(files), "host", compiler.build, flags)
    with store.lock(key):
        folder = store.find(key) or _compile_runtime(files, key, store, compiler, timeout_s)
    return folder / _OBJECTS.binary


def _compile_runtime(
    files: Mapping[str, bytes], key: Key, store: Store, compiler: HostCompiler, timeout_s: float
) -> Path:
    with store.staging() as folder:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        units = [name.removesuffix(".cpp") for name in files if name.endswith(".cpp")]
        flags = [*compiler.machine_flags, *RUNTIME_FLAGS, f"-ffile-prefix-map={folder}={_FOLDER_IN_DEBUG}", "-I."]
        compiles = [[*compiler.command, *flags, "-c", f"{unit}.cpp", "-o", f"{unit}.o"] for unit in units]
        _run_all(compiles, folder, timeout_s, "the emulator's runtime")
        join = [*compiler.command, "-r", "-nostdlib", *(f"{unit}.o" for unit in units), "-o", _OBJECTS.binary]
        _run_all([join], folder, timeout_s, "the emulator's runtime")
        text = "".join(f"// ---- {name}\n{data.decode()}" for name, data in files.items())
        return store.publish(key, text, (folder / _OBJECTS.binary).read_bytes(), {"compiler": compiler.build})


def _compile(
    source: Source, key: Key, runtime_object: Path, store: Store, compiler: HostCompiler, timeout_s: float
) -> Path:
    with store.staging() as folder:
        (folder / LIBRARIES.source).write_text(source.text)
        flags = [*compiler.machine_flags, *KERNEL_FLAGS, f"-ffile-prefix-map={folder}={_FOLDER_IN_DEBUG}"]
        translate = [*compiler.command, *flags, "-x", "c++", "-c", LIBRARIES.source, "-o", "kernel.o"]
        _run_all([translate], folder, timeout_s, f"the host text of {source.name}")
        link = [*compiler.command, *LINK_FLAGS, "kernel.o", str(runtime_object), "-o", LIBRARIES.binary]
        _run_all([link], folder, timeout_s, f"the host text of {source.name}")
        record = {"name": source.name, "text_sha256": source.sha256, "compiler": compiler.build, "flags": flags}
        return store.publish(key, source.text, (folder / LIBRARIES.binary).read_bytes(), record)


def _run_all(commands: Sequence[Sequence[str]], folder: Path, timeout_s: float, what: str) -> None:
    """Run compilers in `folder`, side by side; none is left when this ends.

    Raises:
        BuildError: one failed or took too long.
    """
    deadline = time.monotonic() + timeout_s
    logs = [folder / f"{index}.log" for index in range(len(commands))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with deferred_interrupts():
            for command, log in zip(commands, logs, strict=True):
                processes.append(_start(command, folder, log))
        for process, log in zip(processes, logs, strict=True):
            if process.wait(max(0.0, deadline - time.monotonic())):
                raise BuildError(f"{what} did not compile: {_first_error(log)}")
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{what}: the host compiler took more than {timeout_s:g} s") from error
    finally:
        for process in processes:
            if process.poll() is None:  # its session is its process group: the compiler proper goes with the driver
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _start(command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def _first_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = (line for line in lines if re.search(r"\berror\b|undefined reference", line))
    return next(errors, lines[-1] if lines else "the compiler failed without a message")
