"""When a search last got better: what its patience is counted from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Share by which a time must fall to count; medians of short screens differ by a few tenths of a percent by chance.
GAIN = 0.005


@dataclass(slots=True)
class Gains:
    """The best of several merits so far, and the attempt that last improved one of them.

    A merit is compared with what it was at its last gain, so that many small steps add up to one.
    """

    _marks: dict[str, float] = field(default_factory=dict)
    _last: int = 0

    def see(self, attempt: int, merits: Mapping[str, float]) -> None:
        """Take the merits, of which less is better, that attempt number `attempt` came to."""
        for name, merit in merits.items():
            if merit < self._marks.get(name, math.inf) * (1 - GAIN):
                self._marks[name] = merit
                self._last = attempt

    def since(self, attempt: int) -> int:
        """Attempts since the last gain."""
        return attempt - self._last
