"""`sagegen tune`: which way it takes, what it prints, where it writes, how it ends."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sagegen.cli.main import main
from sagegen.cli.values import Duration
from sagegen.entry import Accuracy, Entry, KernelResources, Provenance, Range, Timing
from sagegen.errors import BuildError, WorkerError
from sagegen.gpu import DetectedGpu, find_gpu
from sagegen.probing.result import SCHEMA, Machine, ProbeResult, Rate, dump_result
from sagegen.problem import TUNED_LENGTHS, Problem
from sagegen.registry import load_registry, save_entries
from sagegen.rules import Target, default_config
from sagegen.toolkit import Toolkit
from sagegen.tuning.journal import Journal, Record
from sagegen.tuning.request import Request
from sagegen.tuning.request import Result as Found

L20, H200 = find_gpu("l20"), find_gpu("h200")
PROBLEM = Problem(128, "bf16", False)
CONFIG = default_config(Target(L20, PROBLEM))
CUBIN = b"cubin"
DIGEST = hashlib.sha256(CUBIN).hexdigest()
ACCURACY = Accuracy(cosine=0.9994, relative_l1=0.03, relative_l2=0.03, max_error=0.1, scale_ratio=1.0)
PRESENT = {
    "l20": DetectedGpu(0, "NVIDIA L20", 92, "580.1", "sm_89", L20),
    "h200": DetectedGpu(0, "NVIDIA H200", 132, "580.1", "sm_90", H200),
    "unknown": DetectedGpu(0, "NVIDIA T4", 40, "580.1", "sm_75", None),
}


def make_entry(kind: str = "measured", **changes: Any) -> Entry:
    measured = kind == "measured"
    values: dict[str, Any] = {
        "problem": PROBLEM.name,
        "bucket": Range(kv_min=2048, kv_max=8191),
        "answer": "kernel",
        "config": CONFIG.name,
        "kernel": f"{PROBLEM.name}_{CONFIG.name}",
        "cubin_sha256": DIGEST,
        "min_cosine": 0.9994 if measured else None,
        "figures": Timing(kernel_us=512.25, full_us=600.5, tops=268.4, speed_vs_default=1.25, speed_vs_sdpa=2.5)
        if measured
        else Timing(predicted_us=812.0),
        "accuracy": {"normal": ACCURACY} if measured else {},
        "resources": KernelResources(registers=168, spill_bytes=0, smem_bytes=33280),
        "provenance": Provenance(
            kind="measured" if measured else "predicted", gpu="l20", sms=92, launch_abi=1, protocol=1,
            date="2026-11-29", shape="b4 h32/32 q4096 kv4096",
        ),
    }  # fmt: skip
    return Entry(**{**values, **changes})


class Stage:
    """The command with its machinery scripted: what is present, what a run finds, what it was asked."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.present: list[DetectedGpu] = []
        self.requests: list[Request] = []
        self.find: Callable[[Request], Found] = self.found
        self.cause: BaseException | None = None
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(CUBIN)
        self.cubins = {DIGEST: cubin}
        patch.setenv("SAGEGEN_CACHE_DIR", str(folder / "cache"))
        patch.setenv("SAGEGEN_TUNED_DIR", str(folder / "tuned"))
        patch.setattr("sagegen.gpu.detect_gpus", lambda: self.present)
        patch.setattr("sagegen.toolkit.find_toolkit", lambda env: Toolkit(Path("/nvcc"), (13, 0), "V13"))
        patch.setattr("sagegen.tuning.tune.tune", lambda request, tools, listen: self.run(request, "measured"))
        patch.setattr(
            "sagegen.tuning.offline.tune_offline", lambda request, *rest, **more: self.run(request, "predicted")
        )

    @property
    def registry(self) -> Path:
        return self.folder / "tuned" / "l20.yaml"

    def run(self, request: Request, kind: str) -> Found:
        self.requests.append(request)
        self.kind = kind
        return self.find(request)

    def found(self, request: Request) -> Found:
        records = tuple(Record(PROBLEM.name, str(n), "screen", "ok", "l20", 1, "aa") for n in range(3))
        crashed = replace(records[0], outcome="crash")
        return Found((make_entry(self.kind),), self.cubins, (*records, crashed), self.cause)

    def invoke(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["tune", *arguments])


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr("sagegen.registry.shipped_dir", lambda: tmp_path / "shipped")
    return Stage(tmp_path, monkeypatch)


