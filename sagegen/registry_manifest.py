"""A bundle's manifest: what registries and cubins it holds, the digest of each file, and where its figures come from.

A bundle is a folder of registries with their cubins and a `manifest.json`. `sagegen pack` writes it as a folder, as an
archive or as a wheel. A digest proves that a file is the one that was packed, not that whoever packed it is to be
trusted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import msgspec

from sagegen.entry import Natural, Positive, Sha256, Text
from sagegen.errors import RegistryError

MANIFEST_FILE = "manifest.json"
SCHEMA = 1
#: What a bundle may hold: nothing that leads out of its folder can be spelled so.
_NAME = re.compile(r"(?P<gpu>[a-z0-9]{1,32})(\.yaml|/[0-9a-f]{16}\.cubin\.gz)")
_MAX_BYTES = 1 << 22
_AGAIN = "get the bundle again, or pack it again with: sagegen pack"


class _Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the manifest's parts."""


class FileFacts(_Facts, frozen=True, kw_only=True):
    """One file; `bytes` is its size."""

    sha256: Sha256
    bytes: Natural


class GpuFacts(_Facts, frozen=True, kw_only=True):
    """One registry of the bundle: how many entries and cubins it has, and where their figures come from.

    Attributes:
        dates: of its oldest and of its newest entry.
        drivers, nvccs, protocols: all that occur in it.
    """

    entries: Positive
    measured: Natural
    predicted: Natural
    cubins: Natural
    dates: tuple[Text, Text]
    drivers: list[Text]
    nvccs: list[Text]
    protocols: list[Positive]


class Manifest(_Facts, frozen=True, kw_only=True):
    """What is in a bundle.

    Attributes:
        sagegen: version of the package that packed it.
        launch_abi: of all its cubins.
        gpus: its registries.
        files: all its files but the manifest, by their path in the bundle.
    """

    schema: int
    sagegen: Text
    launch_abi: Positive
    gpus: dict[str, GpuFacts]
    files: dict[str, FileFacts]


class _Header(msgspec.Struct, frozen=True):
    schema: int


def dump_manifest(manifest: Manifest) -> bytes:
    """The file: the same manifest gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in `data`.

    Args:
        where: its name, for messages.

    Raises:
        RegistryError: it is none, is of another schema, or lists what no bundle holds.
    """
    if len(data) > _MAX_BYTES:
        raise RegistryError(f"{where}: {len(data)} bytes are no manifest", _AGAIN)
    try:
        schema = msgspec.json.decode(data, type=_Header).schema
        if schema != SCHEMA:
            raise RegistryError(
                f"{where}: schema {schema} is not known to this sagegen, which reads {SCHEMA}", "upgrade sagegen"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise RegistryError(f"{where}: no manifest of a bundle: {error}", _AGAIN) from error
    for name in manifest.files:
        match = _NAME.fullmatch(name)
        if match is None or match["gpu"] not in manifest.gpus:
            raise RegistryError(f"{where}: lists {name!r}, which is no registry or cubin of its GPUs", _AGAIN)
    for gpu in manifest.gpus:
        if f"{gpu}.yaml" not in manifest.files:
            raise RegistryError(f"{where}: lists no registry of its GPU {gpu!r}", _AGAIN)
    return manifest


def check_file(manifest: Manifest, name: str, data: bytes, where: str) -> None:
    """Hold a file of a bundle to its digest.

    Args:
        name: its path in the bundle.
        where: its name, for messages.

    Raises:
        RegistryError: the manifest does not list it, or lists another content.
    """
    facts = manifest.files.get(name)
    if facts is None:
        raise RegistryError(f"{where}: {MANIFEST_FILE} of its bundle does not list it", _AGAIN)
    if len(data) != facts.bytes or hashlib.sha256(data).hexdigest() != facts.sha256:
        raise RegistryError(f"{where}: the file is not the one whose digest {MANIFEST_FILE} of its bundle has", _AGAIN)


def check_complete(manifest: Manifest, files: Mapping[str, bytes], where: str) -> None:
    """Hold a whole bundle to its manifest: every file is listed and as listed, and none is missing.

    Raises:
        RegistryError: naming the first file that is not.
    """
    for name, data in files.items():
        check_file(manifest, name, data, f"{where}: {name}")
    for name in sorted(manifest.files.keys() - files.keys()):
        raise RegistryError(f"{where}: {name} is missing", _AGAIN)
