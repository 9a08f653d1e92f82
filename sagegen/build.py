"""Building sources: compile a batch with ninja, keep the results in the store."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from sagegen.compilers import FLAGS, LINE_MARK, LOG_FILE, Source, compile_sources, raise_if_stopped
from sagegen.cubin import Resources, parse_resources, read_sections
from sagegen.errors import BuildError, StoreError
from sagegen.store import CUBIN_FILE, Key, Store, make_key, mark_used, read_record
from sagegen.toolkit import Toolkit, find_toolkit

__all__ = ["Built", "BuildFailure", "Resources", "Toolkit", "build_batch", "find_toolkit"]

#: Changes when build.json's members do, so that an entry of another layout is built anew.
_RECORD_SCHEMA = "record 1"
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled source.

    Attributes:
        arch: what it was compiled for, e.g. `sm_90a`.
        cubin: the file in the store.
        text_sha256: of the source text.
        code_sha256: of the machine code of all kernels, whatever they are called; equal code takes equally long.
        seconds: what nvcc took when it was compiled.
        nvcc: the toolkit's build string.
        cached: it was in the store already.
    """

    name: str
    arch: str
    cubin: Path
    cubin_sha256: str
    text_sha256: str
    code_sha256: str
    resources: Mapping[str, Resources]
    seconds: float
    nvcc: str
    cached: bool


@dataclass(frozen=True, slots=True)
class BuildFailure:
    """A source that did not compile: `reason` is the compiler's first error, `log` all it said."""

    name: str
    outcome: Literal["compile", "timeout"]
    reason: str
    log: str


class _Record(msgspec.Struct):
    """What build.json must hold, as `Built` has it."""

    arch: str
    cubin_sha256: str
    text_sha256: str
    code_sha256: str
    resources: dict[str, Resources]
    seconds: float
    nvcc: str


@dataclass(frozen=True, slots=True)
class _Settings:
    """What all compilers of one batch share."""

    arch: str
    store: Store
    toolkit: Toolkit
    jobs: int
    timeout_s: float
    stop: threading.Event | None


def build_batch(
    sources: Sequence[Source],
    arch: str,
    store: Store,
    toolkit: Toolkit,
    *,
    jobs: int | None = None,
    timeout_s: float = 120,
    stop: threading.Event | None = None,
) -> dict[str, Built | BuildFailure]:
    """Compile `sources` for `arch` unless the store has them; the answers by the sources' names.

    Safe to call from any thread and from many processes: of those that want the same kernel one compiles it.

    Args:
        arch: of the GPU; each source is compiled for its own `Source.target` of it.
        jobs: compilers at a time; None: one per core.
        timeout_s: for each compiler.
        stop: set it to end the build early from another thread.

    Raises:
        BuildError: `stop` was set, or a signal ended the compilers.
        StoreError: the store cannot be written.
        ToolchainError: ninja is missing or failed by itself.
    """
    settings = _Settings(arch, store, toolkit, jobs or len(os.sched_getaffinity(0)), timeout_s, stop)
    try:
        return _build_all(sources, settings)
    except OSError as error:  # a full disk, a cache folder that was removed
        raise StoreError(
            f"building in {store.root} failed: {error}", "free its disk or set SAGEGEN_CACHE_DIR"
        ) from error


def _build_all(sources: Sequence[Source], settings: _Settings) -> dict[str, Built | BuildFailure]:
    arch, store, toolkit = settings.arch, settings.store, settings.toolkit
    wanted = {source.name: (_source_key(source, arch, toolkit), source) for source in sources}
    results: dict[str, Built | BuildFailure] = {}
    for name, (key, source) in wanted.items():
        if built := _find_built(store, key, source):
            results[name] = built
    while missing := [pair for name, pair in wanted.items() if name not in results]:
        with ExitStack() as locks:
            held = [pair for pair in missing if _try_lock(store, pair[0], locks)]
            found = {source.name: _find_built(store, key, source) for key, source in held}
            results.update({name: built for name, built in found.items() if built})
            batch = [(key, source) for key, source in held if not found[source.name]]
            if batch:
                results.update(_compile(batch, settings))
        if not held:  # others are compiling all that is left
            raise_if_stopped(settings.stop)
            time.sleep(_POLL_S)
    return results