def test_with_the_gpu_present_it_measures_and_says_where_the_result_is(stage: Stage) -> None:
    stage.present = [PRESENT["l20"]]
    result = stage.invoke()
    assert result.exit_code == 0, result.output
    assert stage.kind == "measured"
    for word in (
        PROBLEM.name,
        "kv2048-8191",
        "512.2",
        "268",
        "1.250x",
        "2.500x",
        "0.99940",
        CONFIG.name,
        "3 ok, 1 crash",
    ):
        assert word in result.stdout
    assert f"1 entries written to {stage.registry}" in result.stdout
    found = load_registry("l20").find(PROBLEM, 4096)
    assert found is not None
    assert found[0] == make_entry()


def test_f9_with_no_gpu_at_all_it_announces_offline_first(stage: Stage) -> None:
    result = stage.invoke()
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[0] == "No GPU in this machine: tuning l20 offline, which measures nothing."
    assert stage.kind == "predicted"
    assert "predicted" in result.stdout
    assert "~812" in result.stdout


def test_an_offline_run_that_is_interrupted_undoes_nothing(stage: Stage) -> None:
    """A second run, ended before its gate: what it has is the default's, slower or not, and of unknown accuracy."""
    judged = make_entry("predicted", min_cosine=0.9994, accuracy={"normal": ACCURACY})
    stage.find = lambda request: Found((judged,), stage.cubins, ())
    stage.invoke("--offline")
    before = stage.registry.read_bytes()
    assert b"min_cosine: 0.9994" in before
    stage.find = lambda request: Found((make_entry("predicted"),), stage.cubins, (), KeyboardInterrupt())
    result = stage.invoke("--offline")
    assert result.exit_code == 130
    assert "1 predicted entries were not written: better predictions are there already" in result.stdout
    assert "0 entries written" in result.stdout
    assert stage.registry.read_bytes() == before


def test_offline_is_taken_at_its_word_with_any_gpu_present(stage: Stage) -> None:
    stage.present = [PRESENT["h200"]]
    result = stage.invoke("--offline")
    assert result.exit_code == 0
    assert stage.kind == "predicted"


@pytest.mark.parametrize(
    ("present", "names"), [("h200", ("l20", "h200", "NVIDIA H200")), ("unknown", ("l20", "NVIDIA T4"))]
)
def test_f9_another_gpu_is_refused_with_both_names_and_both_remedies(
    stage: Stage, present: str, names: tuple[str, ...]
) -> None:
    stage.present = [PRESENT[present]]
    result = stage.invoke("--gpu", "l20")
    assert result.exit_code == 2
    for word in (*names, "--gpu", "--offline"):
        assert word in result.stderr
    assert stage.requests == []


def test_all_gpus_of_that_kind_are_used_unless_fewer_are_asked_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.present = [PRESENT["h200"], *(replace(PRESENT["l20"], index=n) for n in (1, 2, 3))]
    used: list[list[int]] = []

    def tune(request: Request, tools: Any, listen: Any) -> Found:
        used.append([worker.gpu_index for worker in tools.workers])
        return stage.run(request, "measured")

    monkeypatch.setattr("sagegen.tuning.tune.tune", tune)
    stage.invoke()
    stage.invoke("--devices", "all")
    stage.invoke("--devices", "2")
    stage.invoke("--devices", "1")
    assert used == [[1, 2, 3], [1, 2, 3], [1, 2], [1]]


