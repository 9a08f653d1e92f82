"""Attempts that failed, by outcome and by the sentence that says why, numbers aside."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sagegen.tuning.journal import Outcome, Record


@dataclass(frozen=True, slots=True)
class Failure:
    """Failures whose reasons differ in numbers alone.

    Attributes:
        phases: where they happened.
        reason: of the first of them, in full.
        config: whose it was.
    """

    outcome: Outcome
    phases: tuple[str, ...]
    count: int
    reason: str
    config: str


def group_failures(records: Iterable[Record]) -> list[Failure]:
    """Groups of everything that did not end `ok`, most frequent first."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.outcome != "ok":
            groups.setdefault((record.outcome, re.sub(r"\d+(\.\d+)?", "N", record.reason)), []).append(record)
    failures = [
        Failure(
            own[0].outcome,
            tuple(dict.fromkeys(record.phase for record in own)),
            len(own),
            own[0].reason or "no reason was recorded",
            own[0].config,
        )
        for own in groups.values()
    ]
    return sorted(failures, key=lambda failure: -failure.count)
