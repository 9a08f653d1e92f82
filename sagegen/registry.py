"""The tuned registry: which entry answers a problem on a GPU.

Layers hold entries of a GPU: the user's (`SAGEGEN_TUNED_DIR`), those of `SAGEGEN_REGISTRY`, installed bundles, and the
one that ships in the package. A measured entry goes before a predicted one, then an earlier layer's before a later's.
Cubins lie beside a layer's YAML, named by digest: `<gpu>/<first 16 digits>.cubin.gz`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sagegen.abi import LAUNCH_ABI
from sagegen.entry import Accuracy, Entry, KernelResources, Provenance, Range, Timing
from sagegen.env import Env, read_env
from sagegen.errors import RegistryError
from sagegen.gpu import GPUS, Gpu
from sagegen.problem import Problem
from sagegen.registry_cubins import cubin_name, read_packed, read_plain
from sagegen.registry_disk import file_version, parse_bytes, read_entries, read_file
from sagegen.registry_manifest import MANIFEST_FILE, check_file, parse_manifest
from sagegen.registry_merge import Saved
from sagegen.registry_places import Origin, Place, find_places
from sagegen.registry_save import save_entries

__all__ = [
    "Accuracy",
    "Entry",
    "Found",
    "KernelResources",
    "Layer",
    "Provenance",
    "Range",
    "Registry",
    "Saved",
    "Timing",
    "load_layers",
    "load_registry",
    "lookup",
    "read_cubin",
    "read_entries",
    "save_entries",
    "shipped_dir",
]


@dataclass(frozen=True, slots=True)
class Layer:
    """One registry file: the folder it lies in and what it says; `origin` and `package` as `Place` has them."""

    folder: Path
    gpu: str
    entries: tuple[Entry, ...]
    origin: Origin
    package: str = ""

    @property
    def shipped(self) -> bool:
        """It is the package's own."""
        return self.origin == "shipped"

    @property
    def label(self) -> str:
        """Where it is from, in a word or two."""
        return {"named": str(self.folder), "installed": self.package}.get(self.origin, self.origin)


def _admit_all(entry: Entry) -> bool:
    return True


def _rank(entry: Entry, layer: int) -> tuple[bool, bool, int, bool]:
    """Place of an entry of a layer among those that serve a caller: the least answers."""
    # its cubin is for another sagegen: a bundle from before an upgrade must not hide what came with that
    needs_build = entry.answer == "kernel" and entry.provenance.launch_abi != LAUNCH_ABI
    return needs_build, not entry.measured, layer, entry.tier == "fine"


@dataclass(frozen=True, slots=True)
class Registry:
    """Everything that is known about one GPU; layers in the order in which they are asked."""

    gpu: str
    layers: tuple[Layer, ...]

    def find(
        self, problem: Problem, kv_len: int, min_cosine: float = 0.0, admits: Callable[[Entry], bool] = _admit_all
    ) -> tuple[Entry, Layer] | None:
        """What answers `kv_len` keys: accurate enough before not, of this launch ABI before others, measured before
        predicted, by layer, coarse first."""
        return self._best(
            lambda entry: entry.problem == problem.name and entry.lengths.holds(kv_len) and admits(entry), min_cosine
        )

    def find_longer(
        self, problem: Problem, kv_len: int, min_cosine: float = 0.0, admits: Callable[[Entry], bool] = _admit_all
    ) -> tuple[Entry, Layer] | None:
        """Where no bucket holds `kv_len`, the entry of the next longer one.

        Never a shorter one: a variant for short lengths may be many times slower, or less accurate, on long ones.
        """
        longer = [
            entry.bucket.kv_min
            for layer in self.layers
            for entry in layer.entries
            if entry.problem == problem.name and entry.bucket.kv_min > kv_len and admits(entry)
        ]
        if not longer:
            return None
        nearest = min(longer)
        return self._best(
            lambda entry: entry.problem == problem.name and entry.bucket.kv_min == nearest and admits(entry), min_cosine
        )

    def _best(self, fits: Callable[[Entry], bool], min_cosine: float) -> tuple[Entry, Layer] | None:
        found = [
            (entry, layer, (not entry.serves(min_cosine), *_rank(entry, place)))
            for place, layer in enumerate(self.layers)
            for entry in layer.entries
            if fits(entry)
        ]
        best = min(found, key=lambda row: row[2], default=None)  # min keeps the first of equals
        return None if best is None else best[:2]


@dataclass(frozen=True, slots=True)
class Found:
    """The answer of a lookup.

    Attributes:
        entry: what to run.
        gpu_name: the GPU whose registry has it.
        borrowed: that is not the GPU at hand.
        out_of_range: no bucket holds the length; this is the next longer one.
        layer: where its cubin may lie.
    """

    entry: Entry
    gpu_name: str
    borrowed: bool
    out_of_range: bool
    layer: Layer


def shipped_dir() -> Path:
    """The folder of the registries that ship with the package."""
    return Path(str(importlib.resources.files("sagegen.tuned")))


