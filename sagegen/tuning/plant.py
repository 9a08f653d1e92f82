"""Bad candidates on purpose: a self-test of the tuner, which must survive them and measure everything else.

`sagegen tune --plant crash` spoils one config's attention kernel. The config's own name stays, so it is handled like
any other. `EXPECTED` says what each fault does and how the tuner has to record it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from sagegen.errors import ArgumentError
from sagegen.tuning.journal import Outcome
from sagegen.tuning.variants import Variant

Plant = Literal["crash", "late", "hang", "memory", "wrong", "half", "badcompile", "bomb"]
PLANTS: tuple[Plant, ...] = get_args(Plant)

#: How each ends where it runs on a GPU and is compiled by nvcc.
EXPECTED: Mapping[Plant, Outcome] = {
    "crash": "crash",  # writes to an illegal address
    "late": "crash",  # likewise, but at the 50th launch in its process only
    "hang": "timeout",  # one thread spins for some ten minutes
    "memory": "launch",  # asks for more memory than there is: shared memory on Hopper, local memory elsewhere
    "wrong": "accuracy",  # the output is 3 % too large
    "half": "accuracy",  # every other group of 8 channels is not written
    "badcompile": "compile",
    "bomb": "timeout",  # compiles for hours, and takes gigabytes for it; `compile` where its memory ends first
}


@dataclass(frozen=True, slots=True)
class _Fault:
    """Text that spoils a kernel.

    Attributes:
        before: goes before the attention kernel.
        statement: begins its body.
        store: (pattern, replacement) in the statement that writes the output.
    """

    before: str = ""
    statement: str = ""
    store: tuple[str, str] | None = None


_ILLEGAL_WRITE = "*reinterpret_cast<volatile int*>(8) = 0"
_FIRST_THREAD = "device::block_index() + device::thread_index() == 0"
#: Of all families: where a pair of channels of the output is written.
_STORE = re.compile(r"\*reinterpret_cast<uint32_t\*>\(out_row \+ 8 \* n[^;]*device::pack_io\(first, second\)[^;]*;")

_FAULTS: Mapping[Plant, _Fault] = {
    "crash": _Fault(statement=f"{_ILLEGAL_WRITE};  // planted: illegal address"),
    "late": _Fault(
        before="__device__ unsigned planted_launches;\n\n",
        statement=f"if ({_FIRST_THREAD} && atomicAdd(&planted_launches, 1u) == 49u)  // planted: the 50th launch\n"
        f"        {_ILLEGAL_WRITE};",
    ),
    # one thread, and bounded, so that a GPU whose process cannot be killed is free again after some ten minutes. By the
    # clock: nvcc leaves out a loop that only counts, volatile or not. The emulator has no clock, and g++ keeps it
    "hang": _Fault(
        statement=f"if ({_FIRST_THREAD})  // planted: hang\n"
        "#ifdef __CUDACC__\n"
        "        for (const long long start = clock64(); clock64() - start < 1000000000000LL;) {}\n"
        "#else\n"
        "        for (volatile unsigned long long turns = 0; turns < 1ull << 34; turns = turns + 1) {}\n"
        "#endif"
    ),
    # shared memory where nvcc lets a kernel have all that a block can: it needs more. Elsewhere half a MiB of local
    # memory for each thread of a full GPU, which is more than those have
    "memory": _Fault(
        statement="#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100\n    __shared__\n#endif\n"
        "    volatile unsigned char planted_memory[\n"
        "        __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100 ? 227 << 10 : 510 << 10];\n"
        "    planted_memory[device::thread_index()] = 0;",
    ),
    "wrong": _Fault(store=(r"pack_io\(first, second\)", "pack_io(1.03f * first, 1.03f * second) /* planted */")),
    "half": _Fault(store=(r"^", "if (n % 2 == 0) /* planted */ ")),
    "badcompile": _Fault(statement="planted_compile_error;"),
    "bomb": _Fault(
        before="template <int DEPTH, int PATH>\nstruct Planted {  // planted: 2^30 of them\n"
        "    static constexpr int value = Planted<DEPTH - 1, 2 * PATH>::value +\n"
        "                                 Planted<DEPTH - 1, 2 * PATH + 1>::value;\n"
        "};\ntemplate <int PATH>\nstruct Planted<0, PATH> {\n    static constexpr int value = 1;\n};\n\n",
        statement="static_assert(Planted<30, 0>::value != 0);",
    ),
}


def plant_variant(variant: Variant, plant: Plant) -> Variant:
    """`variant` with the fault in its attention kernel, or in the function by which that writes its output.

    Raises:
        ArgumentError: the source has no place for it.
    """
    text, fault = variant.source.text, _FAULTS[plant]
    entry = text.find(f"{variant.source.entry('attention')}(")
    kernel, body = text.rfind('extern "C"', 0, max(entry, 0)), text.find("{", entry)
    if entry < 0 or kernel < 0 or body < 0 or (fault.store and not _STORE.search(text)):
        raise ArgumentError(
            f"--plant {plant}: the source of {variant.name} has no attention kernel", "report this as a bug"
        )
    if fault.store:
        pattern, replacement = fault.store
        altered = _STORE.sub(lambda store: re.sub(pattern, replacement, store[0], count=1), text)
    else:
        statement = f"\n    {fault.statement}" if fault.statement else ""
        altered = f"{text[:kernel]}{fault.before}{text[kernel : body + 1]}{statement}{text[body + 1 :]}"
    return Variant(replace(variant.source, text=altered), planted=plant)
