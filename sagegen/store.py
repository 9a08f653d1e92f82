"""The kernel store: a content-addressed folder of compiled kernels.

    <root>/<name>.<hash12>/{kernel.cu, kernel.cubin, build.json}

The emulator keeps its shared libraries in one too. The hash is of everything that decides the binary, so an entry is
never out of date and needs no time stamps. Entries appear by one rename; readers take no lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagegen.env import Env
from sagegen.errors import StoreError

if TYPE_CHECKING:
    from filelock import FileLock

SOURCE_FILE = "kernel.cu"
CUBIN_FILE = "kernel.cubin"
RECORD_FILE = "build.json"


@dataclass(frozen=True, slots=True)
class Files:
    """What a store's entries hold beside build.json.

    Attributes:
        source, binary: names of the files.
        digest: what build.json calls the binary's SHA-256.
    """

    source: str
    binary: str
    digest: str


CUBINS = Files(SOURCE_FILE, CUBIN_FILE, "cubin_sha256")

STAGING = ".staging"
LOCKS = ".locks"
#: Longer than any build: what is older was left by a process that was killed.
ABANDONED_S = 24 * 3600.0
_REMEDY = "set SAGEGEN_CACHE_DIR to a writable folder"


@dataclass(frozen=True, slots=True)
class Key:
    """Identity of a compiled kernel.

    Attributes:
        name: the source's name.
        digest: SHA-256 of source text, toolkit build, architecture and flags.
    """

    name: str
    digest: str

    @property
    def folder(self) -> str:
        return f"{self.name}.{self.digest[:12]}"


def make_key(name: str, text: str, arch: str, toolkit_build: str, flags: Sequence[str]) -> Key:
    """The key of `text` compiled for `arch`. Where the compiler lies and how often it was run are no part of it."""
    parts = json.dumps([text, toolkit_build, arch, list(flags)])
    return Key(name, hashlib.sha256(parts.encode()).hexdigest())


class Store:
    """The kernel store below `root`, which is made when something is written.

    Safe to use from many processes and threads at once.

    Args:
        files: what its entries hold.
    """

    def __init__(self, root: Path, files: Files = CUBINS) -> None:
        self.root = root
        self.files = files

    def find(self, key: Key) -> Path | None:
        """The folder of `key`'s entry; None when there is none or it is damaged (building again heals it)."""
        folder = self.root / key.folder
        try:
            record = read_record(folder)
            _read_binary(folder, self.files)
        except StoreError:
            return None
        return folder if record.get("key") == key.digest else None

    def find_cubin(self, name: str, cubin_sha256: str) -> Path | None:
        """The folder that holds exactly that cubin of the source `name`, whichever toolkit built it.

        Needs no toolkit, so a registry entry finds its kernel on machines without nvcc.
        """
        return self._find_record(name, {"cubin_sha256": cubin_sha256})

    def find_text(self, name: str, text_sha256: str, arch: str) -> Path | None:
        """A folder that holds the source `name` of exactly that text, built for `arch` by any toolkit.

        Needs no toolkit, so what was built earlier runs on after nvcc is gone.
        """
        return self._find_record(name, {"text_sha256": text_sha256, "arch": arch})

    def _find_record(self, name: str, facts: Mapping[str, str]) -> Path | None:
        """The first undamaged entry of `name` whose record holds `facts`."""
        for folder in sorted(self.root.glob(f"{name}.*")):
            try:
                if facts.items() <= read_record(folder).items() and _read_binary(folder, self.files):
                    return folder
            except StoreError:
                continue
        return None

    def publish(self, key: Key, text: str, binary: bytes, record: Mapping[str, Any]) -> Path:
        """Put an entry in place and return its folder.

        When another process published the same key first, its entry stays and is returned.

        Args:
            record: facts of the build; `key` and the binary's digest are added.

        Raises:
            StoreError: the store cannot be written.
        """
        complete = {**record, "key": key.digest, self.files.digest: hashlib.sha256(binary).hexdigest()}
        target = self.root / key.folder
        with self.staging() as folder:
            entry = folder / "entry"
            try:
                entry.mkdir()
                (entry / self.files.source).write_text(text)
                (entry / self.files.binary).write_bytes(binary)
                (entry / RECORD_FILE).write_text(json.dumps(complete, indent=1) + "\n")
                if self.find(key) is None and os.path.lexists(target):
                    target.rename(folder / "damaged")
                entry.rename(target)
            except OSError as error:
                if self.find(key) is None:
                    raise StoreError(f"kernel store {self.root} cannot be written: {error}", _REMEDY) from error
        return target

    def discard(self, folder: Path) -> None:
        """Have an entry count as damaged, so that the next build of its key replaces it."""
        try:
            (folder / RECORD_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{folder} is damaged and cannot be replaced: {error}", _REMEDY) from error

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A private folder on the store's file system, removed at the end."""
        parent = self.root / STAGING
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent))
        except OSError as error:
            raise StoreError(f"kernel store {self.root} cannot be written: {error}", _REMEDY) from error
        _remove_abandoned(parent)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def lock(self, key: Key) -> FileLock:
        """The lock that whoever builds `key` holds, not yet acquired."""
        return self.lock_named(key.folder)

    def lock_named(self, name: str) -> FileLock:
        """The same of the entry whose folder has that name."""
        from filelock import FileLock  # not at the top: readers take no lock

        folder = self.root / LOCKS
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"kernel store {self.root} cannot be written: {error}", _REMEDY) from error
        return FileLock(folder / f"{name}.lock")


def open_store(env: Env) -> Store:
    """The store that the environment names."""
    return Store(env.cache_dir / "kernels")


def mark_used(folder: Path) -> None:
    """Note that an entry was loaded, so that `gc` keeps it; a store that cannot be written is left as it is."""
    with suppress(OSError):
        os.utime(folder / RECORD_FILE)


def read_record(folder: Path) -> dict[str, Any]:
    """The facts of an entry's build.

    Raises:
        StoreError: the entry is missing or its build.json is not a JSON object.
    """
    path = folder / RECORD_FILE
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}", "build the kernel again") from error
    if not isinstance(record, dict):
        raise StoreError(f"{path} holds no JSON object", "build the kernel again")
    return record


def read_cubin(folder: Path) -> bytes:
    """An entry's cubin, checked against the digest in its build.json.

    Raises:
        StoreError: the entry is missing or damaged.
    """
    return _read_binary(folder, CUBINS)


def _read_binary(folder: Path, files: Files) -> bytes:
    wanted = read_record(folder).get(files.digest)
    path = folder / files.binary
    try:
        binary = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}", "build the kernel again") from error
    if hashlib.sha256(binary).hexdigest() != wanted:
        raise StoreError(f"{path} does not match the digest in its {RECORD_FILE}", "build the kernel again")
    return binary


def _remove_abandoned(parent: Path) -> None:
    limit = time.time() - ABANDONED_S
    for folder in parent.iterdir():
        try:
            is_old = folder.stat().st_mtime < limit
        except FileNotFoundError:  # its owner was faster
            continue
        if is_old:
            shutil.rmtree(folder, ignore_errors=True)
