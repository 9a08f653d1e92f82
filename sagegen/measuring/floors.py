"""What outputs must reach in the accuracy gate, by kind of input and what Q and K are rounded to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sagegen.problem import Precision
from sagegen.space import Config

#: What Q and K are rounded to: the precision's whole numbers, or FP8.
Rounding = Literal["int8", "int4", "e4m3"]


@dataclass(frozen=True, slots=True)
class Floor:
    """What the figures of one input kind must reach.

    Attributes:
        cosine: compared at the four decimals that papers print: E4M3 P·V gives 0.99930 +- 0.00003 on normal inputs.
        scale: how far the scale ratio may be from 1.
        row_error: upper limit of each row's |o - r| / |r|, for one row of garbage hides in sums over all. INT8 alone
            gives up to 0.07 on normal inputs, 0.45 on outliers, 0.2 on a model's own; garbage gives 1.4.
        relative_l2, relative_error: upper limits; the second is of each element.
        lse_error: upper limit of the lse's error, absolute; None leaves the lse unchecked.
    """

    cosine: float = 0.999
    scale: float = 0.01
    row_error: float = 0.15
    relative_l2: float = math.inf
    relative_error: float = math.inf
    lse_error: float | None = None


#: By input kind; kinds without a row take DEFAULT_FLOOR.
FLOORS: Mapping[str, Floor] = {
    "normal": Floor(cosine=0.999),  # what any caller gets; `entry.FINE_COSINES` says who is better
    "k_offset": Floor(lse_error=0.01),
    "channel_offsets": Floor(cosine=0.9985, row_error=0.3),
    "outliers": Floor(cosine=0.998, row_error=0.9),
    "v_constant": Floor(relative_error=0.01),
    "v_offset_long": Floor(relative_l2=0.05),
    "v_one_long": Floor(relative_l2=0.05),
    "v_one_4k": Floor(relative_l2=0.01),
    "off_edge": Floor(lse_error=0.01),
    "few_keys": Floor(lse_error=0.1),
}
DEFAULT_FLOOR = Floor()
#: Of captured inputs. Their scale ratio varies by 2 % from INT8 alone.
CAPTURED_FLOOR = Floor(cosine=0.9993, scale=0.02, row_error=0.5)

#: INT4's scores are coarser: 1 - cosine on normal inputs is 0.021 with scales per thread, 0.030 per block. Its floors
#: leave a quarter more than the worst error that its numerics have in PyTorch with Q smoothed and both rotated, over
#: both head dims, with and without a mask, scales per thread, warp and block, and both families; docs/numerics.md has
#: the figures. Kinds whose output does not depend on the last bits of scores keep INT8's floors: equal values, and one
#: key that outweighs all others.
INT4_DEFAULT_FLOOR = Floor(cosine=0.961, scale=0.02, row_error=1.25)
_UNCHANGED = ("large_logits", "v_constant", "v_offset_long", "v_one_long", "v_one_4k")
INT4_FLOORS: Mapping[str, Floor] = {
    **{kind: FLOORS.get(kind, DEFAULT_FLOOR) for kind in _UNCHANGED},
    "k_offset": Floor(cosine=0.961, scale=0.02, row_error=1.25, lse_error=0.2),
    "off_edge": Floor(cosine=0.961, scale=0.02, row_error=1.25, lse_error=0.2),
    "few_keys": Floor(cosine=0.961, scale=0.02, row_error=1.25, lse_error=0.8),
    # wide channels make logits so large that a row may take another key's value
    "channel_offsets": Floor(cosine=0.966, scale=0.02, row_error=1.25),
    "outliers": Floor(cosine=0.964, scale=0.04, row_error=math.inf),
}
#: Likewise, of five layers of SmolLM2: cosine 0.978 to 0.999, scale ratio off by up to 0.012. Rows may take another
#: key's value.
INT4_CAPTURED_FLOOR = Floor(cosine=0.972, scale=0.02, row_error=math.inf)

#: E4M3's scores lie between: 1 - cosine on normal inputs is 0.0015 with E4M3 P·V. A quarter more than the worst error,
#: found likewise. They tell wrong kernels from right ones; that the cosine is below a call's default is no fault.
E4M3_DEFAULT_FLOOR = Floor(cosine=0.998, scale=0.02, row_error=0.21)
E4M3_FLOORS: Mapping[str, Floor] = {
    **{kind: FLOORS.get(kind, DEFAULT_FLOOR) for kind in _UNCHANGED},
    "k_offset": Floor(cosine=0.998, scale=0.02, row_error=0.21, lse_error=0.035),
    "off_edge": Floor(cosine=0.998, scale=0.02, row_error=0.21, lse_error=0.035),
    "few_keys": Floor(cosine=0.998, scale=0.02, row_error=0.21, lse_error=0.15),
    "channel_offsets": Floor(cosine=0.9935, scale=0.028, row_error=0.35),
    "outliers": Floor(cosine=0.974, scale=0.031, row_error=math.inf),
}
#: Likewise: cosine 0.9970 to 0.9998, scale ratio off by up to 0.018.
E4M3_CAPTURED_FLOOR = Floor(cosine=0.996, scale=0.022, row_error=0.85)

_DEFAULT_FLOORS: Mapping[Rounding, Floor] = {
    "int8": DEFAULT_FLOOR,
    "int4": INT4_DEFAULT_FLOOR,
    "e4m3": E4M3_DEFAULT_FLOOR,
}
_FLOORS: Mapping[Rounding, Mapping[str, Floor]] = {"int8": FLOORS, "int4": INT4_FLOORS, "e4m3": E4M3_FLOORS}
_CAPTURED_FLOORS: Mapping[Rounding, Floor] = {
    "int8": CAPTURED_FLOOR,
    "int4": INT4_CAPTURED_FLOOR,
    "e4m3": E4M3_CAPTURED_FLOOR,
}


def rounding_of(config: Config, precision: Precision) -> Rounding:
    """What a config's kernels round Q and K to in problems of `precision`."""
    return "e4m3" if config.has_float_scores else precision


def find_floor(kind: str, rounding: Rounding) -> Floor:
    """The floor of one of the gate's own kinds."""
    return _FLOORS[rounding].get(kind, _DEFAULT_FLOORS[rounding])


def captured_floor(rounding: Rounding) -> Floor:
    """The floor of a model's own inputs."""
    return _CAPTURED_FLOORS[rounding]
