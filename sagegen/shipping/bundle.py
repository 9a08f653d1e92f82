"""A bundle in memory: made from the registries of this machine, written to a folder, read from one."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sagegen.abi import LAUNCH_ABI
from sagegen.entry import Entry
from sagegen.env import Env
from sagegen.errors import RegistryError
from sagegen.registry import Found, Layer, load_registry
from sagegen.registry_cubins import cubin_name, pack_cubin, unpack_cubin
from sagegen.registry_disk import read_file
from sagegen.registry_file import dump_entries
from sagegen.registry_kernels import find_cubin
from sagegen.registry_manifest import (
    MANIFEST_FILE,
    SCHEMA,
    FileFacts,
    GpuFacts,
    Manifest,
    check_complete,
    dump_manifest,
    parse_manifest,
)
from sagegen.registry_merge import left_of


@dataclass(frozen=True, slots=True)
class Bundle:
    """Registries with their cubins: `files` by their path in the bundle, all that `manifest` lists."""

    manifest: Manifest
    files: Mapping[str, bytes]

    @property
    def all_files(self) -> dict[str, bytes]:
        """The manifest too, in the order in which archives hold them."""
        return {MANIFEST_FILE: dump_manifest(self.manifest), **dict(sorted(self.files.items()))}


def make_bundle(gpus: Sequence[str], env: Env) -> Bundle:
    """What answers calls on `gpus` on this machine: all layers of each as one registry, with every cubin it names.

    The same entries and cubins give the same bundle, to the byte.

    Raises:
        RegistryError: a registry is malformed or empty, a cubin is not at hand, or one is of another launch ABI.
    """
    files: dict[str, bytes] = {}
    facts = {}
    for gpu in sorted(gpus):
        rows = _lay_over(load_registry(gpu, env).layers)
        if not rows:
            raise RegistryError(f"nothing is tuned for {gpu}", f"run: sagegen tune --gpu {gpu}")
        cubins = _gather_cubins(gpu, rows, env)
        entries = [entry for entry, _ in rows]
        facts[gpu] = _summarize(entries, len(cubins))
        files |= {f"{gpu}.yaml": dump_entries(gpu, entries).encode(), **cubins}
    manifest = Manifest(
        schema=SCHEMA,
        sagegen=_own_version(),
        launch_abi=LAUNCH_ABI,
        gpus=facts,
        files={name: _describe_file(data) for name, data in files.items()},
    )
    return Bundle(manifest, files)


def read_folder(folder: Path) -> Bundle:
    """The bundle that lies in `folder`; files that its manifest does not list are no part of it.

    Raises:
        RegistryError: it is no bundle, or a file of it is missing or changed.
    """
    manifest = parse_manifest(read_file(folder / MANIFEST_FILE), str(folder / MANIFEST_FILE))
    files = {name: read_file(folder / name) for name in sorted(manifest.files)}
    check_complete(manifest, files, str(folder))
    return Bundle(manifest, files)


def write_folder(bundle: Bundle, folder: Path) -> None:
    """Write `bundle` into `folder`, which appears in one step.

    Raises:
        RegistryError: the folder exists and is not empty.
    """
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise RegistryError(f"{folder} is there already", "name another folder, or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, data in bundle.all_files.items():
            (staging / name).parent.mkdir(exist_ok=True)
            (staging / name).write_bytes(data)
        staging.chmod(0o755)  # mkdtemp's 0700 would hide a shared bundle from other users
        os.rename(staging, folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _lay_over(layers: Sequence[Layer]) -> list[tuple[Entry, Layer]]:
    """One registry of all layers, each entry with the layer that has its cubin: measured before predicted, by layer."""
    rows = [(entry, layer, rank) for rank, layer in enumerate(layers) for entry in layer.entries]
    rows.sort(key=lambda row: (row[0].measured, -row[2]))  # each is laid over those before it
    kept: list[tuple[Entry, Layer]] = []
    for entry, layer, _ in rows:
        kept = [(part, own) for other, own in kept for part in left_of(other, entry)]
        kept.append((entry, layer))
    return kept


def _gather_cubins(gpu: str, rows: Sequence[tuple[Entry, Layer]], env: Env) -> dict[str, bytes]:
    """The packed cubins that entries name, by their path in the bundle; torch's answers need none."""
    cubins = {}
    for entry, layer in rows:
        if entry.cubin_sha256 is None:
            continue
        if entry.provenance.launch_abi != LAUNCH_ABI:
            message = f"{gpu} {entry.problem} {entry.lengths.name} has launch ABI {entry.provenance.launch_abi}"
            raise RegistryError(f"{message}, not {LAUNCH_ABI}", f"run: sagegen tune --gpu {gpu}")
        packed = _pack(Found(entry, gpu, False, False, layer), entry.cubin_sha256, env)
        if packed is not None:
            cubins[f"{gpu}/{cubin_name(entry.cubin_sha256)}"] = packed
        elif entry.answer == "kernel":
            message = (
                f"the cubin of {gpu} {entry.problem} {entry.lengths.name} is neither beside its registry nor stored"
            )
            raise RegistryError(message, f"run: sagegen tune --gpu {gpu}")
    return cubins


def _pack(found: Found, digest: str, env: Env) -> bytes | None:
    """The packed cubin of an entry, as it lies beside its registry where it does: packing is slow."""
    file = found.layer.folder / found.gpu_name / cubin_name(digest)
    packed = read_file(file) if file.is_file() else b""
    if unpack_cubin(packed, digest) is not None:
        return packed
    cubin = find_cubin(found, env, _raise)
    return None if cubin is None else pack_cubin(cubin)


def _own_version() -> str:
    try:
        return importlib.metadata.version("sagegen")
    except importlib.metadata.PackageNotFoundError:  # run from a folder that pip did not install
        return "not installed"


def _describe_file(data: bytes) -> FileFacts:
    return FileFacts(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


def _summarize(entries: Sequence[Entry], cubins: int) -> GpuFacts:
    sources = [entry.provenance for entry in entries]
    measured = sum(entry.measured for entry in entries)
    dates = sorted(source.date for source in sources)
    return GpuFacts(
        entries=len(entries),
        measured=measured,
        predicted=len(entries) - measured,
        cubins=cubins,
        dates=(dates[0], dates[-1]),
        drivers=sorted({source.driver for source in sources if source.driver}),
        nvccs=sorted({source.nvcc for source in sources if source.nvcc}),
        protocols=sorted({source.protocol for source in sources}),
    )


def _raise(error: RegistryError) -> None:
    raise error
