"""The kinds of kernels that tests on a card run: which configs stand for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_kinds import EXACT, KINDS, MAIN_KINDS, MMA, PACKED, PROBLEMS, RELATIVES, KernelKind
from pinned_entry import make_entry
from sagegen.env import read_env
from sagegen.gpu import GPUS
from sagegen.problem import Problem
from sagegen.registry import lookup, save_entries
from sagegen.rules import Target, broken_rules, default_config


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_hopper_has_every_kind_in_every_problem(kind: KernelKind, problem: Problem) -> None:
    target = Target(GPUS["h200"], problem)
    config = kind.find_config(target)
    assert config is not None
    assert not broken_rules(config, target)
    assert config.family == kind.family
    assert {name: getattr(config, name) for name in kind.asked} == dict(kind.asked)


@pytest.mark.parametrize("problem", RELATIVES, ids=lambda problem: problem.name)
def test_windows_and_sequences_have_the_kinds_that_their_families_do(problem: Problem) -> None:
    target = Target(GPUS["h200"], problem)
    for kind in KINDS:
        config = kind.find_config(target)
        has_one = not (problem.is_ragged and "mean_span" in kind.asked)
        assert (config is not None) == has_one, kind.name
        if config is not None:
            assert not broken_rules(config, target)
            asked = dict(kind.asked)
            if kind.family == "wgmma" and problem.is_ragged:
                asked["q_quantizer"] = "kernel"
            assert {name: getattr(config, name) for name in asked} == asked


def test_main_kinds_are_the_defaults_of_both_families_and_the_packed_exponent() -> None:
    target = Target(GPUS["h200"], PROBLEMS[0])
    exact, packed, mma = (kind.find_config(target) for kind in MAIN_KINDS)
    assert (EXACT, PACKED, MMA) == MAIN_KINDS
    assert exact == default_config(target)
    assert packed is not None
    assert packed.block_q == exact.block_q  # tiles stay the default's
    assert mma is not None
    assert mma.family == "mma"


def test_kinds_that_a_gpu_has_not_are_none() -> None:
    target = Target(GPUS["a100"], PROBLEMS[0])
    assert EXACT.find_config(target) is None
    assert MMA.find_config(target) is not None


@pytest.mark.parametrize("kind", MAIN_KINDS, ids=lambda kind: kind.name)
def test_a_registry_that_pins_a_kind_is_read_and_goes_first(
    kind: KernelKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds the public API to one kernel in the tests on a card, where a mistake would cost a run."""
    gpu = GPUS["h200"]
    configs = {problem: kind.find_config(Target(gpu, problem)) for problem in PROBLEMS}
    entries = [make_entry(problem, config, "0" * 64, gpu) for problem, config in configs.items()]
    save_entries(tmp_path / "h200.yaml", "h200", entries, {})
    monkeypatch.setenv("SAGEGEN_TUNED_DIR", str(tmp_path))
    for problem, config in configs.items():
        for kv_len in (1, 300, 1 << 17):
            found = lookup(gpu, problem, kv_len, read_env())
            assert found is not None
            assert (found.entry.config, found.entry.answer, found.out_of_range) == (config.name, "kernel", False)
