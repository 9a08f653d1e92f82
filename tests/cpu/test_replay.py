"""Recorded journals searched again: what is counted, and that the default sampler is worth its place."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from replay_scaling import time_run
from sagegen.cli.main import main
from sagegen.errors import ArgumentError
from sagegen.gpu import find_gpu
from sagegen.problem import Problem
from sagegen.rules import Target, default_config
from sagegen.space import Config
from sagegen.tuning.journal import Journal, Outcome, Record, Samples
from sagegen.tuning.replay import Landscape, excess, read_landscapes, replay_searches, spread
from sagegen.tuning.strategy import DEFAULT_SAMPLER, Sampler, Strategy

RUNS = Path(__file__).parents[2] / "docs" / "gpu-runs"
JOURNALS = sorted(RUNS.glob("*journal.jsonl.gz"))
LATEST = RUNS / "2026-11-30c-h200-bf16-journal.jsonl.gz"
TARGET = Target(find_gpu("l20"), Problem(64, "fp16", False))
DEFAULT = default_config(TARGET)
LADDER = list(dict.fromkeys([DEFAULT, *(replace(DEFAULT, stages=s, q_span=q) for s in (2, 3, 4) for q in (16, 32))]))


def make_record(config: Config, short: float, long: float, outcome: Outcome = "ok", shared_from: str = "") -> Record:
    samples = (Samples(1024, 16, 32, 32, (short,)), Samples(16384, 1, 32, 32, (long,)))
    return Record(
        TARGET.problem.name, config.name, "screen", outcome, "l20", 1, "aa",
        samples=samples if outcome == "ok" else (), shared_from=shared_from,
    )  # fmt: skip


def make_landscape(records: list[Record], configs: list[Config]) -> Landscape:
    return Landscape("j.jsonl", TARGET, dict(zip(configs, records, strict=True)), (1024, 16384))


def random_counts(landscape: Landscape, seeds: int) -> list[tuple[int, int]]:
    found = replay_searches(landscape, Strategy("random", starts=0), range(seeds))
    return [(own.overall, own.everywhere) for own in found]


def test_every_length_needs_a_config_within_two_percent_of_its_best() -> None:
    times = [(100.0, 100.0), (50.0, 100.0), (100.0, 50.0), (70.0, 70.0), (200.0, 200.0), (200.0, 200.0)]
    landscape = make_landscape([make_record(c, *us) for c, us in zip(LADDER, times, strict=True)], LADDER)
    # overall, the geometric mean, is best for the second, third (70.71) and fourth (70) alike, to within 2 %
    counts = random_counts(landscape, 40)
    assert {overall for overall, _ in counts} == {2, 3, 4}  # after the default, which is never near
    assert {everywhere for _, everywhere in counts} == {3, 4, 5, 6}


def test_a_config_that_shares_anothers_outcome_is_no_trial_of_its_own() -> None:
    twins = [make_record(c, 100.0, 100.0, shared_from=LADDER[0].name if n else "") for n, c in enumerate(LADDER[:5])]
    landscape = make_landscape([*twins, make_record(LADDER[5], 50.0, 50.0)], LADDER)
    assert random_counts(landscape, 10) == [(2, 2)] * 10


def test_failures_are_trials() -> None:
    crashed = [make_record(c, 0, 0, "crash") for c in LADDER[1:5]]
    records = [make_record(LADDER[0], 100.0, 100.0), *crashed, make_record(LADDER[5], 50.0, 50.0)]
    assert {overall for overall, _ in random_counts(make_landscape(records, LADDER), 40)} == {2, 3, 4, 5, 6}


def test_landscapes_are_a_journals_problems_at_the_lengths_that_all_were_measured_at(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        journal.append(make_record(LADDER[0], 100.0, 100.0))
        journal.append(replace(make_record(LADDER[1], 1.0, 2.0), samples=(Samples(16384, 1, 32, 32, (2.0,)),)))
        journal.append(replace(make_record(LADDER[2], 1.0, 2.0), config="mma_of_another_age"))
    (landscape,) = read_landscapes(path)
    assert (landscape.problem, landscape.tokens) == (TARGET.problem, (16384,))
    assert list(landscape.records) == LADDER[:2]


def test_a_journal_without_a_success_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        journal.append(make_record(LADDER[0], 0, 0, "crash"))
    with pytest.raises(ArgumentError, match="nothing that journal"):
        read_landscapes(path)


def test_spreads() -> None:
    found = spread([4, 1, 3, 2, 5, 10, 9, 8, 7, 6])
    assert (found.median, found.low, found.high, found.mean, found.most) == (5.5, 3.25, 7.75, 5.5, 9)
    assert spread([3]).most == 3


def test_an_excess_is_paired_by_problem() -> None:
    """Problems that are far apart say nothing of samplers that differ by 2 on each."""
    found = excess([3, 42, 902], [1, 40, 900])
    assert (found.mean, found.low, found.high) == (2, 2, 2)
    mixed = excess([3, 1] * 20, [1, 3] * 20)
    assert mixed.mean == 0
    # of 40 differences of 2 either way: 1.96 standard errors are 0.62
    assert (mixed.low, mixed.high) == pytest.approx((-0.62, 0.62), abs=0.1)
    with pytest.raises(ValueError, match="zip"):
        excess([1, 2], [1])


def test_the_default_sampler_is_not_worse_than_drawing_at_random_on_the_recorded_journals() -> None:
    """Without the model's starts, which hide what a sampler is worth; docs/search.md has the whole table."""
    means: dict[Sampler, float] = {}
    landscapes = [found for path in JOURNALS for found in read_landscapes(path) if len(found.records) >= 90]
    assert len(landscapes) == 8
    for sampler in (DEFAULT_SAMPLER, "random"):
        strategy = Strategy(sampler, starts=0)
        counts = [own.everywhere for found in landscapes for own in replay_searches(found, strategy, range(4))]
        means[sampler] = statistics.fmean(counts)
    assert means[DEFAULT_SAMPLER] <= means["random"]


