"""Registries and cubins from wherever a user keeps them: a registry file, a folder, an archive, a wheel."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sagegen.entry import Entry
from sagegen.errors import RegistryError
from sagegen.gpu import GPUS
from sagegen.registry import Found, Layer, read_cubin
from sagegen.registry_cubins import cubin_name, unpack_cubin
from sagegen.registry_disk import parse_bytes, read_file
from sagegen.registry_manifest import MANIFEST_FILE
from sagegen.registry_places import ARCHIVE_SUFFIX
from sagegen.shipping.bundle import Bundle, read_folder


@dataclass(frozen=True, slots=True)
class Source:
    """The registry of one GPU as one file has it.

    Attributes:
        where: that file, for messages.
        read_cubin: the cubin of an entry of it; None when it is not there.
    """

    where: str
    gpu: str
    entries: tuple[Entry, ...]
    read_cubin: Callable[[Entry], bytes | None]


def read_sources(path: Path) -> list[Source]:
    """The registries at `path`, one per GPU: a `.yaml`, a folder of those, or a bundle in any of its forms.

    Raises:
        RegistryError: there is none, or it is malformed or damaged.
    """
    if path.is_dir() and (path / MANIFEST_FILE).exists():
        return _of_bundle(path, read_folder(path))
    if path.is_dir():
        return [_of_file(path / f"{gpu}.yaml", gpu) for gpu in GPUS if (path / f"{gpu}.yaml").is_file()]
    if path.name.endswith(ARCHIVE_SUFFIX):
        from sagegen.shipping.archive import read_archive  # not at the top: needs zstandard

        return _of_bundle(path, read_archive(path))
    if path.suffix == ".whl":
        from sagegen.shipping.wheel import read_wheel

        return _of_bundle(path, read_wheel(path))
    return [_of_file(path, _name_gpu(path))]


def _name_gpu(path: Path) -> str:
    """Whose registry the file says that it is; a copy may have any name."""
    said = re.search(rb"^gpu: ([a-z0-9]+)$", read_file(path), re.MULTILINE)
    return said[1].decode() if said else path.stem


def _of_file(path: Path, gpu: str) -> Source:
    entries = tuple(parse_bytes(read_file(path), str(path), gpu))

    def read(entry: Entry) -> bytes | None:
        # cubins lie in the folder of the file's stem, which is the GPU's name unless the file is a copy
        layer = Layer(path.parent, gpu, entries, "named")
        return read_cubin(Found(entry, path.stem, False, False, layer))

    return Source(str(path), gpu, entries, read)


def _of_bundle(path: Path, bundle: Bundle) -> list[Source]:
    return [_of_member(path, gpu, bundle.files) for gpu in sorted(bundle.manifest.gpus)]


def _of_member(path: Path, gpu: str, files: Mapping[str, bytes]) -> Source:
    name = f"{gpu}.yaml"
    entries = tuple(parse_bytes(files[name], f"{path}: {name}", gpu))

    def read(entry: Entry) -> bytes | None:
        digest = str(entry.cubin_sha256)
        packed = files.get(f"{gpu}/{cubin_name(digest)}")
        if packed is None:
            return None
        cubin = unpack_cubin(packed, digest)
        if cubin is None:
            raise RegistryError(
                f"{path}: {gpu}/{cubin_name(digest)} is not the cubin that its registry names", "pack again"
            )
        return cubin

    return Source(str(path), gpu, entries, read)
