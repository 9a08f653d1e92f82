"""How many mantissa bits a matrix unit's accumulator keeps, from what one product makes of chosen accumulators.

The elements of C are 1 + 2^-b for b = 1 ... 23, then 1 + 2^-b + 2^-(b+1) for the same b, and so on by turns. With
A = B = 0 the product gives C back as far as the accumulator holds it. With products that sum to 1 the sum has one
exponent more and one bit less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

FP32_BITS = 23
Rounding = Literal["truncates", "rounds to nearest", "keeps all"]

#: Four e4m3 elements: 0, 2^-3 and 2^-2. 32 products of the latter two sum to 1.
ZERO_WORD, A_WORD, B_WORD = 0x00000000, 0x20202020, 0x28282828


@dataclass(frozen=True, slots=True)
class AccumulatorBits:
    """What an accumulator keeps.

    Attributes:
        alone: mantissa bits of C when nothing is added.
        with_products: of the same C, relative to its own exponent, when products that sum to 1 are added.
        rounding: what happens to the first bit beyond `alone`.
    """

    alone: int
    with_products: int
    rounding: Rounding


def make_accumulators(count: int) -> np.ndarray:
    """C, [count] float32; every b occurs in both halves when `count` >= 46."""
    c: np.ndarray = (1.0 + np.ldexp(1.0, -_bits_of(count)) + _halves(count)).astype(np.float32)
    return c


def read_accumulators(alone: np.ndarray, with_products: np.ndarray) -> AccumulatorBits:
    """The accumulator that gave those D for `make_accumulators`.

    Args:
        alone: D with A = B = 0, [count] float32, count >= 46.
        with_products: D with products that sum to 1, likewise.

    Raises:
        ValueError: an element is neither C nor C without its low bits: the kernel computed something else.
    """
    count = len(alone)
    bits = _bits_of(count)
    single = _halves(count) == 0
    _require_plausible(alone, make_accumulators(count), 1.0)
    _require_plausible(with_products, make_accumulators(count).astype(np.float64) + 1.0, 2.0)
    kept = _longest_run(bits[single], alone[single] == np.float32(1) + np.ldexp(np.float32(1), -bits[single]))
    added = _longest_run(bits[single], with_products[single].astype(np.float64) == 2.0 + np.ldexp(1.0, -bits[single]))
    return AccumulatorBits(kept, added, _find_rounding(alone[~single], bits[~single], kept))


def _bits_of(count: int) -> np.ndarray:
    return np.arange(count) % FP32_BITS + 1


def _halves(count: int) -> np.ndarray:
    """2^-(b+1) in the second half of the elements, 0 in the first and where FP32 cannot hold it."""
    bits = _bits_of(count)
    is_second = np.arange(count) // FP32_BITS % 2 == 1
    return np.where(is_second & (bits < FP32_BITS), np.ldexp(1.0, -(bits + 1)), 0.0)


def _longest_run(bits: np.ndarray, survives: np.ndarray) -> int:
    """The largest b such that every element of it and of all smaller ones survived."""
    longest = 0
    for b in range(1, FP32_BITS + 1):
        if not survives[bits == b].all():
            break
        longest = b
    return longest


def _find_rounding(d: np.ndarray, bits: np.ndarray, kept: int) -> Rounding:
    """From elements whose bit `kept` is set and whose next one, half of it, is lost."""
    if kept >= FP32_BITS:
        return "keeps all"
    at = d[bits == kept]
    return "truncates" if (at == np.float32(1 + 2.0**-kept)).all() else "rounds to nearest"


def _require_plausible(d: np.ndarray, exact: np.ndarray, scale: float) -> None:
    """A result is off by a bit of a coarse accumulator at most; anything else is another number altogether."""
    off = np.abs(d.astype(np.float64) - exact)
    if not (np.isfinite(d).all() and (off <= scale * 2.0**-7).all()):
        raise ValueError(f"results that no accumulator gives: off by up to {off.max():g} from the exact sum")
