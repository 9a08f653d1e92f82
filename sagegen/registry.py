"""The tuned registry: which entry answers a problem on a GPU, and saving new ones.

Two layers hold entries of a GPU: the user's (`SAGEGEN_TUNED_DIR`) and the one that ships in the package. A measured
entry goes before a predicted one, then the user's before the shipped. Cubins lie beside a layer's YAML, named by
digest: `<gpu>/<first 16 digits>.cubin.gz`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sagegen.entry import Accuracy, Entry, KernelResources, Provenance, Range, Timing
from sagegen.env import Env, read_env
from sagegen.errors import RegistryError
from sagegen.gpu import GPUS, Gpu
from sagegen.problem import Problem
from sagegen.registry_cubins import cubin_name, pack_cubin, read_packed, read_plain, remove_strays
from sagegen.registry_disk import locked_folder, replace_file
from sagegen.registry_file import dump_entries, parse_entries, start_afresh
from sagegen.registry_merge import Saved, merge_entries

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
    "save_entries",
    "shipped_dir",
]


@dataclass(frozen=True, slots=True)
class Layer:
    """One registry file: the folder it lies in and what it says. `shipped` is the package's own."""

    folder: Path
    gpu: str
    entries: tuple[Entry, ...]
    shipped: bool


def _admit_all(entry: Entry) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Registry:
    """Everything that is known about one GPU; layers in the order in which they are asked."""

    gpu: str
    layers: tuple[Layer, ...]

    def find(
        self, problem: Problem, kv_len: int, min_cosine: float = 0.0, admits: Callable[[Entry], bool] = _admit_all
    ) -> tuple[Entry, Layer] | None:
        """What answers `kv_len` keys: accurate enough before not, measured before predicted, by layer, coarse first."""
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
            (not entry.serves(min_cosine), not entry.measured, rank, entry.tier == "fine", entry, layer)
            for rank, layer in enumerate(self.layers)
            for entry in layer.entries
            if fits(entry)
        ]
        best = min(found, key=lambda row: row[:4], default=None)  # min keeps the first of equals
        return None if best is None else best[4:]


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
    for folder, shipped in ((env.tuned_dir, False), (shipped_dir(), True)):
        try:
            layer = _load_layer(folder, gpu_name, shipped)
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
            f"reinstall sagegen or run: sagegen tune --gpu {found.gpu_name}",
        )
    return data


def save_entries(path: Path, gpu: str, entries: Iterable[Entry], cubins: Mapping[str, bytes]) -> Saved:
    """Merge `entries` into the registry file at `path` and put their cubins beside it.

    An entry replaces those of its problem in its bucket, but a predicted one never a measured one. Entries whose
    buckets reach beyond it keep answering what is left of them.
    The file is replaced in one step; cubins that nothing names any more go afterwards.

    Args:
        path: `.../<gpu>.yaml`; its folder is made. Cubins go to the folder of the same stem beside it.
        gpu: name of the GPU that the entries are for.
        cubins: by sha256; may lack those that lie in the kernel store.

    Raises:
        RegistryError: the existing file is malformed, the new one would be, or a cubin is not its digest's.
    """
    for digest, data in cubins.items():
        if hashlib.sha256(data).hexdigest() != digest:
            raise RegistryError(f"{path}: a cubin to be saved is not that of digest {digest}", "report this as a bug")
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked_folder(path.parent):
        present = read_entries(path, gpu)
        kept, saved = merge_entries(present, entries)
        text = dump_entries(gpu, kept)
        parse_entries(text, str(path), gpu)
        folder = path.with_suffix("")
        wanted = {e.cubin_sha256 for e in kept if e.cubin_sha256}
        for digest, data in cubins.items():
            if digest in wanted:
                folder.mkdir(exist_ok=True)
                replace_file(folder / cubin_name(digest), pack_cubin(data))
        replace_file(path, text.encode())
        remove_strays(folder, wanted)
    return saved


def read_entries(path: Path, gpu: str) -> list[Entry]:
    """The entries of one registry file; [] when there is none.

    Raises:
        RegistryError: it cannot be read, is malformed, or is another GPU's.
    """
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RegistryError(f"{path}: cannot be read: {error}", "check the file and its permissions") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RegistryError(f"{path}:{line}: cannot be read: {error}", start_afresh(str(path), gpu)) from error
    return parse_entries(text, str(path), gpu)


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


def _load_layer(folder: Path, gpu_name: str, shipped: bool) -> Layer | None:
    file = folder / f"{gpu_name}.yaml"
    if not file.is_file():
        return None
    status = file.stat()
    version = (status.st_mtime_ns, status.st_ino, status.st_size)
    return Layer(folder, gpu_name, _read_entries(file, gpu_name, version), shipped)


@functools.lru_cache(maxsize=64)
def _read_entries(file: Path, gpu_name: str, version: tuple[int, int, int]) -> tuple[Entry, ...]:
    """Cached by `version`, which replacing the file changes: a long-lived process sees what a tuner wrote."""
    return tuple(read_entries(file, gpu_name))


def _raise(error: RegistryError) -> None:
    raise error
