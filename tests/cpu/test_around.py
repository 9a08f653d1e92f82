"""`bench --around`: one race around a config, and the table of what each parameter is worth."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
from click.testing import CliRunner

from sagegen import registry
from sagegen.cli.main import main
from sagegen.gpu import DetectedGpu, find_gpu
from sagegen.measuring import around, subjects
from sagegen.measuring.around_report import AROUND_HEADINGS
from sagegen.measuring.jobs import Gate, Race, Reply
from sagegen.problem import Shape, parse_problem
from sagegen.space import parse_config

WINNER = "wgmma_c3_bk128_st3_scplain_acone_ks64_rsskip_suones_exmufu"
STAGES_4 = "wgmma_c3_bk128_st4_scplain_acone_ks64_rsskip_suones_exmufu"
ALWAYS = "wgmma_c3_bk128_st3_scplain_acone_ks64_rsalways_suones_exmufu"
#: Of the winner's kernel in the first round; each later round takes a hundredth more.
US = 16000.0


class ScriptedWorker:
    """Answers a race from `slower`: by config how many times longer than US its kernel takes."""

    slower: ClassVar[dict[str, float]] = {}
    gate: ClassVar[dict[str, Reply]] = {}
    faults: ClassVar[dict[str, Reply]] = {}
    made: ClassVar[list] = []

    def __init__(self, gpu_index=0):
        self.gpu_index, self.jobs = gpu_index, []
        self.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def run(self, job, timeout_s):
        self.jobs.append(job)
        if isinstance(job, Gate):
            normal = {"cosine": 0.99931, "relative_l1": 0.0374}
            return self.gate.get(job.candidate.config, Reply("ok", data={"figures": {"normal": normal}}))
        if not isinstance(job, Race):
            return Reply("ok", data={"torch": "2.11"})
        for candidate in job.candidates:
            if candidate.config in self.faults:
                return self.faults[candidate.config]
        names = {f"kernel {i}": US * self.slower.get(c.config, 1.25) for i, c in enumerate(job.candidates)}
        data = {
            "sustained_us": {name: [us * (1 + 0.01 * n) for n in range(job.rounds)] for name, us in names.items()},
            "burst_us": {name: [us / 2] * job.burst_rounds for name, us in names.items()},
            "clock_mhz": {name: [1725.0] * job.rounds for name in names},
            "agreement": {},
            "absent": {},
            "versions": {},
        }
        return Reply("ok", data=data)


@pytest.fixture
def machine(monkeypatch, tmp_path, nvcc):
    """An H200 with a compiler that gives every kernel 40 registers and 6 bytes of spills."""
    gpu = find_gpu("h200")
    device = DetectedGpu(2, gpu.products[0], gpu.sms, "580.95", gpu.arch, gpu)
    monkeypatch.setattr(subjects, "detect_gpus", lambda: [device])
    monkeypatch.setattr(around, "find_toolkit", lambda env: nvcc.toolkit)
    monkeypatch.setattr(registry, "shipped_dir", lambda: tmp_path / "shipped")
    monkeypatch.setenv("SAGEGEN_TUNED_DIR", str(tmp_path / "tuned"))
    monkeypatch.setenv("SAGEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("sagegen.measuring.worker.Worker", ScriptedWorker)
    monkeypatch.setattr(ScriptedWorker, "made", [])
    monkeypatch.setattr(ScriptedWorker, "slower", {WINNER: 1.0, STAGES_4: 0.8})
    monkeypatch.setattr(ScriptedWorker, "gate", {})
    monkeypatch.setattr(ScriptedWorker, "faults", {})
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(main, ["bench", "--gpu", "h200", *arguments])


def around_rows(*arguments):
    result = run("--around", WINNER, *arguments, "--json")
    (values,) = json.loads(result.stdout)["around"]
    return values, {(row["parameter"], row["value"]): row for row in values["rows"]}


def test_everyone_races_once_kernel_alone_without_peers(machine):
    result = run("--around", WINNER)
    assert result.exit_code == 0, result.output
    (worker,) = ScriptedWorker.made
    (race,) = (job for job in worker.jobs if isinstance(job, Race))
    assert (race.problem, race.parts, race.peers) == ("d128_bf16_full_int8", ("kernel",), ())
    assert (race.shape, race.gpu_index) == (Shape(4, 32, 32, 16384, 16384), 2)
    assert (race.rounds, race.sustained_s, race.burst_rounds, race.idle_s) == (5, 0.3, 2, 0.5)
    configs = [candidate.config for candidate in race.candidates]
    assert configs[0] == WINNER
    assert len(configs) == len(set(configs))
    assert {STAGES_4, ALWAYS} < set(configs)
    gates = [job.candidate.config for job in worker.jobs if isinstance(job, Gate)]
    assert sorted(gates) == sorted(configs)


def test_a_default_run_is_about_a_minute(machine):
    result = run("--around", WINNER)
    (race,) = (job for job in ScriptedWorker.made[0].jobs if isinstance(job, Race))
    # (0.1 + 0.3) s five times, 0.5 s twice, per kernel, and 20 s to start
    assert f"about {20 + 3 * len(race.candidates)} s of the GPU" in result.stderr
    assert 12 <= len(race.candidates) <= 20


def test_rows_say_what_a_value_costs_and_what_it_is(machine):
    values, rows = around_rows()
    assert values["winner"] == WINNER
    winner, four = rows[None, None], rows["stages", 4]
    flops = Shape(4, 32, 32, 16384, 16384).flops(parse_problem("d128_bf16_full_int8"))
    assert winner["tops"] == pytest.approx(flops / (US * 1.02) / 1e6)  # the median of five rounds
    assert winner["speed"]["ratio"] == 1
    assert four["speed"]["ratio"] == pytest.approx(1.25)
    assert four["burst_tops"] == pytest.approx(flops / (US * 0.8 / 2) / 1e6)
    assert rows["rescale", "always"]["speed"]["ratio"] == pytest.approx(0.8)
    assert (four["base"], four["config"], four["clock_mhz"]) == (3, STAGES_4, 1725)
    assert four["figures"]["normal"] == {"cosine": 0.99931, "relative_l1": 0.0374}
    assert (four["resources"]["registers"], four["resources"]["spill_store_bytes"]) == (40, 4)
    assert list(rows)[:3] == [(None, None), ("consumers", 2), ("block_k", 64)]
    assert rows["block_k", 192]["changes"] == {"consumers": 2}


def test_the_table_has_a_line_per_value(machine):
    result = run("--around", WINNER, "--markdown", str(machine / "around.md"))
    lines = [line for line in (machine / "around.md").read_text().splitlines() if line.startswith("|")]
    cells = {tuple(line.strip("| ").split(" | "))[:2]: line.strip("| ").split(" | ") for line in lines}
    assert cells["stages", "4"] == [
        "stages", "4", "3", "1347 ±1.2%", "2749 ±0.0%", "1.250 (1.250..1.250)", "0.99931", "0.0374", "40", "6", "1725",
        STAGES_4,
    ]  # fmt: skip
    assert cells["block_k", "192 (with consumers=2)"][2] == "128"
    assert cells["(winner)", "-"][5] == "1.000 (1.000..1.000)"
    assert {line.count("|") for line in lines} == {len(AROUND_HEADINGS) + 1}
    text = " ".join((machine / "around.md").read_text().split())
    assert "5 rounds of sustained samples, each of at least 0.3 s back to back" in text
    assert "GPU NVIDIA H200" in text
    assert "192 (with consumers=2)" in result.stdout


def test_who_fails_the_gate_has_no_times_and_says_why(machine, monkeypatch):
    monkeypatch.setitem(ScriptedWorker.gate, ALWAYS, Reply("accuracy", "normal: cosine 0.98"))
    _, rows = around_rows()
    row = rows["rescale", "always"]
    assert (row["tops"], row["speed"]) == (None, None)
    assert row["note"] == "not in the race: accuracy: normal: cosine 0.98"
    assert rows["stages", 4]["speed"]["ratio"] == pytest.approx(1.25)


def test_who_crashes_in_the_race_is_left_out_and_the_others_are_timed(machine, monkeypatch):
    crash = Reply("crash", "an illegal memory access", {"running": f"d128_bf16_full_int8_{STAGES_4}"})
    monkeypatch.setitem(ScriptedWorker.faults, STAGES_4, crash)
    _, rows = around_rows()
    assert rows["stages", 4]["note"] == "crash: an illegal memory access"
    assert rows["rescale", "always"]["speed"]["ratio"] == pytest.approx(0.8)


def test_what_does_not_compile_costs_its_row_alone(machine, monkeypatch):
    from dataclasses import replace

    from sagegen.render import render

    def broken(problem, config):
        source = render(problem, config)
        return replace(source, text=source.text + "BROKEN") if config.name == ALWAYS else source

    monkeypatch.setattr(around, "render", broken)
    _, rows = around_rows()
    assert 'identifier "BROKEN" is undefined' in rows["rescale", "always"]["note"]
    assert rows["rescale", "always"]["resources"] is None
    assert rows["stages", 4]["tops"]


def test_a_winner_without_times_is_exit_code_one(machine, monkeypatch):
    monkeypatch.setitem(ScriptedWorker.gate, WINNER, Reply("accuracy", "normal: cosine 0.98"))
    result = run("--around", WINNER)
    assert result.exit_code == 1
    assert "not in the race: accuracy: normal: cosine 0.98" in result.stdout


def test_problems_and_lengths_are_races_of_their_own(machine):
    result = run("--around", WINNER, "--head-dim", "64", "--both", "--tokens", "4096,16384", "--rounds", "3",
                 "--burst-rounds", "0", "--json", str(machine / "around.json"))  # fmt: skip
    assert result.exit_code == 0, result.output
    values = json.loads((machine / "around.json").read_text())
    assert [row["work"] for row in values["around"]] == [
        "d64 full 4K", "d64 full 16K", "d64 causal 4K", "d64 causal 16K"
    ]  # fmt: skip
    assert (values["pace"]["rounds"], values["pace"]["burst_rounds"]) == (3, 0)
    gates = [job.candidate.name for job in ScriptedWorker.made[0].jobs if isinstance(job, Gate)]
    assert len(gates) == len(set(gates))  # once for both lengths


def test_a_problems_name_before_the_config_chooses_it(machine):
    result = run("--around", f"d64_bf16_causal_int8_{WINNER}", "--json")
    assert [row["problem"] for row in json.loads(result.stdout)["around"]] == ["d64_bf16_causal_int8"]
    assert parse_config(WINNER).family == "wgmma"


def test_around_is_alone(machine):
    for other in (["--peers"], ["--config", "default"]):
        result = run("--around", WINNER, *other)
        assert result.exit_code == 2
        assert "leave out --peers and --config" in result.output


def test_a_config_that_breaks_a_rule_is_misuse(machine):
    result = run("--around", WINNER.replace("bk128", "bk256"))
    assert result.exit_code == 2
    assert "registers" in result.output
