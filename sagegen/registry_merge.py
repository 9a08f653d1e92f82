"""New entries into those of a registry file: who gives way to whom, and what is left of whose bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from sagegen.entry import Entry, Range, Tier


@dataclass(frozen=True, slots=True)
class Saved:
    """What `save_entries` did.

    Attributes:
        written: entries that are in the file now.
        refused: predicted ones that gave way to measured ones.
        outdone: predicted ones that gave way to better predictions.
    """

    written: tuple[Entry, ...]
    refused: tuple[Entry, ...]
    outdone: tuple[Entry, ...] = ()


def _never(entry: Entry) -> bool:
    return False


def merge_entries(
    present: Iterable[Entry], entries: Iterable[Entry], is_stale: Callable[[Entry], bool] = _never
) -> tuple[list[Entry], Saved]:
    """All entries of a file after `entries` were saved into it, and what became of these.

    A new entry replaces those of its problem in its bucket. A predicted one never replaces a measured one, nor better
    predictions (`_is_better_prediction`): a run that was ended early, or one without an emulator, must not undo what a
    longer one found. The two tiers of a bucket are replaced, or stay, together.

    Args:
        is_stale: whether a present entry's kernel is of an old text; such an entry is no better prediction.
    """
    before, entries = tuple(present), tuple(entries)
    standing = [entry for entry in before if not entry.measured and not is_stale(entry)]
    kept = list(before)
    written: list[Entry] = []
    refused: list[Entry] = []
    outdone: list[Entry] = []
    for entry in entries:
        rivals = [other for other in kept if other.overlaps(entry)]
        if not entry.measured and any(other.measured for other in rivals):
            refused.append(entry)
        elif _are_outdone([other for other in entries if _share_bucket(other, entry)], standing):
            outdone.append(entry)
        else:
            kept = put_over(kept, entry)
            written = [other for other in written if other not in rivals] + [entry]
    return kept, Saved(tuple(written), tuple(refused), tuple(outdone))


def put_over(entries: Iterable[Entry], entry: Entry) -> list[Entry]:
    """`entries` with `entry` in the place of what it overlaps; they keep answering what it leaves of their buckets."""
    return [*(part for other in entries for part in left_of(other, entry)), entry]


def _share_bucket(entry: Entry, other: Entry) -> bool:
    return entry.problem == other.problem and entry.bucket == other.bucket


def _are_outdone(tiers: Sequence[Entry], standing: Sequence[Entry]) -> bool:
    """Whether for each caller of a bucket's new entries a better prediction stands, for all lengths of the bucket."""
    callers: tuple[Tier, ...] = ("coarse", "fine")
    return all(
        any(other.tier in (None, caller) and _is_better_prediction(other, entry) for other in standing)
        for entry in tiers
        for caller in callers
        if entry.tier in (None, caller)
    )


def _is_better_prediction(present: Entry, entry: Entry) -> bool:
    """Whether `present`, a prediction, serves all lengths of a newer one and serves them better.

    It does if it passed the accuracy gate and the newer did not, or if the same model predicts for the same shape that
    it is faster. The same config of another text is not compared: the newer one is what that config is now.
    """
    own, new = present.provenance, entry.provenance
    if entry.measured or own.launch_abi != new.launch_abi or not _covers(present, entry):
        return False
    if present.config == entry.config and own.text_sha256 != new.text_sha256:
        return False
    if (present.min_cosine is None) != (entry.min_cosine is None):
        return entry.min_cosine is None
    return own.model is not None and own.model == new.model and present.is_faster_than(entry)


def _covers(entry: Entry, other: Entry) -> bool:
    """Whether `entry` answers the problem of `other` at every length that it does."""
    own, wanted = entry.bucket, other.bucket
    reaches_end = own.kv_max is None or (wanted.kv_max is not None and wanted.kv_max <= own.kv_max)
    return entry.problem == other.problem and own.kv_min <= wanted.kv_min and reaches_end


def left_of(entry: Entry, other: Entry) -> list[Entry]:
    """What of an entry another one leaves: all, or its bucket below and above, where there is such a length."""
    if not entry.overlaps(other):
        return [entry]
    own, taken = entry.bucket, other.bucket
    parts = []
    if own.kv_min < taken.kv_min:
        parts.append(Range(kv_min=own.kv_min, kv_max=taken.kv_min - 1))
    if taken.kv_max is not None and (own.kv_max is None or own.kv_max > taken.kv_max):
        parts.append(Range(kv_min=taken.kv_max + 1, kv_max=own.kv_max))
    return [structs.replace(entry, bucket=part) for part in parts]
