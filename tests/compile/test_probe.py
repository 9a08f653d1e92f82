"""What nvcc makes of the probes: each loop has exactly the instructions that are counted, and nothing is spilled."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from sagegen.build import Built
from sagegen.probing.probes import PROBES, probes_for
from sagegen.probing.sass import _OPCODES, count_opcodes, describe, is_emulated
from sagegen.probing.source import kernel_entry, render_probe

pytestmark = pytest.mark.compile

Build = Callable[[str, Sequence[object]], list[Built]]
Sass = Callable[[Built, str], str]

ARCHS = {"sm_80": 80, "sm_89": 89, "sm_90": 90, "sm_120": 120}
CASES = [(arch, probe.name) for arch, cc in ARCHS.items() for probe in probes_for(cc)]
#: Matrix instructions that no unit of the architecture has.
EMULATED = {
    "sm_80": set(),
    "sm_89": set(),
    "sm_90": {"mma_s4", "mma_e4m3f32", "mma_e4m3f16", "mma_e4m3f32_bits"},
    "sm_120": {"mma_s4"},
}
#: The full name of what a native probe must have, in each turn of its loop or, of an accumulator, at all.
NATIVE = {
    "mma_s8": r"IMMA\.16832\.S8\.S8",
    "mma_s4": r"IMMA\.16864\.S4\.S4",
    "mma_e4m3f32": r"QMMA\.16832\.F32\.E4M3\.E4M3",
    "mma_e4m3f16": r"QMMA\.16832\.F16\.E4M3\.E4M3",
    "mma_f16f32": r"HMMA\.16816\.F32",
    "mma_f16f16": r"HMMA\.16816\.F16",
    "mma_bf16f32": r"HMMA\.16816\.F32\.BF16",
    "wgmma_s8_ss_n128": r"IGMMA\.64x128x32\.S8\.S8",
    "wgmma_s8_ss_n256": r"IGMMA\.64x256x32\.S8\.S8",
    "wgmma_s8_rs_n128": r"IGMMA\.64x128x32\.S8\.S8",
    "wgmma_e4m3f32_ss_n128": r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3",
    "wgmma_e4m3f32_ss_n256": r"QGMMA\.64x256x32\.F32\.E4M3\.E4M3",
    "wgmma_e4m3f32_rs_n128": r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3",
    "wgmma_e4m3f16_ss_n128": r"QGMMA\.64x128x32\.F16\.E4M3\.E4M3",
    "wgmma_e4m3f16_rs_n128": r"QGMMA\.64x128x32\.F16\.E4M3\.E4M3",
    "wgmma_f16f32_ss_n256": r"HGMMA\.64x256x16\.F32",
    "wgmma_bf16f32_ss_n256": r"HGMMA\.64x256x16\.F32\.BF16",
    "wgmma_bf16f32_rs_n128": r"HGMMA\.64x128x16\.F32\.BF16",
    "ex2": r"MUFU\.EX2",
    "rcp": r"MUFU\.RCP",
    "i2f": r"I2FP?(\.F32\.S32)?",
    "f2i": r"F2I\.NTZ",
    "pack_e4m3": r"F2FP\.SATFINITE\.E4M3\.F32\.PACK_AB_MERGE_C",
    "half2_to_e4m3": r"F2FP\.SATFINITE\.E4M3\.F16\.UNPACK_B_MERGE_C",
    "pack_half2": r"F2FP(\.F16\.F32)?\.PACK_AB",
    "fma": r"FFMA",
    "fma_half2": r"HFMA2(\.MMA)?",
    "max": r"FMNMX",
    "dram": r"LDG\.E\.128",
    "l2": r"LDG\.E\.128\.STRONG\.GPU",
    "mma_e4m3f32_bits": r"QMMA\.16832\.F32\.E4M3\.E4M3",
    "wgmma_e4m3f32_ss_bits": r"QGMMA\.64x64x32\.F32\.E4M3\.E4M3",
    "wgmma_e4m3f32_rs_bits": r"QGMMA\.64x64x32\.F32\.E4M3\.E4M3",
}
#: Instructions of a mixed unit's loop that issue beside the ones that are counted; what is counted takes longer.
#: So many for each, and so many in all.
OTHERS_EACH = {"ex2": (1, 44), "rcp": (1, 44), "f2i": (2, 48), "half2_to_e4m3": (1, 48)}
#: Likewise of all else; of mma.sync what changes the operands once a turn.
MOST_OTHERS = {"unit": (0.1, 0), "mma": (0, 64), "wgmma": (0, 60), "copy": (0, 60)}


@pytest.fixture(scope="module")
def listing_of(kernels: Callable[[str, str], Built], sass: Sass) -> Callable[[str, str], str]:
    """A kernel's disassembly, by architecture and probe."""
    return functools.cache(lambda arch, name: sass(kernels(arch, name), "probe"))


@pytest.fixture(scope="module")
def kernels(build: Build) -> Callable[[str, str], Built]:
    """A probe's kernel for an architecture; all of one architecture are built together."""
    built: dict[str, dict[str, Built]] = {}

    def find(arch: str, name: str) -> Built:
        if arch not in built:
            made = build(arch, [render_probe(probe) for probe in probes_for(ARCHS[arch])])
            built[arch] = {one.name: one for one in made}
        return built[arch][name]

    return find


def instructions(listing: str) -> list[tuple[int, str, str]]:
    """Address, name and operands of every instruction."""
    form = r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)([^;]*);"
    return [(int(at, 16), name, rest) for at, name, rest in re.findall(form, listing)]


