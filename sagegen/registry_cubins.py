"""Cubins beside a registry: gzip files named by the digest of what they hold, `<first 16 digits>.cubin.gz`."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

_DIGEST_IN_NAME = 16
#: Of the largest cubin taken; those of this project have a hundredth of it.
_MAX_BYTES = 1 << 26


def cubin_name(digest: str) -> str:
    return f"{digest[:_DIGEST_IN_NAME]}.cubin.gz"


def pack_cubin(data: bytes) -> bytes:
    """As a gzip file without a time in its header: the same cubin is the same file."""
    return gzip.compress(data, mtime=0)


def read_packed(file: Path) -> bytes:
    """A gzip file's content; of anything else, or of more than a cubin can be, what no digest is of.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    return _unpack(_read_bounded(file))


def unpack_cubin(packed: bytes, digest: str) -> bytes | None:
    """The cubin of that digest in a gzip file's bytes; None where they hold anything else."""
    data = _unpack(packed)
    return data if hashlib.sha256(data).hexdigest() == digest else None


def read_plain(packed: Path, digest: str) -> bytes | None:
    """The cubin as registries had it before they packed them; None when it is not there, or another's."""
    try:
        data = _read_bounded(packed.with_suffix(""))
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest() == digest else None


def remove_strays(folder: Path, digests: Iterable[str]) -> None:
    """Remove the cubins, packed or not, whose digest is none of `digests`."""
    wanted = {cubin_name(digest) for digest in digests}
    for file in (*folder.glob("*.cubin.gz"), *folder.glob("*.cubin")):
        if f"{file.name.removesuffix('.gz')}.gz" not in wanted:
            file.unlink()


def _unpack(packed: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = unpacker.decompress(packed, _MAX_BYTES)
    except zlib.error:
        return b""
    return content if unpacker.eof else b""


def _read_bounded(file: Path) -> bytes:
    """At most what a cubin can have, without waiting: a named pipe waits for its writer, and a device has no end."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        return opened.read(_MAX_BYTES)
