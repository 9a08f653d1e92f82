"""Reading a tile's instructions off nvdisasm's text, and the formulas that stand in for them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from sagegen.gpu import find_gpu
from sagegen.layout import make_layout
from sagegen.problem import Problem, Shape, parse_problem
from sagegen.space import WgmmaConfig, parse_config
from sagegen.tuning.disassembly import count_tile, parse_tile
from sagegen.tuning.model import Measured, predict
from sagegen.tuning.tile_counts import TileCounts, unit_of
from sagegen.tuning.wgmma_cost import expected_instructions

DATA = Path(__file__).parents[1] / "data" / "h200-tile-counts.json"
COUNTS = {name: TileCounts(**values) for name, values in json.loads(DATA.read_text()).items()}

#: As nvdisasm prints it, much shortened: a loop that loads, one over tiles with a mask that is skipped and a wait, the
#: same once more with more instructions, and another kernel.
LISTING = """
	.section	.text.attention_d64_x,"ax",@progbits
.text.attention_d64_x:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E R2, [R4.64] ;
        /*0020*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   IMMA.16832.S8.S8 R8, R4.ROW, R6.COL, R8 ;
        /*0040*/               @P1 BRA `(.L_x_2) ;
        /*0050*/                   ISETP.GE.AND P2, PT, R0, R1, PT ;
        /*0060*/                   FSEL R8, R8, -INF , P2 ;
.L_x_2:
        /*0070*/              @P4 FADD R9, R9, R8 ;
        /*0080*/                   MUFU.EX2 R8, R8 ;
        /*0090*/                   F2FP.BF16.F32.PACK_AB R8, R8, R9 ;
        /*00a0*/                   HMMA.16816.F32.BF16 R12, R8, R10, R12 ;
        /*00b0*/                   LDSM.16.M88.4 R4, [R20] ;
        /*00c0*/               @P3 BRA `(.L_x_1) ;
.L_x_3:
        /*00d0*/                   IMMA.16832.S8.S8 R8, R4.ROW, R6.COL, R8 ;
        /*00e0*/                   HMMA.16816.F32.BF16 R12, R8, R10, R12 ;
        /*00f0*/                   MUFU.EX2 R8, R8 ;
        /*0100*/                   MUFU.EX2 R9, R9 ;
        /*0110*/                   FADD R9, R9, R8 ;
        /*0120*/                   FADD R9, R9, R8 ;
        /*0130*/                   FADD R9, R9, R8 ;
        /*0140*/                   FADD R9, R9, R8 ;
        /*0150*/                   FADD R9, R9, R8 ;
        /*0160*/               @P3 BRA `(.L_x_3) ;
        /*0170*/                   EXIT ;
	.section	.text.quantize_d64_x,"ax",@progbits
.text.quantize_d64_x:
.L_x_9:
        /*0000*/                   IMMA.16832.S8.S8 R8, R4.ROW, R6.COL, R8 ;
        /*0010*/                   HMMA.16816.F32.BF16 R12, R8, R10, R12 ;
        /*0020*/                   BRA `(.L_x_9) ;
"""


def test_the_shortest_loop_with_both_products_counts_without_what_it_skips() -> None:
    # IMMA, BRA, FADD, MUFU, F2FP, HMMA, LDSM, BRA
    assert parse_tile(LISTING) == TileCounts(matrix=2, mufu=1, fp32=1, alu=1, memory=1, other=2)


def test_the_formula_of_shortest_is_by_instructions() -> None:
    without_waste = "\n".join(line for line in LISTING.splitlines() if "FADD R9, R9, R8" not in line or "@P4" in line)
    assert parse_tile(without_waste) == TileCounts(matrix=2, mufu=2, fp32=0, alu=0, memory=0, other=1)


@pytest.mark.parametrize("listing", ["", "no listing", LISTING.replace("HMMA", "FADD"), LISTING.replace("BRA", "NOP")])
def test_without_such_a_loop_nothing_is_counted(listing: str) -> None:
    assert parse_tile(listing) is None


def test_a_disassembler_that_fails_counts_nothing(tmp_path: Path) -> None:
    assert count_tile(tmp_path / "kernel.cubin", Path("/bin/false")) is None
    assert count_tile(tmp_path / "kernel.cubin", tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("opcode", "unit"),
    [("QGMMA.64x128x32.F32.E4M3.E4M3", "matrix"), ("MUFU.EX2", "mufu"), ("HFMA2.MMA", "fp32"), ("I2FP.F32.S32", "alu"),
     ("LDSM.16.M88.4", "memory"), ("UIADD3", "other"), ("WARPGROUP.ARRIVE", "other")],
)  # fmt: skip
def test_units_by_opcode(opcode: str, unit: str) -> None:
    assert unit_of(opcode) == unit


def test_counts_of_real_kernels_hold_the_formula_of_wgmma() -> None:
    """The file's kernels were compiled by nvcc and read by nvdisasm; the formula has never seen the compiler."""
    seen = 0
    for name, counts in COUNTS.items():
        problem, config = split(name)
        if not isinstance(config, WgmmaConfig):
            continue
        expected = expected_instructions(config, problem.head_dim, make_layout(config, problem).k_spans)
        assert counts.issued == pytest.approx(expected, rel=0.08), name
        seen += 1
    assert seen >= 30


def test_counts_of_real_kernels_hold_the_formula_of_mma() -> None:
    """By what the model says of a tile: issue slots, with the counts and without."""
    gpu, shape, seen = find_gpu("h200"), Shape(4, 32, 32, 4096, 4096), 0
    for name, counts in COUNTS.items():
        problem, config = split(name)
        if isinstance(config, WgmmaConfig):
            continue
        by_formula, counted = (
            predict(config, problem, shape, gpu, measured).units_us["issue"]
            for measured in (Measured(168), Measured(168, counts=counts))
        )
        # emulated e4m3 adds what depends on the depth; small tiles have less overhead than the formula gives all
        tolerance = 0.35 if config.pv.startswith("e4m3") else 0.25
        assert by_formula == pytest.approx(counted, rel=tolerance), name
        seen += 1
    assert seen >= 25


def test_more_instructions_in_the_code_take_more_time() -> None:
    name = next(name for name in COUNTS if "wgmma" in name)
    for chosen in (name, next(name for name in COUNTS if "_mma_" in name)):
        problem, config = split(chosen)
        counts, shape, gpu = COUNTS[chosen], Shape(4, 32, 32, 4096, 4096), find_gpu("h200")
        more = TileCounts(**{f.name: 2 * getattr(counts, f.name) for f in fields(counts)})
        few, many = (predict(config, problem, shape, gpu, Measured(168, counts=c)).kernel_us for c in (counts, more))
        assert many > few


def split(name: str) -> tuple[Problem, WgmmaConfig]:
    problem, family, config = name.partition("_wgmma_" if "_wgmma_" in name else "_mma_")
    return parse_problem(problem), parse_config(family[1:] + config)  # type: ignore[return-value]