def timed_loop(listing: str, native: str) -> Counter[str]:
    """Names in the smallest loop that holds the instruction that is counted, or the call that stands in for it."""
    found = instructions(listing)
    best: list[str] = []
    for at, name, rest in found:
        target = re.search(r"0x([0-9a-f]+)\s*$", rest)
        if not name.startswith("BRA") or not target or int(target[1], 16) >= at:
            continue
        body = [other for place, other, _ in found if int(target[1], 16) <= place <= at]
        if any(re.fullmatch(native, other) for other in body) and (not best or len(body) < len(best)):
            best = body
    return Counter(best)


def count(names: Counter[str], pattern: str) -> int:
    return sum(number for name, number in names.items() if re.fullmatch(pattern, name))


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_loops_have_the_instructions_that_are_counted_and_nothing_is_spilled(
    kernels: Callable[[str, str], Built], listing_of: Callable[[str, str], str], arch: str, name: str
) -> None:
    built, probe = kernels(arch, name), PROBES[name]
    used = built.resources["probe"]
    assert used.spill_store_bytes == used.spill_load_bytes == used.stack_bytes == 0
    listing = listing_of(arch, name)
    if name in EMULATED[arch]:
        return
    everywhere = Counter(found for _, found, _ in instructions(listing))
    if probe.kind == "accumulator":
        assert count(everywhere, NATIVE[name]) == 1
        return
    loop = timed_loop(listing, NATIVE[name])
    native = count(loop, NATIVE[name])
    assert probe.per_loop <= native <= probe.per_loop * 1.02
    # one or two more may move a constant before the loop
    assert count(everywhere, NATIVE[name]) <= native + 2, "some of it is done outside of the loop"
    others = sum(loop.values()) - native - count(loop, "NOP")  # ptxas puts one beside most products of sm_120
    each, extra = OTHERS_EACH.get(name, MOST_OTHERS[probe.kind])
    assert others <= each * native + extra
    if probe.kind == "wgmma":  # a group is in flight while the next one is issued: no wait after every product
        assert count(loop, r"WARPGROUP\.ARRIVE") == count(loop, r"WARPGROUP\.DEPBAR\.LE") == 1
    if probe.kind == "copy":
        assert count(loop, r"STG\.E\.128") == (0 if name == "l2" else probe.per_loop)


@pytest.mark.parametrize("name", ["mma_e4m3f32", "mma_e4m3f16"])
def test_hopper_emulates_fp8_by_conversions_and_two_fp16_products_in_every_turn(
    listing_of: Callable[[str, str], str], name: str
) -> None:
    loop = timed_loop(listing_of("sm_90", name), r"HMMA\.16816\.F(16|32)")
    assert count(loop, r"HMMA\.16816\.F(16|32)") == 2 * 32
    # fresh operands are converted in every turn: 4 tiles of 4 words and 8 of 2, two conversions a word
    assert count(loop, r"F2FP\.F16\.E4M3\.UNPACK_B") == 2 * (4 * 4 + 8 * 2)
    assert count(loop, r"FADD|HADD2") == (128 if name == "mma_e4m3f32" else 64)


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_int4_is_a_call_in_every_turn_where_there_are_no_units(
    listing_of: Callable[[str, str], str], arch: str
) -> None:
    listing = listing_of(arch, "mma_s4")
    loop = timed_loop(listing, r"CALL\.REL\.NOINC")
    assert count(loop, r"CALL\.REL\.NOINC") == PROBES["mma_s4"].per_loop == 128
    assert count(Counter(name for _, name, _ in instructions(listing)), r"IMMA\..*") == 2  # of the routine


@pytest.mark.parametrize("arch", ARCHS)
def test_emulation_is_told_from_the_machine_code(kernels: Callable[[str, str], Built], arch: str) -> None:
    emulated = set()
    for probe in probes_for(ARCHS[arch]):
        counts = count_opcodes(kernels(arch, probe.name).cubin.read_bytes(), kernel_entry(probe), ARCHS[arch])
        assert describe(probe, counts)
        if is_emulated(probe, counts):
            emulated.add(probe.name)
    assert emulated == EMULATED[arch]


@pytest.mark.parametrize("arch", ARCHS)
def test_opcodes_read_from_the_code_are_nvdisasms(
    kernels: Callable[[str, str], Built], listing_of: Callable[[str, str], str], arch: str
) -> None:
    known = set(_OPCODES.values())
    for probe in probes_for(ARCHS[arch]):
        built = kernels(arch, probe.name)
        names = (name.split(".")[0] for _, name, _ in instructions(listing_of(arch, probe.name)))
        wanted = Counter(name for name in names if name in known)
        assert count_opcodes(built.cubin.read_bytes(), kernel_entry(probe), ARCHS[arch]) == wanted, probe.name


def test_a_cubin_without_the_kernel_is_refused(kernels: Callable[[str, str], Built]) -> None:
    cubin = kernels("sm_80", "ex2").cubin.read_bytes()
    with pytest.raises(ValueError, match="no kernel probe_other"):
        count_opcodes(cubin, "probe_other", 80)


def test_emulations_are_described_by_what_they_are_made_of() -> None:
    counts = Counter({"HMMA": 32, "F2FP": 48, "FADD": 64, "LDG": 4})
    assert is_emulated(PROBES["mma_e4m3f32"], counts)
    assert describe(PROBES["mma_e4m3f32"], counts) == "32 HMMA, 48 F2FP, 64 FADD"
    assert describe(PROBES["mma_s8"], Counter({"IMMA": 16, "LDG": 1})) == "16 IMMA"
