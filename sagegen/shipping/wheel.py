"""A bundle as a wheel: a package of data without any code, which sagegen finds by its entry point."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
import zlib
from pathlib import Path

from sagegen.errors import RegistryError
from sagegen.registry_manifest import MANIFEST_FILE, Manifest, check_complete, parse_manifest
from sagegen.registry_places import ENTRY_POINT_GROUP
from sagegen.shipping.bundle import Bundle

#: The first that a zip file can say; the same in every wheel, so that its bytes are.
_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16
_UNIX = 3
_MAX_BYTES = 1 << 29
_DIGITS = 8
_AGAIN = "get the wheel again, or pack it again with: sagegen pack --wheel"


def pack_wheel(bundle: Bundle) -> tuple[str, bytes]:
    """The wheel's file name and content.

    The version is `<launch ABI>.<date of the newest entry>+c<digest>`: `pip install 'NAME==1.*'` takes what kernels of
    launch ABI 1 need, and another content is another version.
    """
    name, version = _name_package(bundle.manifest), _name_version(bundle)
    folder = name.replace("-", "_")
    info = f"{folder}-{version}.dist-info"
    files = {f"{folder}/{file}": data for file, data in bundle.all_files.items()}
    files[f"{info}/METADATA"] = _describe(bundle.manifest, name, version).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: sagegen\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = f"[{ENTRY_POINT_GROUP}]\n{name} = {folder}\n".encode()
    record = [f"{file},sha256={_record_digest(data)},{len(data)}" for file, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]).encode() + b"\n"
    return f"{folder}-{version}-py3-none-any.whl", _zip(files)


def read_wheel(path: Path) -> Bundle:
    """The bundle in a wheel that `pack_wheel` made. Nothing is written anywhere.

    Raises:
        RegistryError: it cannot be read, is damaged, or holds no bundle.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > _MAX_BYTES:
                raise RegistryError(f"{path}: unpacks to more than the {_MAX_BYTES >> 20} MiB of a bundle", _AGAIN)
            files = {member.filename: archive.read(member) for member in members}
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise RegistryError(f"{path}: damaged: {error}", _AGAIN) from error
    if len(files) != len(members):
        raise RegistryError(f"{path}: a member is there twice", _AGAIN)
    top = next((name.partition("/")[0] for name in files if name.endswith(f"/{MANIFEST_FILE}")), None)
    if top is None:
        raise RegistryError(f"{path}: has no {MANIFEST_FILE}, so it is no bundle", _AGAIN)
    own = {name.partition("/")[2]: data for name, data in files.items() if name.startswith(f"{top}/")}
    manifest = parse_manifest(own.pop(MANIFEST_FILE), f"{path}: {MANIFEST_FILE}")
    check_complete(manifest, own, str(path))
    return Bundle(manifest, own)


def _name_package(manifest: Manifest) -> str:
    """`sagegen-kernels-h200`; of several GPUs `sagegen-kernels`, so that one more makes no other package."""
    return "-".join(["sagegen-kernels", *(manifest.gpus if len(manifest.gpus) == 1 else ())])


def _name_version(bundle: Bundle) -> str:
    newest = max(facts.dates[1] for facts in bundle.manifest.gpus.values())
    content = hashlib.sha256(bundle.all_files[MANIFEST_FILE]).hexdigest()
    return f"{bundle.manifest.launch_abi}.{newest.replace('-', '')}+c{content[:_DIGITS]}"


def _describe(manifest: Manifest, name: str, version: str) -> str:
    """METADATA. It requires nothing: which sagegen takes it, the launch ABI says."""
    gpus = ", ".join(manifest.gpus)
    rows = [
        f"{gpu}: {facts.measured} measured and {facts.predicted} predicted entries, {facts.cubins} cubins"
        for gpu, facts in manifest.gpus.items()
    ]
    return "\n".join(
        [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            f"Summary: Tuned attention kernels for {gpus}; launch ABI {manifest.launch_abi} of sagegen",
            f"Keywords: sagegen,sagegen-launch-abi-{manifest.launch_abi}",
            "Requires-Python: >=3.10",
            "Description-Content-Type: text/plain",
            "",
            f"Registries and cubins, packed by sagegen {manifest.sagegen}. Data alone: nothing in this package is run.",
            "",
            *rows,
            "",
        ]
    )


def _record_digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _zip(files: dict[str, bytes]) -> bytes:
    """Stored, since cubins are packed already, and what zlib makes of bytes is not the same everywhere."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            member = zipfile.ZipInfo(name, _TIME)
            member.external_attr, member.create_system = _MODE, _UNIX
            archive.writestr(member, data)
    return packed.getvalue()
