"""A tuning run from end to end, with a scripted worker and a scripted compiler in place of the GPU and of nvcc."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from optuna.storages import BaseStorage

from sagegen.build import BuildFailure, Built
from sagegen.cubin import Resources
from sagegen.errors import BuildError, GpuBusyError, GpuLostError, GpuMismatchError, WorkerError
from sagegen.gpu import DetectedGpu, find_gpu
from sagegen.measuring import telemetry
from sagegen.measuring.jobs import Candidate, Finals, Gate, Job, Ping, Reply, Screen
from sagegen.measuring.telemetry import Conditions, GpuState
from sagegen.plan import ROLES
from sagegen.problem import TUNED_LENGTHS, Problem, make_lengths
from sagegen.registry import read_entries, save_entries
from sagegen.render import Source
from sagegen.rules import Target, broken_rules, default_config
from sagegen.space import Config, parse_config
from sagegen.store import CUBIN_FILE, Store, make_key
from sagegen.toolkit import Toolkit
from sagegen.tuning.events import Attempted, Decided, Event, Started, Warned
from sagegen.tuning.journal import Journal, Outcome, read_journal
from sagegen.tuning.plant import EXPECTED, PLANTS
from sagegen.tuning.request import Request, Result, Tools, make_searchers
from sagegen.tuning.search import Searcher
from sagegen.tuning.strategy import Strategy
from sagegen.tuning.tune import tune

GPU = find_gpu("l20")
PROBLEM = Problem(64, "fp16", False)
OTHER = Problem(64, "fp16", True)
TARGET = Target(GPU, PROBLEM)
DEFAULT = default_config(TARGET)
KNOBS = {
    "conversion": ("i2f", "magic"),
    "stages": (2, 3),
    "rescale": ("always", "skip"),
    "q_operand": ("reg", "smem"),
    "min_blocks": (1, 2),
}
SPACE = [
    config
    for values in itertools.product(*KNOBS.values())
    if not broken_rules(config := replace(DEFAULT, **dict(zip(KNOBS, values, strict=True))), TARGET)  # type: ignore[arg-type]
]
BEST = replace(DEFAULT, rescale="skip", q_operand="reg")
VICTIMS = [config for config in SPACE if config.stages == 3 and config.conversion == "magic"][:4]
FIGURES = {"cosine": 0.9994, "relative_l1": 0.03, "relative_l2": 0.03, "max_error": 0.1, "scale_ratio": 1.0}


def kernel_us(config: Config, tokens: int) -> float:
    """The scripted landscape: BEST is the fastest everywhere, by 1.5 x 1.25 over the default."""
    us = tokens / 8
    us *= 1 if config.rescale == "skip" else 1.5
    us *= 1 if config.q_operand == "reg" else 1.25
    us *= 1 if config.conversion == "i2f" else 1.1
    return us * (1 + 0.02 * (config.stages - 2) + 0.01 * (config.min_blocks - 1))


@dataclass
class FakeWorker:
    """Answers jobs from the landscape; `faults` say what a config does instead, `once` only in the first process."""

    faults: dict[Config, Outcome] = field(default_factory=dict)
    once: set[Config] = field(default_factory=set)
    final_faults: dict[Config, Outcome] = field(default_factory=dict)
    peers_us: float = 1e6
    call_extra_us: dict[Config, float] = field(default_factory=dict)
    screen_extra_us: dict[Config, float] = field(default_factory=dict)
    figures: Callable[[Config], dict[str, float]] = lambda config: FIGURES
    sms: int = GPU.sms
    gpu_index: int = 0
    jobs: list[Job] = field(default_factory=list)
    processes: int = 0
    pid: int | None = None

    def run(self, job: Job, timeout_s: float) -> Reply:
        if self.pid is None:
            self.processes += 1
            self.pid = 1_000_000 + self.processes
        self.jobs.append(job)
        if isinstance(job, Ping):
            return Reply("ok", data={"product": "NVIDIA L20", "compute_capability": 89, "sms": self.sms})
        if isinstance(job, Finals):
            return self._finals(job)
        config = parse_config(job.candidate.config)
        fault = self.faults.get(config)
        if fault and isinstance(job, Gate) and not (config in self.once and self.processes > 1):
            if fault in ("crash", "timeout"):
                self.pid = None
            return Reply(fault, f"scripted {fault}", {"running": job.candidate.name})
        if isinstance(job, Gate):
            return Reply("ok", data={"figures": {"normal": self.figures(config)}, "seconds": 0.1})
        us = kernel_us(config, job.shape.kv_len)
        call_us = us + 10 + self.screen_extra_us.get(config, 0)
        return Reply("ok", data={"kernel_us": [us] * job.launches, "call_us": [call_us] * job.launches})

    def _finals(self, job: Finals) -> Reply:
        for candidate in job.candidates:
            if fault := self.final_faults.get(parse_config(candidate.config)):
                return Reply(fault, f"scripted {fault}", {"running": candidate.name})

        def times(candidate: Candidate, extra: float) -> list[float]:
            config = parse_config(candidate.config)
            base = kernel_us(config, job.shape.kv_len) + extra
            return [base * (1 + 0.001 * math.sin(7 * n)) for n in range(job.rounds)]

        extra = [10 + self.call_extra_us.get(parse_config(c.config), 0) for c in job.candidates]
        return Reply(
            "ok",
            data={
                "kernel_us": [times(c, 0) for c in job.candidates],
                "call_us": [times(c, more) for c, more in zip(job.candidates, extra, strict=True)],
                "peers": {"sdpa-flash": [self.peers_us] * job.rounds} if job.peers else {},
                "absent": {},
            },
        )

    def close(self) -> None:
        self.pid = None

    @property
    def gated(self) -> list[Config]:
        return [parse_config(job.candidate.config) for job in self.jobs if isinstance(job, Gate)]

    @property
    def screened(self) -> list[Config]:
        return [parse_config(job.candidate.config) for job in self.jobs if isinstance(job, Screen)]


@dataclass
class FakeCompiler:
    """Stands in for build_batch and keeps what it makes in a real store."""

    broken: Callable[[Config], bool] = lambda config: False
    spill_bytes: Callable[[Config], int] = lambda config: 0
    code: Callable[[Source], str] = lambda source: source.text
    built: list[Source] = field(default_factory=list)

    def build_batch(
        self,
        sources: Sequence[Source],
        arch: str,
        store: Store,
        toolkit: Toolkit,
        *,
        jobs: int | None = None,
        timeout_s: float = 120,
        stop: threading.Event | None = None,
    ) -> dict[str, Built | BuildFailure]:
        return {source.name: self._build(source, arch, store, toolkit) for source in sources}

    def _build(self, source: Source, arch: str, store: Store, toolkit: Toolkit) -> Built | BuildFailure:
        self.built.append(source)
        if "struct Planted" in source.text:
            return BuildFailure(source.name, "timeout", "nvcc took more than 60 s", "")
        if self.broken(source.config) or "planted_compile_error" in source.text:
            return BuildFailure(source.name, "compile", "kernel.cu(12): error: scripted", "log")
        cubin = source.text.encode()
        folder = store.publish(make_key(source.name, source.text, arch, toolkit.build, ()), source.text, cubin, {})
        return Built(
            name=source.name,
            arch=arch,
            cubin=folder / CUBIN_FILE,
            cubin_sha256=hashlib.sha256(cubin).hexdigest(),
            text_sha256=source.sha256,
            code_sha256=hashlib.sha256(self.code(source).encode()).hexdigest(),
            resources={role: Resources(168, 0, self.spill_bytes(source.config), 0, 0) for role in ROLES},
            seconds=1.0,
            nvcc=toolkit.build,
            cached=False,
        )


@dataclass
class Bench:
    """Everything a test needs to tune; `events` are those of the last run."""

    folder: Path
    worker: FakeWorker = field(default_factory=FakeWorker)
    compiler: FakeCompiler = field(default_factory=FakeCompiler)
    workers: list[FakeWorker] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    stop_after: int | None = None
    stop_with: type[BaseException] = KeyboardInterrupt
    searchers: Mapping[Problem, Searcher] = field(default_factory=dict)

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"

    def tune(
        self, problems: Sequence[Problem] = (PROBLEM,), storage: BaseStorage | None = None, **changes: object
    ) -> Result:
        self.events = []
        request = Request(GPU, tuple(problems), **{"budget_s": None, "strategy": Strategy("random"), **changes})  # type: ignore[arg-type]
        workers = self.workers or [self.worker]
        device = DetectedGpu(0, "NVIDIA L20", GPU.sms, "580.1", "sm_89", GPU)
        toolkit = Toolkit(Path("/nvcc"), (13, 0), "V13.0.88")
        with Journal(self.journal) as journal:
            store = Store(self.folder / "kernels")
            tools = Tools(workers, [device] * len(workers), journal, store, toolkit, storage=storage)
            return tune(request, tools, self.listen)

    def make_searchers(self, request: Request, toolkit: Toolkit) -> Mapping[Problem, Searcher]:
        self.searchers = make_searchers(request, toolkit)
        return self.searchers

    def listen(self, event: Event) -> None:
        self.events.append(event)
        if self.stop_after == sum(isinstance(e, Attempted) for e in self.events):
            self.stop_after = None
            raise self.stop_with

    def outcomes(self) -> dict[str, Outcome]:
        return {r.config: r.outcome for r in read_journal(self.journal) if r.phase in ("build", "screen")}


def make_bench(folder: Path, patch: pytest.MonkeyPatch) -> Bench:
    """A bench whose compiler, space and NVML are scripted for as long as `patch` holds."""
    made = Bench(folder)
    patch.setattr(
        "sagegen.tuning.variants.build_batch", lambda *args, **options: made.compiler.build_batch(*args, **options)
    )
    patch.setattr("sagegen.tuning.request.all_searched_configs", lambda target: list(SPACE))
    patch.setattr("sagegen.tuning.tune.make_searchers", lambda *asked: made.make_searchers(*asked))
    patch.setattr(telemetry, "read_state", lambda index: GpuState())
    return made


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return make_bench(tmp_path, monkeypatch)


def test_the_test_space_holds_what_the_tests_speak_of() -> None:
    assert DEFAULT in SPACE
    assert BEST in SPACE
    assert len(SPACE) == 32
    assert min(SPACE, key=lambda config: kernel_us(config, 1024)) == BEST


def test_every_bucket_gets_the_best_config_with_its_figures_and_provenance(bench: Bench) -> None:
    result = bench.tune(trials=100)
    assert result.cause is None
    assert [(e.bucket.kv_min, e.bucket.kv_max) for e in result.entries] == [
        (1, 1448), (1449, 2896), (2897, 5792), (5793, 11585), (11586, None)
    ]  # fmt: skip
    for entry, length in zip(result.entries, TUNED_LENGTHS, strict=True):
        assert (entry.config, entry.answer) == (BEST.name, "kernel")
        assert entry.figures.kernel_us == pytest.approx(length.tokens / 8, rel=0.01)
        assert entry.figures.full_us == pytest.approx(length.tokens / 8 + 10, rel=0.01)
        assert entry.figures.speed_vs_default == pytest.approx(1.875, rel=0.01)
        assert entry.min_cosine == 0.9994
        assert (entry.provenance.kind, entry.provenance.driver, entry.provenance.nvcc) == (
            "measured",
            "580.1",
            "V13.0.88",
        )
        assert result.cubins[entry.cubin_sha256 or ""].is_file()


def test_tops_follow_the_papers_convention(bench: Bench) -> None:
    entry = bench.tune(trials=3).entries[2]
    assert entry.provenance.shape == "b4 h32/32 q4096 kv4096"
    assert entry.figures.kernel_us is not None
    flops = 4 * 4 * 32 * 4096**2 * 64
    assert entry.figures.tops == pytest.approx(flops / entry.figures.kernel_us / 1e6, abs=0.1)


def test_a_winner_whose_calls_were_slow_in_its_screen_is_found_by_its_kernel(bench: Bench) -> None:
    """As a GPU at its power limit screens: finals are of those that have the fastest kernels, too."""
    bench.worker.screen_extra_us[BEST] = 1e4
    result = bench.tune(trials=len(SPACE))
    assert {entry.config for entry in result.entries} == {BEST.name}


def test_the_default_is_measured_first_at_every_length(bench: Bench) -> None:
    bench.tune(trials=3)
    screens = [job for job in bench.worker.jobs if isinstance(job, Screen)]
    assert [(parse_config(j.candidate.config), j.shape.kv_len) for j in screens[:5]] == [
        (DEFAULT, 1024), (DEFAULT, 2048), (DEFAULT, 4096), (DEFAULT, 8192), (DEFAULT, 16384)
    ]  # fmt: skip


def test_f6_a_space_of_twelve_ends_after_twelve_without_duplicates(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    twelve = [DEFAULT, *[config for config in SPACE if config != DEFAULT][:11]]
    monkeypatch.setattr("sagegen.tuning.request.all_searched_configs", lambda target: twelve)
    result = bench.tune(trials=100)
    assert sorted(r.config for r in result.records) == sorted(c.name for c in twelve)
    assert len(bench.worker.gated) == 12


def test_trials_are_counted_per_problem_and_problems_take_turns(bench: Bench) -> None:
    result = bench.tune([PROBLEM, OTHER], trials=5)
    assert Counter(r.problem for r in result.records) == {PROBLEM.name: 5, OTHER.name: 5}
    order = [e.record.problem for e in bench.events if isinstance(e, Attempted)]
    assert set(order[:2]) == {PROBLEM.name, OTHER.name}
    assert len(result.entries) == 10


def test_failing_candidates_are_recorded_and_the_search_goes_on(bench: Bench) -> None:
    broken, crashing, hanging, wrong = VICTIMS
    bench.compiler.broken = lambda config: config == broken
    bench.worker.faults = {crashing: "crash", hanging: "timeout", wrong: "accuracy"}
    result = bench.tune(trials=100)
    outcomes = bench.outcomes()
    assert [outcomes[c.name] for c in (broken, crashing, hanging, wrong)] == ["compile", "crash", "timeout", "accuracy"]
    assert Counter(outcomes.values())["ok"] == len(SPACE) - 4
    assert {entry.config for entry in result.entries} == {BEST.name}
    failed = next(r for r in read_journal(bench.journal) if r.config == wrong.name)
    assert failed.reason == "scripted accuracy"


@pytest.mark.parametrize("fault", ["crash", "timeout"])
def test_a_suspect_is_run_once_more_alone_in_a_fresh_process(bench: Bench, fault: Outcome) -> None:
    suspect = VICTIMS[0]
    bench.worker.faults = {suspect: fault}
    bench.tune(trials=100)
    assert Counter(bench.worker.gated)[suspect] == 2
    assert bench.outcomes()[suspect.name] == fault


def test_a_bystander_of_an_earlier_crash_is_not_blamed(bench: Bench) -> None:
    bystander = VICTIMS[0]
    bench.worker.faults = {bystander: "crash"}
    bench.worker.once = {bystander}
    bench.tune(trials=100)
    assert bench.outcomes()[bystander.name] == "ok"


def test_a_failed_accuracy_gate_is_not_timed_and_not_repeated(bench: Bench) -> None:
    bench.worker.faults = {VICTIMS[0]: "accuracy"}
    bench.tune(trials=100)
    assert VICTIMS[0] not in bench.worker.screened
    assert Counter(bench.worker.gated)[VICTIMS[0]] == 1


def test_a_spilling_variant_is_not_measured_unless_it_is_the_default(bench: Bench) -> None:
    bench.compiler.spill_bytes = lambda config: 8 if config in (DEFAULT, VICTIMS[0]) else 0
    bench.tune(trials=100)
    assert bench.outcomes()[VICTIMS[0].name] == "constraint"
    assert VICTIMS[0] not in bench.worker.gated
    assert bench.outcomes()[DEFAULT.name] == "ok"


def test_f8_when_nothing_compiles_the_first_message_is_raised(bench: Bench) -> None:
    bench.compiler.broken = lambda config: True
    with pytest.raises(BuildError, match=r"kernel\.cu\(12\): error: scripted"):
        bench.tune(budget_s=600)
    assert set(bench.outcomes().values()) == {"compile"}
    assert bench.worker.gated == []


def test_a_hopeless_problem_is_given_up_before_the_space_is_exhausted(bench: Bench) -> None:
    bench.compiler.broken = lambda config: True
    with pytest.raises(BuildError):
        bench.tune(trials=100)
    assert 24 <= len(bench.outcomes()) < len(SPACE)


def test_when_nothing_runs_the_first_reason_is_raised(bench: Bench) -> None:
    bench.worker.faults = dict.fromkeys(SPACE, "launch")
    with pytest.raises(WorkerError, match="launch: scripted launch"):
        bench.tune(trials=100)


def test_one_barren_problem_is_a_warning_and_the_other_is_tuned(bench: Bench) -> None:
    real = bench.compiler._build
    bench.compiler._build = lambda source, *rest: (  # type: ignore[method-assign]
        BuildFailure(source.name, "compile", "scripted", "") if source.problem == OTHER else real(source, *rest)
    )
    result = bench.tune([PROBLEM, OTHER], trials=30)
    assert {entry.problem for entry in result.entries} == {PROBLEM.name}
    assert any(isinstance(e, Warned) and OTHER.name in e.message for e in bench.events)


def test_f5_interrupted_after_ten_it_keeps_the_best_so_far(bench: Bench) -> None:
    bench.stop_after = 10
    result = bench.tune(trials=100)
    assert isinstance(result.cause, KeyboardInterrupt)
    assert len(bench.outcomes()) == 10
    done = [parse_config(name) for name in bench.outcomes()]
    assert {e.config for e in result.entries} == {min(done, key=lambda config: kernel_us(config, 1024)).name}
    assert all(e.figures.speed_vs_default is not None and e.figures.speed_vs_sdpa is None for e in result.entries)
    assert not any(isinstance(job, Finals) for job in bench.worker.jobs)


def test_interrupted_before_anything_was_measured_it_has_nothing(bench: Bench) -> None:
    bench.stop_after = 0
    result = bench.tune(trials=100)
    assert isinstance(result.cause, KeyboardInterrupt)
    assert result.entries == ()


def test_an_infinite_figure_does_not_spoil_the_journal(bench: Bench) -> None:
    real = bench.worker.run

    def run(job: Job, timeout_s: float) -> Reply:
        if isinstance(job, Gate) and parse_config(job.candidate.config) == VICTIMS[0]:
            return Reply("accuracy", "all zero", {"figures": {"normal": {"cosine": 0.0, "relative_l1": None}}})
        return real(job, timeout_s)

    bench.worker.run = run  # type: ignore[method-assign]
    bench.tune(trials=100)
    assert len(bench.outcomes()) == len(SPACE)
    assert bench.outcomes()[VICTIMS[0].name] == "accuracy"


def test_resumed_it_repeats_none_of_the_ten_and_finishes_the_rest(bench: Bench) -> None:
    bench.stop_after = 10
    bench.tune(trials=100)
    known = set(bench.outcomes())
    bench.worker.jobs.clear()
    result = bench.tune(trials=100)
    started = next(e for e in bench.events if isinstance(e, Started))
    assert started.known == 10
    assert not {c.name for c in bench.worker.gated} & known
    assert len(bench.worker.gated) == len(SPACE) - 10
    assert {entry.config for entry in result.entries} == {BEST.name}


def test_a_signal_that_comes_while_a_run_is_closed_loses_nothing(bench: Bench) -> None:
    """Between the last final and the registry: the first signal, or the second of a burst."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    real = bench.worker.close

    def close() -> None:
        if any(isinstance(event, Decided) for event in bench.events) or bench.stop_after is None:
            os.kill(os.getpid(), signal.SIGINT)
        real()

    try:
        bench.stop_after = 10
        bench.worker.close = close  # type: ignore[method-assign]
        interrupted = bench.tune(trials=100)
        bench.worker.close = real  # type: ignore[method-assign]
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(interrupted.cause, KeyboardInterrupt)
    assert len(interrupted.entries) == 5


