"""What of the kernel stores nobody needs: entries that no registry names, and what killed processes left."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sagegen.emulator.compiler import open_libraries
from sagegen.env import Env
from sagegen.errors import StoreError
from sagegen.gpu import GPUS
from sagegen.registry import load_registry
from sagegen.store import ABANDONED_S, LOCKS, RECORD_FILE, STAGING, Store, open_store, read_record

DAY_S = 24 * 3600.0

Kind = Literal["kernel", "damaged", "staging", "lock"]


@dataclass(frozen=True, slots=True)
class Stray:
    """Something that nobody needs.

    Attributes:
        kind: a `kernel`, a `damaged` entry, or a killed process' `staging` folder or `lock`.
        idle_s: since it was last built, loaded or written to.
        size: bytes of its files.
    """

    store: Store
    path: Path
    kind: Kind
    idle_s: float
    size: int


def find_strays(env: Env, max_idle_s: float) -> list[Stray]:
    """What can go from the stores of kernels and of the emulator's libraries. Removes nothing.

    A kernel stays that a registry of any layer names, by its cubin or its text, or that a process built or loaded
    within `max_idle_s`. What else lies around stays for a day, in which its owner may be at work.

    Raises:
        RegistryError: a registry is malformed, so that nobody knows what it names.
    """
    named = _named_digests(env)
    now = time.time()
    return [
        stray
        for store in (open_store(env), open_libraries(env))
        for stray in (*_idle_entries(store, named, max_idle_s, now), *_abandoned(store, now))
    ]


def remove_stray(stray: Stray) -> bool:
    """Remove one; False if a process is building it or has loaded it since.

    An entry disappears in one step, so that who finds it has all of it.

    Raises:
        StoreError: the store cannot be written.
    """
    if stray.kind == "staging":
        shutil.rmtree(stray.path, ignore_errors=True)
        return True
    from filelock import Timeout

    name = stray.path.name.removesuffix(".lock")
    lock = stray.store.lock_named(name)
    try:
        with lock.acquire(timeout=0):
            is_removed = _remove_locked(stray)
            # who waits for the file then holds a lock that nobody sees, and may build what another builds: harmless
            Path(lock.lock_file).unlink(missing_ok=True)
            return is_removed
    except Timeout:
        return False


def _remove_locked(stray: Stray) -> bool:
    if stray.kind == "lock":
        return True
    if _idle_s(stray.path, time.time()) < stray.idle_s:
        return False
    with stray.store.staging() as folder:
        try:
            stray.path.rename(folder / "stray")
        except OSError as error:
            raise StoreError(f"{stray.path} cannot be removed: {error}", "check its permissions") from error
    return True


def _named_digests(env: Env) -> set[str]:
    """Of the cubins and texts that registries name."""
    entries = (entry for gpu in GPUS for layer in load_registry(gpu, env).layers for entry in layer.entries)
    digests = {digest for entry in entries for digest in (entry.cubin_sha256, entry.provenance.text_sha256)}
    return {digest for digest in digests if digest is not None}


def _idle_entries(store: Store, named: Set[str], max_idle_s: float, now: float) -> Iterator[Stray]:
    for folder in _list(store.root):
        if folder.name.startswith("."):
            continue
        record: dict[str, Any] = {}
        kind: Kind = "kernel"
        try:
            record = read_record(folder)
        except StoreError:
            kind = "damaged"
        idle_s = _idle_s(folder, now)
        is_named = not named.isdisjoint({str(record.get("cubin_sha256")), str(record.get("text_sha256"))})
        if idle_s > (ABANDONED_S if kind == "damaged" else max_idle_s) and not is_named:
            yield Stray(store, folder, kind, idle_s, _measure(folder))


def _abandoned(store: Store, now: float) -> Iterator[Stray]:
    kinds: tuple[tuple[str, Kind], ...] = ((STAGING, "staging"), (LOCKS, "lock"))
    for folder, kind in kinds:
        for path in _list(store.root / folder):
            idle_s = _idle_s(path, now)
            if idle_s > ABANDONED_S:
                yield Stray(store, path, kind, idle_s, _measure(path))


def _list(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _idle_s(path: Path, now: float) -> float:
    """Seconds since an entry's record, which loading it touches, or whatever else it is was last written."""
    for file in (path / RECORD_FILE, path):
        try:
            return now - file.stat().st_mtime
        except OSError:  # no record, or its owner was faster
            continue
    return 0.0


def _measure(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.lstat().st_size for file in files)
