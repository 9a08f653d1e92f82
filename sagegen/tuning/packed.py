"""Journals that were packed by gzip, whole or not: what is before a damaged place is read."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

from sagegen.errors import ArgumentError

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 31  # zlib's word for gzip's header and trailer
_CHUNK_BYTES = 512

_log = logging.getLogger(__name__)


def unpack(path: Path, data: bytes) -> bytes:
    """What can be unpacked of a journal's bytes, of one or more gzip members, with a warning where that is not all.

    Raises:
        ArgumentError: they were never packed; names `path`.
    """
    if not data.startswith(_GZIP_MAGIC):
        raise ArgumentError(f"journal {path} is not packed by gzip", f"rename it: mv {path} {path.with_suffix('')}")
    text = bytearray()
    unpacker = zlib.decompressobj(wbits=_GZIP_WBITS)
    try:
        for start in range(0, len(data), _CHUNK_BYTES):  # what comes before a damaged place is kept
            rest = data[start : start + _CHUNK_BYTES]
            while rest:
                if unpacker.eof:
                    rest = rest.lstrip(b"\0")  # gzip may pad members with zeros
                    unpacker = zlib.decompressobj(wbits=_GZIP_WBITS) if rest else unpacker
                text += unpacker.decompress(rest)
                rest = unpacker.unused_data if rest else b""
        whole = unpacker.eof
    except zlib.error:
        whole = False
    if not whole:
        _log.warning("journal %s is cut short or damaged: read the %d lines before that", path, text.count(b"\n"))
    return bytes(text)