class KilledError(BaseException):
    """Ends the run as SIGKILL would, as far as its records go."""


def test_killed_in_the_middle_of_a_write_it_resumes_with_what_was_whole(bench: Bench) -> None:
    bench.stop_after, bench.stop_with = 10, KilledError
    with pytest.raises(KilledError):
        bench.tune(trials=20)
    with bench.journal.open("ab") as file:
        file.write(b'{"problem":"d64_fp16_full_int8","config":"mma')
    bench.worker.jobs.clear()
    bench.tune(trials=20)
    assert len(bench.worker.gated) == 10
    assert len(bench.outcomes()) == 20


def test_a_run_that_its_budget_ended_goes_on_from_its_journal(bench: Bench) -> None:
    bench.tune(budget_s=1e-6)
    known = set(bench.outcomes())
    assert known == {DEFAULT.name}
    bench.worker.jobs.clear()
    result = bench.tune(budget_s=600, trials=100)
    assert next(e for e in bench.events if isinstance(e, Started)).known == 1
    assert not {c.name for c in bench.worker.gated} & known
    assert {entry.config for entry in result.entries} == {BEST.name}
    bench.worker.jobs.clear()
    again = bench.tune(budget_s=600, trials=100)
    assert bench.worker.gated == []
    assert [e.config for e in again.entries] == [e.config for e in result.entries]