def test_the_models_starts_save_more_than_half_of_the_trials() -> None:
    (landscape,) = [found for found in read_landscapes(LATEST) if found.problem.name == "d128_bf16_causal_int8"]
    with_starts, without = (
        statistics.fmean(own.everywhere for own in replay_searches(landscape, Strategy("random", starts=n), range(20)))
        for n in (6, 0)
    )
    assert with_starts < without / 2


def test_two_workers_take_at_most_six_tenths_of_the_time_of_one(tmp_path: Path) -> None:
    (whole,) = [found for found in read_landscapes(LATEST) if found.problem.name == "d128_bf16_full_int8"]
    landscape = replace(whole, records=dict(islice(whole.successes.items(), 24)))
    shares = []
    for attempt in range(3):  # others may be using the cores
        folders = [tmp_path / f"{attempt}-{count}" for count in (1, 2)]
        for folder in folders:
            folder.mkdir()
        (alone, _), (both, workers) = (time_run(landscape, n, 0.25, f) for n, f in zip((1, 2), folders, strict=True))
        gated = [name for worker in workers for name in worker.gated]
        assert sorted(gated) == sorted({config.name for config in landscape.records})  # one journal, nothing twice
        shares.append(both / alone)
        if shares[-1] <= 0.6:
            break
    assert min(shares) <= 0.6


# --- the command


def invoke(*arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(main, ["tune", "--replay", *arguments])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


def test_a_packed_journal_is_searched_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SAGEGEN_TUNED_DIR", str(tmp_path / "tuned"))
    answer = invoke(str(LATEST), "--head-dim", "64", "--causal", "--sampler", "random", "--seeds", "3", "--json")
    (problem,) = answer["problems"]  # type: ignore[misc]
    assert (problem["problem"], problem["configs"]) == ("d64_bf16_causal_int8", 96)
    assert list(problem["samplers"]) == ["random"]
    assert not list(tmp_path.iterdir())


def test_several_journals_are_searched_one_by_one() -> None:
    both = f"{JOURNALS[0]},{LATEST}"
    answer = invoke(both, "--sampler", "random", "--seeds", "2", "--starts", "0", "--json")
    assert len(answer["problems"]) == 8  # type: ignore[arg-type]
    assert (answer["seeds"], answer["starts"], answer["within"]) == (2, 0, 0.02)


def test_the_table_names_the_samplers_and_the_problem() -> None:
    arguments = [
        "tune",
        "--replay",
        str(LATEST),
        "--head-dim",
        "64",
        "--full",
        "--sampler",
        "neighbour",
        "--seeds",
        "2",
    ]
    result = CliRunner().invoke(main, arguments)
    for word in ("neighbour", "d64_bf16_full_int8", LATEST.name, "nine in ten"):
        assert word in result.stdout


@pytest.mark.parametrize("option", [("--gpu", "h200"), ("--offline",), ("-o", "l20.yaml"), ("--devices", "2")])
def test_what_a_replay_would_not_look_at_is_misuse(option: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["tune", "--replay", str(LATEST), *option])
    assert result.exit_code == 2
    assert "leave out --" in result.stderr


@pytest.mark.parametrize("option", [("--dtype", "fp16"), ("--precision", "int4")])
def test_a_choice_that_leaves_nothing_is_misuse(option: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["tune", "--replay", str(LATEST), *option])
    assert result.exit_code == 2
    assert "nothing of these" in result.stderr


def test_a_journal_that_is_not_there_is_misuse() -> None:
    result = CliRunner().invoke(main, ["tune", "--replay", "nowhere.jsonl"])
    assert result.exit_code == 2
    assert "there is no journal 'nowhere.jsonl'" in result.stderr
