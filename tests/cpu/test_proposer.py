"""Optuna's samplers behind one face: what they need, what they are told of failures."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from sagegen.errors import ArgumentError
from sagegen.gpu import find_gpu
from sagegen.problem import Problem
from sagegen.rules import Target, default_config
from sagegen.tuning.proposer import Proposer

DEFAULT = default_config(Target(find_gpu("l20"), Problem(64, "fp16", False)))
SPACE = [
    replace(DEFAULT, stages=stages, conversion=conversion, rescale=rescale, q_span=q_span, min_blocks=min_blocks)
    for stages, conversion, rescale, q_span, min_blocks in itertools.product(
        (2, 3, 4), ("i2f", "magic"), ("always", "skip"), (16, 32), (1, 2)
    )
]


def states(proposer: Proposer) -> set[str]:
    return {trial.state.name for trial in proposer._study.trials}


def test_a_failure_is_told_as_a_broken_constraint_and_never_as_a_failed_trial() -> None:
    proposer = Proposer(SPACE, seed=0)
    for config, value in ((SPACE[0], 1.0), (SPACE[1], None), (SPACE[2], 0.5)):
        proposer.start(config)
        proposer.finish(config, value)
    trials = proposer._study.trials
    assert {trial.state.name for trial in trials} == {"COMPLETE"}
    assert [trial.value for trial in trials] == [1.0, float("inf"), 0.5]
    assert [trial.constraints["violation"] for trial in trials] == [0.0, 1.0, 0.0]
    assert proposer._study.best_value == 0.5


def test_a_proposal_that_another_config_stands_in_for_teaches_nothing() -> None:
    proposer = Proposer(SPACE, seed=0)
    proposed = proposer.propose()
    other = next(config for config in SPACE if config != proposed)
    proposer.start(other)
    proposer.finish(other, 1.0)
    assert [(t.state.name, t.value) for t in proposer._study.trials] == [("FAIL", None), ("COMPLETE", 1.0)]


@pytest.mark.filterwarnings("error:Clip non-finite")
def test_the_gaussian_process_finds_a_value_that_halves_the_time() -> None:
    pytest.importorskip("scipy")
    proposer, rng = Proposer(SPACE, seed=1, sampler="gp"), random.Random(1)
    for config in rng.sample(SPACE, 16):
        proposer.finish(config, 0.5 if config.stages == 3 else 1.0)
    proposer.finish(next(config for config in SPACE if config.stages == 4), None)  # a failure, and no word of it
    proposed = []
    for _ in range(4):
        proposed.append(proposer.propose())
        proposer.start(proposed[-1])
        proposer.finish(proposed[-1], 0.5 if proposed[-1].stages == 3 else 1.0)
    assert [config.stages for config in proposed].count(3) >= 3  # at random one in three would


def test_the_gaussian_process_without_scipy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="SciPy") as raised:
        Proposer(SPACE, seed=0, sampler="gp")
    assert raised.value.remedy == "pip install 'sagegen[gp]'"
