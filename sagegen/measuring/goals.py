"""What Hopper's kernels are held to: a table of targets, of certain shapes, with floors in the speed of peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sagegen.entry import Tier
from sagegen.measuring.jobs import CUDNN_FP8, SDPA_CUDNN, Part
from sagegen.problem import Dtype, Problem, Shape

#: Of all goals.
BATCH, HEADS = 4, 32


@dataclass(frozen=True, slots=True)
class Goal:
    """What one tier shall reach in one row.

    Attributes:
        tops: the target, sustained.
        floor: the speed over `peer`, measured in the same run, that must not be missed.
    """

    tops: float
    floor: float
    peer: str


@dataclass(frozen=True, slots=True)
class Leg:
    """A shape to race at, and which parts of our calls run."""

    problem: Problem
    shape: Shape
    parts: tuple[Part, ...]

    @property
    def work(self) -> str:
        """`d128 full 16K`: the problem and the length; a dtype other than bf16 is said."""
        tokens = self.shape.kv_len
        length = f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens} tokens"
        dtype = "" if self.problem.dtype == "bf16" else f" {self.problem.dtype}"
        mask = "causal" if self.problem.is_causal else "full"
        return f"d{self.problem.head_dim}{dtype} {mask} {length}"


def _goals(tops: tuple[float, float], floors: tuple[float, float], peer: str) -> dict[Tier, Goal]:
    return {"fine": Goal(tops[0], floors[0], peer), "coarse": Goal(tops[1], floors[1], peer)}


#: By head dim, mask, tokens and part; bf16, BATCH and HEADS, as many KV heads as query heads.
GOALS: Mapping[tuple[int, bool, int, Part], Mapping[Tier, Goal]] = {
    (128, False, 16384, "kernel"): _goals((1080, 1220), (1.05, 1.13), CUDNN_FP8),
    (128, True, 16384, "kernel"): _goals((960, 1120), (1.02, 1.12), CUDNN_FP8),
    (64, False, 16384, "kernel"): _goals((720, 950), (1.12, 1.45), CUDNN_FP8),
    (128, False, 2048, "call"): _goals((700, 740), (1.0, 1.0), SDPA_CUDNN),
    (128, False, 4096, "call"): _goals((800, 880), (1.15, 1.15), SDPA_CUDNN),
    (128, False, 16384, "call"): _goals((1000, 1120), (1.5, 1.5), SDPA_CUDNN),
}


def find_goal(leg: Leg, part: Part, tier: Tier) -> Goal | None:
    """The goal of one row, None where there is none."""
    shape = leg.shape
    is_goal_shape = shape == Shape(BATCH, HEADS, HEADS, shape.q_len, shape.q_len) and leg.problem.dtype == "bf16"
    rows = GOALS.get((leg.problem.head_dim, leg.problem.is_causal, shape.kv_len, part)) if is_goal_shape else None
    return rows[tier] if rows else None


def goal_legs(dtype: Dtype, batch: int, heads: int, heads_kv: int) -> list[Leg]:
    """The table's shapes, with other counts if asked for, and of each the parts that it has goals for."""
    parts: dict[tuple[int, bool, int], list[Part]] = {}
    for head_dim, is_causal, tokens, part in GOALS:
        parts.setdefault((head_dim, is_causal, tokens), []).append(part)
    return [
        Leg(Problem(head_dim, dtype, is_causal), Shape(batch, heads, heads_kv, tokens, tokens), tuple(own))
        for (head_dim, is_causal, tokens), own in parts.items()
    ]
