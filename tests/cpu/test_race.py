"""Races from the command line to the tables, with a worker that answers from a script of speeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner

from sagegen import registry
from sagegen.cli.main import main
from sagegen.gpu import DetectedGpu, find_gpu
from sagegen.measuring import rivals, subjects
from sagegen.measuring.contenders import Contender
from sagegen.measuring.goals import GOALS, Leg, find_goal, goal_legs
from sagegen.measuring.jobs import BURST_LAUNCHES, CUDNN_FP8, PEERS, SDPA_CUDNN, SDPA_FLASH, Gate, Race, Reply
from sagegen.measuring.race import Pace, estimate_seconds, hold_race, hold_races
from sagegen.measuring.race_report import RIVAL_HEADINGS, SCORE_HEADINGS, remarks, rival_rows, score_rows, to_markdown
from sagegen.measuring.rivals import Rival
from sagegen.measuring.subjects import Subject
from sagegen.measuring.telemetry import GpuState
from sagegen.problem import Problem, Shape, parse_problem
from sagegen.space import parse_config

FULL, D64 = Problem(128, "bf16", False), Problem(64, "bf16", False)
SHAPE = Shape(4, 32, 32, 16384, 16384)
LEG = Leg(FULL, SHAPE, ("kernel", "call"))
FINE = parse_config("mma_bq128_bk64_w4_st3_pvbf16f32_ad0_cvmagic_grwarp_qs32_ks64_rsskip_qosmem_mb2")
COARSE = parse_config("mma_bq128_bk128_w8_st2_pvbf16f32_ad0_cvmagic_grthread_qs16_ks128_rsalways_qoreg_mb1")
#: TOPS when sustained; bursts are a fifth faster.
SPEEDS = {
    **{f"kernel {FINE.name}": 1090.0, f"call {FINE.name}": 990.0},
    **{f"kernel {COARSE.name}": 1200.0, f"call {COARSE.name}": 1130.0},
    **{SDPA_FLASH: 350.0, SDPA_CUDNN: 620.0, CUDNN_FP8: 930.0},
}


def figures(cosine=0.99931):
    return {"normal": {"cosine": cosine, "relative_l1": 0.0374}, "channel_offsets": {"cosine": 0.9992}}


def contender(config, cosine, note=""):
    return Contender(Subject(FULL, config, Path("x.cubin"), "built here"), figures(cosine), note)


FIELD = (contender(FINE, 0.99931), contender(COARSE, 0.99905, "a note"))


class Timer:
    """Scripted by SPEEDS; a sustained sample is slower by a little each round, for a spread."""

    def __init__(self, flops, speeds, names):
        self.flops, self.speeds, self.names, self.round = flops, speeds, names, 0

    def _time(self, launch):
        return self.flops / self.speeds.get(self.names[launch()], 500.0) / 1e6

    def settled(self, launch, settle, count, look):
        look()
        return self._time(launch)

    def burst(self, launch, idle_s, count):
        assert count == BURST_LAUNCHES
        return self._time(launch) / 1.2


class ScriptedWorker:
    """Stands for worker.Worker: a race really is run, by the worker's own code, on launches that do nothing.

    Attributes:
        speeds: TOPS by `<part> <config>` or peer.
        absent: peers that cannot run, and why.
        faults: what to answer instead, by who is running.
    """

    made: ClassVar[list] = []

    def __init__(self, gpu_index=0, speeds=SPEEDS, absent=None, faults=None):
        self.gpu_index, self.speeds = gpu_index, speeds
        self.absent, self.faults = absent or {}, faults or {}
        self.jobs = []
        self.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def run(self, job, timeout_s):
        self.jobs.append(job)
        if isinstance(job, Gate):
            return Reply("ok", data={"figures": figures(0.9991), "seconds": 0.2})
        if not isinstance(job, Race):
            return Reply("ok", data={"torch": "2.11"})
        for guilty, reply in self.faults.items():
            if guilty in [*job.peers, *(candidate.name for candidate in job.candidates)]:
                return reply
        present = [peer for peer in job.peers if peer not in self.absent]
        names = {f"{part} {i}": f"{part} {c.config}" for i, c in enumerate(job.candidates) for part in job.parts}
        names |= {peer: peer for peer in present}
        field = {name: Rival(name, lambda name=name: name) for name in names}
        timer = Timer(job.shape.flops(parse_problem(job.problem)), self.speeds, names)
        data = rivals.run_race(field, job, timer, lambda name: None)
        absent = {peer: self.absent[peer] for peer in job.peers if peer in self.absent}
        agreement = dict.fromkeys(names, 0.9993)
        return Reply("ok", data={**data, "agreement": agreement, "absent": absent, "versions": {"cudnn": "9.19.0"}})


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(rivals, "read_state", lambda index: GpuState(clock_mhz=1410.0))
    monkeypatch.setattr(ScriptedWorker, "made", [])


def race(worker=None, leg=LEG, field=FIELD, pace=Pace()):  # noqa: B008 - frozen
    return hold_race(worker or ScriptedWorker(), leg, field, pace)


def test_scores_are_of_the_fastest_kernel_that_is_accurate_enough():
    scores = {(score.part, score.tier): score for score in race().scores()}
    assert {key: (score.rival, round(score.tops)) for key, score in scores.items()} == {
        ("kernel", "fine"): ("kernel 0", 1090),
        ("kernel", "coarse"): ("kernel 1", 1200),
        ("call", "fine"): ("call 0", 990),
        ("call", "coarse"): ("call 1", 1130),
    }
    assert scores["kernel", "fine"].speeds[CUDNN_FP8].ratio == pytest.approx(1090 / 930)
    assert scores["call", "coarse"].speeds[SDPA_CUDNN].ratio == pytest.approx(1130 / 620)


def test_a_fine_kernel_that_is_faster_is_the_coarse_tiers_too():
    speeds = {**SPEEDS, f"kernel {FINE.name}": 1300.0}
    scores = {(score.part, score.tier): score for score in race(ScriptedWorker(speeds=speeds)).scores()}
    assert scores["kernel", "coarse"].rival == "kernel 0"


def test_goals_are_held_against_the_peers_of_the_same_run():
    met = {(s.part, s.tier): (s.meets_target, s.meets_floor) for s in race().scores()}
    # kernel: 1090 >= 1080 and 1.172 >= 1.05; 1200 < 1220 but 1.290 >= 1.13; call: 990 < 1000 but 1.597 >= 1.5
    assert met == {
        ("kernel", "fine"): (True, True),
        ("kernel", "coarse"): (False, True),
        ("call", "fine"): (False, True),
        ("call", "coarse"): (True, True),
    }
    slow = race(ScriptedWorker(speeds={**SPEEDS, CUDNN_FP8: 1050.0})).scores()[0]
    assert (slow.meets_target, slow.meets_floor) == (True, False)  # 1.038 < 1.05


def test_goals_are_of_their_shape_alone():
    assert find_goal(LEG, "kernel", "fine").tops == 1080
    other = Shape(2, 32, 32, 16384, 16384)
    for leg in (
        Leg(FULL, other, ("kernel",)),
        Leg(FULL, Shape(4, 32, 8, 16384, 16384), ("kernel",)),
        Leg(FULL, Shape(4, 32, 32, 1024, 16384), ("kernel",)),
        Leg(Problem(128, "fp16", False), SHAPE, ("kernel",)),
        Leg(Problem(64, "bf16", True), SHAPE, ("kernel",)),
    ):
        assert find_goal(leg, "kernel", "fine") is None
    (score, *_) = race(leg=Leg(FULL, other, ("kernel",))).scores()
    assert (score.goal, score.meets_target, score.meets_floor) == (None, None, None)


def test_the_goals_shapes_are_raced_with_the_parts_they_are_of():
    legs = {leg.work: leg.parts for leg in goal_legs("bf16", 4, 32, 32)}
    assert legs == {
        "d128 full 16K": ("kernel", "call"),
        "d128 causal 16K": ("kernel",),
        "d64 full 16K": ("kernel",),
        "d128 full 2K": ("call",),
        "d128 full 4K": ("call",),
    }
    assert {len(rows) for rows in GOALS.values()} == {2}


def test_the_default_run_is_short():
    field = [(leg, FIELD) for leg in goal_legs("bf16", 4, 32, 32)]
    assert estimate_seconds(field, Pace()) == pytest.approx(27 * (3 * 0.4 + 2 * 0.5))
    assert estimate_seconds(field, Pace()) < 65


def test_bursts_and_sustained_samples_are_told_apart():
    standing = race()
    assert standing.tops("kernel 0") == pytest.approx(1090)
    assert standing.tops("kernel 0", "burst") == pytest.approx(1090 * 1.2)
    assert standing.clock("kernel 0") == 1410
    without = race(pace=Pace(burst_rounds=0))
    assert without.tops("kernel 0", "burst") is None
    assert without.tops("kernel 0") == pytest.approx(1090)


def test_an_absent_peer_costs_its_column_and_its_floor_alone():
    standing = race(ScriptedWorker(absent={CUDNN_FP8: "ImportError: nvidia-cudnn-frontend cannot be imported"}))
    score = standing.scores()[0]
    assert (score.meets_target, score.meets_floor) == (True, None)
    cells = dict(zip(SCORE_HEADINGS, next(score_rows([standing])), strict=True))
    assert (cells["target"], cells["floor"], cells["held"]) == ("1080", "1.05 x cuDNN FP8", "-")
    assert (cells["/ cuDNN FP8"], cells["/ cuDNN bf16"][:5]) == ("-", "1.758")
    assert "d128 full 16K: cuDNN FP8 could not run: ImportError: nvidia-cudnn-frontend" in remarks([standing])[0]


def test_a_peer_that_crashes_is_left_out_and_the_race_held_again():
    crash = Reply("crash", "CUDA error: an illegal memory access was encountered", {"running": CUDNN_FP8})
    worker = ScriptedWorker(faults={CUDNN_FP8: crash})
    standing = race(worker)
    assert [job.peers for job in worker.jobs] == [PEERS, (SDPA_FLASH, SDPA_CUDNN)]
    assert standing.failure == ""
    assert standing.absent == {CUDNN_FP8: "crash: CUDA error: an illegal memory access was encountered"}
    assert standing.tops("kernel 1") == pytest.approx(1200)


def test_a_kernel_that_hangs_is_left_out_too():
    name = FIELD[0].subject.candidate.name
    worker = ScriptedWorker(faults={name: Reply("timeout", "no answer within 600 s", {"running": name})})
    standing = race(worker)
    assert [c.subject.config for c in standing.contenders] == [COARSE]
    assert standing.absent == {FINE.name: "timeout: no answer within 600 s"}
    fine, coarse, *_ = standing.scores()
    assert (fine.rival, coarse.rival) == (None, "kernel 0")
    cells = next(score_rows([standing]))
    assert cells[-1] == "no kernel is accurate enough"
    assert len(cells) == len(SCORE_HEADINGS)


def test_a_failure_that_nobody_owns_ends_the_race_and_keeps_its_rows():
    standing = race(ScriptedWorker(faults={SDPA_FLASH: Reply("crash", "worker killed by SIGKILL")}))
    assert standing.failure == "crash: worker killed by SIGKILL"
    assert [cells[-1] for cells in score_rows([standing])] == [standing.failure] * 4
    assert list(rival_rows([standing])) == []
    assert standing.failure in to_markdown([standing], {}, Pace(), "sagegen bench")
    json.dumps(standing.as_values())


def test_the_gate_judges_a_named_config_once_for_all_its_races():
    worker = ScriptedWorker()
    unknown = Contender(Subject(FULL, FINE, Path("x.cubin"), "built here"))
    short = Leg(FULL, Shape(4, 32, 32, 2048, 2048), ("call",))
    first, second = hold_races(worker, [(LEG, [unknown]), (short, [unknown])], Pace())
    assert [type(job).__name__ for job in worker.jobs] == ["Gate", "Race", "Race"]
    assert first.contenders[0].tiers == second.contenders[0].tiers == ("coarse",)


def test_who_is_accurate_enough_for_no_tier_does_not_run():
    worker = ScriptedWorker()
    standing = race(worker, field=(contender(FINE, 0.99), FIELD[1]))
    assert [c.config for c in worker.jobs[0].candidates] == [COARSE.name]
    assert standing.absent == {FINE.name: "accurate enough for no tier"}


def test_cells_say_what_was_asked_and_measured():
    standing = race()
    cells = dict(zip(SCORE_HEADINGS, next(score_rows([standing])), strict=True))
    assert cells == {
        "work": "d128 full 16K kernel",
        "tier": "fine",
        "TOPS": "1090 ±0.0%",
        "target": "1080 (1.161 x cuDNN FP8)",
        "reached": "100.9%",
        "floor": "1.05 x cuDNN FP8",
        "held": "yes",
        "/ cuDNN FP8": "1.172 (1.172..1.172)",
        "/ cuDNN bf16": "1.758 (1.758..1.758)",
        "/ flash bf16": "3.114 (3.114..3.114)",
        "cosine, L1": "0.99931, 0.0374",
        "config": FINE.name,
    }
    rows = [dict(zip(RIVAL_HEADINGS, cells, strict=True)) for cells in rival_rows([standing])]
    assert [row["who"] for row in rows] == [
        *(f"{part} {config.name}" for config in (FINE, COARSE) for part in ("kernel", "call")),
        "flash bf16", "cuDNN bf16", "cuDNN FP8",
    ]  # fmt: skip
    assert (rows[0]["sustained TOPS"], rows[0]["burst TOPS"], rows[0]["burst / sustained"]) == (
        "1090 ±0.0%", "1308 ±0.0%", "1.200",
    )  # fmt: skip
    assert (rows[0]["SM MHz"], rows[0]["agrees"]) == ("1410", "0.99930")


def test_markdown_says_how_it_was_measured():
    machine = {"GPU": "NVIDIA H200", "driver": "580.1", "power limit W": 700.0, "nothing": None}
    text = to_markdown([race()], machine, Pace(), "sagegen bench --gpu h200 --peers")
    assert text.startswith(
        "`sagegen bench --gpu h200 --peers` on GPU NVIDIA H200, driver 580.1, power limit W 700.0, cudnn"
    )
    words = " ".join(text.split())
    assert "batch 4, 32 heads, 32 KV heads" in words
    assert "3 rounds of sustained samples, each of at least 0.3 s back to back" in words
    assert "2 rounds of bursts: 3 launches after 0.5 s of rest" in words
    assert "- d128 full 16K: " + COARSE.name + ": a note" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.count("|") for line in rows] == [len(SCORE_HEADINGS) + 1] * 6 + [len(RIVAL_HEADINGS) + 1] * 9
    assert "bursts" not in " ".join(to_markdown([race()], {}, Pace(burst_rounds=0), "x").split("Sustained")[0].split())


def test_values_are_json_with_every_time():
    values = json.loads(json.dumps(race().as_values()))
    assert values["rivals"]["kernel 0"]["sustained"]["tops"] == pytest.approx(1090)
    assert len(values["rivals"]["cudnn-fp8"]["burst"]["times_us"]) == 2
    assert values["scores"][0]["goal"] == {"tops": 1080, "floor": 1.05, "peer": "cudnn-fp8"}
    assert values["contenders"][0]["tiers"] == ["fine", "coarse"]


# --- from the command line


@pytest.fixture
def machine(monkeypatch, tmp_path, nvcc):
    """A machine with an H200, a compiler, empty registries and the scripted worker."""
    gpu = find_gpu("h200")
    device = DetectedGpu(2, gpu.products[0], gpu.sms, "580.95", gpu.arch, gpu)
    monkeypatch.setattr(subjects, "detect_gpus", lambda: [device])
    monkeypatch.setattr(subjects, "find_toolkit", lambda env: nvcc.toolkit)
    monkeypatch.setattr(registry, "shipped_dir", lambda: tmp_path / "shipped")
    monkeypatch.setenv("SAGEGEN_TUNED_DIR", str(tmp_path / "tuned"))
    monkeypatch.setenv("SAGEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("sagegen.measuring.worker.Worker", ScriptedWorker)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(main, ["bench", "--gpu", "h200", "--peers", *arguments])


NAMED = ("--config", FINE.name, "--config", f"{FULL.name}_{COARSE.name}")


def test_the_default_race_is_the_table(machine):
    result = run(*NAMED, "--json", str(machine / "race.json"), "--markdown", str(machine / "race.md"))
    assert result.exit_code == 0, result.output
    (worker,) = ScriptedWorker.made
    jobs = [job for job in worker.jobs if isinstance(job, Race)]
    assert [(job.problem, job.shape.kv_len, job.parts, len(job.candidates)) for job in jobs] == [
        ("d128_bf16_full_int8", 16384, ("kernel", "call"), 2),
        ("d128_bf16_causal_int8", 16384, ("kernel",), 1),
        ("d64_bf16_full_int8", 16384, ("kernel",), 1),
        ("d128_bf16_full_int8", 2048, ("call",), 2),
        ("d128_bf16_full_int8", 4096, ("call",), 2),
    ]
    assert {(job.shape.batch, job.shape.heads_q, job.rounds, job.sustained_s, job.burst_rounds) for job in jobs} == {
        (4, 32, 3, 0.3, 2)
    }
    assert worker.gpu_index == jobs[0].gpu_index == 2
    values = json.loads((machine / "race.json").read_text())
    assert values["machine"]["torch"] == "2.11"
    assert values["pace"]["idle_s"] == 0.5
    assert [row["work"] for row in values["races"]][:2] == ["d128 full 16K", "d128 causal 16K"]
    assert (machine / "race.md").read_text().count("\n| d128 full 16K kernel |") == 2
    assert "5 races, about" in result.stderr
    assert "d128 causal 16K kernel" in result.stdout
    assert "1220 (1.312 x cuDNN FP8)" in result.stdout


def test_rows_are_chosen_by_head_dim_mask_and_length(machine):
    def works(*arguments):
        values = json.loads(run(*arguments, "--config", "default", "--json").stdout)
        return [row["work"] for row in values["races"]]

    assert works("--head-dim", "64") == ["d64 full 16K"]
    assert works("--head-dim", "128", "--full") == ["d128 full 16K", "d128 full 2K", "d128 full 4K"]
    assert works("--head-dim", "64", "--causal", "--tokens", "1024,1000") == ["d64 causal 1K", "d64 causal 1000 tokens"]
    result = run("--head-dim", "64", "--causal")
    assert result.exit_code == 2
    assert "add --tokens" in result.output


def test_options_of_pace_and_shape_reach_the_job(machine):
    result = run(
        *NAMED[:2], "--head-dim", "128", "--full", "--tokens", "4096", "--heads-kv", "8", "--batch", "2",
        "--rounds", "5", "--sustained", "0.4", "--burst-rounds", "0", "--idle", "1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (job,) = (job for job in ScriptedWorker.made[0].jobs if isinstance(job, Race))
    assert (job.shape, job.parts) == (Shape(2, 32, 8, 4096, 4096), ("kernel", "call"))
    assert (job.rounds, job.sustained_s, job.burst_rounds, job.idle_s) == (5, 0.4, 0, 1.0)


def test_files_hold_the_rows_of_a_run_that_is_cut_short(machine, monkeypatch):
    def stop(self, job, timeout_s, run=ScriptedWorker.run):
        if isinstance(job, Race) and len([j for j in self.jobs if isinstance(j, Race)]) == 2:
            raise KeyboardInterrupt
        return run(self, job, timeout_s)

    monkeypatch.setattr(ScriptedWorker, "run", stop)
    assert run(*NAMED, "--json", str(machine / "race.json")).exit_code != 0
    assert len(json.loads((machine / "race.json").read_text())["races"]) == 2


def test_a_race_that_fails_is_exit_code_one_and_the_others_go_on(machine, monkeypatch):
    def fall(self, job, timeout_s, run=ScriptedWorker.run):
        if isinstance(job, Race) and job.problem == "d64_bf16_full_int8":
            return Reply("timeout", "no answer within 600 s")
        return run(self, job, timeout_s)

    monkeypatch.setattr(ScriptedWorker, "run", fall)
    result = run(*NAMED)
    assert result.exit_code == 1
    assert "d64 full 16K: timeout: no answer within 600 s" in result.output
    assert "d128 full 4K call" in result.stdout


def test_several_configs_are_for_races_alone(machine):
    result = CliRunner().invoke(main, ["bench", "--gpu", "h200", *NAMED])
    assert result.exit_code == 2
    assert "several --config need --peers" in result.output


def test_bench_without_peers_writes_json_to_a_file_too(machine, monkeypatch):
    data = {"kernel_us": [[1000.0] * 5], "call_us": [[1250.0] * 5], "peers": {}, "absent": {}}
    answers = {"Finals": Reply("ok", data=data), "Host": Reply("ok", data={"attention_us": [1.0], "sdpa_us": [1.0]})}
    monkeypatch.setattr(
        ScriptedWorker, "run", lambda self, job, timeout_s: answers.get(type(job).__name__, Reply("ok", data={}))
    )
    file = machine / "bench.json"
    arguments = ["bench", "--gpu", "h200", "--head-dim", "64", "--full", "--tokens", "1024", "--json", str(file)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["rounds"] == 40
    assert "kernel TOPS" in result.stdout
