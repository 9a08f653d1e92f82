"""Patience: what counts as a gain, and when a search ends for want of one."""

from __future__ import annotations

from dataclasses import replace

from sagegen.gpu import find_gpu
from sagegen.problem import Problem
from sagegen.rules import Target, default_config
from sagegen.space import Config, neighbours
from sagegen.tuning.gains import Gains
from sagegen.tuning.journal import Record, Samples
from sagegen.tuning.search import Searcher
from sagegen.tuning.strategy import Strategy

TARGET = Target(find_gpu("l20"), Problem(64, "fp16", False))
DEFAULT = default_config(TARGET)
SPACE = [
    replace(DEFAULT, stages=stages, conversion=conversion, rescale=rescale, q_span=q_span, min_blocks=min_blocks)
    for stages in (2, 3)
    for conversion in ("i2f", "magic")
    for rescale in ("always", "skip")
    for q_span in (16, 32)
    for min_blocks in (1, 2)
]


def make_record(config: Config, *us: float) -> Record:
    samples = tuple(Samples(tokens, 1, 32, 32, (value,)) for tokens, value in zip((1024, 4096), us, strict=False))
    return Record(TARGET.problem.name, config.name, "screen", "ok" if us else "crash", "l20", 1, "aa", samples=samples)


def run_until_over(search: Searcher, us: dict[Config, float]) -> list[Config]:
    asked = []
    while not search.is_over:
        (config,) = search.ask(1)
        asked.append(config)
        search.tell(config, make_record(config, us.get(config, 100.0), 100.0))
    return asked


def test_a_gain_is_half_a_percent_and_small_ones_add_up() -> None:
    gains = Gains()
    for attempt, us in enumerate((100.0, 99.7, 99.6, 99.4), start=1):
        gains.see(attempt, {"all": us})
    assert gains.since(4) == 0  # 99.4 is 0.6 % below 100, though 0.2 % below the one before
    gains.see(5, {"all": 99.0})
    assert gains.since(5) == 1  # 0.4 % below 99.4


def test_a_gain_at_one_length_is_a_gain() -> None:
    gains = Gains()
    gains.see(1, {"1024": 50.0, "4096": 80.0})
    gains.see(2, {"1024": 60.0, "4096": 70.0})
    assert gains.since(2) == 0


def test_patience_ends_a_search_after_so_many_attempts_without_a_gain() -> None:
    search = Searcher(TARGET, SPACE, first=[DEFAULT], strategy=Strategy("random"), patience=6)
    assert len(run_until_over(search, {})) == 7  # the first is a gain


def test_a_gain_renews_patience_and_half_of_it_is_spent_on_neighbours() -> None:
    best = next(config for config in SPACE if config.stages == 3 and config != DEFAULT)
    search = Searcher(TARGET, SPACE, first=[DEFAULT, best], strategy=Strategy("tpe", random_starts=99), patience=8)
    asked = run_until_over(search, {best: 50.0})
    assert len(asked) == 2 + 8
    near = {near for top in search.best(count=3) for near in neighbours(top)} | set(neighbours(DEFAULT))
    assert set(asked[-3:]) <= near


def test_starts_are_tried_whatever_patience_says() -> None:
    starts = [DEFAULT, *[config for config in SPACE if config != DEFAULT][:9]]
    search = Searcher(TARGET, SPACE, first=starts, strategy=Strategy("random"), patience=3)
    assert run_until_over(search, {})[:10] == starts


def test_what_comes_before_the_default_waits_for_it() -> None:
    search = Searcher(TARGET, SPACE, first=[DEFAULT])
    first, second, third = search.ask(3)
    assert first == DEFAULT
    search.tell(third, make_record(third, 50.0, 50.0))
    search.tell(second, make_record(second))
    assert search.objectives == {}  # on two GPUs the default need not be the first to be done
    search.tell(DEFAULT, make_record(DEFAULT, 100.0, 100.0))
    assert search.objectives == {DEFAULT: 1.0, third: 0.5}
    assert set(search.records) == {first, second, third}


def test_what_another_machine_measured_is_learned_from_and_not_asked() -> None:
    search = Searcher(TARGET, SPACE, first=[DEFAULT], strategy=Strategy("neighbour", random_starts=0))
    search.tell(DEFAULT, make_record(DEFAULT, 100.0, 100.0))
    far = max(SPACE, key=lambda config: sum(getattr(config, p.name) != getattr(DEFAULT, p.name) for p in config.params))
    search.tell_elsewhere(far, 0.5)
    search.tell_elsewhere(SPACE[1], None)
    asked = search.ask(len(SPACE))
    assert not {far, SPACE[1], DEFAULT} & set(asked)
    assert far not in search.records  # what was measured here, the journal says
    assert asked[0] in neighbours(far) or asked[1] in neighbours(far)
