"""Which instructions a compiled probe has, from the machine code itself: no disassembler is needed."""

from __future__ import annotations

from collections import Counter

from sagegen.cubin import read_sections
from sagegen.probing.probes import Probe

_INSTRUCTION_BYTES = 16  # sm_70 and later
#: Names by the lowest nine bits of an instruction, which do not change with its kinds of operands; read off what
#: nvdisasm says of the probes on sm_80, 89, 90a and 120a (tests/compile holds them to it).
_OPCODES = {
    0x009: "FMNMX",
    0x021: "FADD",
    0x023: "FFMA",
    0x030: "HADD2",
    0x031: "HFMA2",
    0x037: "IMMA",
    0x03C: "HMMA",
    0x03E: "F2FP",
    0x045: "I2FP",
    0x07A: "QMMA",
    0x105: "F2I",
    0x106: "I2F",
    0x108: "MUFU",
    0x144: "CALL",
    0x181: "LDG",
    0x1F0: "HGMMA",
    0x1F1: "IGMMA",
    0x1F3: "QGMMA",
}
#: HFMA2.MMA; later architectures have another instruction of that number.
_UNTIL_HOPPER = {0x035: "HFMA2"}
_LAST_OF_HOPPER = 90
#: What an emulation is made of, for whoever reads that there is one.
_TELLING = ("IMMA", "HMMA", "QMMA", "F2FP", "FADD", "HADD2", "CALL")
#: ptxas may do a conversion twice where a loop begins; an emulation has another number altogether.
_SLACK = 1.02


def count_opcodes(cubin: bytes, entry: str, compute_capability: int) -> Counter[str]:
    """How often each known instruction stands in the kernel `entry`, subroutines included.

    Args:
        compute_capability: of what `cubin` was built for, e.g. 90.

    Raises:
        ValueError: `cubin` is damaged or has no such kernel.
    """
    try:
        code = read_sections(cubin)[f".text.{entry}"]
    except KeyError as error:
        raise ValueError(f"no kernel {entry}") from error
    names = _OPCODES | (_UNTIL_HOPPER if compute_capability <= _LAST_OF_HOPPER else {})
    words = (int.from_bytes(code[at : at + 2], "little") & 0x1FF for at in range(0, len(code), _INSTRUCTION_BYTES))
    return Counter(names[word] for word in words if word in names)


def is_emulated(probe: Probe, counts: Counter[str]) -> bool:
    """Whether other instructions stand in for the native one."""
    native = sum(counts[opcode] for opcode in probe.opcodes)
    return not probe.per_loop <= native <= probe.per_loop * _SLACK


def describe(probe: Probe, counts: Counter[str]) -> str:
    """The instructions that do the probe's work: `16 IMMA`, or those of the emulation."""
    telling = _TELLING if is_emulated(probe, counts) else probe.opcodes
    return ", ".join(f"{counts[opcode]} {opcode}" for opcode in dict.fromkeys(telling) if counts[opcode])
