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


#: Of a warp only lane 0 arrives at an mbarrier, after warp_sync (`release`), which racecheck does not carry over to
#: what the other lanes read before. Bugs planted in the emulator's tests show that without the barrier there is a race.
EXPLAINED = (
    Explanation(
        ("k_scale[span] = scales[K_GROUPS * span", '"r"(shared_address(barrier))'),
        "k_free: a K stage is copied to again when all consumer warps have arrived, each after it read its scales",
    ),
    *(
        Explanation(
            (line, '"r"(shared_address(barrier))'),
            "k_free: delta S lies in a K stage and is copied again with it; v_free where products are FP8",
        )
        for line in ("const uint4 words = chunks[4 * chunk]", "const float start = device::fma(delta[")
    ),
    *(
        Explanation(
            ("make_work(p, device::uniform(barriers.work[slot])", written),
            "work_free: a slot gets another work when all consumer warps have arrived, each after its last read of it",
        )
        for written in ("barriers.work[slot] = index", "barriers.item[slot] = item")
    ),
    # queries that the attention kernel quantizes: written by warps that arrive by their lane 0, too
    *(
        Explanation(lines, "work_full: consumers read what all query warps wrote before they arrived; and work_free")
        for lines in (
            ("consumer.q_scale[0] = q_scales[0]", "scales[row] = is_bad"),
            ("consumer.q_scale[1] = q_scales[8]", "scales[row] = is_bad"),
            ("const float bias = biases[", "biases[row] = sum"),
        )
    ),
    *(
        Explanation(
            (line, '"r"(shared_address(barrier))'),
            "work_free: a slot's values are copied again when all consumer warps have arrived, each after its output",
        )
        for line in (
            "consumer.q_scale[0] = q_scales[0]",
            "consumer.q_scale[1] = q_scales[8]",
            "o[4 * n + 2 * half] * inverse * v_scales[8 * n]",
            "o[4 * n + 2 * half + 1] * inverse * v_scales[8 * n + 1]",
            "channel[0], channel[MEANS_ROW * HEAD_DIM])",
            "reinterpret_cast<const int*>(channel)[SUMS_ROW * HEAD_DIM]",
            "facts[FIRST_BAD_K] < facts[FIRST_BAD_V]",
        )
    ),
)


def explain(group: HazardGroup, explained: Iterable[Explanation] = EXPLAINED) -> str:
    """The barrier that orders a hazard's accesses; empty when nobody has said."""
    return next((explanation.barrier for explanation in explained if explanation.covers(group)), "")
