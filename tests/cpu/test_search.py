"""The searcher asks distinct valid configs, in a sensible order, and learns from failures."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from statistics import mean

import pytest

from sagegen.gpu import find_gpu
from sagegen.problem import Problem, Shape
from sagegen.rules import Target, broken_rules, default_config, searched_configs
from sagegen.space import FAMILIES, Config, neighbours
from sagegen.tuning.journal import Outcome, Record, Samples, replay
from sagegen.tuning.model import predict
from sagegen.tuning.ranking import distance, promising_configs, rank_configs
from sagegen.tuning.replay import rehearse
from sagegen.tuning.search import Searcher, objective
from sagegen.tuning.strategy import SAMPLERS, Sampler, Strategy

TARGET = Target(find_gpu("l20"), Problem(64, "fp16", False))
DEFAULT = default_config(TARGET)
SHAPES = (Shape(16, 32, 32, 1024, 1024), Shape(1, 32, 32, 16384, 16384))
KNOBS = {
    "block_q": (64, 128),
    "block_k": (64, 128),
    "warps": (2, 4, 8),
    "stages": (2, 3),
    "conversion": ("i2f", "magic"),
    "rescale": ("always", "skip"),
    "q_operand": ("reg", "smem"),
    "min_blocks": (1, 2),
}
SPACE = [
    config
    for values in itertools.product(*KNOBS.values())
    if not broken_rules(config := replace(DEFAULT, **dict(zip(KNOBS, values, strict=True))), TARGET)  # type: ignore[arg-type]
]

#: The samplers that propose in a millisecond; `gp` takes a hundred times as long and has a test of its own.
QUICK = tuple(sampler for sampler in SAMPLERS if sampler != "gp")


def make_record(config: Config, us: float = 100.0, outcome: Outcome = "ok") -> Record:
    samples = (Samples(1024, 16, 32, 32, (us,)), Samples(16384, 1, 32, 32, (us,))) if outcome == "ok" else ()
    return Record(TARGET.problem.name, config.name, "screen", outcome, "l20", 1, "aa", samples=samples)


def landscape(seed: int) -> dict[Config, float]:
    """Additive in the knobs, with one pair of them interacting."""
    rng = random.Random(seed)
    cost = {(knob, value): rng.uniform(0, 1) for knob, values in KNOBS.items() for value in values}
    pair = {(warps, stages): rng.uniform(0, 1) for warps in (2, 4, 8) for stages in (2, 3)}
    return {
        config: 100 * math.exp(sum(cost[k, getattr(config, k)] for k in KNOBS) + pair[config.warps, config.stages])
        for config in SPACE
    }


def searcher(sampler: Sampler = "tpe", seed: int = 0, configs: list[Config] = SPACE, **options: object) -> Searcher:
    return Searcher(TARGET, configs, first=[DEFAULT], strategy=Strategy(sampler), seed=seed, **options)  # type: ignore[arg-type]


def test_the_test_space_is_worth_searching() -> None:
    assert DEFAULT in SPACE
    assert 100 < len(SPACE) < math.prod(map(len, KNOBS.values()))


@pytest.mark.parametrize("sampler", QUICK)
def test_twelve_configs_and_a_hundred_trials_measure_twelve(sampler: Sampler) -> None:
    search = Searcher(TARGET, SPACE[:12], strategy=Strategy(sampler))
    asked: list[Config] = []
    for trial in range(100):
        for config in search.ask(1, trial / 100):
            asked.append(config)
            search.tell(config, make_record(config))
    assert sorted(c.name for c in asked) == sorted(c.name for c in SPACE[:12])
    assert search.exhausted


@pytest.mark.parametrize("sampler", QUICK)
def test_every_ask_is_valid_and_unseen_failures_included(sampler: Sampler) -> None:
    search, asked = searcher(sampler), []
    for trial in range(40):
        for config in search.ask(2, trial / 40):
            search.tell(config, make_record(config, outcome="crash" if config.warps == 8 else "ok"))
            asked.append(config)
    assert len(set(asked)) == len(asked) == 80
    assert set(asked) <= set(SPACE)


def test_asks_of_one_batch_differ_before_any_outcome_is_known() -> None:
    batch = searcher().ask(30)
    assert len(set(batch)) == 30


def test_the_default_comes_first_then_the_incumbent_then_the_other_starts() -> None:
    starts = [DEFAULT, SPACE[7], SPACE[3]]
    search = Searcher(TARGET, SPACE, first=[*starts, SPACE[7]])
    assert search.ask(2) + search.ask(1) == starts


@pytest.mark.parametrize("sampler", QUICK)
def test_what_a_journal_knows_is_never_asked_again(sampler: Sampler) -> None:
    search = searcher(sampler)
    known = SPACE[:-20]
    for config in known:
        search.tell(config, make_record(config))
    assert set(search.ask(1000)) == (set(SPACE) | {DEFAULT}) - set(known)


def test_a_known_start_is_skipped() -> None:
    search = Searcher(TARGET, SPACE, first=[DEFAULT, SPACE[5]])
    search.tell(DEFAULT, make_record(DEFAULT))
    assert search.ask(1) == [SPACE[5]]


@pytest.mark.parametrize("sampler", QUICK)
def test_the_same_seed_and_outcomes_give_the_same_asks(sampler: Sampler) -> None:
    times = landscape(1)
    runs = []
    for _ in range(2):
        search, asked = searcher(sampler, seed=5), []
        for trial in range(25):
            (config,) = search.ask(1, trial / 25)
            asked.append(config)
            search.tell(config, make_record(config, times[config]))
        runs.append(asked)
    assert runs[0] == runs[1]


def test_tpe_stays_away_from_a_region_where_everything_fails() -> None:
    failures = []
    for name, failing in (("q_operand", "reg"), ("q_operand", "smem"), ("rescale", "skip"), ("rescale", "always")):
        # neighbours of the best, tried in turn with proposals, know nothing of regions
        search = Searcher(TARGET, SPACE, first=[DEFAULT], strategy=Strategy("tpe", neighbours=0))
        for trial in range(70):
            (config,) = search.ask(1)
            fails = getattr(config, name) == failing
            search.tell(config, make_record(config, outcome="accuracy" if fails else "ok"))
            if trial >= 30:
                failures.append(fails)
    # each region is half of the space: asks at random would fail half of the time, 160 of them within 0.04 of that
    assert mean(failures) < 0.3


def test_the_last_third_tries_one_knob_neighbours_of_the_best() -> None:
    search = searcher()
    search.tell(DEFAULT, make_record(DEFAULT, 210))
    for config, us in zip(SPACE[:60], range(200, 140, -1), strict=True):
        search.tell(config, make_record(config, us))
    best = search.best(count=3)
    near = {config for top in best for config in neighbours(top)}
    assert set(search.ask(3, progress=0.7)) <= near
    assert best[0] == SPACE[59]


def test_each_length_has_its_own_best() -> None:
    search = searcher()
    for config, short, long in ((SPACE[0], 10.0, 30.0), (SPACE[1], 20.0, 20.0), (SPACE[2], 30.0, 10.0)):
        samples = (Samples(1024, 16, 32, 32, (short,)), Samples(16384, 1, 32, 32, (long,)))
        search.tell(config, replace(make_record(config), samples=samples))
    assert search.best(1024) == [SPACE[0]]
    assert search.best(16384, count=2) == [SPACE[2], SPACE[1]]


def test_the_objective_is_the_geometric_mean_of_ratios_to_the_default() -> None:
    baseline = make_record(DEFAULT, 100.0)
    samples = (Samples(1024, 16, 32, 32, (90.0, 50.0, 20.0)), Samples(16384, 1, 32, 32, (800.0,)))
    other = replace(baseline, samples=samples)
    assert objective(other, baseline) == pytest.approx(2.0)  # sqrt(50/100 * 800/100)
    assert objective(baseline, baseline) == 1.0
    assert objective(make_record(DEFAULT, outcome="crash"), baseline) is None


def test_when_the_default_fails_the_first_success_is_the_baseline() -> None:
    search = searcher()
    search.tell(DEFAULT, make_record(DEFAULT, outcome="compile"))
    search.tell(SPACE[0], make_record(SPACE[0], 80.0))
    search.tell(SPACE[1], make_record(SPACE[1], 40.0))
    assert search.objectives == {SPACE[0]: 1.0, SPACE[1]: 0.5}


def test_starts_are_the_models_favourites_no_two_of_them_alike_to_it() -> None:
    starts = promising_configs(SPACE, TARGET, SHAPES, 6)
    assert starts == rank_configs(starts, TARGET, SHAPES)
    fastest = predict(rank_configs(SPACE, TARGET, SHAPES)[0], TARGET.problem, SHAPES[1], TARGET.gpu).kernel_us
    times = [predict(config, TARGET.problem, SHAPES[1], TARGET.gpu).kernel_us for config in starts]
    assert len(set(times)) == 6
    assert min(times) == fastest


def test_as_many_starts_as_wanted_even_when_the_model_cannot_tell_them_apart() -> None:
    twins = [replace(DEFAULT, q_span=16), DEFAULT, replace(DEFAULT, granularity="warp")]
    starts = promising_configs(twins, TARGET, SHAPES, 9)
    assert starts[0] == DEFAULT
    assert sorted(c.name for c in starts) == sorted(c.name for c in twins)


def test_searching_beats_guessing_on_a_recorded_landscape() -> None:
    gaps: dict[str, list[float]] = {sampler: [] for sampler in QUICK}
    for seed in (1, 2, 3):
        times = landscape(seed)
        for sampler in QUICK:
            run = replay([make_record(config, us) for config, us in times.items()])
            search = searcher(sampler, seed)
            tried = rehearse(search, lambda config, run=run: run(TARGET.problem, config), 40)
            curve = [min(search.objectives.values()) for _ in itertools.islice(tried, 40)]
            assert len(curve) == 40
            assert curve == sorted(curve, reverse=True)
            gaps[sampler].append(curve[-1] * times[DEFAULT] / min(times.values()) - 1)
    assert mean(gaps["tpe"]) < mean(gaps["random"]) / 2
    assert mean(gaps["neighbour"]) < mean(gaps["random"]) / 2


# --- two families

HOPPER = Target(find_gpu("h200"), Problem(128, "bf16", False))


@pytest.fixture(scope="module")
def both() -> list[Config]:
    """What tuning may try on Hopper, of `mma` a few; seconds, which only these tests should take."""
    return [*searched_configs(FAMILIES["mma"], HOPPER)[::70], *searched_configs(FAMILIES["wgmma"], HOPPER)]


def search_hopper(configs: list[Config], sampler: Sampler, us: dict[str, float], trials: int = 40) -> list[Config]:
    """The configs tried where a family's configs all take the same time."""
    search, asked = Searcher(HOPPER, configs, first=[default_config(HOPPER)], strategy=Strategy(sampler)), []
    for trial in range(trials):
        for config in search.ask(1, trial / trials):
            asked.append(config)
            search.tell(config, make_record(config, us[config.family]))
    return asked


