"""Reading ptxas' log and ELF sections, against hand-made ones."""

from __future__ import annotations

import struct

import pytest

from sagegen.cubin import Resources, parse_resources, read_sections

#: As ptxas 13.0 prints it; `helper` is a function that was not inlined, the warning comes from --warn-on-spills.
LOG = """\
ptxas info    : 0 bytes gmem, 40 bytes cmem[4]
ptxas info    : Compiling entry function 'stats_k' for 'sm_89'
ptxas info    : Function properties for stats_k
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 39 registers, used 1 barriers, 8192 bytes smem, 640 bytes cmem[0]
ptxas info    : Compile time = 31.842 ms
ptxas warning : Registers are spilled to local memory in function 'attention_k'
ptxas info    : Compiling entry function 'attention_k' for 'sm_89'
ptxas info    : Function properties for attention_k
    32 bytes stack frame, 24 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 32 bytes cumulative stack size, 640 bytes cmem[0]
ptxas info    : Function properties for helper
    16 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
"""


def make_elf(sections: dict[str, bytes]) -> bytes:
    """An ELF64 file of one string table and `sections`, laid out by the ELF-64 object format."""
    names = b"\0.shstrtab\0" + b"".join(name.encode() + b"\0" for name in sections)
    body, rows = b"", [struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)]
    for name, data in {".shstrtab": names, **sections}.items():
        kind = 3 if name == ".shstrtab" else 1
        name_at = names.index(b"\0" + name.encode() + b"\0") + 1
        rows.append(struct.pack("<IIQQQQIIQQ", name_at, kind, 0, 0, 64 + len(body), len(data), 0, 0, 1, 0))
        body += data
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(rows), 1)
    return header + body + b"".join(rows)


def test_resources_of_every_entry_are_read() -> None:
    assert parse_resources(LOG) == {
        "stats_k": Resources(39, 0, 0, 0, 8192),
        "attention_k": Resources(255, 32, 24, 48, 0),
    }


def test_a_log_without_entries_has_no_resources() -> None:
    assert parse_resources("kernel.cu(3): error: expected a ';'\n") == {}


def test_sections_are_read_by_name() -> None:
    sections = read_sections(make_elf({".text.attention_k": b"code", ".nv.info": b"", ".text.stats_k": b"more"}))
    assert sections[".text.attention_k"] == b"code"
    assert sections[".text.stats_k"] == b"more"
    assert sections[".nv.info"] == b""


def test_a_section_without_bits_in_the_file_is_empty() -> None:
    elf = bytearray(make_elf({".nv.shared.attention_k": b"x" * 8}))
    last_row = len(elf) - 64
    elf[last_row + 4 : last_row + 8] = struct.pack("<I", 8)  # SHT_NOBITS
    elf[last_row + 32 : last_row + 40] = struct.pack("<Q", 10**9)  # larger than the file, as shared memory is
    assert read_sections(bytes(elf))[".nv.shared.attention_k"] == b""


def test_a_file_cut_short_anywhere_is_refused() -> None:
    whole = make_elf({".text.attention_k": b"code"})
    for size in range(len(whole)):
        with pytest.raises(ValueError, match=r"ELF64|cut short"):
            read_sections(whole[:size])


def test_another_kind_of_file_is_refused() -> None:
    with pytest.raises(ValueError, match="ELF64"):
        read_sections(b"#!/bin/sh\n" + bytes(200))
