"""Rules of FP8 (e4m3) operands of Q·K^T, which hold for every family."""

from __future__ import annotations

from sagegen.rule import Target
from sagegen.space import Config

E4M3_OPERANDS = "e4m3 is another coding of int8's 8 bits; int4's 15 values are whole numbers"
E4M3_SCORES = "no GPU multiplies e4m3 faster than int8, and its 3 mantissa bits cost the cosine that calls ask for"


def e4m3_operands_margin(config: Config, target: Target) -> float:
    return 1 if config.has_float_scores and target.problem.precision != "int8" else 0


def e4m3_scores_margin(config: Config, _: Target) -> float:
    """Tuning leaves e4m3 out; it stays valid, to be built, verified and timed by name."""
    return 1 if config.has_float_scores else 0
