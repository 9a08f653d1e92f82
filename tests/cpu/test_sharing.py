"""Machines that share a search through Optuna's storages: nothing twice, and each learns what the others found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import optuna
import pytest

from sagegen.errors import ArgumentError
from sagegen.gpu import find_gpu
from sagegen.problem import Problem
from sagegen.rules import Target, default_config
from sagegen.space import Config
from sagegen.tuning.journal import Outcome, Record, Samples
from sagegen.tuning.sharing import Elsewhere, SharedStudies, open_storage

PROBLEM = Problem(64, "fp16", False)
DEFAULT = default_config(Target(find_gpu("l20"), PROBLEM))
OTHER = replace(DEFAULT, stages=3)
NOW = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)


def make_record(config: Config, outcome: Outcome = "ok") -> Record:
    samples = (Samples(1024, 16, 32, 32, (90.0,), (100.0, 104.0, 99.0)),) if outcome == "ok" else ()
    return Record(PROBLEM.name, config.name, "screen", outcome, "l20", 1, "text", "as scripted", samples=samples)


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "study.log")


@pytest.fixture(params=["journal file", "sqlite"])
def any_place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/study.db" if request.param == "sqlite" else str(tmp_path / "study.log")


def join(place: str, machine: str, clock: Callable[[], datetime] = lambda: NOW) -> SharedStudies:
    shared = SharedStudies(open_storage(place), "l20", 1, machine, clock)
    shared.open([PROBLEM])
    return shared


def test_what_one_machine_measures_no_other_gets(any_place: str) -> None:
    one, two = join(any_place, "one"), join(any_place, "two")
    assert one.claim(PROBLEM, DEFAULT, "text")
    assert not two.claim(PROBLEM, DEFAULT, "text")
    assert two.claim(PROBLEM, OTHER, "text")
    one.finish(PROBLEM, DEFAULT, make_record(DEFAULT), 0.5)
    assert not two.claim(PROBLEM, DEFAULT, "text")


def test_other_text_is_another_kernel_and_the_default_is_everyones(place: str) -> None:
    one, two = join(place, "one"), join(place, "two")
    one.claim(PROBLEM, DEFAULT, "text")
    assert two.claim(PROBLEM, DEFAULT, "newer text")
    assert two.claim(PROBLEM, DEFAULT, "text", always=True)


def test_outcomes_travel_once_with_medians_and_without_samples(any_place: str) -> None:
    one, two = join(any_place, "one"), join(any_place, "two")
    for config, outcome, value in ((DEFAULT, "ok", 0.75), (OTHER, "crash", None)):
        one.claim(PROBLEM, config, "text")
        one.finish(PROBLEM, config, make_record(config, outcome), value)
    assert two.news() == [
        Elsewhere(PROBLEM, DEFAULT, "text", 0.75, "one"),
        Elsewhere(PROBLEM, OTHER, "text", None, "one"),
    ]
    assert two.news() == []
    assert one.news() == []
    (name,) = optuna.get_all_study_names(storage=open_storage(any_place))
    trials = optuna.load_study(study_name=name, storage=open_storage(any_place)).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE"]  # a crash is a constraint, not a FAIL
    assert [trial.constraints["failed"] for trial in trials] == [0.0, 1.0]
    assert trials[0].user_attrs["call_us"] == {"1024": 100.0}
    assert trials[1].user_attrs["outcome"] == "crash"
    assert not any("times" in key or "samples" in key for trial in trials for key in trial.user_attrs)
    assert trials[0].params["mma.stages"] == DEFAULT.stages


def test_what_a_journal_knows_already_is_told_once(place: str) -> None:
    for _ in range(2):
        join(place, "one").finish(PROBLEM, DEFAULT, make_record(DEFAULT), 1.0)
    assert len(join(place, "two").news()) == 1


def test_what_a_machine_gives_up_others_may_take(place: str) -> None:
    one, two = join(place, "one"), join(place, "two")
    one.claim(PROBLEM, DEFAULT, "text")
    one.release()
    assert two.claim(PROBLEM, DEFAULT, "text")


def test_a_killed_machine_gives_up_its_claims_when_it_is_back_or_after_a_quarter_of_an_hour(place: str) -> None:
    join(place, "one").claim(PROBLEM, DEFAULT, "text")
    join(place, "one").claim(PROBLEM, OTHER, "text")  # killed, and back: the first claim is given up
    two = join(place, "two", lambda: NOW + timedelta(minutes=14))
    assert two.claim(PROBLEM, DEFAULT, "text")
    assert not two.claim(PROBLEM, OTHER, "text")
    assert join(place, "three", lambda: NOW + timedelta(minutes=16)).claim(PROBLEM, OTHER, "text")


def test_a_storage_that_fails_is_warned_of_once_and_the_run_goes_on(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(place)
    shared = SharedStudies(storage, "l20", 1, "one")
    shared.open([PROBLEM])

    def fail(*arguments: object, **options: object) -> int:
        raise OSError("No space left on device")

    storage.create_new_trial = fail  # type: ignore[method-assign]
    assert shared.claim(PROBLEM, DEFAULT, "text")
    assert shared.claim(PROBLEM, OTHER, "text")
    shared.finish(PROBLEM, DEFAULT, make_record(DEFAULT), 1.0)
    assert shared.news() == []
    assert [r.getMessage() for r in caplog.records if "alone" in r.getMessage()] == [
        "the shared storage failed, this machine goes on alone: No space left on device"
    ]


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("nosuch://host/db", "storage nosuch://host/db cannot be opened"),
        ("postgresql+pg8000://me:secret@host/db", "postgresql+pg8000://me@host/db needs a database driver"),
        ("", "storage  cannot be opened"),
        ("/proc/nothing/study.log", "storage /proc/nothing/study.log cannot be opened"),
    ],
)
def test_a_storage_that_cannot_be_opened_is_named_without_its_password(place: str, says: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        open_storage(place)
    assert says in str(raised.value)
    assert "secret" not in str(raised.value)


def test_two_processes_measure_nothing_twice_and_both_know_the_best(tmp_path: Path) -> None:
    place = f"sqlite:///{tmp_path}/study.db"
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    child = Path(__file__).with_name("sharing_child.py")
    runs = [
        subprocess.Popen([sys.executable, str(child), str(own), place, str(other)], stdout=subprocess.PIPE, text=True)
        for own, other in (folders, folders[::-1])
    ]
    one, two = (json.loads(run.communicate(timeout=120)[0]) for run in runs)
    assert set(one["measured"]) & set(two["measured"]) == {one["default"]}  # each machine's reference
    assert [len(one["measured"]), len(two["measured"])] == [10, 10]
    assert one["best"] in one["measured"] + two["measured"]
    for own in (one, two):
        assert own["best"] in own["known"]
        assert (own["best"] in own["heard"]) == (own["best"] not in own["measured"])
