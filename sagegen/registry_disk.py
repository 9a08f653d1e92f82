"""Writing a registry's files so that other processes see the old ones or the new ones, never half of one."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