def load_registry(gpu_name: str, env: Env | None = None) -> Registry:
    """All layers of `gpu_name` that exist; none is an empty registry. `env` None reads the environment.

    Raises:
        RegistryError: a file is malformed; the message names file, line and key.
    """
    return _load(gpu_name, env or read_env(), _raise)


def load_layers(gpu_name: str, env: Env, on_error: Callable[[RegistryError], None]) -> Iterator[Layer]:
    """The layers of `gpu_name` that exist, the user's first; `on_error` gets the error of each malformed one."""
    for place in find_places(env, shipped_dir(), on_error):
        try:
            layer = _load_layer(place, gpu_name)
        except RegistryError as error:
            on_error(error)
            continue
        if layer is not None:
            yield layer


def lookup(
    gpu: Gpu | None,
    problem: Problem,
    kv_len: int,
    env: Env | None = None,
    *,
    arch: str | None = None,
    min_cosine: float = 0.0,
    admits: Callable[[Entry], bool] = _admit_all,
    on_error: Callable[[RegistryError], None] | None = None,
) -> Found | None:
    """The entry for `kv_len` keys: of the GPU itself, of its declared siblings, then of any GPU of its architecture.

    Args:
        gpu: the GPU at hand, None for a product that has no row in the GPU table.
        env: the environment's settings; None reads them.
        arch: its architecture (`sm_89`), needed when `gpu` is None.
        min_cosine: of a bucket's two entries the fast one answers if it reaches that.
        admits: whether an entry may answer at all; it is asked of no other problem's.
        on_error: gets the error of a malformed file, which is then left out; by default the error is raised.

    Returns:
        None when nothing that is admitted answers the length and nothing longer does either.
    """
    env = env or read_env()
    names = _search_order(gpu, arch)
    for out_of_range in (False, True):
        for name in names:
            registry = _load(name, env, on_error or _raise)
            find = registry.find_longer if out_of_range else registry.find
            if hit := find(problem, kv_len, min_cosine, admits):
                entry, layer = hit
                return Found(entry, name, gpu is None or name != gpu.name, out_of_range, layer)
    return None


def read_cubin(found: Found) -> bytes | None:
    """The cubin of `found` from beside its registry file; None when it does not lie there.

    Raises:
        RegistryError: the file's digest is not the registry's.
    """
    digest = found.entry.cubin_sha256
    if digest is None:
        return None
    file = found.layer.folder / found.gpu_name / cubin_name(digest)
    try:
        data: bytes | None = read_packed(file)
    except FileNotFoundError:
        data = read_plain(file, digest)
    except OSError as error:
        raise RegistryError(f"{file}: cannot be read: {error}", "check the file and its permissions") from error
    if data is not None and hashlib.sha256(data).hexdigest() != digest:
        raise RegistryError(
            f"{file}: the file is not the cubin whose digest its registry names",
            f"{_replacement(found.layer)}, or run: sagegen tune --gpu {found.gpu_name}",
        )
    return data


def _replacement(layer: Layer) -> str:
    """How to get a layer's files anew."""
    if layer.origin == "installed":
        return f"reinstall {layer.package.partition(' ')[0]}"
    return "get the bundle again" if layer.origin == "named" else "reinstall sagegen"


def _search_order(gpu: Gpu | None, arch: str | None) -> list[str]:
    arch = gpu.arch if gpu is not None else arch
    kin = [name for name, other in GPUS.items() if other.arch == arch]
    if gpu is None:
        return kin
    # a sibling of another architecture could not run the cubin
    siblings = [name for name in gpu.siblings if name in kin]
    return list(dict.fromkeys([gpu.name, *siblings, *kin]))


def _load(gpu_name: str, env: Env, on_error: Callable[[RegistryError], None]) -> Registry:
    return Registry(gpu_name, tuple(load_layers(gpu_name, env, on_error)))


def _load_layer(place: Place, gpu_name: str) -> Layer | None:
    file = place.folder / f"{gpu_name}.yaml"
    if not file.is_file():
        return None
    if place.is_bundle:
        manifest = place.folder / MANIFEST_FILE
        entries = _read_bundled(file, gpu_name, file_version(file), file_version(manifest))
    else:
        entries = _read_entries(file, gpu_name, file_version(file))
    return Layer(place.folder, gpu_name, entries, place.origin, place.package)


@functools.lru_cache(maxsize=64)
def _read_entries(file: Path, gpu_name: str, version: tuple[int, int, int]) -> tuple[Entry, ...]:
    """Cached by `version`, which replacing the file changes: a long-lived process sees what a tuner wrote."""
    return tuple(read_entries(file, gpu_name))


@functools.lru_cache(maxsize=64)
def _read_bundled(file: Path, gpu_name: str, *versions: tuple[int, int, int]) -> tuple[Entry, ...]:
    """The same of a bundle, whose manifest must have the file's digest."""
    manifest = file.with_name(MANIFEST_FILE)
    data = read_file(file)
    check_file(parse_manifest(read_file(manifest), str(manifest)), file.name, data, str(file))
    return tuple(parse_bytes(data, str(file), gpu_name))


def _raise(error: RegistryError) -> None:
    raise error
