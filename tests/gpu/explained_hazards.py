"""Hazards of racecheck that are none, each with the barrier that orders its two accesses.

racecheck follows __syncthreads and cp.async, but not every order that an mbarrier and the asynchronous proxy give. A
hazard stays here only as long as somebody can name what orders it; sanitize.py fails on all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sanitizer_report import HazardGroup


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why two lines are ordered.

    Attributes:
        lines: a part of either line's text, in any order.
        barrier: what orders them.
    """

    lines: tuple[str, str]
    barrier: str

    def covers(self, group: HazardGroup) -> bool:
        (a, b), (first, second) = self.lines, group.lines
        return (a in first and b in second) or (a in second and b in first)


EXPLAINED: tuple[Explanation, ...] = ()


def explain(group: HazardGroup, explained: Iterable[Explanation] = EXPLAINED) -> str:
    """The barrier that orders a hazard's accesses; empty when nobody has said."""
    return next((explanation.barrier for explanation in explained if explanation.covers(group)), "")
