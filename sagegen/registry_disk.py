"""A registry's files: read with bounds, written so that others see the old ones or the new ones, never half of one."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sagegen.entry import Entry
from sagegen.errors import RegistryError
from sagegen.registry_file import parse_entries, start_afresh

#: Of the largest registry taken; those of this project have a hundredth of it.
_MAX_BYTES = 1 << 25


def read_entries(path: Path, gpu: str) -> list[Entry]:
    """The entries of one registry file; [] when there is none.

    Raises:
        RegistryError: it cannot be read, is malformed, or is another GPU's.
    """
    return parse_bytes(read_file(path), str(path), gpu) if os.path.lexists(path) else []


def parse_bytes(data: bytes, where: str, gpu: str) -> list[Entry]:
    """As `parse_entries`, of a file's bytes.

    Raises:
        RegistryError: they are malformed, or another GPU's registry.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RegistryError(f"{where}:{line}: cannot be read: {error}", start_afresh(where, gpu)) from error
    return parse_entries(text, where, gpu)


def read_file(path: Path) -> bytes:
    """The content of a file of a registry's folder.

    Raises:
        RegistryError: it cannot be read, is no plain file, or is larger than any that belongs there.
    """
    try:
        # a named pipe would wait for its writer for good, a device has no end
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RegistryError(f"{path}: is no plain file", "put the registry's own file there")
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise RegistryError(f"{path}: cannot be read: {error}", "check the file and its permissions") from error
    if len(data) > _MAX_BYTES:
        raise RegistryError(f"{path}: more than {_MAX_BYTES >> 20} MiB", "put the registry's own file there")
    return data


def file_version(path: Path) -> tuple[int, int, int]:
    """Another one once the file was replaced.

    Raises:
        RegistryError: there is none.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise RegistryError(f"{path}: cannot be read: {error}", "check the file and its permissions") from error
    return status.st_mtime_ns, status.st_ino, status.st_size


def replace_file(path: Path, data: bytes) -> None:
    """Write `path` in one step: a reader sees the old file or the new one, a crash leaves the old one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp's 0600 would hide a shared registry from other users
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Only one process merges into a folder at a time; the lock is the folder itself, so nothing is left behind."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
