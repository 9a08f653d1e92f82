"""Bad candidates on purpose: a self-test of the tuner, which must survive them and measure everything else.

`sagegen tune --plant crash` makes one config's attention kernel write through a null pointer, `hang` makes it spin for
minutes, `badcompile` makes it not compile. The config's own name stays, so it is handled like any other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from sagegen.errors import ArgumentError
from sagegen.tuning.variants import Variant

Plant = Literal["crash", "hang", "badcompile"]
PLANTS: tuple[Plant, ...] = get_args(Plant)

_STATEMENTS: dict[Plant, str] = {
    "crash": "*reinterpret_cast<volatile int*>(8) = 0;  // planted: illegal address",
    # one thread, and bounded, so that a GPU whose process cannot be killed is free again after some ten minutes
    "hang": "if (blockIdx.x + threadIdx.x == 0)\n"
    "        for (const long long start = clock64(); clock64() - start < 1000000000000LL;) {}  // planted: hang",
    "badcompile": "planted_compile_error;",
}


def plant_variant(variant: Variant, plant: Plant) -> Variant:
    """`variant` with the fault at the start of its attention kernel's body.

    Raises:
        ArgumentError: the source has no attention kernel to plant it in.
    """
    text = variant.source.text
    entry = text.find(f"{variant.source.entry('attention')}(")
    body = text.find("{", entry)
    if entry < 0 or body < 0:
        raise ArgumentError(
            f"--plant {plant}: the source of {variant.name} has no attention kernel", "report this as a bug"
        )
    altered = f"{text[: body + 1]}\n    {_STATEMENTS[plant]}{text[body + 1 :]}"
    return Variant(replace(variant.source, text=altered), planted=plant)
