"""What the cubins that ship for the H200 hold: native matrix instructions, no spills, no serialized products."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from sagegen.registry import read_entries, shipped_dir
from sagegen.registry_cubins import read_packed

pytestmark = pytest.mark.compile

CUBINS = sorted((shipped_dir() / "h200").glob("*.cubin.gz"))


INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", re.M)


def count(found: Counter[str], prefix: str) -> int:
    return sum(number for name, number in found.items() if name.startswith(prefix))


def test_there_are_cubins() -> None:
    assert len(CUBINS) > 20


@pytest.mark.parametrize("packed", CUBINS, ids=lambda file: file.name.partition(".")[0])
def test_a_shipped_cubin_is_native_and_spills_nothing(
    packed: Path, tmp_path: Path, sass_of_file: Callable[[Path], dict[str, str]]
) -> None:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(read_packed(packed))
    functions = {name: Counter(INSTRUCTION.findall(text)) for name, text in sass_of_file(cubin).items()}
    for name, found in functions.items():
        assert count(found, "STL") == count(found, "LDL") == 0, f"{name} uses local memory"
    ((name, attention),) = ((name, found) for name, found in functions.items() if name.startswith("attention_"))
    if "_mma_" in name:
        check_mma_sync(attention)
    else:
        check_wgmma(attention)


def check_wgmma(attention: Counter[str]) -> None:
    qk, pv = count(attention, "IGMMA"), count(attention, "QGMMA")
    assert qk > 0
    assert pv > 0
    assert count(attention, "HGMMA") == count(attention, "IMMA") == count(attention, "HMMA") == 0
    # ptxas that can't keep products in flight waits after every single one
    assert count(attention, "WARPGROUP.DEPBAR") <= (qk + pv) / 3


def check_mma_sync(attention: Counter[str]) -> None:
    """Head dims that `wgmma` has not: INT8 and 16-bit products, which sm_90 has by mma.sync too."""
    assert count(attention, "IMMA") > 0
    assert count(attention, "HMMA") > 0
    assert count(attention, "IGMMA") == count(attention, "QGMMA") == count(attention, "HGMMA") == 0


def test_what_answers_on_an_h200_is_wgmma_alone() -> None:
    """`mma` ships there only for those who ask for a kernel where torch SDPA is faster."""
    entries = read_entries(shipped_dir() / "h200.yaml", "h200")
    assert {str(entry.config).split("_")[0] for entry in entries if entry.answer == "kernel"} == {"wgmma"}
