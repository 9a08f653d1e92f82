"""New entries into those of a registry file: who gives way to whom, and what is left of whose bucket."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import structs

from sagegen.entry import Entry, Range


@dataclass(frozen=True, slots=True)
class Saved:
    """What `save_entries` did: entries that are in the file now, and those that gave way to measured ones."""

    written: tuple[Entry, ...]
    refused: tuple[Entry, ...]


def merge_entries(present: Iterable[Entry], entries: Iterable[Entry]) -> tuple[list[Entry], Saved]:
    """All entries of a file after `entries` were saved into it, and what became of these."""
    kept = list(present)
    written: list[Entry] = []
    refused: list[Entry] = []
    for entry in entries:
        rivals = [other for other in kept if other.overlaps(entry)]
        if not entry.measured and any(other.measured for other in rivals):
            refused.append(entry)
            continue
        kept = [part for other in kept for part in (_outside(other, entry) if other in rivals else [other])] + [entry]
        written = [other for other in written if other not in rivals] + [entry]
    return kept, Saved(tuple(written), tuple(refused))


def _outside(entry: Entry, other: Entry) -> list[Entry]:
    """What of an entry's bucket another one leaves: it below and above, where there is such a length."""
    own, taken = entry.bucket, other.bucket
    parts = []
    if own.kv_min < taken.kv_min:
        parts.append(Range(kv_min=own.kv_min, kv_max=taken.kv_min - 1))
    if taken.kv_max is not None and (own.kv_max is None or own.kv_max > taken.kv_max):
        parts.append(Range(kv_min=taken.kv_max + 1, kv_max=own.kv_max))
    return [structs.replace(entry, bucket=part) for part in parts]
