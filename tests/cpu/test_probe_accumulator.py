"""How accumulator bits are read off a product's results, with accumulators that are simulated."""

from __future__ import annotations

import numpy as np
import pytest

from sagegen.probing.accumulator import AccumulatorBits, make_accumulators, read_accumulators

COUNT = 128


def keep(x: np.ndarray, bits: int, how: str) -> np.ndarray:
    """`x` with `bits` mantissa bits below its leading one."""
    unit = np.ldexp(1.0, np.frexp(x)[1] - 1 - bits)
    return (np.trunc(x / unit) if how == "truncates" else np.rint(x / unit)) * unit


def simulate(bits: int, how: str, count: int = COUNT) -> AccumulatorBits:
    c = make_accumulators(count).astype(np.float64)
    return read_accumulators(keep(c, bits, how).astype(np.float32), keep(c + 1, bits, how).astype(np.float32))


def test_13_bits_that_truncate_are_hoppers_fp8_accumulator() -> None:
    assert simulate(13, "truncates") == AccumulatorBits(alone=13, with_products=12, rounding="truncates")


def test_13_bits_may_round() -> None:
    assert simulate(13, "rounds to nearest") == AccumulatorBits(13, 12, "rounds to nearest")


def test_an_fp32_accumulator_keeps_all_23_bits() -> None:
    assert simulate(23, "rounds to nearest") == AccumulatorBits(23, 22, "keeps all")


@pytest.mark.parametrize("bits", [8, 10, 14, 22])
@pytest.mark.parametrize("count", [46, 128, 4096])
def test_other_widths_are_told_apart(bits: int, count: int) -> None:
    assert simulate(bits, "truncates", count) == AccumulatorBits(bits, bits - 1, "truncates")


def test_one_lane_that_loses_a_bit_counts() -> None:
    c = make_accumulators(COUNT)
    d = c.copy()
    d[23 * 2 + 8] = 1.0  # b = 9 once more, of lanes that come later
    assert read_accumulators(d, (c.astype(np.float64) + 1).astype(np.float32)).alone == 8


@pytest.mark.parametrize("wrong", [0.0, np.nan, np.inf, 3.0])
def test_a_kernel_that_computes_something_else_is_no_accumulator(wrong: float) -> None:
    c = make_accumulators(COUNT)
    added = (c.astype(np.float64) + 1).astype(np.float32)
    d = c.copy()
    d[7] = wrong
    with pytest.raises(ValueError, match="no accumulator"):
        read_accumulators(d, added)
    with pytest.raises(ValueError, match="no accumulator"):
        read_accumulators(c, c)  # the products never arrived
