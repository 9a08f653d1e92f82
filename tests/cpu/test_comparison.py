"""A kernel beside its peers: rates, spreads and ratios against hand-worked numbers."""

import json

import pytest

from sagegen.measuring.comparison import HEADINGS, make_cells, make_comparison, to_markdown
from sagegen.measuring.jobs import Reply
from sagegen.problem import Problem, Shape

FULL = Problem(128, "bf16", False)
CAUSAL = Problem(128, "bf16", True)
# 4 x 4 x 32 x 4096 x 4096 x 128 operations
SHAPE = Shape(4, 32, 32, 4096, 4096)


def reply(kernel, call, absent=None, **peers):
    data = {
        "kernel_us": [kernel],
        "call_us": [call],
        "peers": {name.replace("_", "-"): times for name, times in peers.items()},
        "absent": absent or {},
    }
    return Reply("ok", data=data)


def compare(problem=FULL, answer=None):
    answer = answer or reply([1000] * 5, [1250] * 5, sdpa_flash=[3000] * 5, sdpa_cudnn=[1500] * 5)
    return make_comparison(problem, SHAPE, "mma_x", "default, built here", answer)


def test_rates_are_operations_over_the_median_time():
    # 1.0995e12 operations in a millisecond
    assert compare().tops("kernel") == pytest.approx(1099.5, abs=0.1)
    assert compare(CAUSAL).tops("kernel") == pytest.approx(549.8, abs=0.1)
    assert compare().tops("sdpa-flash") == pytest.approx(366.5, abs=0.1)


def test_speeds_are_over_the_faster_peer():
    comparison = compare()
    assert comparison.speed.ratio == 1500 / 1250
    assert comparison.kernel_speed.ratio == 1500 / 1000
    assert (comparison.speed.low, comparison.speed.high) == (1.2, 1.2)


def test_cells_show_spread_and_interval():
    # percentiles 20 and 80 of 980, 990, 1000, 1010, 1020 are 988 and 1012
    answer = reply([990, 1020, 1000, 980, 1010], [1250] * 5, sdpa_flash=[2500] * 5)
    cells = dict(zip(HEADINGS, make_cells(compare(answer=answer)), strict=True))
    assert cells["kernel TOPS"] == "1100 ±1.2%"
    assert cells["call / best"] == "2.000 (2.000..2.000)"
    assert cells["cuDNN TOPS"] == "-"


def test_missing_peers_are_named_with_their_reason():
    answer = reply([1000] * 2, [1250] * 2, absent={"sdpa-flash": "no kernel", "sdpa-cudnn": "cuDNN is off"})
    comparison = compare(answer=answer)
    assert comparison.speed is None
    text = to_markdown([comparison], {"GPU": "NVIDIA H200"}, 2, 0)
    assert "sdpa-cudnn could not run: cuDNN is off" in text


def test_failure_keeps_its_row():
    comparison = compare(answer=Reply("crash", "CUDA error: an illegal memory access was encountered"))
    assert comparison.failure == "crash: CUDA error: an illegal memory access was encountered"
    assert len(make_cells(comparison)) == len(HEADINGS)
    assert comparison.failure in to_markdown([comparison], {}, 2, 0)


def test_markdown_says_how_it_was_measured():
    text = to_markdown([compare(), compare(CAUSAL)], {"GPU": "NVIDIA H200", "driver": "580.1", "limit": None}, 40, 0.3)
    assert text.startswith("Measured on GPU NVIDIA H200, driver 580.1; protocol 1, 40 interleaved rounds")
    assert "means of 0.3 s back to back" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {len(HEADINGS) + 3}
    assert "`mma_x` (default, built here)" in rows[-1]


def test_values_are_json():
    values = json.loads(json.dumps(compare().as_values()))
    assert values["times"]["call"]["median_us"] == 1250
    assert values["speed"]["ratio"] == 1.2