@pytest.mark.parametrize(
    ("present", "arguments", "says", "remedy"),
    [
        (0, ("--devices", "2"), "--devices 2, but this machine has 0 of l20", "leave out --devices to tune offline"),
        (1, ("--devices", "2"), "--devices 2, but this machine has 1 of l20", "give --devices 1"),
        (3, ("--devices", "2", "--offline"), "--offline measures nothing", "leave one out"),
        (3, ("--storage", "study.log", "--offline"), "--offline measures nothing", "leave one out"),
        (0, ("--storage", "study.log"), "--storage shares what is measured on l20", "leave it out to tune offline"),
        (0, ("--storage", ""), "--storage shares what is measured on l20", "leave it out to tune offline"),
        (1, ("--devices", "none"), "'none' is no count of GPUs", "write a number from 1 on, or all"),
    ],
)
def test_more_gpus_than_there_are_to_measure_are_misuse(
    stage: Stage, present: int, arguments: tuple[str, ...], says: str, remedy: str
) -> None:
    stage.present = [replace(PRESENT["l20"], index=n) for n in range(present)]
    result = stage.invoke(*arguments)
    assert (result.exit_code, stage.requests) == (2, [])
    assert says in result.stderr
    assert remedy in result.stderr


def test_a_storage_without_a_name_is_misuse_where_the_gpu_is(stage: Stage) -> None:
    stage.present = [PRESENT["l20"]]
    result = stage.invoke("--storage", "")
    assert (result.exit_code, stage.requests) == (2, [])
    assert "storage  cannot be opened" in result.stderr


@pytest.mark.parametrize("masks", [("--causal", "--full"), ("--both", "--causal"), ("--full", "--both")])
@pytest.mark.parametrize("command", ["tune", "bench"])
def test_masks_that_exclude_each_other_are_misuse(stage: Stage, command: str, masks: tuple[str, str]) -> None:
    result = CliRunner().invoke(main, [command, "--gpu", "l20", *masks])
    assert (result.exit_code, stage.requests) == (2, [])
    assert f"{masks[0]} and {masks[1]} exclude each other: give one of" in result.stderr


def test_the_problems_are_the_product_of_what_is_asked(stage: Stage) -> None:
    stage.invoke()
    stage.invoke("--head-dim", "128", "--dtype", "fp16,bf16", "--causal")
    names = [[problem.name for problem in request.problems] for request in stage.requests]
    assert names == [
        ["d64_bf16_full_int8", "d64_bf16_causal_int8", "d128_bf16_full_int8", "d128_bf16_causal_int8"],
        ["d128_fp16_causal_int8", "d128_bf16_causal_int8"],
    ]


def test_int4_is_tuned_when_it_is_asked_for(stage: Stage) -> None:
    stage.invoke("--head-dim", "64", "--full", "--precision", "int4")
    assert [problem.name for problem in stage.requests[0].problems] == ["d64_bf16_full_int4"]


@pytest.mark.parametrize(
    ("arguments", "budget_s", "trials"),
    [((), 360.0, None), (("--budget", "90s"), 90.0, None), (("--trials", "7"), None, 7),
     (("--budget", "1h", "--trials", "7"), 3600.0, 7)],
)  # fmt: skip
def test_budget_and_trials(
    stage: Stage, arguments: tuple[str, ...], budget_s: float | None, trials: int | None
) -> None:
    stage.invoke(*arguments)
    assert (stage.requests[0].budget_s, stage.requests[0].trials) == (budget_s, trials)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), (600.0, None, (5, 20), 3)),
        (("--effort", "quick"), (180.0, 24, (3, 8), 2)),
        (("--effort", "quick", "--budget", "9m", "--patience", "7"), (540.0, 7, (3, 8), 2)),
        (("--patience", "50"), (600.0, 50, (5, 20), 3)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) and value and isinstance(value[0], str) else None,
)
def test_effort_sets_what_no_other_option_does(
    stage: Stage, arguments: tuple[str, ...], expected: tuple[object, ...]
) -> None:
    stage.present = [PRESENT["l20"]]
    stage.invoke(*arguments)
    request = stage.requests[0]
    assert (request.budget_s, request.patience, request.effort.launches, request.effort.finalists) == expected


