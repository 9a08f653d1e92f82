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
        numbers: of a config, for the message; most rules have a margin that says enough.
    """

    name: str
    why: str
    margin: Callable[[Judged, Target], float]
    reads: tuple[str, ...] = ()
    numbers: Callable[[Judged], str] | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule that a config breaks, and by how much."""

    rule: Rule[Any]
    margin: float
