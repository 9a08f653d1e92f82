"""What rules are made of: what a config is judged against, a condition with its margin, a condition that is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sagegen.gpu import Gpu
from sagegen.problem import Problem

Version = tuple[int, int]

#: Toolkit that a config is judged for when none was asked: the one that the `nvcc` extra installs at least.
DEFAULT_TOOLKIT: Version = (13, 0)

Judged = TypeVar("Judged", contravariant=True)


@dataclass(frozen=True, slots=True)
class Target:
    """What a config is judged against: the GPU, the problem, and the nvcc version that would build it."""

    gpu: Gpu
    problem: Problem
    toolkit: Version = DEFAULT_TOOLKIT


@dataclass(frozen=True, slots=True)
class Rule(Generic[Judged]):
    """A validity condition of one family's configs. `margin` <= 0 is valid; its size says how far off a config is.

    Attributes:
        reads: the parameters that the margin depends on. Where they are named, configs are refused as soon as those
            have their values, before the others multiply them; empty: it may depend on all.
        numbers: of a rule with a limit, the size that a config has and, where `why` does not say it, the limit.
    """

    name: str
    why: str
    margin: Callable[[Judged, Target], float]
    reads: tuple[str, ...] = ()
    numbers: Callable[[Judged, Target], str] | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule that a config breaks, and by how much."""

    rule: Rule[Any]
    margin: float


def limit_rule(
    name: str, why: str, size: Callable[[Judged, Target], tuple[int, int]], unit: str, *, reads: tuple[str, ...]
) -> Rule[Judged]:
    """A rule that a size keeps within its limit.

    Args:
        size: what a config takes, and the most it may, both in `unit`.
    """

    def margin(config: Judged, target: Target) -> float:
        taken, limit = size(config, target)
        return taken - limit

    def numbers(config: Judged, target: Target) -> str:
        taken, limit = size(config, target)
        return f"{taken} of {limit} {unit}"

    return Rule(name, why, margin, reads, numbers)
