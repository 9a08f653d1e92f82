"""Who wins a bucket: paired intervals, full calls, confirmation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sagegen.errors import WorkerError
from sagegen.measuring.jobs import Finals, Job, Ping, Reply
from sagegen.problem import TUNED_LENGTHS, Problem
from sagegen.space import Config, MmaConfig
from sagegen.tuning.examine import Examiner
from sagegen.tuning.finals import Bout, Match, confirm, confirmation, decide, run_match

PROBLEM = Problem(128, "bf16", False)
DEFAULT: Config = MmaConfig(128, 64, 8, 2, "e4m3f32", 64, "i2f", "thread", 32, 64, "always", "reg", 1)
INCUMBENT = replace(DEFAULT, rescale="skip")
CHALLENGER = replace(DEFAULT, q_operand="smem")
ROUNDS = 60


def noisy(us: float, spread: float = 0.01, seed: int = 0) -> list[float]:
    return (us * (1 + spread * np.random.default_rng(seed).standard_normal(ROUNDS))).tolist()


def make_bout(
    kernel_us: Mapping[Config, Sequence[float]],
    call_us: Mapping[Config, Sequence[float]] | None = None,
    peers_us: Mapping[str, Sequence[float]] | None = None,
    incumbent: Config = INCUMBENT,
) -> Bout:
    cubins = {config: Path(config.name) for config in kernel_us}
    match = Match(PROBLEM, TUNED_LENGTHS[2], cubins, DEFAULT, incumbent, ROUNDS)
    calls = call_us or {config: [us + 50 for us in times] for config, times in kernel_us.items()}
    return Bout(match, kernel_us, calls, peers_us or {})


def test_a_clearly_faster_challenger_takes_the_bucket() -> None:
    bout = make_bout({DEFAULT: noisy(120), INCUMBENT: noisy(110, seed=1), CHALLENGER: noisy(100, seed=2)})
    decision = decide(bout)
    assert decision.config == CHALLENGER
    assert decision.against_default is not None
    assert decision.against_default.ratio == pytest.approx(1.2, rel=0.01)


def test_a_lead_within_the_noise_leaves_the_incumbent_in_place() -> None:
    held = [100.0] * ROUNDS
    narrow = [99.0 if n % 2 else 101.0 for n in range(ROUNDS - 2)] + [99.0] * 2  # ahead in 31 of 60 rounds
    bout = make_bout({DEFAULT: noisy(120), INCUMBENT: held, CHALLENGER: narrow})
    assert np.median(narrow) < np.median(held)
    assert decide(bout).config == INCUMBENT


def test_noise_that_hits_all_rivals_of_a_round_alike_hides_no_lead() -> None:
    drift = noisy(100, 0.2)
    bout = make_bout({DEFAULT: drift, INCUMBENT: drift, CHALLENGER: [us * 0.99 for us in drift]})
    assert decide(bout).config == CHALLENGER


def test_the_next_best_wins_when_the_fastest_kernel_has_a_slower_call() -> None:
    second = replace(CHALLENGER, stages=3)
    kernels = {DEFAULT: noisy(120), INCUMBENT: noisy(120), CHALLENGER: noisy(90), second: noisy(100)}
    calls = {DEFAULT: noisy(150), INCUMBENT: noisy(150), CHALLENGER: noisy(170), second: noisy(130)}
    assert decide(make_bout(kernels, calls)).config == second


def test_a_shorter_call_wins_though_its_kernel_takes_longer() -> None:
    kernels = {DEFAULT: noisy(120), INCUMBENT: noisy(100), CHALLENGER: noisy(103)}
    calls = {DEFAULT: noisy(170), INCUMBENT: noisy(150), CHALLENGER: noisy(140)}
    assert decide(make_bout(kernels, calls)).config == CHALLENGER


def test_without_the_incumbent_the_default_holds_the_bucket() -> None:
    bout = make_bout({DEFAULT: noisy(100), CHALLENGER: noisy(100.05, seed=1)})
    assert decide(bout).config == DEFAULT


def test_when_neither_finished_the_fastest_wins() -> None:
    second = replace(CHALLENGER, stages=3)
    decision = decide(make_bout({second: noisy(100), CHALLENGER: noisy(99)}))
    assert decision.config == CHALLENGER
    assert decision.against_default is None


def test_nobody_finished() -> None:
    assert decide(make_bout({})).config is None


@pytest.mark.parametrize(("sdpa_us", "answer"), [(140.0, "sdpa"), (160.0, "kernel")])
def test_the_fastest_sdpa_backend_is_compared_with_the_full_call(sdpa_us: float, answer: str) -> None:
    bout = make_bout(
        {DEFAULT: noisy(100)}, {DEFAULT: noisy(150)}, {"sdpa-flash": noisy(900), "sdpa-cudnn": noisy(sdpa_us)}
    )
    decision = decide(bout)
    assert decision.answer == answer
    assert decision.against_sdpa is not None
    assert decision.against_sdpa.ratio == pytest.approx(sdpa_us / 150, rel=0.01)


def test_only_a_change_of_hands_is_confirmed() -> None:
    changed = decide(make_bout({DEFAULT: noisy(120), INCUMBENT: noisy(110), CHALLENGER: noisy(100)}))
    kept = decide(make_bout({DEFAULT: noisy(120), INCUMBENT: noisy(100), CHALLENGER: noisy(110)}))
    match = confirmation(changed, 20)
    assert match is not None
    assert list(match.cubins) == [CHALLENGER, INCUMBENT]
    assert (match.rounds, match.peers) == (20, False)
    assert confirmation(kept, 20) is None


@pytest.mark.parametrize(
    ("again", "winner"),
    [
        ({CHALLENGER: noisy(100), INCUMBENT: noisy(110)}, CHALLENGER),
        ({CHALLENGER: noisy(110), INCUMBENT: noisy(100)}, INCUMBENT),
        ({INCUMBENT: noisy(100)}, INCUMBENT),
        ({CHALLENGER: noisy(100)}, CHALLENGER),
        ({}, INCUMBENT),
    ],
    ids=["wins again", "loses", "winner crashes", "holder crashes", "both crash"],
)
def test_the_bucket_goes_back_unless_the_winner_wins_again(
    again: Mapping[Config, Sequence[float]], winner: Config
) -> None:
    decision = decide(make_bout({DEFAULT: noisy(120), INCUMBENT: noisy(110), CHALLENGER: noisy(100)}))
    match = confirmation(decision, ROUNDS)
    assert match is not None
    assert confirm(decision, Bout(match, again, again, {})).config == winner


class ScriptedWorker:
    """Fails finals while a config that it cannot run takes part; `alone` says whether also when it runs alone."""

    gpu_index = 0
    pid: int | None = 1

    def __init__(self, faulty: Config | None, names_it: bool = True, alone: bool = True, times: int = 99) -> None:
        self.faulty, self.names_it, self.alone, self.times = faulty, names_it, alone, times
        self.closed = 0
        self.matches: list[list[str]] = []

    def run(self, job: Job, timeout_s: float) -> Reply:
        if isinstance(job, Ping):
            return Reply("ok")
        assert isinstance(job, Finals)
        self.matches.append([candidate.config for candidate in job.candidates])
        for candidate in job.candidates:
            is_faulty = self.faulty is not None and candidate.config == self.faulty.name
            if is_faulty and self.times and (self.alone or len(job.candidates) > 1):
                self.times -= 1
                return Reply("crash", "illegal address", {"running": candidate.name} if self.names_it else {})
        times = [[1.0] * job.rounds] * len(job.candidates)
        return Reply("ok", data={"kernel_us": times, "call_us": times, "peers": {}, "absent": {}})

    def close(self) -> None:
        self.closed += 1


def run_scripted(worker: ScriptedWorker) -> Bout:
    match = make_bout({DEFAULT: [], INCUMBENT: [], CHALLENGER: []}).match
    return run_match(Examiner(worker, TUNED_LENGTHS), match)


def test_a_config_that_fails_alone_too_falls_out_and_the_others_run_again() -> None:
    worker = ScriptedWorker(CHALLENGER)
    bout = run_scripted(worker)
    assert list(bout.kernel_us) == [DEFAULT, INCUMBENT]
    assert bout.failures == ((CHALLENGER, "crash", "illegal address"),)
    assert not bout.cleared
    everyone, others = [DEFAULT.name, INCUMBENT.name, CHALLENGER.name], [DEFAULT.name, INCUMBENT.name]
    assert worker.matches == [everyone, [CHALLENGER.name], others]
    assert worker.closed == 2  # a fresh process to run it alone, another for the others


def test_a_bystander_that_runs_well_alone_takes_part_again() -> None:
    worker = ScriptedWorker(CHALLENGER, alone=False, times=1)
    bout = run_scripted(worker)
    assert list(bout.kernel_us) == [DEFAULT, INCUMBENT, CHALLENGER]
    assert bout.failures == ()
    assert bout.cleared == {CHALLENGER: "crash: illegal address"}
    assert [len(match) for match in worker.matches] == [3, 1, 3]


def test_one_that_fails_in_company_twice_falls_out_and_the_reason_says_so() -> None:
    bout = run_scripted(ScriptedWorker(CHALLENGER, alone=False))
    assert list(bout.kernel_us) == [DEFAULT, INCUMBENT]
    ((config, outcome, reason),) = bout.failures
    assert (config, outcome) == (CHALLENGER, "crash")
    assert reason == "illegal address, for the second time in company; alone it did not"


def test_a_peer_that_fails_is_left_out_and_condemns_nobody() -> None:
    class NoPeers(ScriptedWorker):
        def run(self, job: Job, timeout_s: float) -> Reply:
            if isinstance(job, Finals) and job.peers:
                return Reply("crash", "in torch", {"running": "sdpa-cudnn"})
            return super().run(job, timeout_s)

    bout = run_scripted(NoPeers(None))
    assert list(bout.kernel_us) == [DEFAULT, INCUMBENT, CHALLENGER]
    assert not bout.peers_us


def test_a_match_that_fails_for_no_ones_fault_is_an_error() -> None:
    match = make_bout({DEFAULT: [], CHALLENGER: []}).match
    with pytest.raises(WorkerError, match="4096 tokens: illegal address"):
        run_match(Examiner(ScriptedWorker(CHALLENGER, names_it=False), TUNED_LENGTHS), match)
