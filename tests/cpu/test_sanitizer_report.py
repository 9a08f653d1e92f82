"""Reading what compute-sanitizer says, and which hazards count as explained."""

from __future__ import annotations

import pytest

from explained_hazards import Explanation, explain
from sanitize import print_report, run_command
from sanitizer_report import group_hazards, parse_report

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at quantize_d64_fp16_full_int8_mma_bq64(Params)+0x1b8 in /sagegen/d64_fp16_full_int8_mma_bq64.cu:3
=========     by thread (31,0,0) in block (2,0,0)
=========     Access to 0x7f7a4e000000 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f7a4dff0000 of size 65,536 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernel [0x123456] in libcuda.so.1
=========
14 kernels on h200
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at attention_a(Params)+0x430 in /sagegen/a.cu:2
=========     and Read access at attention_a(Params)+0x770 in /sagegen/a.cu:4 [248 hazards]
=========     and Read access at attention_a(Params)+0x7a0 in /sagegen/a.cu:4 [2 hazards]
=========
========= Warning: Race reported between Read access at 0x90 in /sagegen/b.cu:5:attention_b(Params)
=========     and Write access at 0x50 in /sagegen/b.cu:3:attention_b(Params) [7 hazards]
=========
========= Warning: Race reported between Write access at void at::native::reduce<float>(T1)+0x10
=========     and Write access at void at::native::reduce<float>(T1)+0x20 [1 hazards]
=========
14 kernels on h200
========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)
"""
#: The same two lines, one line further down in `b`.
SOURCES = {
    "a": ["// a", "  copy_tile(k);", "", "  x = tile[i];"],
    "b": ["// b", "", "  copy_tile(k);", "", "  x = tile[i];"],
}


def test_an_error_has_its_message_and_its_line() -> None:
    report = parse_report("memcheck", MEMCHECK)
    assert report.counted == 1
    (fault,) = report.faults
    assert fault.message == "Invalid __global__ read of size 16 bytes"
    assert fault.place.name == "d64_fp16_full_int8_mma_bq64.cu:3"
    assert fault.place.kernel == "quantize_d64_fp16_full_int8_mma_bq64"
    assert fault.place.quote({"d64_fp16_full_int8_mma_bq64": ["", "", "  load();"]}) == "load();"


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "initcheck"])
def test_a_clean_run_counts_nothing(tool: str) -> None:
    report = parse_report(tool, "========= COMPUTE-SANITIZER\n14 kernels on h200\n========= ERROR SUMMARY: 0 errors\n")
    assert (report.counted, report.faults, report.hazards) == (0, (), ())


def test_a_run_that_broke_off_has_no_count() -> None:
    assert parse_report("racecheck", "========= COMPUTE-SANITIZER\nKilled\n").counted is None


def test_hazards_of_old_and_new_versions_have_both_lines() -> None:
    report = parse_report("racecheck", RACECHECK)
    assert report.counted == 3
    found = [(h.severity, h.first.verb, h.first.place.name, h.second.place.name, h.count) for h in report.hazards]
    assert found[:3] == [
        ("Error", "Write", "a.cu:2", "a.cu:4", 248),
        ("Error", "Write", "a.cu:2", "a.cu:4", 2),
        ("Warning", "Read", "b.cu:5", "b.cu:3", 7),
    ]
    assert [h.first.place.kernel for h in report.hazards] == ["attention_a", "attention_a", "attention_b", ""]


def test_hazards_of_equal_lines_are_one_group() -> None:
    ours, torchs = group_hazards(parse_report("racecheck", RACECHECK).hazards, SOURCES)
    assert ours.lines == ("Read: x = tile[i];", "Write: copy_tile(k);")
    assert (ours.count, ours.kernels) == (257, ("attention_a", "attention_b"))
    assert "at::native::reduce" in torchs.lines[0]


def test_a_hazard_is_explained_by_both_of_its_lines() -> None:
    ours, torchs = group_hazards(parse_report("racecheck", RACECHECK).hazards, SOURCES)
    explained = [Explanation(("copy_tile", "tile[i]"), "full[stage]: waited for before the tile is read")]
    assert explain(ours, explained) == "full[stage]: waited for before the tile is read"
    assert explain(torchs, explained) == ""
    assert explain(ours, [Explanation(("copy_tile", "other"), "no")]) == ""


# --- what sanitize.py makes of it


def test_hazards_that_nobody_explained_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert not print_report(parse_report("racecheck", RACECHECK), SOURCES)
    said = capsys.readouterr().out
    assert "257 hazards in 2 kernels: ?" in said
    assert "Write: copy_tile(k);\n      a.cu:2" in said


def test_an_error_fails_and_its_line_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert not print_report(parse_report("memcheck", MEMCHECK), {"d64_fp16_full_int8_mma_bq64": ["", "", "  load();"]})
    assert "d64_fp16_full_int8_mma_bq64.cu:3: load();" in capsys.readouterr().out


def test_hazards_that_cannot_be_read_fail() -> None:
    assert not print_report(parse_report("racecheck", "========= RACECHECK SUMMARY: 2 hazards displayed\n"), {})
    assert print_report(parse_report("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed\n"), {})


def test_a_tool_that_does_not_end_is_ended() -> None:
    code, output = run_command(["sh", "-c", "echo begun; sleep 60"], 0.5)
    assert code != 0
    assert "begun" in output
    assert "ended after 0.5 s" in output
