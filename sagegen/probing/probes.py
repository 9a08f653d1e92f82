"""What is probed: instructions, copies and accumulators, each with the kernel that measures it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

#: Which template measures a probe.
Kind = Literal["mma", "wgmma", "unit", "copy", "accumulator"]
#: What is counted: operations (two per multiply-add), results (lanes x instructions), bytes; products of an accumulator
#: probe are not timed.
Unit = Literal["operations", "results", "bytes", "none"]

_WGMMA_ONLY = 90  # and no later architecture
_OPERANDS = {  # random bits of a 32-bit word of operands, and bits that keep its numbers between 0.5 and 2
    "s4": ("0xffffffff", "0x0"),
    "s8": ("0xffffffff", "0x0"),
    "e4m3": ("0x8f8f8f8f", "0x30303030"),
    "f16": ("0x87ff87ff", "0x38003800"),
    "bf16": ("0x80ff80ff", "0x3f003f00"),
}


@dataclass(frozen=True, slots=True)
class Operand:
    """How random words become operands: bits that are random, bits that are set."""

    random_bits: str
    fixed_bits: str


@dataclass(frozen=True, slots=True)
class Accumulator:
    """C++ type of an accumulator's words, their number per thread and mma tile, elements in a word."""

    type: str
    words: int
    elements: int


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing to measure, and its kernel.

    Attributes:
        name: `mma_s8`, `wgmma_e4m3f32_rs_n128`, `ex2`; the key of its figures everywhere.
        title: the instruction in words.
        architectures: lowest and highest compute capability that have it, native or emulated.
        includes: of the device layer.
        function: of the device layer: what is called; of a unit, its name in the template.
        threads: of a block; an SM runs `blocks_per_sm` at a time.
        opcodes: SASS instructions that do it natively.
        per_loop: such instructions of a thread in one turn of the kernel's loop; of an accumulator probe, in all.
        work: operations, results or bytes of one such instruction of one warp, or warpgroup.
        values: what the template names beside these.
    """

    name: str
    kind: Kind
    title: str
    unit: Unit
    architectures: tuple[int, int]
    includes: tuple[str, ...]
    function: str
    threads: int
    opcodes: tuple[str, ...]
    per_loop: int
    work: int
    blocks_per_sm: int = 1
    shared_bytes: int = 0
    operand: Operand | None = None
    accumulator: Accumulator | None = None
    wgmma_form: str = ""
    values: Mapping[str, object] = field(default_factory=dict)

    @property
    def accumulators(self) -> int:
        """Accumulators of all threads of a block, as floats, where a probe reads and writes them."""
        return self.threads * (4 if self.values["by"] == "mma" else int(str(self.values["columns"])) // 2)

    @property
    def work_per_loop(self) -> float:
        """Operations or results of one block in one turn of its loop."""
        lanes = 128 if self.kind == "wgmma" else 32
        return self.threads / lanes * self.per_loop * self.work

    def runs_on(self, compute_capability: int) -> bool:
        first, last = self.architectures
        return first <= compute_capability <= last


_INT32 = Accumulator("int", 4, 1)
_FP32 = Accumulator("float", 4, 1)
_FP16 = Accumulator("uint32_t", 2, 2)
_ANY = (80, 999)
_ADA = (89, 999)
_HOPPER = (_WGMMA_ONLY, _WGMMA_ONLY)
_ROWS, _COLUMNS = 4, 8  # tiles of A, and of B, that a warp multiplies with one another


def _mma(
    name: str, operand: str, depth: int, function: str, include: str, accumulator: Accumulator, opcode: str
) -> Probe:
    types = {"int": "s32", "float": "f32", "uint32_t": "f16"}
    # Changing the operands takes issue slots and register ports from products, so several passes share a change. Where
    # e4m3 is emulated each operand would be converted once for all passes, and kernels use it about as often as one
    passes = 1 if operand == "e4m3" else 4
    return Probe(
        name=f"mma_{name}",
        kind="mma",
        title=f"mma.sync m16n8k{depth} {types[accumulator.type]}.{operand}",
        unit="operations",
        architectures=_ADA if operand == "e4m3" else _ANY,
        includes=("thread", "clock", include),
        function=function,
        threads=256,
        opcodes=(opcode,),
        per_loop=_ROWS * _COLUMNS * passes,
        work=2 * 16 * 8 * depth,
        operand=Operand(*_OPERANDS[operand]),
        accumulator=accumulator,
        values=MappingProxyType({"rows": _ROWS, "columns": _COLUMNS, "passes": passes}),
    )


_WGMMA_INCLUDES = ("thread", "clock", "math", "shared_memory", "bulk_copy", "wgmma")
_A_STAGES, _B_STAGES = 2, 4
_GROUPS = 2  # warpgroups: one multiplies while the other waits


def _wgmma(name: str, place: str, columns: int) -> Probe:
    """`name`: s8, e4m3f32, e4m3f16, f16f32 or bf16f32; `place`: of A, ss or rs."""
    operand = "e4m3" if name.startswith("e4m3") else name.removesuffix("f32")
    depth = 16 if operand in ("f16", "bf16") else 32
    accumulator = {"s8": _INT32, "e4m3f16": _FP16}.get(name, _FP32)
    to = {"s8": "s32", "e4m3f16": "f16"}.get(name, "f32")
    form = {"e4m3f32": "e4m3", "f16f32": "f16", "bf16f32": "bf16"}.get(name, name)
    row_bytes = 128
    return Probe(
        name=f"wgmma_{name}_{place}_n{columns}",
        kind="wgmma",
        title=f"wgmma m64n{columns}k{depth} {to}.{operand}, A in {'registers' if place == 'rs' else 'shared memory'}",
        unit="operations",
        architectures=_HOPPER,
        includes=_WGMMA_INCLUDES,
        function="wgmma_" + {"e4m3f16": "e4m3_f16"}.get(form, form),
        threads=128 * _GROUPS,
        opcodes=({"s8": "IGMMA", "e4m3": "QGMMA"}.get(operand, "HGMMA"),),
        per_loop=4 * _B_STAGES,
        work=2 * 64 * columns * depth,
        shared_bytes=row_bytes * (_GROUPS * _A_STAGES * 64 + _B_STAGES * columns),
        operand=Operand(*_OPERANDS[operand]),
        accumulator=accumulator,
        wgmma_form=f"{form}_{place}",
        values=MappingProxyType(
            {"columns": columns, "a_stages": _A_STAGES, "b_stages": _B_STAGES, "a_in_registers": place == "rs"}
        ),
    )


_CHAINS, _STEPS = 8, 64


def _unit(
    name: str,
    title: str,
    opcodes: tuple[str, ...],
    includes: tuple[str, ...],
    instructions: int = 1,
    needs_ada: bool = False,
) -> Probe:
    """`instructions`: of one step."""
    return Probe(
        name=name,
        kind="unit",
        title=title,
        unit="results",
        architectures=_ADA if needs_ada else _ANY,
        includes=tuple(dict.fromkeys(("thread", "clock", "math", *includes))),
        function=name,
        threads=512,
        opcodes=opcodes,
        per_loop=_CHAINS * _STEPS * instructions,
        work=32,
        values=MappingProxyType({"operation": name, "chains": _CHAINS, "steps": _STEPS}),
    )


_UNROLL = 4  # loads of 16 bytes that a thread has in flight


def _copy(name: str, title: str, through_l2: bool) -> Probe:
    return Probe(
        name=name,
        kind="copy",
        title=title,
        unit="bytes",
        architectures=_ANY,
        includes=("thread", "clock", "grid", "load_l2"),
        function=name,
        threads=512,
        opcodes=("LDG",),
        per_loop=_UNROLL,
        work=0,  # follows from the buffers
        blocks_per_sm=3,
        values=MappingProxyType({"through_l2": through_l2, "unroll": _UNROLL}),
    )


def _accumulator(name: str, by: str, title: str, opcode: str, place: str = "") -> Probe:
    columns = 8 if by == "mma" else 64
    return Probe(
        name=name,
        kind="accumulator",
        title=title,
        unit="none",
        architectures=_ADA if by == "mma" else _HOPPER,
        includes=("thread", "clock", "math", "mma_e4m3") if by == "mma" else _WGMMA_INCLUDES,
        function="mma_pv" if by == "mma" else "wgmma_e4m3",
        threads=32 if by == "mma" else 128,
        opcodes=(opcode,),
        per_loop=1,
        work=0,
        shared_bytes=0 if by == "mma" else 128 * (64 + columns),
        accumulator=_FP32,
        wgmma_form=f"e4m3_{place}" if place else "",
        values=MappingProxyType({"by": by, "columns": columns, "a_in_registers": place == "rs"}),
    )


_ALL = (
    _mma("s8", "s8", 32, "mma_s8", "mma_s8", _INT32, "IMMA"),
    _mma("s4", "s4", 64, "mma_s4", "mma_s4", _INT32, "IMMA"),
    _mma("e4m3f32", "e4m3", 32, "mma_pv", "mma_e4m3", _FP32, "QMMA"),
    _mma("e4m3f16", "e4m3", 32, "mma_pv", "mma_e4m3_f16", _FP16, "QMMA"),
    _mma("f16f32", "f16", 16, "mma_pv", "mma_f16", _FP32, "HMMA"),
    _mma("f16f16", "f16", 16, "mma_pv", "mma_f16_f16", _FP16, "HMMA"),
    _mma("bf16f32", "bf16", 16, "mma_pv", "mma_bf16", _FP32, "HMMA"),
    _wgmma("s8", "ss", 128),
    _wgmma("s8", "ss", 256),
    _wgmma("s8", "rs", 128),
    _wgmma("e4m3f32", "ss", 128),
    _wgmma("e4m3f32", "ss", 256),
    _wgmma("e4m3f32", "rs", 128),
    _wgmma("e4m3f16", "ss", 128),
    _wgmma("e4m3f16", "rs", 128),
    _wgmma("f16f32", "ss", 256),
    _wgmma("bf16f32", "ss", 256),
    _wgmma("bf16f32", "rs", 128),
    _unit("ex2", "ex2.approx.ftz.f32", ("MUFU",), ("math",)),
    _unit("rcp", "rcp.approx.ftz.f32", ("MUFU",), ("packed",)),
    _unit("i2f", "cvt.rn.f32.s32", ("I2F", "I2FP"), ("math",)),
    _unit("f2i", "cvt.rni.s32.f32", ("F2I",), ("packed",)),
    _unit("pack_e4m3", "cvt.rn.satfinite.e4m3x2.f32", ("F2FP",), ("convert_e4m3",), 2, needs_ada=True),
    _unit("half2_to_e4m3", "cvt.rn.satfinite.e4m3x2.f16x2", ("F2FP",), ("convert_half2", "packed"), 2, needs_ada=True),
    _unit("pack_half2", "cvt.rn.f16x2.f32", ("F2FP",), ("convert_half2",)),
    _unit("fma", "fma.rn.f32", ("FFMA",), ("math",)),
    _unit("fma_half2", "fma.rn.f16x2", ("HFMA2",), ("packed",)),
    _unit("max", "max.f32", ("FMNMX",), ("math",)),
    _copy("dram", "copy in device memory, read + write", through_l2=False),
    _copy("l2", "read from L2", through_l2=True),
    _accumulator("mma_e4m3f32_bits", "mma", "mma.sync m16n8k32 f32.e4m3", "QMMA"),
    _accumulator("wgmma_e4m3f32_ss_bits", "wgmma", "wgmma m64n64k32 f32.e4m3, A in shared memory", "QGMMA", "ss"),
    _accumulator("wgmma_e4m3f32_rs_bits", "wgmma", "wgmma m64n64k32 f32.e4m3, A in registers", "QGMMA", "rs"),
)

#: All probes by name, in the order in which they are shown.
PROBES: Mapping[str, Probe] = MappingProxyType({probe.name: probe for probe in _ALL})


def probes_for(compute_capability: int) -> tuple[Probe, ...]:
    """Those that a GPU of that compute capability can run."""
    return tuple(probe for probe in PROBES.values() if probe.runs_on(compute_capability))
