"""Tuning for an absent GPU: compile, drop what spills, rank by the model."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from sagegen.build import BuildFailure, Built
from sagegen.cubin import Resources
from sagegen.errors import ArgumentError, BuildError, ToolchainError
from sagegen.gpu import find_gpu
from sagegen.layout import make_layout
from sagegen.measuring.emulated import EmulatedVerdict
from sagegen.plan import ROLES
from sagegen.problem import Problem
from sagegen.render import Source
from sagegen.rules import Target, broken_rules, default_config
from sagegen.space import Config
from sagegen.store import CUBIN_FILE, Store, make_key
from sagegen.toolkit import Toolkit
from sagegen.tuning import offline
from sagegen.tuning.events import Attempted, Decided, Event, GateStarted, Started, Warned
from sagegen.tuning.gatekeeper import Gate
from sagegen.tuning.request import Request, Result

GPU = find_gpu("rtx4090")
PROBLEM = Problem(64, "fp16", False)
TARGET = Target(GPU, PROBLEM)
DEFAULT = default_config(TARGET)
KNOBS = {"stages": (2, 3), "rescale": ("always", "skip"), "q_operand": ("reg", "smem"), "pv": ("e4m3f32", "f16f32")}
SPACE = [
    config
    for values in itertools.product(*KNOBS.values())
    for depth in (0, 64)
    if not broken_rules(config := replace(DEFAULT, accum_depth=depth, **dict(zip(KNOBS, values, strict=True))), TARGET)  # type: ignore[arg-type]
]


@dataclass
class Compiler:
    """Stands in for build_batch; `registers` and `spills` are what its ptxas says of a config."""

    broken: Callable[[Config], bool] = lambda config: False
    registers: Callable[[Config], int] = lambda config: 128
    spills: Callable[[Config], int] = lambda config: 0
    smem: int = 0
    names: list[str] = field(default_factory=list)

    def __call__(
        self, sources: Sequence[Source], arch: str, store: Store, toolkit: Toolkit, **options: object
    ) -> dict[str, Built | BuildFailure]:
        return {source.name: self._build(source, arch, store) for source in sources}

    def _build(self, source: Source, arch: str, store: Store) -> Built | BuildFailure:
        self.names.append(source.name)
        if self.broken(source.config):
            return BuildFailure(source.name, "compile", "kernel.cu(3): error: scripted", "")
        data = source.text.encode()
        folder = store.publish(make_key(source.name, source.text, arch, "13", ()), source.text, data, {})
        used = Resources(self.registers(source.config), 0, self.spills(source.config), 0, self.smem)
        digest = hashlib.sha256(data).hexdigest()
        resources = dict.fromkeys(ROLES, used)
        cubin = folder / CUBIN_FILE
        return Built(source.name, arch, cubin, digest, source.sha256, digest, resources, 1.0, "13", cached=False)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr("sagegen.tuning.variants.build_batch", lambda *args, **options: made(*args, **options))
    monkeypatch.setattr(offline, "all_searched_configs", lambda target: list(SPACE))
    return made


def tune(
    folder: Path, listen: Callable[[Event], None] = lambda event: None, gate: Gate | None = None, **changes: object
) -> Result:
    request = Request(GPU, **{"problems": (PROBLEM,), "budget_s": None, **changes})  # type: ignore[arg-type]
    return offline.tune_offline(request, Store(folder), Toolkit(Path("/nvcc"), (13, 0), "13"), listen, gate=gate)


def test_entries_are_predicted_for_every_bucket(tmp_path: Path, compiler: Compiler) -> None:
    result = tune(tmp_path)
    assert [entry.bucket.kv_min for entry in result.entries] == [1, 1449, 2897, 5793, 11586]
    for entry in result.entries:
        assert (entry.provenance.kind, entry.provenance.gpu) == ("predicted", "rtx4090")
        assert entry.figures.predicted_us is not None
        assert entry.figures.kernel_us is None
        assert entry.accuracy == {}
        cubin = result.cubins[entry.cubin_sha256 or ""].read_bytes()
        assert hashlib.sha256(cubin).hexdigest() == entry.cubin_sha256


def test_a_budget_that_ends_before_anything_was_tried_is_told(tmp_path: Path, compiler: Compiler) -> None:
    with pytest.raises(ArgumentError, match=r"budget of 1e-09 s ended before any config .* rtx4090; raise --budget"):
        tune(tmp_path, budget_s=1e-9)
    assert compiler.names == []


def test_long_sequences_on_ada_get_fp8(tmp_path: Path, compiler: Compiler) -> None:
    assert "_pve4m3f32_" in (tune(tmp_path).entries[-1].config or "")


def test_spilling_and_oversized_variants_are_dropped(tmp_path: Path, compiler: Compiler) -> None:
    compiler.spills = lambda config: 8 if config.pv == "e4m3f32" and config != DEFAULT else 0
    result = tune(tmp_path)
    dropped = [record for record in result.records if record.outcome == "constraint"]
    assert dropped
    assert all("_pve4m3f32_" in record.config and "spills 8 bytes" in record.reason for record in dropped)
    compiler.smem = GPU.smem_per_block - min(make_layout(config, PROBLEM).smem_bytes for config in SPACE) + 1
    with pytest.raises(BuildError):
        tune(tmp_path)


def test_registers_of_ptxas_decide_what_the_estimate_cannot_see(tmp_path: Path, compiler: Compiler) -> None:
    compiler.registers = lambda config: 64 if config.stages == 3 else 255
    assert all("_st3_" in (entry.config or "") for entry in tune(tmp_path).entries)


def test_the_default_always_takes_part(tmp_path: Path, compiler: Compiler) -> None:
    result = tune(tmp_path, trials=1)
    assert [record.config for record in result.records] == [DEFAULT.name]
    assert {entry.config for entry in result.entries} == {DEFAULT.name}


def test_trials_are_distinct_and_counted_per_problem(tmp_path: Path, compiler: Compiler) -> None:
    result = tune(tmp_path, trials=7)
    assert len({record.config for record in result.records}) == 7
    assert len(compiler.names) == 7


def test_a_failed_compilation_is_an_outcome_and_all_failed_is_an_error(tmp_path: Path, compiler: Compiler) -> None:
    compiler.broken = lambda config: config.stages == 3
    outcomes = Counter(record.outcome for record in tune(tmp_path).records)
    assert set(outcomes) == {"ok", "compile"}
    compiler.broken = lambda config: True
    with pytest.raises(BuildError, match=r"rtx4090.*kernel\.cu\(3\): error: scripted"):
        tune(tmp_path / "other")


def test_a_spent_budget_ends_the_run_after_a_batch(tmp_path: Path, compiler: Compiler) -> None:
    clock = itertools.count(step=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline.time, "monotonic", lambda: next(clock))
        result = tune(tmp_path, budget_s=250.0)
    assert 0 < len(result.records) < len(SPACE)
    assert len(result.entries) == 5


def test_a_problem_that_gets_no_entry_is_named_with_the_reason(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, causal = compiler._build, replace(PROBLEM, is_causal=not PROBLEM.is_causal)

    def build_one_problem(source: Source, arch: str, store: Store) -> Built | BuildFailure:
        if source.problem == causal:
            return BuildFailure(source.name, "compile", "kernel.cu(3): error: scripted", "")
        return build(source, arch, store)

    monkeypatch.setattr(compiler, "_build", build_one_problem)
    heard: list[Event] = []
    result = tune(tmp_path, heard.append, problems=(PROBLEM, causal))
    assert {entry.problem for entry in result.entries} == {PROBLEM.name}
    (warned,) = [event.message for event in heard if isinstance(event, Warned)]
    assert causal.name in warned
    assert "no entry" in warned
    assert "scripted" in warned


def test_interrupted_it_ranks_what_it_has(tmp_path: Path, compiler: Compiler) -> None:
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, Attempted) and len(events) == 2 + 4:  # two tell of the start
            raise KeyboardInterrupt

    result = tune(tmp_path, listen)
    assert isinstance(result.cause, KeyboardInterrupt)
    assert len(result.records) == 4
    assert len(result.entries) == 5


def test_the_run_says_that_it_measures_nothing(tmp_path: Path, compiler: Compiler) -> None:
    events: list[Event] = []
    tune(tmp_path, events.append)
    assert next(e for e in events if isinstance(e, Started)).offline
    progress = [e.progress for e in events if isinstance(e, Attempted)]
    assert progress == sorted(progress)
    assert progress[-1] == 1.0


# --- the accuracy gate

FIGURES = {"cosine": 0.99935, "relative_l1": 0.03, "relative_l2": 0.036, "max_error": 0.02, "scale_ratio": 0.999}


@dataclass
class FakeGate:
    """Passes what `fails` does not name; notes what it was asked."""

    fails: Callable[[Config], bool] = lambda config: False
    error: BaseException | None = None
    figures: Callable[[Config], dict[str, float]] = lambda config: FIGURES
    asked: list[Config] = field(default_factory=list)

    def __call__(self, problem: Problem, config: Config) -> EmulatedVerdict:
        self.asked.append(config)
        if self.error is not None:
            raise self.error
        if self.fails(config):
            return EmulatedVerdict("crash", "race in kernel attention, block 0", {}, 1.0)
        return EmulatedVerdict("ok", "", {"normal": self.figures(config)}, 1.0)


def test_winners_have_the_emulators_accuracy(tmp_path: Path, compiler: Compiler) -> None:
    gate, events = FakeGate(), list[Event]()
    result = tune(tmp_path, events.append, gate)
    assert len(gate.asked) == len({entry.config for entry in result.entries})  # each config once
    for entry in result.entries:
        assert entry.min_cosine == 0.99935
        assert entry.accuracy["normal"].scale_ratio == 0.999
        assert (entry.provenance.kind, entry.provenance.accuracy_from) == ("predicted", "emulator")
    assert {r.config for r in result.records if r.figures} == {entry.config for entry in result.entries}
    assert [e.config for e in events if isinstance(e, GateStarted)] == [config.name for config in gate.asked]


def test_a_bucket_whose_best_is_coarse_has_the_best_fine_one_too(tmp_path: Path, compiler: Compiler) -> None:
    single = [entry.config for entry in tune(tmp_path).entries]
    coarse, events = {**FIGURES, "relative_l1": 0.0382}, list[Event]()
    gate = FakeGate(figures=lambda config: coarse if config.name == single[-1] else FIGURES)
    entries = [e for e in tune(tmp_path, events.append, gate).entries if e.bucket.kv_max is None]
    assert [(e.tier, e.accuracy["normal"].relative_l1) for e in entries] == [("coarse", 0.0382), ("fine", 0.03)]
    assert entries[0].config == single[-1] != entries[1].config
    assert entries[0].figures.predicted_full_us <= entries[1].figures.predicted_full_us  # type: ignore[operator]
    decided = [e.bucket.rpartition(" ")[2] for e in events if isinstance(e, Decided)]
    assert decided[-2:] == ["(coarse)", "(fine)"]


def test_where_nothing_is_fine_the_search_for_it_ends(tmp_path: Path, compiler: Compiler) -> None:
    gate = FakeGate(figures=lambda config: {**FIGURES, "cosine": 0.9991})
    result = tune(tmp_path, gate=gate)
    assert [entry.tier for entry in result.entries] == [None] * len(result.entries)
    assert len(gate.asked) <= 7 * len(result.entries)


def test_a_winner_that_fails_gives_way_to_the_next_best(tmp_path: Path, compiler: Compiler) -> None:
    wanted = [entry.config for entry in tune(tmp_path).entries]
    gate, events = FakeGate(fails=lambda config: config.name == wanted[-1]), list[Event]()
    result = tune(tmp_path, events.append, gate)
    assert len(result.entries) == 5
    assert wanted[-1] not in {entry.config for entry in result.entries}
    (failed,) = (record for record in result.records if record.outcome == "accuracy")
    assert (failed.config, failed.reason) == (wanted[-1], "race in kernel attention, block 0")
    told = [e for e in events if isinstance(e, Attempted)][-1]
    assert told.record == failed
    assert sum(told.counts.values()) == len(result.records) == len(SPACE)
    assert told.counts["accuracy"] == 1


def test_where_all_fail_there_is_no_entry(tmp_path: Path, compiler: Compiler) -> None:
    events: list[Event] = []
    result = tune(tmp_path, events.append, FakeGate(fails=lambda config: True))
    assert result.entries == ()
    assert [e.config for e in events if isinstance(e, Decided)] == [None] * 5
    assert {record.outcome for record in result.records} == {"accuracy"}


def test_without_a_host_compiler_it_is_said_once(tmp_path: Path, compiler: Compiler) -> None:
    gate, events = FakeGate(error=ToolchainError("g++ was not found", "apt-get install g++")), list[Event]()
    result = tune(tmp_path, events.append, gate)
    assert [e.message for e in events if isinstance(e, Warned)] == [
        "the accuracy gate in the emulator was skipped: g++ was not found; apt-get install g++"
    ]
    assert len(result.entries) == 5
    assert all(e.min_cosine is None and e.provenance.accuracy_from is None for e in result.entries)


def test_what_the_emulator_cannot_compile_is_kept_and_said(tmp_path: Path, compiler: Compiler) -> None:
    gate, events = FakeGate(error=BuildError("the host text did not compile: error")), list[Event]()
    result = tune(tmp_path, events.append, gate)
    assert len(result.entries) == 5
    warned = [e.message for e in events if isinstance(e, Warned)]
    assert len(warned) == len(gate.asked) == len({entry.config for entry in result.entries})
    assert "was not checked: the host text did not compile" in warned[0]


def test_interrupted_in_the_gate_it_keeps_what_it_has(tmp_path: Path, compiler: Compiler) -> None:
    gate = FakeGate(error=KeyboardInterrupt())
    result = tune(tmp_path, gate=gate)
    assert isinstance(result.cause, KeyboardInterrupt)
    assert len(gate.asked) == 1
    assert len(result.entries) == 5


def test_interrupted_before_it_does_not_gate(tmp_path: Path, compiler: Compiler) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, Attempted):
            raise KeyboardInterrupt

    gate = FakeGate()
    assert len(tune(tmp_path, listen, gate).entries) == 5
    assert gate.asked == []


def test_the_gate_has_a_share_of_the_budget(tmp_path: Path, compiler: Compiler) -> None:
    def batches(gate: Gate | None) -> int:
        clock = itertools.count(step=10)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offline.time, "monotonic", lambda: next(clock))
            return len(tune(tmp_path, gate=gate, budget_s=150.0).records)

    assert 0 < batches(FakeGate()) < batches(None) < len(SPACE)


def test_a_spent_budget_ends_the_gate(tmp_path: Path, compiler: Compiler) -> None:
    clock = itertools.count(step=100)
    gate, events = FakeGate(), list[Event]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline.time, "monotonic", lambda: next(clock))
        result = tune(tmp_path, events.append, gate, budget_s=250.0)
    assert len(result.entries) == 5
    assert gate.asked == []
    assert [e.message for e in events if isinstance(e, Warned)] == [
        "the accuracy gate in the emulator was skipped: the budget is spent"
    ]
