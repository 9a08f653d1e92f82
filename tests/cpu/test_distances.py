"""How far others are from a journal's winners; the committed journals against the figures of their runs' reports."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from sagegen.cli.main import main
from sagegen.gpu import find_gpu
from sagegen.problem import Problem
from sagegen.rules import Target, default_config
from sagegen.tuning.distances import find_distances
from sagegen.tuning.journal import Record, Samples, read_journal

RUNS = Path(__file__).parents[2] / "docs" / "gpu-runs"
WGMMA_RUN = RUNS / "2026-11-30c-h200-bf16-journal.jsonl.gz"
PROBLEM = Problem(128, "bf16", False)
DEFAULT = default_config(Target(find_gpu("l20"), PROBLEM)).name
FAST, NEXT, SLOW, COARSE = "fast", "next", "slow", "coarse"
FINE = {"normal": {"cosine": 0.9995, "relative_l1": 0.02}}
ROUGH = {"normal": {"cosine": 0.9991, "relative_l1": 0.042}}


def record(config, us, phase="screen", tokens=4096, outcome="ok", figures=FINE, **rest):
    times = us if isinstance(us, tuple) else (us,) * 3
    samples = (Samples(tokens, 4, 32, 32, times),) if outcome == "ok" else ()
    screened = figures if phase == "screen" else {}
    return Record(PROBLEM.name, config, phase, outcome, "l20", 1, "0" * 64, samples=samples, figures=screened, **rest)


SCREENS = [record(DEFAULT, 150.0), record(FAST, 104.0), record(NEXT, 102.0), record(SLOW, 400.0)]


def roles(records):
    (case,) = find_distances(records)
    return {distance.role: distance for distance in case.distances}


def test_finals_say_who_won_and_screens_who_was_left_out():
    finals = [record(FAST, 100.0, "final"), record(NEXT, 110.0, "final"), record(DEFAULT, 150.0, "final")]
    found = roles(SCREENS + finals)
    assert {role: distance.config for role, distance in found.items()} == {
        "winner": FAST, "runner-up": NEXT, "default": DEFAULT, "worst": SLOW
    }  # fmt: skip
    assert [found[role].behind for role in found] == pytest.approx([1, 1.1, 1.5, 400 / 104])
    assert [found[role].phase for role in found] == ["final", "final", "final", "screen"]
    assert found["default"].interval == (1.5, 1.5)
    assert found["worst"].interval is None
    # 4 B H L^2 d operations in 100 us
    assert found["winner"].tops == pytest.approx(4 * 4 * 32 * 4096**2 * 128 / 100e-6 / 1e12)


def test_without_finals_screens_decide():
    found = roles(SCREENS)
    assert (found["winner"].config, found["runner-up"].config) == (NEXT, FAST)
    assert {distance.phase for distance in found.values()} == {"screen"}


def test_who_was_faster_than_all_finalists_by_the_screens_is_in_front():
    finals = [record(DEFAULT, 150.0, "final"), record(SLOW, 400.0, "final")]
    found = roles(SCREENS + finals)
    assert (found["winner"].config, found["winner"].phase) == (NEXT, "screen")
    assert (found["runner-up"].config, found["default"].interval) == (FAST, None)
    assert found["default"].behind == pytest.approx(150 / 102)


def test_the_last_finals_count():
    first = [record(SLOW, 90.0, "final"), record(FAST, 100.0, "final")]
    second = [record(FAST, 100.0, "final"), record(NEXT, 110.0, "final")]
    assert roles(SCREENS + first + second)["winner"].config == FAST


def test_a_winner_that_is_not_confirmed_gives_way_to_who_held_the_bucket():
    finals = [record(FAST, 100.0, "final"), record(NEXT, 101.0, "final")]
    again = [record(FAST, 101.0, "confirm"), record(NEXT, 100.0, "confirm")]
    assert roles(SCREENS + finals + again)["winner"].config == NEXT
    won = [record(FAST, 100.0, "confirm"), record(NEXT, 101.0, "confirm")]
    assert roles(SCREENS + finals + won)["winner"].config == FAST


def test_a_fine_winner_is_a_case_of_its_own_where_the_fastest_is_not_fine():
    rough = [record(COARSE, 80.0, figures=ROUGH)]
    finals = [record(COARSE, 80.0, "final"), record(FAST, 100.0, "final"), record(NEXT, 120.0, "final")]
    coarse, fine = find_distances(SCREENS + rough + finals)
    assert (coarse.tier, coarse.distances[0].config, coarse.distances[1].config) == ("coarse", COARSE, FAST)
    assert (fine.tier, fine.distances[0].config, fine.distances[1].config) == ("fine", FAST, NEXT)
    assert fine.distances[1].behind == pytest.approx(1.2)


def test_failures_and_shared_measurements_are_no_rivals():
    others = [
        record("broken", 1.0, outcome="accuracy"),
        record("twin", 104.0, shared_from=FAST),
        record("crashed", 1.0, "final", outcome="crash"),
    ]
    finals = [record(FAST, 100.0, "final"), record(NEXT, 110.0, "final")]
    configs = {distance.config for distance in roles(SCREENS + finals + others).values()}
    assert configs == {FAST, NEXT, DEFAULT, SLOW}


def test_the_first_attempt_stands_for_a_default_that_has_changed():
    renamed = [replace(r, config="old default") if r.config == DEFAULT else r for r in SCREENS]
    assert roles(renamed)["default"].config == "old default"


def test_lengths_are_cases_of_their_own():
    both = [replace(r, samples=(*r.samples, Samples(1024, 16, 32, 32, (50.0,)))) for r in SCREENS]
    assert [case.tokens for case in find_distances(both)] == [1024, 4096]


#: Kernel TOPS of winners, by problem, length and tier, as the run printed them: docs/gpu-runs/2026-11-30c-h200.md.
REPORTED = {
    ("d128_bf16_full_int8", 1024, "coarse"): 827, ("d128_bf16_full_int8", 2048, "coarse"): 1046,
    ("d128_bf16_full_int8", 16384, "coarse"): 1357, ("d128_bf16_full_int8", 16384, "fine"): 1279,
    ("d128_bf16_causal_int8", 4096, None): 872, ("d128_bf16_causal_int8", 16384, None): 1248,
}  # fmt: skip


def test_a_committed_journal_gives_the_figures_of_its_report():
    cases = {(case.problem, case.tokens, case.tier): case.distances for case in find_distances(read_journal(WGMMA_RUN))}
    assert {key: round(cases[key][0].tops) for key in REPORTED} == REPORTED
    for (_, _, tier), distances in cases.items():
        assert [d.role for d in distances] == ["winner", "runner-up", "default", "worst"]
        winner, second, default, worst = distances
        assert default.config.endswith("st3_scplain_acone_ks64_rsskip_suones_exmufu_laearly")
        assert winner.behind == 1 < worst.behind
        assert second.behind < worst.behind
        if tier != "fine":  # the default was in all finals, and is fine for some problems alone
            assert default.interval is not None
            assert second.behind < default.behind < worst.behind


def test_every_committed_journal_can_be_shown():
    for file in RUNS.glob("*.jsonl.gz"):
        result = CliRunner().invoke(main, ["show", "--journal", str(file)])
        assert result.exit_code == 0, result.output
        rows = [line.split() for line in result.output.splitlines()[1:]]
        assert {row[0] for row in rows} == {"h200"}
    assert {"1024", "4096", "16384"} <= {row[2] for row in rows} <= {"1024", "2048", "4096", "8192", "16384"}


def test_a_row_says_who_where_and_how_far(tmp_path):
    finals = [record(FAST, 100.0, "final"), record(NEXT, 110.0, "final")]
    file = tmp_path / "l20.jsonl.gz"
    file.write_bytes(gzip.compress(b"".join(msgspec.json.encode(r) + b"\n" for r in SCREENS + finals)))
    output = CliRunner().invoke(main, ["show", "--journal", str(file)]).output
    row = next(line for line in output.splitlines() if "runner-up" in line)
    assert row.split() == [
        "l20", PROBLEM.name, "4096", "-", "runner-up", "9996", "110.0", "1.100x", "1.100..1.100", "final", NEXT
    ]  # fmt: skip
    values = json.loads(CliRunner().invoke(main, ["show", "--journal", str(file), "--json"]).output)
    assert [d["role"] for d in values["cases"][0]["distances"]] == ["winner", "runner-up", "default", "worst"]
    other = CliRunner().invoke(main, ["show", "--journal", str(file), "--problem", "d64_bf16_full_int8"])
    assert "no config that was measured for what was asked" in other.output
