"""What a compiled kernel says of itself: resources from ptxas' log, code from the cubin's ELF sections."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_PROPERTIES = re.compile(r"Function properties for (\w+)")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+)(?:\+\d+)? bytes smem")

_ELF64_MAGIC = b"\x7fELF\x02\x01"
#: e_shoff at 40, then e_flags, e_ehsize, e_phentsize, e_phnum, e_shentsize, e_shnum, e_shstrndx (ELF-64 object format).
_ELF_HEADER = struct.Struct("<40xQ10xHHH")
#: sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size; the rest of the 64 bytes is not needed.
_SECTION_HEADER = struct.Struct("<II8x8xQQ24x")
_NO_BITS = 8


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes, by ptxas: registers per thread; bytes per thread of stack and spills; static shared
    memory per block in bytes."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int


def parse_resources(log: str) -> dict[str, Resources]:
    """Resources of every entry that `ptxas -v` reported in `log`, by the entry's name."""
    found: dict[str, Resources] = {}
    entry, described, frame = "", "", (0, 0, 0)
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry, frame = match[1], (0, 0, 0)
        elif match := _PROPERTIES.search(line):
            described = match[1]
        elif (match := _SPILLS.search(line)) and described == entry:
            frame = (int(match[1]), int(match[2]), int(match[3]))
        elif entry and (match := _USED.search(line)):
            smem = _SMEM.search(line)
            found[entry] = Resources(int(match[1]), *frame, int(smem[1]) if smem else 0)
            entry = ""
    return found


def read_sections(cubin: bytes) -> dict[str, bytes]:
    """The sections of an ELF64 file by name.

    Raises:
        ValueError: `cubin` is no complete little-endian ELF64 file.
    """
    if cubin[:6] != _ELF64_MAGIC:
        raise ValueError("not an ELF64 file")
    try:
        table, entry_size, count, names_index = _ELF_HEADER.unpack_from(cubin)
        headers = [_SECTION_HEADER.unpack_from(cubin, table + i * entry_size) for i in range(count)]
        _, _, names_at, names_size = headers[names_index]
    except (struct.error, IndexError) as error:
        raise ValueError("cut short: its section headers are missing") from error
    names = cubin[names_at : names_at + names_size]
    sections = {}
    for name_at, kind, start, size in headers:
        name = names[name_at : names.find(b"\0", name_at)].decode()
        if kind != _NO_BITS and start + size > len(cubin):
            raise ValueError(f"cut short: section {name} is missing")
        sections[name] = b"" if kind == _NO_BITS else cubin[start : start + size]
    return sections
