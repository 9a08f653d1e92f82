"""Several registries of one GPU as one: measured before predicted, then newer before older."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sagegen.entry import Entry
from sagegen.errors import RegistryError
from sagegen.registry_merge import left_of
from sagegen.shipping.sources import Source


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two files answer the same lengths differently: there `kept` is in the result, and `dropped` is not."""

    kept: Entry
    kept_from: str
    dropped: Entry
    dropped_from: str

    def __str__(self) -> str:
        rows = ((self.kept, self.kept_from), (self.dropped, self.dropped_from))
        kept, dropped = (
            f"{entry.lengths.name}{f' {entry.tier}' if entry.tier else ''} of {where} "
            f"({entry.provenance.kind} {entry.provenance.date})"
            for entry, where in rows
        )
        return f"{self.kept.problem}: {kept} goes before {dropped}"


@dataclass(frozen=True, slots=True)
class Merged:
    """The registry that came out, with the cubins that its entries name, by digest, as far as the sources have them.

    Attributes:
        conflicts: who gave way to whom; entries that are equal in two files are none.
    """

    gpu: str
    entries: tuple[Entry, ...]
    cubins: Mapping[str, bytes]
    conflicts: tuple[Conflict, ...]


def merge_sources(sources: Sequence[Source]) -> Merged:
    """One registry of `sources`, which are of one GPU; among equals the file that is named first goes before.

    The tiers of a file's bucket stay together: their date is that of the newer one. An entry whose bucket reaches
    beyond one that goes before it keeps what that leaves.

    Raises:
        RegistryError: they are of several GPUs, or a cubin is not the one that its registry names.
    """
    gpus = sorted({source.gpu for source in sources})
    if len(gpus) != 1:
        named = ", ".join(f"{source.where} is of {source.gpu}" for source in sources)
        raise RegistryError(
            f"registries of several GPUs do not merge: {named}", "merge those of each GPU by themselves"
        )
    units = [(unit, source, rank) for rank, source in enumerate(sources) for unit in _units(source)]
    units.sort(key=lambda row: (*_standing(row[0]), -row[2]))  # each is laid over those before it
    kept: list[tuple[Entry, Source]] = []
    conflicts: list[Conflict] = []
    for unit, source, _ in units:
        for entry in unit:
            beaten = [(other, own) for other, own in kept if other.overlaps(entry) and other not in unit]
            conflicts += (Conflict(entry, source.where, other, own.where) for other, own in beaten)
            kept = [(part, own) for other, own in kept for part in left_of(other, entry)]
            kept.append((entry, source))
    return Merged(gpus[0], tuple(entry for entry, _ in kept), _read_cubins(kept), tuple(conflicts))


def _units(source: Source) -> list[list[Entry]]:
    """The entries of a source, the tiers of a bucket together."""
    units: dict[tuple[str, int], list[Entry]] = {}
    for entry in source.entries:
        units.setdefault((entry.problem, entry.bucket.kv_min), []).append(entry)
    return list(units.values())


def _standing(unit: Sequence[Entry]) -> tuple[bool, str]:
    """What a unit goes before others by."""
    return all(entry.measured for entry in unit), max(entry.provenance.date for entry in unit)


def _read_cubins(kept: Sequence[tuple[Entry, Source]]) -> dict[str, bytes]:
    cubins = {}
    for entry, source in kept:
        cubin = source.read_cubin(entry) if entry.cubin_sha256 else None
        if cubin is not None:
            cubins[str(entry.cubin_sha256)] = cubin
    return cubins
