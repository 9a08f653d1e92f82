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


def cut(x, unit, how):
    """Multiples of `unit`: toward zero, toward minus infinity, or the nearest."""
    return {"zero": np.trunc, "floor": np.floor, "nearest": np.rint}[how](x / unit) * unit


def exponent_of(x):
    """Of the leading bit; very small for zero."""
    return np.where(x == 0, -200, np.frexp(np.abs(x))[1] - 1)


def align_and_add(products, c, bits, how, with_c, extra):
    """Every addend cut to `bits` bits below the largest one's exponent, then the sum to 13 mantissa bits.

    Args:
        products: [..., 32] of doubles.
        with_c: the accumulator is aligned with the products; otherwise it is added to their sum, exactly.
        extra: a product's exponent is the sum of its factors', so that its mantissa reaches 4: the unit is this many
            bits larger.
    """
    addends = np.concatenate([products, c[..., None]], -1) if with_c else products
    top = exponent_of(addends).max(-1, keepdims=True)
    unit = np.ldexp(1.0, top + extra - bits)
    total = cut(addends, unit, how).sum(-1)
    return cases.cut_to_fp22(total if with_c else total + c)


def read_products(a, b):
    """[blocks, rows, columns, 32]."""
    return cases.from_e4m3(a)[:, :, None, :] * cases.from_e4m3(b)[:, None, :, :]


def main():
    arrays = np.load(sys.argv[1])
    spreads = sorted({int(name[1:]) for name in arrays})
    models = list(product((12, 13, 14, 15, 16, 20, 24), ("zero", "floor", "nearest"), (True, False), (0, 1)))
    fits = {model: [] for model in models}
    exact = []
    for spread in spreads:
        a, b, c, d = (arrays[f"{name}{spread}"][:4] for name in "abcd")  # four blocks are 16,384 sums
        products = read_products(a, b)
        exact.append(np.mean(cases.fp22_sums(a, b, c) == d))
        for model in models:
            fits[model].append(np.mean(align_and_add(products, c.astype(np.float64), *model) == d))
    print("share of sums that are equal, by spread", spreads)
    print("exact sum, cut to 13 bits          ", " ".join(f"{fit:6.1%}" for fit in exact))
    for model in sorted(models, key=lambda model: -min(fits[model]))[:12]:
        bits, how, with_c, extra = model
        name = f"{bits} bits, {how}, {'with C' if with_c else 'C after'}, +{extra}"
        print(f"{name:35}", " ".join(f"{fit:6.1%}" for fit in fits[model]))


if __name__ == "__main__":
    main()
