"""How many instructions of each kind a warp issues for one key tile, by the names that disassemblers give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

#: Opcodes without their suffixes, by the unit that takes them on sm_80 to sm_120; what is in no set is `other`.
_UNITS: Mapping[str, frozenset[str]] = {
    "matrix": frozenset({"IMMA", "HMMA", "QMMA", "IGMMA", "HGMMA", "QGMMA", "OMMA"}),
    "mufu": frozenset({"MUFU"}),
    "fp32": frozenset({"FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2", "IMAD", "FFMA2", "FADD2", "FMUL2"}),
    "alu": frozenset({"FMNMX", "FMNMX3", "VIMNMX", "VIMNMX3", "VIADDMNMX", "HMNMX2", "PRMT", "I2FP", "I2F", "F2FP"}),
    "memory": frozenset(
        {"LDSM", "LDS", "STS", "LDG", "STG", "LDL", "STL", "LDGSTS", "LDC", "UBLKCP", "UTMALDG", "SHFL", "SYNCS"}
    ),
}


@dataclass(frozen=True, slots=True)
class TileCounts:
    """Instructions that one warp of the attention kernel issues for one key tile where nothing is masked.

    Attributes:
        matrix: products of the tensor core.
        mufu: of the special function unit, exponentials above all.
        fp32: multiplies and adds of the 128 lanes, packed 16-bit and integer ones too.
        alu: maxima, byte permutations and conversions, which have half that rate or less.
        memory: shared, global and local memory, shuffles and barriers in shared memory.
        other: integer, uniform and control instructions.
    """

    matrix: int
    mufu: int
    fp32: int
    alu: int
    memory: int
    other: int

    @property
    def issued(self) -> int:
        """All of them: each takes a slot of a scheduler."""
        return sum(getattr(self, field.name) for field in fields(self))


def unit_of(opcode: str) -> str:
    """The attribute of `TileCounts` that counts an opcode such as `MUFU.EX2`."""
    stem = opcode.partition(".")[0]
    return next((unit for unit, stems in _UNITS.items() if stem in stems), "other")


def count_units(opcodes: Iterable[str]) -> TileCounts:
    """The counts of a tile's instructions."""
    counts = dict.fromkeys((*_UNITS, "other"), 0)
    for opcode in opcodes:
        counts[unit_of(opcode)] += 1
    return TileCounts(**counts)
