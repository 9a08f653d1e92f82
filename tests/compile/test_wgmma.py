"""What nvcc makes of the wgmma family: its instructions, no spills, no serialized products."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sagegen.build import Built
from sagegen.compilers import FLAGS
from sagegen.cubin import parse_resources
from sagegen.env import read_env
from sagegen.gpu import find_gpu
from sagegen.problem import TUNED_HEAD_DIMS, Problem
from sagegen.render import Source, render
from sagegen.rules import Target, check_config, default_config
from sagegen.space import parse_config
from sagegen.toolkit import find_toolkit

pytestmark = pytest.mark.compile

Build = Callable[[str, Sequence[Source]], list[Built]]
Sass = Callable[[Built, str], str]

H200 = find_gpu("h200")
#: The default, and what was fastest on an H200 with each exponent, schedule and accumulation.
CONFIGS = (
    "c3_bk128_st3_scplain_acone_ks64_rsskip_suones_exmufu_laearly",
    "c3_bk128_st3_scplain_acone_ks128_rsskip_suones_expacked_laearly",
    "c2_bk256_st2_scplain_acone_ks256_rsskip_suones_expacked_laearly",
    "c2_bk256_st2_scplain_acone_ks256_rsskip_suones_exmixed4_laearly",
    "c2_bk192_st2_scoverlap_acone_ks192_rsskip_suones_expacked",
    "c3_bk128_st2_scplain_acone_ks64_rsskip_suones_exmufu_laearly_qqprologue",
    "c3_bk128_st2_scplain_acone_ks128_rsskip_suones_expacked_laearly_qqprologue",
    "c2_bk256_st2_scplain_acone_ks256_rsskip_suones_expacked_laearly_qqprologue",
    "c2_bk256_st2_scplain_acone_ks256_rsskip_suones_exmixed3_laearly_qqprologue",
    "c2_bk128_st3_scplain_actwo_ks64_rsskip_suones_exmufu",
    "c2_bk128_st2_scplain_actwo_ks64_rsskip_suones_exmufu_laearly_qqprologue",
    "c2_bk128_st3_scplain_actwo_ks64_rsskip_sufadd_exmufu",
    "c3_bk128_st3_scplain_acone_ks64_rsskip_suones_exmufu_laearly_ms192_dsf16_royes",
    "c3_bk128_st3_scplain_acone_ks64_rsskip_suones_exmufu_laearly_ms192_dsf16_royes_blyes",
    "c2_bk192_st2_scoverlap_acone_ks192_rsskip_suones_exmufu_laearly_ms128_blyes",
    "c2_bk192_st2_scoverlap_acone_ks192_rsskip_suones_exmufu_laearly_ms128",
)
SOURCES = [
    render(Problem(head_dim, "bf16", is_causal), parse_config(f"wgmma_{name}"))
    for name in CONFIGS
    for head_dim, is_causal in ((128, False), (64, True))
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_products_are_wgmma_in_batches_and_nothing_spills(
    tmp_path: Path, sass_of_file: Callable[[Path], dict[str, str]], source: Source
) -> None:
    """By nvcc itself, since a build keeps no messages of what compiled."""
    check_config(source.config, Target(H200, source.problem))
    (tmp_path / "kernel.cu").write_text(source.text)
    command = [find_toolkit(read_env()).nvcc, f"-arch={source.target(H200.arch)}", *FLAGS, "kernel.cu"]
    done = subprocess.run(
        [*command, "-o", "kernel.cubin"], cwd=tmp_path, capture_output=True, text=True, check=True
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert "sm_90a" in log
    assert "C75" not in log, "ptxas serializes products"
    resources = parse_resources(log)
    assert len(resources) == 3
    for used in resources.values():
        assert (used.spill_store_bytes, used.spill_load_bytes) == (0, 0)
    text = sass_of_file(tmp_path / "kernel.cubin")[f"attention_{source.name}"]
    batches = 0.0
    for instruction, steps in (("IGMMA", source.problem.head_dim // 32), ("QGMMA", source.config.block_k // 32)):
        count = len(re.findall(rf"\b{instruction}\.", text))
        assert count > 0
        assert count % steps == 0
        batches += count / steps
    # where ptxas serializes products there is one of each around every instruction
    assert 0 < text.count("WARPGROUP.ARRIVE") <= batches
    assert 0 < text.count("WARPGROUP.DEPBAR") <= batches


#: Two products in FP8: the default, two at once, sums promoted every tile, queries in the prologue.
E4M3_SOURCES = [
    render(Problem(head_dim, "bf16", is_causal), parse_config(f"wgmma_{name}_qke4m3"))
    for name, head_dim, is_causal in (
        ("c3_bk128_st3_scplain_acone_ks64_rsskip_suones_exmufu_laearly", 128, False),
        ("c2_bk192_st2_scoverlap_acone_ks192_rsskip_suones_exmufu", 64, True),
        ("c2_bk128_st3_scplain_actwo_ks64_rsskip_suones_exmufu", 128, False),
        ("c3_bk128_st2_scplain_acone_ks64_rsskip_suones_exmufu_laearly_qqprologue", 64, True),
    )
]


@pytest.mark.parametrize("source", E4M3_SOURCES, ids=lambda source: source.name)
def test_e4m3_scores_are_fp8_wgmma_and_nothing_spills(build: Build, sass: Sass, source: Source) -> None:
    check_config(source.config, Target(H200, source.problem))
    (built,) = build(H200.arch, [source])
    for used in built.resources.values():
        assert (used.spill_store_bytes, used.spill_load_bytes) == (0, 0)
    text = sass(built, "attention")
    assert "IGMMA" not in text
    columns = [int(n) for n in re.findall(r"\bQGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3", text)]
    of_scores = columns.count(source.config.block_k)
    of_values = columns.count(source.problem.head_dim + 8)
    assert of_scores + of_values == len(columns)
    batches = of_scores / (source.problem.head_dim // 32) + of_values / (source.config.block_k // 32)
    assert batches == int(batches) > 1
    # where ptxas serializes products there is one of each around every instruction
    assert 0 < text.count("WARPGROUP.ARRIVE") <= batches
    assert 0 < text.count("WARPGROUP.DEPBAR") <= batches


@pytest.mark.parametrize("head_dim", TUNED_HEAD_DIMS)
def test_the_default_of_hopper_is_of_this_family(head_dim: int) -> None:
    assert default_config(Target(H200, Problem(head_dim, "bf16", False))).family == "wgmma"