def test_sittings_of_other_lengths_and_problems_make_one_registry(bench: Bench) -> None:
    path = bench.folder / "l20.yaml"
    short, long = TUNED_LENGTHS[:2], TUNED_LENGTHS[2:]
    for problem, lengths in ((PROBLEM, short), (OTHER, TUNED_LENGTHS), (PROBLEM, long)):
        result = bench.tune([problem], trials=100, lengths=lengths)
        assert len(result.entries) == len(lengths)
        save_entries(path, "l20", result.entries, {d: file.read_bytes() for d, file in result.cubins.items()})
    entries = read_entries(path, "l20")
    for problem in (PROBLEM, OTHER):
        own = [e.lengths for e in entries if e.problem == problem.name]
        assert own == [length.bucket for length in TUNED_LENGTHS]


def test_what_sittings_measured_length_by_length_is_not_measured_again(bench: Bench) -> None:
    bench.tune(trials=100, lengths=TUNED_LENGTHS[:2])
    bench.tune(trials=100, lengths=TUNED_LENGTHS[2:])
    assert {job.shape.kv_len for job in bench.worker.jobs if isinstance(job, Screen)} == {1024, 2048, 4096, 8192, 16384}
    bench.worker.jobs.clear()
    result = bench.tune(trials=100)
    assert bench.worker.gated == []
    assert len(result.entries) == 5
    one = bench.tune(trials=100, lengths=TUNED_LENGTHS[4:])
    assert bench.worker.gated == []
    assert [e.bucket.kv_min for e in one.entries] == [11586]


