"""What changed between two registries, by problem and length, as callers notice it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sagegen.entry import Entry, Tier
from sagegen.problem import Bucket
from sagegen.shipping.sources import Source

#: Of two times: less than a run of the same kernel on another day may differ by.
_NOTICED = 0.01
#: Of a cosine, as everywhere (`entry.reaches`).
_DECIMALS = 4


@dataclass(frozen=True, slots=True)
class Change:
    """What answers a problem at some lengths, before and after.

    Attributes:
        tier: of the callers whose answer it is, where these have different ones.
        old, new: None where nothing answered.
        words: what changed, the most important first: `added`, `removed`, `faster`, `slower`, ...; empty: nothing.
        speed: the old answer's time divided by the new one's, where both are known for the same shape.
        is_speed_measured: both times are measured; else both are predicted.
    """

    gpu: str
    problem: str
    lengths: Bucket
    tier: Tier | None
    old: Entry | None
    new: Entry | None
    words: tuple[str, ...]
    speed: float | None
    is_speed_measured: bool


def find_changes(old: Iterable[Source], new: Iterable[Source]) -> list[Change]:
    """Every range of lengths in which the old or the new registries have an answer, unchanged ones included.

    Registries that one side lacks are added, or removed, as a whole.
    """
    sides = [{source.gpu: source.entries for source in side} for side in (old, new)]
    changes: list[Change] = []
    for gpu in sorted(sides[0].keys() | sides[1].keys()):
        before, after = (side.get(gpu, ()) for side in sides)
        for problem in sorted({entry.problem for entry in (*before, *after)}):
            own = [[entry for entry in side if entry.problem == problem] for side in (before, after)]
            changes += _compare_problem(gpu, problem, *own)
    return changes


def _compare_problem(gpu: str, problem: str, old: Sequence[Entry], new: Sequence[Entry]) -> Iterator[Change]:
    for lengths in _cut([*old, *new]):
        pairs: dict[Tier | None, tuple[Entry | None, Entry | None]] = {}
        callers: tuple[Tier, ...] = ("coarse", "fine")
        for caller in callers:
            pairs[caller] = (_answer(old, lengths, caller), _answer(new, lengths, caller))
        if pairs["coarse"] == pairs["fine"]:
            pairs = {None: pairs["coarse"]}
        for tier, (before, after) in pairs.items():
            if before is not None or after is not None:
                yield _compare(gpu, problem, lengths, tier, before, after)


def _cut(entries: Sequence[Entry]) -> Iterator[Bucket]:
    """The ranges between all edges of the entries' buckets; in each the answers are the same throughout."""
    starts = sorted(
        {entry.bucket.kv_min for entry in entries}
        | {entry.bucket.kv_max + 1 for entry in entries if entry.bucket.kv_max is not None}
    )
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        if any(entry.lengths.holds(start) for entry in entries):
            yield Bucket(start, None if following is None else following - 1)


def _answer(entries: Iterable[Entry], lengths: Bucket, caller: Tier) -> Entry | None:
    return next((e for e in entries if e.tier in (None, caller) and e.lengths.holds(lengths.kv_min)), None)


def _compare(
    gpu: str, problem: str, lengths: Bucket, tier: Tier | None, old: Entry | None, new: Entry | None
) -> Change:
    if old is None or new is None:
        return Change(gpu, problem, lengths, tier, old, new, ("added" if old is None else "removed",), None, False)
    speed = _find_speed(old, new)
    words = tuple(_describe(old, new, speed))
    return Change(gpu, problem, lengths, tier, old, new, words, speed, old.measured and new.measured)


def _find_speed(old: Entry, new: Entry) -> float | None:
    """How many times faster the new answer is; None where the times are not of one kind, shape, protocol and model."""
    own, other = old.provenance, new.provenance
    if own.kind != other.kind or own.shape != other.shape:
        return None
    if old.measured and own.protocol != other.protocol:
        return None
    if old.measured:
        return new.answer_tops / old.answer_tops if old.answer_tops and new.answer_tops else None
    if own.model != other.model:
        return None
    before, after = old.call_time, new.call_time
    return before.us / after.us if before and after else None


def _describe(old: Entry, new: Entry, speed: float | None) -> Iterator[str]:
    if old.provenance.kind != new.provenance.kind:
        yield f"{new.provenance.kind}, was {old.provenance.kind}"
    if old.answer != new.answer:
        yield f"answers {new.answer}, was {old.answer}"
    if speed is not None and speed >= 1 + _NOTICED:
        yield "faster"
    if speed is not None and speed <= 1 / (1 + _NOTICED):
        yield "slower"
    yield from _describe_accuracy(old, new)
    if old.config != new.config:
        yield "another config"
    elif old.cubin_sha256 != new.cubin_sha256:
        yield "rebuilt"


def _describe_accuracy(old: Entry, new: Entry) -> Iterator[str]:
    before, after = (None if e.min_cosine is None else round(e.min_cosine, _DECIMALS) for e in (old, new))
    if before == after:
        return
    if before is None or after is None:
        yield "accuracy known" if before is None else "accuracy no longer known"
    else:
        yield "more accurate" if after > before else "less accurate"