@pytest.mark.parametrize("sampler", ["tpe", "neighbour", "random"])
def test_the_sampler_reaches_the_search(stage: Stage, sampler: str) -> None:
    stage.invoke("--sampler", sampler)
    assert stage.requests[0].strategy.sampler == sampler


def test_a_gaussian_process_without_scipy_is_misuse_with_the_remedy(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "scipy" else found(name))
    result = stage.invoke("--sampler", "gp")
    assert (result.exit_code, stage.requests) == (2, [])
    assert "pip install 'sagegen[gp]'" in result.stderr


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("6m", 360), ("1h30m", 5400), ("6", 360), ("0.5", 30), ("1.5h", 5400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize(
    "arguments",
    [("--budget", "soon"), ("--budget", "0m"), ("--head-dim", "96"), ("--dtype", "fp8"), ("--trials", "0"),
     ("--gpu", "l21"), ("--tokens", "3000"), ("--sampler", "cmaes"), ("--incumbent", "mma_bq128")],
    ids=lambda arguments: " ".join(arguments),
)  # fmt: skip
def test_misuse_is_exit_code_2_before_anything_runs(stage: Stage, arguments: tuple[str, ...]) -> None:
    result = stage.invoke(*arguments)
    assert result.exit_code == 2
    assert stage.requests == []
    assert not stage.registry.exists()


def test_the_registrys_winner_is_the_incumbent(stage: Stage) -> None:
    save_entries(stage.registry, "l20", [make_entry()], {DIGEST: CUBIN})
    stage.invoke()
    assert stage.requests[0].incumbents == {(PROBLEM, length): CONFIG for length in TUNED_LENGTHS[1:3]}


def test_winners_of_other_buckets_and_problems_are_starts_unless_an_incumbent_is_named(stage: Stage) -> None:
    won = replace(CONFIG, stages=3, rescale="skip")
    save_entries(
        stage.registry, "l20", [make_entry(config=won.name, kernel=f"{PROBLEM.name}_{won.name}")], {DIGEST: CUBIN}
    )
    stage.invoke("--head-dim", "128", "--tokens", "16384")
    stage.invoke("--head-dim", "128", "--tokens", "16384", "--incumbent", "default")
    causal = Problem(128, "bf16", True)
    assert stage.requests[0].starts == {PROBLEM: (won,), causal: (won,)}
    assert stage.requests[1].starts == {}


def test_a_sitting_may_be_of_some_lengths(stage: Stage) -> None:
    stage.invoke("--tokens", "16384,2048", "--head-dim", "64", "--causal")
    stage.invoke()
    first, second = stage.requests
    assert [length.tokens for length in first.lengths] == [2048, 16384]
    assert [problem.name for problem in first.problems] == ["d64_bf16_causal_int8"]
    assert second.lengths == TUNED_LENGTHS


def test_the_incumbent_may_be_the_default_or_named(stage: Stage) -> None:
    save_entries(stage.registry, "l20", [make_entry()], {DIGEST: CUBIN})
    named = replace(CONFIG, stages=3, rescale="skip")
    stage.invoke("--incumbent", "default")
    stage.invoke("--incumbent", named.name, "--head-dim", "64", "--full")
    assert stage.requests[0].incumbents == {}
    assert set(stage.requests[1].incumbents.values()) == {named}
    assert len(stage.requests[1].incumbents) == len(TUNED_LENGTHS)


def test_the_worst_incumbent_is_valid_and_not_the_default(stage: Stage) -> None:
    stage.invoke("--incumbent", "worst", "--head-dim", "128", "--full")
    (worst,) = set(stage.requests[0].incumbents.values())
    assert worst != CONFIG


def test_an_incumbent_that_breaks_a_rule_is_refused(stage: Stage) -> None:
    result = stage.invoke("--incumbent", replace(CONFIG, pv="f16f32", accum_depth=0).name)
    assert result.exit_code == 2
    assert "pv_dtype" in result.stderr


def test_predicted_entries_do_not_replace_measured_ones(stage: Stage) -> None:
    save_entries(stage.registry, "l20", [make_entry()], {DIGEST: CUBIN})
    result = stage.invoke("--offline")
    assert "1 predicted entries were not written" in result.stdout
    found = load_registry("l20").find(PROBLEM, 4096)
    assert found is not None
    assert found[0].provenance.kind == "measured"


def test_f5_interrupted_it_writes_the_best_so_far(stage: Stage) -> None:
    stage.present = [PRESENT["l20"]]
    stage.cause = KeyboardInterrupt()
    result = stage.invoke()
    assert result.exit_code == 130
    assert "the same command goes on" in result.stderr
    assert load_registry("l20").find(PROBLEM, 4096) is not None


@pytest.mark.parametrize(("cause", "code"), [(KeyboardInterrupt(), 130), (None, 1)], ids=["interrupted", "ended"])
def test_without_any_result_nothing_is_written(stage: Stage, cause: BaseException | None, code: int) -> None:
    stage.find = lambda request: Found((), {}, (), cause)
    assert stage.invoke().exit_code == code
    assert not stage.registry.exists()


def test_a_broken_machinery_writes_the_best_so_far_and_is_told(stage: Stage) -> None:
    stage.present = [PRESENT["l20"]]
    stage.cause = WorkerError("the worker's own code failed", "report this as a bug")
    result = stage.invoke()
    assert result.exit_code == 2
    assert "the worker's own code failed" in result.stderr
    assert stage.registry.exists()


@pytest.mark.parametrize("present", [True, False], ids=["measured", "offline"])
def test_f8_when_nothing_compiles_the_message_is_shown_and_the_registry_untouched(stage: Stage, present: bool) -> None:
    save_entries(stage.registry, "l20", [make_entry()], {DIGEST: CUBIN})
    before = stage.registry.read_bytes()

    def fail(request: Request) -> Found:
        raise BuildError('none of 24 configs works; the first: compile: kernel.cu(12): error: "x" is undefined')

    stage.find = fail
    stage.present = [PRESENT["l20"]] if present else []
    result = stage.invoke()
    assert result.exit_code == 2
    assert 'error: "x" is undefined' in result.stderr
    assert stage.registry.read_bytes() == before


def test_sigterm_ends_a_run_as_ctrl_c_does(stage: Stage) -> None:
    stage.present = [PRESENT["l20"]]

    def terminated(request: Request) -> Found:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        return replace(stage.found(request), cause=KeyboardInterrupt())

    stage.find = terminated
    before = signal.getsignal(signal.SIGTERM)
    assert stage.invoke().exit_code == 130
    assert signal.getsignal(signal.SIGTERM) == before


def test_fresh_sets_the_journal_aside(stage: Stage) -> None:
    stage.present = [PRESENT["l20"]]
    journal = stage.folder / "j.jsonl"
    with Journal(journal) as opened:
        opened.append(Record(PROBLEM.name, "c", "screen", "ok", "l20", 1, "aa"))
    stage.invoke("--journal", str(journal))
    assert journal.stat().st_size > 0
    stage.invoke("--journal", str(journal), "--fresh")
    assert journal.stat().st_size == 0
    assert len(list(stage.folder.glob("j.*.jsonl"))) == 1


def test_a_journal_in_use_is_misuse(stage: Stage) -> None:
    stage.present = [PRESENT["l20"]]
    with Journal(stage.folder / "cache" / "journals" / "l20.jsonl"):
        result = stage.invoke()
    assert result.exit_code == 2
    assert "in use" in result.stderr


def test_the_output_file_is_where_it_is_asked(stage: Stage) -> None:
    path = stage.folder / "elsewhere" / "l20.yaml"
    result = stage.invoke("-o", str(path))
    assert str(path) in result.stdout
    assert path.exists()
    assert not stage.registry.exists()


def test_json_is_the_whole_of_stdout(stage: Stage) -> None:
    stage.present = [PRESENT["l20"]]
    result = stage.invoke("--json")
    answer = json.loads(result.stdout)
    assert answer["outcomes"] == {"ok": 3, "crash": 1}
    assert answer["entries"][0]["figures"]["kernel_us"] == 512.25
    assert answer["path"] == str(stage.registry)


def test_a_probes_file_gives_the_gpu_its_rates_and_is_that_gpu_all_the_same(stage: Stage, tmp_path: Path) -> None:
    machine = Machine(product="NVIDIA L20", sms=92, driver="580.1", nvcc="V13", power_limit_w=275.0, date="2026-11-30")
    rate = Rate(unit="results", per_clock=15.5, per_second=3.6, low=3.5, high=3.7, clock_mhz=2520.0, nvml_mhz=None,
                power_w=None, emulated=False, sass="256 MUFU")  # fmt: skip
    probed = ProbeResult(schema=SCHEMA, gpu="l20", machine=machine, rates={"ex2": rate}, accumulators={})
    file = tmp_path / "probe.yaml"
    file.write_text(dump_result(probed))
    stage.present = [PRESENT["l20"]]
    assert stage.invoke("--gpu", "l20", "--probe", str(file)).exit_code == 0
    assert stage.kind == "measured"
    assert stage.requests[0].gpu == L20
    assert stage.requests[0].gpu.measured.units == {"ex2": 15.5}


def test_plants_reach_the_run_and_stay_out_of_the_help(stage: Stage) -> None:
    stage.invoke("--plant", "crash", "--plant", "hang")
    assert stage.requests[0].plants == ("crash", "hang")
    help_text = stage.invoke("--help").output
    assert "sagegen tune --gpu" in help_text
    assert "--plant" not in help_text


@pytest.mark.parametrize("name", ["l20", "l20.yml", "out/"])
def test_an_output_that_is_no_yaml_file_is_refused_before_anything_runs(stage: Stage, name: str) -> None:
    result = stage.invoke("-o", name)
    assert result.exit_code == 2
    assert "ends in .yaml" in result.stderr
    assert stage.requests == []


def test_verify_repeats_finals_and_tunes_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, bool]] = []

    def repeat(request: Request, tools: Any, listen: Any, as_json: bool) -> None:
        asked.append((request, as_json))
        raise SystemExit(1)

    monkeypatch.setattr("sagegen.cli.tune.repeat_and_report", repeat)
    stage.present = [PRESENT["l20"]]
    save_entries(stage.registry, "l20", [make_entry()], {DIGEST: CUBIN})
    result = stage.invoke("--verify", "--json", "--force", "--head-dim", "128", "--full")
    assert (result.exit_code, stage.requests) == (1, [])
    ((request, as_json),) = asked
    assert as_json
    assert request.force
    assert request.incumbents[PROBLEM, TUNED_LENGTHS[1]] == CONFIG


def test_verify_needs_the_gpu(stage: Stage) -> None:
    result = stage.invoke("--verify")
    assert (result.exit_code, stage.requests) == (2, [])
    assert "--verify repeats finals on l20, which this machine has not" in result.stderr
    assert "offline" not in result.stderr
    assert "--offline measures nothing" in stage.invoke("--verify", "--offline").stderr
    assert stage.requests == []


def test_a_signal_while_the_registry_is_written_comes_after_that(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.present = [PRESENT["l20"]]

    def save(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return save_entries(*arguments)

    monkeypatch.setattr("sagegen.registry.save_entries", save)
    result = stage.invoke()
    assert result.exit_code == 130
    assert "Interrupted: the best so far is kept" in result.stderr
    assert load_registry("l20").find(PROBLEM, 4096) is not None