def _source_key(source: Source, arch: str, toolkit: Toolkit) -> Key:
    return make_key(source.name, source.text, source.target(arch), toolkit.build, (*FLAGS, LINE_MARK, _RECORD_SCHEMA))


def _try_lock(store: Store, key: Key, locks: ExitStack) -> bool:
    from filelock import Timeout

    try:
        locks.enter_context(store.lock(key).acquire(timeout=0))
    except Timeout:
        return False
    return True


def _find_built(store: Store, key: Key, source: Source) -> Built | None:
    folder = store.find(key)
    if folder is None:
        return None
    try:
        record = msgspec.convert(read_record(folder), _Record)
        resources = {role: record.resources[role] for role in source.roles}
    except (StoreError, msgspec.ValidationError, KeyError):
        store.discard(folder)  # somebody edited it; building again heals it
        return None
    mark_used(folder)
    return Built(
        name=key.name,
        arch=record.arch,
        cubin=folder / CUBIN_FILE,
        cubin_sha256=record.cubin_sha256,
        text_sha256=record.text_sha256,
        code_sha256=record.code_sha256,
        resources=resources,
        seconds=record.seconds,
        nvcc=record.nvcc,
        cached=True,
    )


def _compile(batch: Sequence[tuple[Key, Source]], settings: _Settings) -> dict[str, Built | BuildFailure]:
    sources = [source for _, source in batch]
    with settings.store.staging() as folder:
        seconds = compile_sources(
            folder, sources, settings.arch, settings.toolkit,
            jobs=settings.jobs, timeout_s=settings.timeout_s, stop=settings.stop,
        )  # fmt: skip
        results: dict[str, Built | BuildFailure] = {}
        for index, (key, source) in enumerate(batch):
            own = folder / str(index)
            log = (own / LOG_FILE).read_text(errors="replace")
            if index in seconds:
                results[source.name] = _keep(key, source, own / CUBIN_FILE, log, seconds[index], settings)
            else:
                results[source.name] = _failure(source, log, settings.timeout_s)
        return results


def _failure(source: Source, log: str, timeout_s: float) -> BuildFailure:
    if "timeout: sending signal" in log:
        return BuildFailure(source.name, "timeout", f"nvcc took more than {timeout_s:g} s", log)
    return BuildFailure(source.name, "compile", _first_error(log), log)


def _keep(
    key: Key, source: Source, cubin_file: Path, log: str, seconds: float, settings: _Settings
) -> Built | BuildFailure:
    """Put a compiled source into the store."""
    resources = parse_resources(log)
    try:
        cubin = cubin_file.read_bytes()
        sections = read_sections(cubin)
        code = b"".join(sections[f".text.{source.entry(role)}"] for role in source.roles)
        used = {role: asdict(resources[source.entry(role)]) for role in source.roles}
    except FileNotFoundError:
        return BuildFailure(source.name, "compile", "nvcc ended well but wrote no cubin", log)
    except (ValueError, KeyError) as error:
        return BuildFailure(source.name, "compile", f"nvcc's cubin or log is not usable: {error}", log)
    record = {
        "name": source.name,
        "arch": source.target(settings.arch),
        "text_sha256": source.sha256,
        "code_sha256": hashlib.sha256(code).hexdigest(),
        "resources": used,
        "seconds": seconds,
        "nvcc": settings.toolkit.build,
        "flags": [f"-arch={source.target(settings.arch)}", *FLAGS],
    }
    settings.store.publish(key, source.text, cubin, record)
    built = _find_built(settings.store, key, source)
    if built is None:
        raise BuildError(f"kernel {source.name} vanished from {settings.store.root} as it was built", "run it again")
    return replace(built, cached=False)


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = (line for line in lines if re.search(r"\b(error|fatal)\b", line))
    return next(errors, lines[-1] if lines else "nvcc failed without a message")
