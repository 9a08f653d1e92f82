"""Reads the loop over key tiles off a cubin: which instructions a tile takes, as nvdisasm prints them.

The loop's body lies between a backward branch and its target. Of several such loops (with and without a mask, with and
without a log-sum-exp) the shortest is the one that runs most.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sagegen.toolkit import Toolkit
from sagegen.tuning.tile_counts import TileCounts, count_units, unit_of

_TIMEOUT_S = 120
_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"\.L_x_\d+")


@dataclass(frozen=True, slots=True)
class _Instruction:
    """`target`: of a branch, the index that it goes to; `is_conditional`: it has a predicate."""

    opcode: str
    is_conditional: bool
    target: int | None


def find_disassembler(toolkit: Toolkit) -> Path | None:
    """nvdisasm beside the toolkit's nvcc, else on PATH; None where there is none."""
    beside = toolkit.nvcc.with_name("nvdisasm")
    found = shutil.which(str(beside)) or shutil.which("nvdisasm")
    return Path(found) if found else None


def count_tile(cubin: Path, disassembler: Path) -> TileCounts | None:
    """Instructions of one key tile in the attention kernel of `cubin`; None where they cannot be read off."""
    command = [str(disassembler), "-c", str(cubin)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_tile(done.stdout)


def parse_tile(listing: str) -> TileCounts | None:
    """The same from nvdisasm's text; None without a loop that has both matrix products."""
    code = _parse_kernel(listing, "attention")
    bodies = [_usual(code, first, last) for first, last in _tile_loops(code)]
    if not bodies:
        return None
    shortest: list[str] = min(bodies, key=len)
    return count_units(shortest)


def _parse_kernel(listing: str, role: str) -> list[_Instruction]:
    """The instructions of the kernel whose name begins with `role`."""
    rows: list[tuple[str, bool, str]] = []
    labels: dict[str, int] = {}
    is_inside = False
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            is_inside = section[1].startswith(f"{role}_")
        elif is_inside and (label := _LABEL.match(line.strip())):
            labels[label[1]] = len(rows)
        elif is_inside and (row := _INSTRUCTION.match(line)):
            target = _TARGET.search(row[3]) if row[2].startswith("BRA") else None
            rows.append((row[2], row[1] is not None, target[0] if target else ""))
    return [_Instruction(opcode, predicate, labels.get(target)) for opcode, predicate, target in rows]


def _tile_loops(code: Sequence[_Instruction]) -> list[tuple[int, int]]:
    """First and last index of the innermost loops that have both matrix products."""
    loops = [
        (row.target, index)
        for index, row in enumerate(code)
        if row.target is not None and row.target <= index and _products(code[row.target : index + 1]) > 1
    ]
    return [
        own for own in loops if not any(own != inner and own[0] <= inner[0] and inner[1] <= own[1] for inner in loops)
    ]


def _products(code: Sequence[_Instruction]) -> int:
    """Kinds of matrix instructions in `code`: Q K^T has one, P V another."""
    return len({row.opcode.partition(".")[0] for row in code if unit_of(row.opcode) == "matrix"})


def _usual(code: Sequence[_Instruction], first: int, last: int) -> list[str]:
    """Opcodes of a loop's body without what a conditional branch can jump over: masks, rescales, waiting.

    What holds matrix products is never left out.
    """
    skipped: set[int] = set()
    for index in range(first, last):
        row = code[index]
        if not row.is_conditional or row.target is None or not index < row.target <= last:
            continue
        between = range(index + 1, row.target)
        if not any(unit_of(code[at].opcode) == "matrix" for at in between):
            skipped.update(between)
    return [code[at].opcode for at in range(first, last + 1) if at not in skipped]
