"""The measuring protocol with a scripted timer, and its statistics against hand-worked numbers."""

import itertools

import numpy as np
import pytest
import torch

from sagegen.measuring import bench
from sagegen.measuring.bench import WARM_UP_S, EventTimer, interleave, take_rounds, time_cold, time_host, time_warm
from sagegen.measuring.verdict import compare, summarize


class ScriptedTimer:
    """Gives times from a script and keeps what it was asked."""

    def __init__(self, *times):
        self.times = itertools.cycle(times)
        self.asked = []

    def cold(self, launch):
        launch()
        self.asked.append("cold")
        return next(self.times)

    def sustained(self, launch, seconds):
        launch()
        self.asked.append(f"sustained {seconds}")
        return next(self.times)


def test_cold_times_come_after_a_warm_up():
    launches = []
    timer = ScriptedTimer(99, 5, 7, 6)
    assert time_cold(lambda: launches.append(1), timer, 3) == [5, 7, 6]
    assert timer.asked == [f"sustained {WARM_UP_S}", "cold", "cold", "cold"]
    assert len(launches) == 4


class SlowHost:
    """A GPU that waits for as many cycles as it is told, and a host that needs `host_cycles` to queue a burst."""

    def __init__(self, monkeypatch, host_cycles):
        self.host_cycles, self.waits = host_cycles, []
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("", (), {"L2_cache_size": 0}))
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "_sleep", self.waits.append)
        monkeypatch.setattr(bench, "_LEAST_FLUSH_BYTES", 1)

    def query(self):
        return self.waits[-1] < self.host_cycles

    def elapsed_time(self, _):
        return 9.0 if self.query() else 3.0  # milliseconds of three launches

    def record(self):
        pass

    synchronize = record


def test_a_burst_is_repeated_behind_longer_waits_until_the_host_is_ahead(monkeypatch):
    host = SlowHost(monkeypatch, 5_000_000)
    launches = []
    assert EventTimer(torch.device("cpu")).burst(lambda: launches.append(1), 0, 3) == 1000
    assert host.waits == [400_000, 1_600_000, 6_400_000]
    assert len(launches) == 9


def test_a_burst_that_the_host_cannot_be_ahead_of_is_still_timed(monkeypatch):
    host = SlowHost(monkeypatch, 1e12)
    assert EventTimer(torch.device("cpu")).burst(lambda: None, 0, 3) == 3000
    assert len(host.waits) == 4


def test_warm_times_come_right_behind_a_launch_of_the_same(monkeypatch):
    launches = []
    timer = EventTimer.__new__(EventTimer)
    monkeypatch.setattr(
        timer, "_time", lambda launch, count: (launches.append(("timed", count)), 4.0)[1], raising=False
    )
    assert time_warm(lambda: launches.append("untimed"), timer, 2) == [4.0, 4.0]
    assert launches == ["untimed", ("timed", 1)] * 2


@pytest.mark.parametrize(
    ("throttles", "kept"),
    [
        ("....", [0, 1, 2, 3]),
        (".!..!.", [0, 2, 3, 5]),  # repeated
        ("!!!!!!..", [6, 7]),  # twice as many rounds are the end of it; two of four are enough
        ("!!!!!!!.", [7, 0, 1, 2]),  # and one is not: throttled ones fill up
    ],
)
def test_rounds_in_which_the_gpu_throttles_are_repeated(throttles, kept):
    numbers, marks = itertools.count(), iter(throttles)
    assert take_rounds(lambda: next(numbers), 4, lambda: next(marks) == "!") == kept
    assert next(marks, None) is None


def test_a_throttled_round_is_dropped_for_all_rivals():
    timer = ScriptedTimer(*range(1, 100))
    marks = iter([False, True, False])
    times = interleave({"a": int, "b": int}, timer.cold, 2, is_throttled=lambda: next(marks))
    assert sorted(times["a"] + times["b"]) == [1, 2, 5, 6]


def test_summary_is_median_and_outer_fifths():
    summary = summarize([50, 10, 40, 20, 30, 60])
    # sorted 10..60: the quantile p lies at 5 p between neighbours
    assert (summary.p20_us, summary.median_us, summary.p80_us) == (20, 35, 50)