def test_a_journal_of_fewer_lengths_does_not_count_for_more(bench: Bench) -> None:
    bench.worker.faults = {VICTIMS[0]: "accuracy"}
    bench.tune(trials=100, lengths=make_lengths((1024, 4096, 16384)))
    bench.worker.jobs.clear()
    result = bench.tune(trials=100)
    assert set(bench.worker.gated) == set(SPACE) - {VICTIMS[0]}  # a failure needs no second look
    assert [entry.config for entry in result.entries] == [BEST.name] * 5


def test_only_the_incumbents_of_a_sittings_lengths_are_measured(bench: Bench) -> None:
    held = {(PROBLEM, TUNED_LENGTHS[0]): BEST, (PROBLEM, TUNED_LENGTHS[4]): VICTIMS[0]}
    bench.tune(trials=2, incumbents=held, lengths=TUNED_LENGTHS[:1])
    assert bench.worker.gated == [DEFAULT, BEST]


def test_a_changed_template_text_makes_old_records_not_count(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from sagegen.render import render

    bench.tune(trials=10)
    bench.worker.jobs.clear()
    monkeypatch.setattr(
        "sagegen.tuning.variants.render", lambda p, c: replace(s := render(p, c), text=s.text + "// changed\n")
    )
    bench.tune(trials=10)
    assert len(bench.worker.gated) == 10


def test_equal_text_is_built_once_and_shares_the_outcome(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from sagegen.render import render

    def blind(problem: Problem, config: Config) -> Source:  # as if min_blocks left no trace in the text
        source = render(problem, config)
        return replace(source, text=f"{source.name} {replace(config, min_blocks=1)}")

    monkeypatch.setattr("sagegen.tuning.variants.render", blind)
    result = bench.tune(trials=100)
    assert {r.config for r in result.records} == {c.name for c in SPACE}
    texts = {replace(config, min_blocks=1) for config in SPACE}
    assert len(bench.worker.gated) == len(texts) < len(SPACE)
    for record in result.records:
        if record.shared_from:
            shared, own = parse_config(record.shared_from), parse_config(record.config)
            assert replace(shared, min_blocks=1) == replace(own, min_blocks=1)
            assert shared != own


def test_equal_code_is_gated_but_timed_once(bench: Bench) -> None:
    bench.compiler.code = lambda source: repr(replace(source.config, min_blocks=1))
    bench.tune(trials=100)
    assert set(bench.worker.gated) == set(SPACE)
    assert len(bench.worker.screened) == len(TUNED_LENGTHS) * len({replace(c, min_blocks=1) for c in SPACE})


def test_finals_leave_out_configs_that_share_a_measurement(bench: Bench) -> None:
    bench.compiler.code = lambda source: repr(replace(source.config, min_blocks=1))
    bench.tune(trials=100)
    finals = [job for job in bench.worker.jobs if isinstance(job, Finals)]
    for job in finals:
        alike = [replace(parse_config(c.config), min_blocks=1) for c in job.candidates]
        assert len(set(alike)) == len(alike)


def test_a_spent_budget_still_measures_the_default_and_decides(bench: Bench) -> None:
    result = bench.tune(budget_s=1e-6)
    assert set(bench.worker.screened) == {DEFAULT}
    assert {entry.config for entry in result.entries} == {DEFAULT.name}


def test_an_incumbent_is_measured_and_kept_when_nothing_is_faster(bench: Bench) -> None:
    held = {(PROBLEM, length): BEST for length in TUNED_LENGTHS}
    result = bench.tune(trials=8, incumbents=held)
    assert bench.worker.gated[:2] == [DEFAULT, BEST]
    assert {entry.config for entry in result.entries} == {BEST.name}
    assert [job.peers for job in bench.worker.jobs if isinstance(job, Finals)] == [True] * 5  # and no confirmation


def test_a_challenger_is_confirmed_in_a_fresh_process_against_the_incumbent(bench: Bench) -> None:
    bench.tune(trials=100)
    finals = [job for job in bench.worker.jobs if isinstance(job, Finals)]
    confirmations = finals[5:]
    assert [[parse_config(c.config) for c in job.candidates] for job in confirmations] == [[BEST, DEFAULT]] * 5
    assert bench.worker.processes == 2


def test_a_config_that_crashes_in_finals_falls_out(bench: Bench) -> None:
    bench.worker.final_faults = {BEST: "crash"}
    result = bench.tune(trials=100)
    assert BEST.name not in {entry.config for entry in result.entries}
    assert len(result.entries) == 5
    assert any(r.phase == "final" and r.outcome == "crash" for r in read_journal(bench.journal))


def test_sdpa_answers_where_it_is_faster_with_quantization_counted_in(bench: Bench) -> None:
    bench.worker.peers_us = 4096 / 8 + 5  # between the best kernel's time at 4096 tokens and that of its full call
    result = bench.tune(trials=100)
    assert [entry.answer for entry in result.entries] == ["kernel", "kernel", "sdpa", "sdpa", "sdpa"]
    assert result.entries[2].figures.speed_vs_sdpa == pytest.approx((512 + 5) / (512 + 10), rel=0.01)


def test_a_faster_kernel_with_a_slower_full_call_does_not_win(bench: Bench) -> None:
    bench.worker.call_extra_us = {config: 1e4 for config in SPACE if config.rescale == "skip"}
    result = bench.tune(trials=100)
    assert all("_rsalways_" in (entry.config or "") for entry in result.entries)


#: By what stands in the text of a planted candidate: what a worker on a GPU answers, the gate or the screen.
PLANTED_REPLIES: dict[str, tuple[type[Job], Outcome]] = {
    "illegal address": (Gate, "crash"),
    "the 50th launch": (Screen, "crash"),
    "planted: hang": (Gate, "timeout"),
    "planted_memory": (Gate, "launch"),
    "1.03f": (Gate, "accuracy"),
    "n % 2 == 0": (Gate, "accuracy"),
}


def answer_as_planted(worker: FakeWorker) -> None:
    """Have `worker` answer planted candidates as a GPU does."""
    real = worker.run

    def run(job: Job, timeout_s: float) -> Reply:
        text = Path(job.candidate.cubin).read_text() if isinstance(job, Gate | Screen) else ""
        for words, (step, outcome) in PLANTED_REPLIES.items():
            if words in text and isinstance(job, step):
                if outcome in ("crash", "timeout"):
                    worker.close()
                return Reply(outcome, "as planted")
        return real(job, timeout_s)

    worker.run = run  # type: ignore[method-assign]


def test_f1_f2_planted_faults_are_survived(bench: Bench) -> None:
    answer_as_planted(bench.worker)
    result = bench.tune(trials=12, plants=PLANTS)
    assert result.cause is None
    outcomes = Counter(bench.outcomes().values())
    assert outcomes == {"ok": 12, "crash": 2, "timeout": 2, "launch": 1, "accuracy": 2, "compile": 1}
    assert outcomes - Counter(EXPECTED.values()) == {"ok": 12}
    assert len(result.entries) == 5


class BrokenGpu(FakeWorker):
    """A GPU that is lost for good when a config runs on it."""

    fatal: Config | None = None
    is_lost = False

    def run(self, job: Job, timeout_s: float) -> Reply:
        if isinstance(job, Gate) and parse_config(job.candidate.config) == self.fatal:
            self.is_lost = True
        if not self.is_lost:
            return super().run(job, timeout_s)
        self.pid = None
        return Reply("crash", "CUDA error: unknown error")


def test_a_gpu_that_is_lost_ends_the_run_with_a_clear_message_and_the_best_so_far(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sagegen.tuning.examine.find_loss", lambda index: "NVML says: GPU is lost")
    bench.worker = BrokenGpu()
    bench.worker.fatal = VICTIMS[0]
    result = bench.tune(trials=100)
    assert isinstance(result.cause, GpuLostError)
    said = (
        r"GPU 0 does not answer any more, .*: crash: CUDA error: unknown error \(NVML says: GPU is lost\); .*nvidia-smi"
    )
    assert re.match(said, str(result.cause))
    assert VICTIMS[0].name not in bench.outcomes()  # it may be the GPU's fault: the next run tries it again
    assert len(result.entries) == 5
    assert set(bench.outcomes().values()) == {"ok"}


def test_a_gpu_that_never_answers_is_an_error(bench: Bench) -> None:
    bench.worker = BrokenGpu()
    bench.worker.fatal = DEFAULT
    with pytest.raises(GpuLostError, match="not even to a fresh process"):
        bench.tune(trials=100)


def test_a_failure_in_company_that_is_not_seen_again_is_recorded_so(bench: Bench) -> None:
    bench.worker.faults = {VICTIMS[0]: "crash"}
    bench.worker.once = {VICTIMS[0]}
    bench.tune(trials=100)
    records = read_journal(bench.journal)
    assert {r.config: r.first_failure for r in records if r.first_failure} == {VICTIMS[0].name: "crash: scripted crash"}


def test_a_suspect_that_was_alone_with_the_proven_is_not_run_again(bench: Bench) -> None:
    first = [BEST, *VICTIMS[:2]]
    bench.worker.faults = {VICTIMS[0]: "crash", VICTIMS[1]: "crash"}
    held = {(PROBLEM, length): config for length, config in zip(TUNED_LENGTHS, first, strict=False)}
    bench.tune(trials=100, incumbents=held)
    gated = Counter(bench.worker.gated)
    assert bench.worker.gated[:2] == [DEFAULT, BEST]
    assert (gated[VICTIMS[0]], gated[VICTIMS[1]]) == (2, 1)  # the second was the first guest of a fresh process


def test_what_the_worker_measures_beside_the_times_is_recorded(bench: Bench) -> None:
    conditions = {"looks": 3, "clock_mhz": 1755.0, "power_w": 400.5, "temperature_c": 71, "throttled": 2, "dropped": 1}
    reasons = {"slowdowns": ["power brake"]}
    real = bench.worker.run

    def run(job: Job, timeout_s: float) -> Reply:
        reply = real(job, timeout_s)
        if isinstance(job, Screen):
            reply.data.update(warm_us=[3.5] * job.launches, conditions=conditions | reasons)
        if isinstance(job, Finals):
            reply.data["conditions"] = conditions | reasons
        return reply

    bench.worker.run = run  # type: ignore[method-assign]
    bench.tune(trials=3)
    screens, finals = ([r for r in read_journal(bench.journal) if r.phase == phase] for phase in ("screen", "final"))
    expected = Conditions(3, 1755.0, None, 400.5, 71, 2, 1, ("power brake",))
    assert {s.conditions for r in (*screens, *finals) for s in r.samples} == {expected}
    assert all(set(s.warm_us) == {3.5} for r in screens for s in r.samples)
    warned = [e.message for e in bench.events if isinstance(e, Warned)]
    assert f"{PROBLEM.name} at 1024 tokens: times of a GPU that throttled (power brake)" in warned


def test_two_gpus_share_the_work(bench: Bench) -> None:
    bench.workers = [FakeWorker(), FakeWorker(gpu_index=1)]
    result = bench.tune(trials=100)
    gated = [c for worker in bench.workers for c in worker.gated]
    assert sorted(c.name for c in gated) == sorted(c.name for c in SPACE)
    assert {entry.config for entry in result.entries} == {BEST.name}


def test_a_worker_on_another_gpu_stops_the_run(bench: Bench) -> None:
    bench.worker.sms = 132
    with pytest.raises(GpuMismatchError, match="132 SMs"):
        bench.tune(trials=5)
    assert bench.outcomes() == {}


def test_f7_a_busy_gpu_is_refused_or_warned_of(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "read_state", lambda index: GpuState(processes=(4711,)))
    with pytest.raises(GpuBusyError, match=r"4711.*--force"):
        bench.tune(trials=2)
    assert bench.worker.jobs == []
    bench.tune(trials=2, force=True)
    assert any(isinstance(e, Warned) and "4711" in e.message for e in bench.events)


@pytest.mark.parametrize("count", [1, 3])
def test_others_that_come_during_the_run_are_warned_of(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr("sagegen.tuning.judge.read_state", lambda index: GpuState(processes=tuple(range(count))))
    result = bench.tune(trials=2)
    assert len(result.entries) == 5
    warned = [e.message for e in bench.events if isinstance(e, Warned)]
    expected = [f"{PROBLEM.name} at {t.tokens} tokens: 2 other processes use the GPU by now" for t in TUNED_LENGTHS]
    assert warned == (expected if count == 3 else [])


def test_progress_rises_to_one_and_decisions_are_told(bench: Bench) -> None:
    bench.tune(trials=25, strategy=Strategy("tpe"))
    progress = [e.progress for e in bench.events if isinstance(e, Attempted)]
    assert progress == sorted(progress)
    assert progress[-1] == 1.0
    decided = [e for e in bench.events if isinstance(e, Decided)]
    assert [e.config for e in decided] == [BEST.name] * 5
    # the default's kernel takes 1.875 times as long, and both calls 10 us more than their kernels
    for event, length in zip(decided, TUNED_LENGTHS, strict=True):
        calls = (1.875 * length.tokens / 8 + 10) / (length.tokens / 8 + 10)
        assert event.speed_vs_default == pytest.approx(calls, rel=0.01)


def test_f7_two_runs_with_different_seeds_find_the_same_winner(bench: Bench, tmp_path: Path) -> None:
    first = bench.tune(trials=25, seed=1, strategy=Strategy("tpe"))
    bench.folder = tmp_path / "second"
    second = bench.tune(trials=25, seed=2, strategy=Strategy("tpe"))
    assert [e.config for e in first.entries] == [e.config for e in second.entries]


# --- tiers


COARSE_FIGURES = {**FIGURES, "cosine": 0.9991}


def coarse_where(is_coarse: Callable[[Config], bool]) -> FakeWorker:
    return FakeWorker(figures=lambda config: COARSE_FIGURES if is_coarse(config) else FIGURES)


def test_a_bucket_has_its_fastest_and_its_fastest_fine_config(bench: Bench) -> None:
    bench.worker = coarse_where(lambda config: config.rescale == "skip")  # type: ignore[union-attr]
    result = bench.tune()
    fine = replace(DEFAULT, q_operand="reg")
    assert [(e.config, e.tier, e.min_cosine) for e in result.entries] == [
        (BEST.name, "coarse", 0.9991),
        (fine.name, "fine", 0.9994),
    ] * 5
    assert {e.cubin_sha256 for e in result.entries} == set(result.cubins)
    decided = [event for event in bench.events if isinstance(event, Decided)]
    assert [event.bucket.rpartition(" ")[2] for event in decided] == ["(coarse)", "(fine)"] * 5
    # the same with both as the ones to beat: nothing changes hands, nothing needs confirming
    cases = [(PROBLEM, length) for length in TUNED_LENGTHS]
    again = bench.tune(incumbents=dict.fromkeys(cases, BEST), fine_incumbents=dict.fromkeys(cases, fine))
    assert [e.config for e in again.entries] == [e.config for e in result.entries]


def test_where_the_fastest_config_is_fine_it_is_for_everyone(bench: Bench) -> None:
    bench.worker = coarse_where(lambda config: config != BEST)
    assert [(e.config, e.tier) for e in bench.tune().entries] == [(BEST.name, None)] * 5


def test_where_nothing_is_fine_the_fastest_config_is_all_there_is(bench: Bench) -> None:
    bench.worker = coarse_where(lambda config: True)
    assert [(e.config, e.tier) for e in bench.tune().entries] == [(BEST.name, None)] * 5


def test_a_run_that_ends_before_its_finals_has_both_tiers_too(bench: Bench) -> None:
    bench.worker = coarse_where(lambda config: config.rescale == "skip")  # type: ignore[union-attr]
    bench.stop_after = len(SPACE) - 1
    entries = bench.tune().entries
    assert [entry.tier for entry in entries] == ["coarse", "fine"] * 5
