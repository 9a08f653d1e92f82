"""How a search spends its attempts. The defaults were chosen on recorded journals: docs/search.md has the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Sampler = Literal["neighbour", "tpe", "gp", "random"]
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)
DEFAULT_SAMPLER: Sampler = "neighbour"


@dataclass(frozen=True, slots=True)
class Strategy:
    """What a search tries when.

    Attributes:
        sampler: who proposes: `tpe` and `gp` are Optuna's; `neighbour` draws at random, then tries neighbours of the
            best only; `random` draws at random only.
        starts: configs of the model's choice that are tried first, after the default and the incumbents.
        random_starts: attempts, `starts` among them, after which configs are no longer drawn at random.
        neighbours: one-knob neighbours of the best that are tried for each proposal.
        polish_from: share of the budget after which neighbours of the best come before anything else.
        tops: configs whose neighbours are tried, besides the best at each length.
        explore_every: one of so many proposals is for a family that is not the best one's.
    """

    sampler: Sampler = DEFAULT_SAMPLER
    starts: int = 6
    random_starts: int = 16
    neighbours: int = 1
    polish_from: float = 2 / 3
    tops: int = 3
    explore_every: int = 5