def test_summary_ignores_one_wild_time():
    assert summarize([10, 10, 10, 10, 9000]).median_us == 10


def make_rivals(seen):
    return {name: lambda name=name: seen.append(name) for name in "abc"}


def test_every_round_times_every_rival_once_in_an_order_of_its_own():
    seen = []
    times = interleave(make_rivals(seen), ScriptedTimer(1).cold, rounds=50)
    rounds = [tuple(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) == 6
    assert {name: len(t) for name, t in times.items()} == {"a": 50, "b": 50, "c": 50}


def test_rounds_are_kept_as_pairs():
    drift = itertools.count()  # a GPU that gets slower with every launch
    rounds = interleave({"a": lambda: None, "b": lambda: None}, lambda launch: launch() or next(drift), rounds=4)
    assert [{a, b} for a, b in zip(rounds["a"], rounds["b"], strict=True)] == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]


def test_order_follows_the_seed():
    orders = []
    for seed in (0, 0, 1):
        seen = []
        interleave(make_rivals(seen), ScriptedTimer(1).cold, rounds=10, seed=seed)
        orders.append(seen)
    assert orders[0] == orders[1] != orders[2]


def test_steady_lead_is_certain():
    verdict = compare([20, 22, 18, 26], [10, 11, 9, 13])
    assert (verdict.ratio, verdict.low, verdict.high) == (2, 2, 2)
    assert verdict.is_faster
    assert not verdict.is_slower


def test_ratio_is_the_median_of_the_pairs():
    # 1/2, 2, 3: the ratio of the medians would be 20/10 as well, of the means 60/60
    assert compare([10, 20, 30], [20, 10, 10]).ratio == 2
    # 4, 1, 1: the ratio of the medians would be 2
    assert compare([40, 20, 10], [10, 20, 10]).ratio == 1


def test_drift_that_both_share_cancels():
    drift = np.linspace(1, 3, 40)
    verdict = compare(list(10 * drift), list(9.9 * drift))
    assert verdict.low == pytest.approx(10 / 9.9)
    assert verdict.is_faster


def test_noise_without_a_difference_decides_nothing():
    random = np.random.default_rng(5)
    a, b = (list(100 * random.lognormal(0, 0.05, 60)) for _ in range(2))
    verdict = compare(a, b)
    assert verdict.low < 1 < verdict.high
    assert not verdict.is_faster
    assert not verdict.is_slower


def test_slower_candidate_is_told():
    random = np.random.default_rng(6)
    base = 100 * random.lognormal(0, 0.02, 60)
    verdict = compare(list(base), list(base * 1.05 * random.lognormal(0, 0.02, 60)))
    assert verdict.is_slower
    assert verdict.low < 1 / 1.05 < verdict.high


def test_interval_is_that_of_the_exact_bootstrap():
    # three pairs with ratios 1, 2, 3: of the 27 draws, 7 have median 1, 13 have 2, 7 have 3; so 95 % reach from 1 to 3
    verdict = compare([1, 2, 3], [1, 1, 1])
    assert (verdict.ratio, verdict.low, verdict.high) == (2, 1, 3)


def test_interval_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(7)
    hits = 0
    for trial in range(200):
        a = list(100 * random.lognormal(0, 0.03, 40))
        b = list(95 * random.lognormal(0, 0.03, 40))
        verdict = compare(a, b, seed=trial)
        hits += verdict.low <= 100 / 95 <= verdict.high
    assert 180 <= hits <= 200


@pytest.mark.parametrize(("a", "b"), [([], []), ([1, 2], [1])])
def test_times_that_are_not_pairs_are_refused(a, b):
    with pytest.raises(ValueError, match="paired times"):
        compare(a, b)


def test_host_time_is_per_call_without_the_wait(monkeypatch) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr("sagegen.measuring.bench.time.perf_counter", lambda: clock["now"])

    def call() -> None:
        clock["now"] += 20e-6

    def wait() -> None:
        clock["now"] += 1.0

    assert time_host(call, wait, batches=3) == pytest.approx([20.0] * 3)
