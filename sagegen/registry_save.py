"""Saving entries into a registry file, with their cubins beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sagegen.entry import Entry
from sagegen.errors import RegistryError
from sagegen.registry_cubins import cubin_name, pack_cubin, remove_strays
from sagegen.registry_disk import locked_folder, read_entries, replace_file
from sagegen.registry_file import dump_entries, parse_entries
from sagegen.registry_merge import Saved, merge_entries


def _never(entry: Entry) -> bool:
    return False


def save_entries(
    path: Path,
    gpu: str,
    entries: Iterable[Entry],
    cubins: Mapping[str, bytes],
    is_stale: Callable[[Entry], bool] = _never,
) -> Saved:
    """Merge `entries` into the registry file at `path` and put their cubins beside it.

    An entry replaces those of its problem in its bucket, but a predicted one never a measured one or a better
    prediction. Entries whose buckets reach beyond it keep answering what is left of them.
    The file is replaced in one step; cubins that nothing names any more go afterwards.

    Args:
        path: `.../<gpu>.yaml`; its folder is made. Cubins go to the folder of the same stem beside it.
        gpu: name of the GPU that the entries are for.
        cubins: by sha256; may lack those that lie in the kernel store.
        is_stale: whether a present entry's kernel is of an old text.

    Raises:
        RegistryError: the existing file is malformed, the new one would be, or a cubin is not its digest's.
    """
    _check_digests(path, cubins)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked_folder(path.parent):
        kept, saved = merge_entries(read_entries(path, gpu), entries, is_stale)
        _write(path, gpu, kept, cubins)
    return saved


def write_entries(path: Path, gpu: str, entries: Iterable[Entry], cubins: Mapping[str, bytes]) -> None:
    """Write a registry of `entries` alone, whatever the file at `path` holds; else as `save_entries`."""
    _check_digests(path, cubins)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked_folder(path.parent):
        _write(path, gpu, list(entries), cubins)


def _check_digests(path: Path, cubins: Mapping[str, bytes]) -> None:
    for digest, data in cubins.items():
        if hashlib.sha256(data).hexdigest() != digest:
            raise RegistryError(f"{path}: a cubin to be saved is not that of digest {digest}", "report this as a bug")


def _write(path: Path, gpu: str, entries: list[Entry], cubins: Mapping[str, bytes]) -> None:
    text = dump_entries(gpu, entries)
    parse_entries(text, str(path), gpu)
    folder = path.with_suffix("")
    wanted = {e.cubin_sha256 for e in entries if e.cubin_sha256}
    for digest, data in cubins.items():
        if digest in wanted:
            folder.mkdir(exist_ok=True)
            replace_file(folder / cubin_name(digest), pack_cubin(data))
    replace_file(path, text.encode())
    remove_strays(folder, wanted)
