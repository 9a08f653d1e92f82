"""The arguments of `attention` that are no tensors."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from sagegen.entry import ASSUMED_COSINES
from sagegen.errors import ArgumentError

LAYOUTS = ("HND", "NHD")
PRECISIONS = ("auto", "int8", "int4")
#: Arguments that ask for a step of the quantizer, and the config's attribute that says whether it takes it.
STEPS = {"smooth_q": "smooths_q", "smooth_v": "smooths_v", "rotate": "rotates"}
BACKENDS = ("kernel", "emulator", "sdpa", "reference")
#: Keys that no call has.
_WIDEST_SIDE = 2**62
DEFAULT_MIN_COSINE = ASSUMED_COSINES["int8"]


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `attention` that are no tensors, as the caller gave them. See there for their meaning."""

    layout: str = "HND"
    is_causal: bool = False
    scale: float | None = None
    window: tuple[int, int] | None = None
    precision: str = "auto"
    min_cosine: float = DEFAULT_MIN_COSINE
    smooth_k: bool | None = None
    smooth_q: bool | None = None
    smooth_v: bool | None = None
    rotate: bool | None = None
    return_lse: bool = False
    backend: str | None = None

    @property
    def steps(self) -> dict[str, bool]:
        """The steps of the quantizer that the caller wants, or wants not, by argument."""
        asked = {name: getattr(self, name) for name in STEPS}
        return {name: value for name, value in asked.items() if value is not None}


def narrow(is_causal: bool, window: tuple[int, int] | None) -> tuple[bool, tuple[int, int] | None]:
    """The same visible keys, by `is_causal` alone where that can say it, else by the window alone."""
    left, right = window or (-1, -1)
    right = 0 if is_causal else right
    if left < 0 and right <= 0:
        return right == 0, None
    return False, (left, right)


def clamp_window(window: tuple[int, int] | None) -> tuple[int, int] | None:
    """`window` with sides that 64-bit numbers hold with a length added: beyond all keys is beyond all keys."""
    if window is None:
        return None
    left, right = window
    return min(left, _WIDEST_SIDE), min(right, _WIDEST_SIDE)


def kinds_of(options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Types that tell options from others which equal them, as 1 does True; None where they are the usual ones.

    Part of what calls are remembered by, so it asks no more than it must.

    Args:
        options: the fields of Options in order.
    """
    _, is_causal, scale, window, _, cosine, smooth_k, smooth_q, smooth_v, rotate, return_lse, _ = options
    if (
        window is smooth_k is smooth_q is smooth_v is rotate is None
        and (scale is None or scale.__class__ is float)
        and (is_causal is False or is_causal is True)
        and (return_lse is False or return_lse is True)
        and (cosine is DEFAULT_MIN_COSINE or cosine.__class__ is float)
    ):
        return None
    sides = map(type, window) if isinstance(window, tuple) else ()
    return (*map(type, options), *sides)


def check_backend(name: str, value: str | None) -> None:
    """Raise ArgumentError, naming the argument or variable `name`, unless `value` is None or one of BACKENDS."""
    if value is not None and value not in BACKENDS:
        raise ArgumentError(f"{name}={value!r} does not exist", f"use one of {', '.join(BACKENDS)}")


def check_options(options: Options) -> None:
    """Raise TypeError or ArgumentError, naming the argument, unless every option has a value that it may have."""
    for name, value, allowed in (
        ("layout", options.layout, LAYOUTS),
        ("precision", options.precision, PRECISIONS),
    ):
        if value not in allowed:
            raise ArgumentError(f"{name}={value!r} does not exist", f"use one of {', '.join(map(str, allowed))}")
    check_backend("backend", options.backend)
    for name in ("is_causal", "return_lse"):
        if not isinstance(getattr(options, name), bool):
            raise TypeError(f"{name} must be a bool, not {type(getattr(options, name)).__name__}")
    for name in ("smooth_k", *STEPS):
        if not isinstance(getattr(options, name), (bool, type(None))):
            raise TypeError(f"{name} must be a bool or None, not {type(getattr(options, name)).__name__}")
    _check_number("scale", options.scale)
    _check_number("min_cosine", options.min_cosine)
    _check_window(options.window)


def _check_number(name: str, value: object) -> None:
    if value is None and name == "scale":
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise ArgumentError(f"{name}={number} is not finite", "give a finite number")
    if name == "min_cosine" and not 0 <= number <= 1:
        raise ArgumentError(f"min_cosine={value} is no cosine that an output could have to reach", "use 0 to 1")


def _check_window(window: object) -> None:
    if window is None:
        return
    if not isinstance(window, tuple) or len(window) != 2 or not all(type(side) is int for side in window):
        raise TypeError(f"window must be a pair of ints (left, right) or None, not {window!r}")
    if min(window) < -1:
        raise ArgumentError(f"window={window} has a negative side", "-1 leaves a side open")
