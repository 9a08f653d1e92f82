"""Which model of the FP8 tensor core's accumulator fits what a card gave.

    python tests/device_layer/fit_accumulator.py fp22.npz

The file holds, for several spreads of the numbers, A and B of e4m3, the accumulator C before and D after one product of
32 (tests/gpu/test_device_layer.py writes it). A model says what happens to the 33 addends of each element.
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import product
from pathlib import Path

import numpy as np


def _load_cases():
    path = Path(__file__).with_name("cases.py")
    spec = importlib.util.spec_from_file_location("device_layer_cases", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


cases = _load_cases()
BITS = (11, 12, 13, 14, 15, 16, 20, 24, 50)  # the last loses nothing


def cut(x, unit, how):
    """Multiples of `unit`: toward zero, toward minus infinity, or the nearest."""
    return {"zero": np.trunc, "floor": np.floor, "nearest": np.rint}[how](x / unit) * unit


def exponent_of(x):
    """Of the leading bit; very small for zero."""
    return np.where(x == 0, -1000, np.frexp(np.abs(x))[1] - 1)


def align_and_add(a, b, c, bits, how, with_c, of_factors):
    """Every addend cut to `bits` bits below the largest exponent, then the sum to 13 mantissa bits.

    Args:
        a, b: [blocks, rows, 32] of e4m3.
        how: `cut`'s.
        with_c: the accumulator is cut like the products; otherwise it is added to their sum as it is.
        of_factors: a product's exponent is the sum of its factors', not its own.
    """
    products = cases.from_e4m3(a)[:, :, None] * cases.from_e4m3(b)[:, None]
    exponents = exponent_of(products)
    if of_factors:
        exponents = cases.exponents_of_e4m3(a)[:, :, None] + cases.exponents_of_e4m3(b)[:, None]
    top = exponents.max(-1)
    if with_c:
        top = np.maximum(top, exponent_of(c))
    unit = np.ldexp(1.0, top - bits)
    total = cut(products, unit[..., None], how).sum(-1)
    return cases.cut_to_fp22(total + (cut(c, unit, how) if with_c else c))


def main():
    arrays = np.load(sys.argv[1])
    spreads = sorted({int(name[1:]) for name in arrays})
    models = list(product(BITS, ("zero", "floor", "nearest"), (True, False), (True, False)))
    fits = {model: [] for model in models}
    for spread in spreads:
        a, b, c, d = (arrays[f"{name}{spread}"][:4] for name in "abcd")  # four blocks are 16,384 sums
        for model in models:
            fits[model].append(np.mean(align_and_add(a, b, c.astype(np.float64), *model) == d))
    print("share of sums that are equal, by spread", spreads)
    for model in sorted(models, key=lambda model: -min(fits[model]))[:12]:
        bits, how, with_c, of_factors = model
        name = f"{bits} bits, {how}, {'with C' if with_c else 'C after'}, {'factors' if of_factors else 'products'}"
        print(f"{name:40}", " ".join(f"{fit:6.1%}" for fit in fits[model]))


if __name__ == "__main__":
    main()
