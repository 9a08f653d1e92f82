"""How much a tuning run spends: on its search, on each measurement, on its finals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

EffortName = Literal["quick", "full"]
EFFORT_NAMES: tuple[EffortName, ...] = get_args(EffortName)


@dataclass(frozen=True, slots=True)
class Effort:
    """What a run spends where the request does not say otherwise.

    Attributes:
        budget_s: wall time of a run that measures.
        offline_budget_s: of one that does not.
        launches: fewest and most timed launches of a screen, per length.
        finalists: configs of a bucket that go to its finals, besides incumbent and default.
        rounds: of finals, fewest, when time is short, and most.
        confirm_rounds: of a confirmation.
        patience: attempts at a problem without a gain that end its search; None: only budget and trials do.
    """

    budget_s: float
    offline_budget_s: float
    launches: tuple[int, int]
    finalists: int
    rounds: tuple[int, int]
    confirm_rounds: int
    patience: int | None = None


EFFORTS: dict[EffortName, Effort] = {
    "quick": Effort(180.0, 120.0, launches=(3, 8), finalists=2, rounds=(8, 20), confirm_rounds=10, patience=24),
    "full": Effort(600.0, 360.0, launches=(5, 20), finalists=3, rounds=(12, 60), confirm_rounds=20),
}
