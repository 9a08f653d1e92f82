"""Kinds of kernels that tests on a card run side by side, and the config that stands for each on a GPU.

A kind asks for a few fields; all others are its family's default, so a field that the space gains needs no line here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from sagegen.mma_rules import default_mma_config
from sagegen.problem import DTYPES, TUNED_HEAD_DIMS, Problem
from sagegen.rules import Target, broken_rules, fitted_config
from sagegen.space import Config, Value
from sagegen.wgmma_rules import default_wgmma_config

PROBLEMS = [Problem(d, t, causal) for d in TUNED_HEAD_DIMS for t in DTYPES for causal in (False, True)]
#: Sequences of their own lengths, and windows.
RELATIVES = [
    Problem(64, "bf16", False, is_ragged=True),
    Problem(128, "bf16", True, is_ragged=True),
    Problem(64, "fp16", False, is_windowed=True),
    Problem(128, "bf16", False, is_windowed=True, is_ragged=True),
]

_DEFAULTS: Mapping[str, Callable[[Target], Config]] = {
    "mma": default_mma_config,
    "wgmma": lambda _: default_wgmma_config(),
}
#: Fields beside the asked ones that may leave the default to keep the rules.
_MOST_CHANGES = 4


@dataclass(frozen=True, slots=True)
class KernelKind:
    """One kind.

    Attributes:
        asked: the fields that make it.
    """

    name: str
    family: str
    asked: Mapping[str, Value] = field(default_factory=dict, hash=False)

    def find_config(self, target: Target) -> Config | None:
        """The valid config nearest to the family's default that has the asked fields; None when there is none.

        A windowed or ragged problem gets that of its dense one, as far as it can have it.
        """
        if target.problem != target.problem.tuned:
            dense = self.find_config(replace(target, problem=target.problem.tuned))
            return None if dense is None else fitted_config(dense, target)
        start = replace(_DEFAULTS[self.family](target), **self.asked)
        # tiles, which come first in a space, change last
        free = [param for param in reversed(start.params) if param.name not in self.asked]
        for changes in range(_MOST_CHANGES + 1):
            for changed in itertools.combinations(free, changes):
                names = [param.name for param in changed]
                for values in itertools.product(*(param.values for param in changed)):
                    config = replace(start, **dict(zip(names, values, strict=True)))
                    if not broken_rules(config, target):
                        return config
        return None

    def needs(self) -> str:
        """Why a GPU has none."""
        return f"needs a GPU and an nvcc with {self.family} kernels of kind {self.name}"


#: What users get from either family: every case of a user runs on each.
EXACT = KernelKind("wgmma-exact", "wgmma", {"exponent": "mufu"})
PACKED = KernelKind("wgmma-packed", "wgmma", {"exponent": "packed", "q_quantizer": "prologue"})
MMA = KernelKind("mma", "mma")
MAIN_KINDS = (EXACT, PACKED, MMA)
#: Other ways through the loops: sums by FADD, both exponents in a tile, two products at once, sums promoted
#: every tile, FP8 by mma.sync, its sums in FP16, or of smoothed V and never promoted; and queries quantized by a kernel
#: of their own, or by the attention kernel.
KINDS = (
    *MAIN_KINDS,
    KernelKind("wgmma-fadd", "wgmma", {"row_sum": "fadd"}),
    KernelKind("wgmma-mixed", "wgmma", {"exponent": "mixed4", "block_k": 256}),
    KernelKind("wgmma-mixed-prologue", "wgmma", {"exponent": "mixed4", "block_k": 256, "q_quantizer": "prologue"}),
    KernelKind("wgmma-exact-prologue", "wgmma", {"exponent": "mufu", "q_quantizer": "prologue"}),
    KernelKind("wgmma-overlap", "wgmma", {"schedule": "overlap", "exponent": "mufu"}),
    KernelKind("wgmma-overlap-packed", "wgmma", {"schedule": "overlap", "exponent": "packed"}),
    KernelKind("wgmma-two-level", "wgmma", {"accumulation": "two"}),
    KernelKind("wgmma-smooth-q", "wgmma", {"mean_span": 64, "exponent": "mufu"}),
    KernelKind("wgmma-smooth-q-rotated", "wgmma", {"mean_span": 192, "delta": "f16", "rotate": "yes"}),
    KernelKind("mma-smooth-q-rotated", "mma", {"mean_span": 64, "delta": "f16", "rotate": "yes"}),
    KernelKind("wgmma-balanced", "wgmma", {"mean_span": 192, "delta": "f16", "rotate": "yes", "balance": "yes"}),
    KernelKind("mma-balanced", "mma", {"mean_span": 128, "delta": "f16", "rotate": "yes", "balance": "yes"}),
    KernelKind("mma-fp8", "mma", {"pv": "e4m3f32"}),
    KernelKind("mma-fp16-sums", "mma", {"pv": "e4m3f16", "accum_depth": 64, "p_max": 224, "v_max": 4.5}),
    KernelKind("mma-smooth-v", "mma", {"pv": "e4m3f32", "accum_depth": 0, "smooth_v": "yes"}),
)
