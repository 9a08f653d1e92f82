"""A bundle as a `.tar.zst` archive, the same bytes each time; reading one trusts nothing in it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import zstandard

from sagegen.errors import RegistryError
from sagegen.registry_manifest import MANIFEST_FILE, check_complete, parse_manifest
from sagegen.shipping.bundle import Bundle

#: Cubins are packed already, so that more effort gains nothing.
_LEVEL = 10
#: Of an archive, packed and unpacked: some hundred times this project's largest.
_MAX_BYTES = 1 << 29
_MAX_MEMBERS = 1 << 14
#: What reading a tar file raises where its headers make no sense, or are nested to overflow the stack.
_DAMAGE = (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError)
_AGAIN = "get the archive again, or pack it again with: sagegen pack"


def pack_archive(bundle: Bundle) -> bytes:
    """The archive: members in a fixed order, without times and owners."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in bundle.all_files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True).compress(tar.getvalue())


def read_archive(path: Path) -> Bundle:
    """The bundle in an archive. Nothing is written anywhere.

    Raises:
        RegistryError: it cannot be read, is damaged, unpacks to more than a bundle can be, or holds a member that no
            bundle has: a link, a device, a path that leads elsewhere, a name twice, a file that is not listed.
    """
    tar = _decompress(path)
    try:
        with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
            files = _read_members(archive, len(tar), path)
    except _DAMAGE as error:
        raise RegistryError(f"{path}: damaged: {error}", _AGAIN) from error
    if MANIFEST_FILE not in files:
        raise RegistryError(f"{path}: has no {MANIFEST_FILE}, so it is no bundle", _AGAIN)
    manifest = parse_manifest(files.pop(MANIFEST_FILE), f"{path}: {MANIFEST_FILE}")
    check_complete(manifest, files, str(path))
    return Bundle(manifest, files)


def _decompress(path: Path) -> bytes:
    """The tar file; its size is read from the header, and refused, before memory is taken for it."""
    try:
        packed_size = path.stat().st_size
        if not path.is_file() or packed_size > _MAX_BYTES:
            raise RegistryError(f"{path}: is no file that a bundle can be", _AGAIN)
        packed = path.read_bytes()
    except OSError as error:
        raise RegistryError(f"{path}: cannot be read: {error}", "check the file and its permissions") from error
    try:
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= _MAX_BYTES:
            unpacked = "an unknown size" if size < 0 else f"{size >> 20} MiB"
            raise RegistryError(
                f"{path}: unpacks to {unpacked}, more than the {_MAX_BYTES >> 20} MiB of a bundle", _AGAIN
            )
        return zstandard.ZstdDecompressor().decompress(packed, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RegistryError(f"{path}: damaged: {error}", _AGAIN) from error


def _read_members(archive: tarfile.TarFile, size: int, path: Path) -> dict[str, bytes]:
    """The members of a tar file of so many bytes. The manifest, which can spell no path out of a bundle, names them."""
    files: dict[str, bytes] = {}
    for member in archive:
        if flaw := _find_flaw(member, files, size):
            raise RegistryError(f"{path}: member {member.name!r} {flaw}", "do not unpack it; get it from who packed it")
        content = archive.extractfile(member)
        data = content.read(member.size) if content else b""
        if len(data) != member.size:
            raise RegistryError(f"{path}: damaged: {member.name!r} is cut short", _AGAIN)
        files[member.name] = data
    return files


def _find_flaw(member: tarfile.TarInfo, before: dict[str, bytes], archive_size: int) -> str:
    """What is wrong with a member whatever it holds; empty when nothing is."""
    if member.issym() or member.islnk():
        return f"is a link to {member.linkname!r}"
    if not member.isreg() or member.sparse is not None:
        return "is no plain file"
    if member.name.startswith("/"):
        return "is an absolute path"
    if ".." in member.name.split("/"):
        return "leads out of its folder"
    if not 0 <= member.size <= archive_size:
        return f"says that it has {member.size} bytes"
    if member.name in before:
        return "is there twice"
    if len(before) >= _MAX_MEMBERS:
        return f"is one of more than {_MAX_MEMBERS}"
    return ""