@pytest.mark.parametrize("sampler", QUICK)
@pytest.mark.parametrize(
    ("us", "better"), [({"mma": 200.0, "wgmma": 100.0}, "wgmma"), ({"mma": 100.0, "wgmma": 200.0}, "mma")]
)
def test_the_better_family_gets_most_trials_and_the_other_some(
    both: list[Config], sampler: Sampler, us: dict[str, float], better: str
) -> None:
    asked = search_hopper(both, sampler, us)
    assert len(set(asked)) == 40
    assert set(asked) <= set(both)
    assert 24 <= [config.family for config in asked].count(better) <= 38


def test_all_of_both_families_are_tried_in_the_end(both: list[Config]) -> None:
    first_wgmma = [config.family for config in both].index("wgmma")
    configs = [*both[:9], *both[first_wgmma : first_wgmma + 4]]
    search = Searcher(HOPPER, configs)
    asked = search.ask(100)
    assert sorted(c.name for c in asked) == sorted(c.name for c in configs)


def test_the_models_favourites_on_hopper_are_wgmma_and_elsewhere_there_is_none(both: list[Config]) -> None:
    assert {config.family for config in promising_configs(both, HOPPER, SHAPES, 6)} == {"wgmma"}
    assert not searched_configs(FAMILIES["wgmma"], TARGET)


def test_families_are_infinitely_far_apart(both: list[Config]) -> None:
    assert distance(both[0], both[1]) > 0
    assert distance(both[0], both[-1]) == math.inf
