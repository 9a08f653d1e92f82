"""The report's figures, axes and statistics, against values worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from sagegen.entry import Entry, Provenance, Range, Timing
from sagegen.errors import ArgumentError
from sagegen.gpu import Rates, find_gpu
from sagegen.measuring.contenders import Contender
from sagegen.measuring.goals import Leg
from sagegen.measuring.race import Standing
from sagegen.measuring.subjects import Subject
from sagegen.problem import Problem, Shape
from sagegen.report.accuracy_charts import pareto_front
from sagegen.report.cases import Attempt, Case, ProblemFacts, Tuned
from sagegen.report.failures import group_failures
from sagegen.report.figure import Figure, format_number, format_tokens
from sagegen.report.importance import find_agreement, find_influences, main_family
from sagegen.report.limits import find_roofs, least_bytes
from sagegen.report.races import draw_race, read_races
from sagegen.report.scale import linear_scale, log_scale
from sagegen.report.search_charts import draw_parameters, draw_progress, improvements
from sagegen.report.standings import make_rows
from sagegen.report.tables import attempts_table
from sagegen.space import MmaConfig, parse_config
from sagegen.tuning.distances import CaseDistances, Distance
from sagegen.tuning.journal import Record

PROBLEM = Problem(128, "bf16", False)
TOKENS = 4096
SHAPE = Shape(4, 32, 32, TOKENS, TOKENS)
MMA = parse_config("mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qoreg_mb1")
WGMMA = parse_config("wgmma_c2_bk128_st2_scplain_acone_ks128_rsskip_suones_exmufu_laearly")
H200 = find_gpu("h200")


def attempt(number: int, us: float, error: float | None = None, config=MMA, outcome="ok") -> Attempt:
    figures = {} if error is None else {"normal": {"cosine": 1 - error}}
    record = Record(PROBLEM.name, config.name, "screen", outcome, "h200", 1, "0" * 64, figures=figures)
    times = {TOKENS: Figure(us, "measured")} if outcome == "ok" else {}
    return Attempt(number, record, config, times, times, {}, True)


def case(*attempts: Attempt, tuned: tuple[Tuned, ...] = ()) -> Case:
    return Case(H200, PROBLEM, SHAPE, attempts, (), {}, tuned)


def entry(kind: str, **figures: float) -> Entry:
    provenance = Provenance(kind=kind, gpu="h200", sms=132, launch_abi=1, protocol=1, date="2026-01-01", shape="b4")
    return Entry(
        problem=PROBLEM.name, bucket=Range(kv_min=1, kv_max=None), answer="sdpa", config=MMA.name,
        provenance=provenance, figures=Timing(**figures),
    )  # fmt: skip


# ---- figures


def test_numbers_have_four_digits():
    values = (0.51234, 5.1234, 51.234, 512.34, 5123.4, 51234, 0, 0.0000012)
    assert [format_number(v) for v in values] == [
        "0.5123", "5.123", "51.23", "512.3", "5,123", "51,234", "0", "0.000001",
    ]  # fmt: skip
    assert [format_tokens(n) for n in (1024, 16384, 1000)] == ["1K", "16K", "1,000"]


def test_a_prediction_keeps_its_mark_whatever_is_made_of_it():
    time = Figure(2000.0, "predicted")
    made = (time, time.scaled(0.5), time.rate(4e12))
    assert [figure.text("x") for figure in made] == ["~2,000 x", "~1,000 x", "~2,000 x"]
    assert Figure(2000.0, "measured").rate(4e12) == Figure(2000.0, "measured")  # 4e12 in 2 ms


def test_an_entrys_times_are_what_its_provenance_says():
    times = {"kernel_us": 50.0, "full_us": 80.0, "speed_vs_sdpa": 2.0}
    measured = Tuned(entry("measured", **times, predicted_us=1.0, predicted_full_us=2.0), SHAPE)
    assert (measured.kernel, measured.call) == (Figure(50.0, "measured"), Figure(80.0, "measured"))
    assert measured.sdpa == Figure(160.0, "measured")
    predicted = Tuned(entry("predicted", predicted_us=50.0, predicted_full_us=80.0), SHAPE)
    assert (predicted.kernel, predicted.call) == (Figure(50.0, "predicted"), Figure(80.0, "predicted"))
    assert predicted.sdpa is None
    assert Tuned(entry("measured", predicted_us=1.0), SHAPE).kernel is None


def test_times_that_no_kernel_takes_are_not_known():
    odd = Tuned(entry("measured", kernel_us=1e300, full_us=1e-300, speed_vs_sdpa=2.0), SHAPE)
    assert (odd.kernel, odd.call, odd.sdpa) == (None, None, None)
    assert Tuned(entry("measured", full_us=80.0, speed_vs_sdpa=1e300), SHAPE).sdpa is None


def test_rows_without_a_journal_are_the_registrys():
    rows = make_rows(case(tuned=(Tuned(entry("predicted", predicted_us=50.0, predicted_full_us=80.0), SHAPE),)))
    assert [(row.who, row.call, row.basis) for row in rows] == [
        ("winner", Figure(80.0, "predicted"), "predicted, 2026-01-01")
    ]


def test_a_measured_registry_has_the_models_guess_beside_its_own_times():
    measured = Tuned(entry("measured", kernel_us=50.0, full_us=80.0), SHAPE, Figure(70.0, "predicted"))
    rows = make_rows(case(tuned=(measured,)))
    assert [(row.who, row.call) for row in rows] == [
        ("winner", Figure(80.0, "measured")), ("winner, predicted", Figure(70.0, "predicted")),
    ]  # fmt: skip


# ---- axes


def test_the_second_of_all_that_is_the_first_of_the_fine_ones_is_a_winner() -> None:
    def distance(role, config, us):
        return Distance(role, config, us, 1.0, us / 10.0, None, "final")

    default, worst = WGMMA.name, "worst"
    coarse = (distance("winner", "a", 10.0), distance("runner-up", "b", 11.0), distance("default", default, 20.0))
    fine = (distance("winner", "b", 11.0), distance("runner-up", "c", 12.0), distance("default", default, 20.0))
    standings = tuple(
        CaseDistances("h200", PROBLEM.name, TOKENS, tier, (*own, distance("worst", name, 30.0)))
        for tier, own, name in (("coarse", coarse, worst), ("fine", fine, "worst of the fine"))
    )
    rows = make_rows(replace(case(), standings=standings))
    assert {(row.who, row.kind, row.config) for row in rows} == {
        ("winner, coarse", "win", "a"),
        ("winner, fine", "win", "b"),
        ("runner-up, fine", "also", "c"),
        ("default config", "default", default),
        ("slowest valid, coarse", "also", worst),
        ("slowest valid, fine", "also", "worst of the fine"),
    }


def test_a_linear_axis_ends_at_round_values():
    scale = linear_scale([37.0, 91.0], 0, 100)
    assert scale.ticks == (0, 20, 40, 60, 80, 100)
    assert [scale.place(v) for v in (0, 25, 91, 1000, -5)] == [0, 25, 91, 100, 0]
    assert linear_scale([0.0], 0, 10).ticks[-1] > 0


def test_a_logarithmic_axis_gives_equal_ratios_equal_room():
    scale = log_scale([100.0, 10000.0], 200, 0)
    ten, hundred, thousand = (scale.place(v) for v in (100, 1000, 10000))
    assert ten - hundred == pytest.approx(hundred - thousand, abs=0.11)
    assert scale.ticks == (100, 300, 1000, 3000, 10000)


@pytest.mark.parametrize("values", [[5.0], [100.0, 101.0], [300.0, 9000.0], [1e-6, 1e-3], [1e-9, 1e9], [2.0, 2.0]])
def test_ticks_lie_on_their_axis_and_are_few(values):
    scale = log_scale(values, 0, 100)
    assert 1 <= len(scale.ticks) <= 7
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks)
    assert len({scale.place(tick) for tick in scale.ticks}) == len(scale.ticks)


# ---- statistics


def test_importance_is_the_share_of_variance_between_the_values():
    """Logs of the times are 0, 2, 2, 4; by stages their means are 1 and 3: 4 of 8. By rescale 2 and 2: nothing."""
    two, three = (replace(MMA, stages=n) for n in (2, 3))
    skipping = [replace(config, rescale="skip") for config in (two, three)]
    times = [(two, 0), (skipping[0], 2), (skipping[1], 2), (three, 4)]
    own = [attempt(i, math.exp(log), config=config) for i, (config, log) in enumerate(times, start=1)]
    found = find_influences(own, TOKENS)
    assert [(i.param.name, pytest.approx(i.share)) for i in found] == [("stages", 0.5), ("rescale", 0.0)]
    groups = found[0].groups
    assert [(g.value, len(g.times)) for g in groups] == [(2, 2), (3, 2)]
    assert groups[0].best == Figure(1.0, "measured")
    assert groups[0].median.value == pytest.approx((1 + math.exp(2)) / 2)


def test_parameters_of_the_family_with_most_attempts_are_compared():
    assert main_family([attempt(1, 1.0), attempt(2, 1.0, config=WGMMA), attempt(3, 2.0)]) == "mma"
    assert main_family([]) == ""


def test_agreement_by_hand():
    """Ranks 1 2 3 4 and 1 3 2 4: 1 - 6 * 2 / (4 * 15) = 0.8. The two favourites' fastest is the best's equal."""
    predicted = {"a": 10.0, "b": 20.0, "c": 30.0, "d": 40.0, "unseen": 1.0}
    measured = {"a": 20.0, "b": 60.0, "c": 40.0, "d": 80.0}
    found = find_agreement(predicted, measured, top=2)
    assert found is not None
    assert found.spearman == pytest.approx(0.8)
    assert (found.top, found.behind, found.median_ratio) == (2, 1.0, 0.5)
    worse = find_agreement({"a": 9.0, "b": 1.0, "c": 8.0}, {"a": 4.0, "b": 6.0, "c": 5.0}, top=1)
    assert worse is not None
    assert (worse.spearman, worse.behind) == (pytest.approx(-1.0), 1.5)


def test_equal_values_share_their_mean_rank():
    """Ranks 1.5 1.5 3 against 1 2 3: Pearson's of these is 1.5 / sqrt(1.5 * 2)."""
    found = find_agreement({"a": 1.0, "b": 1.0, "c": 2.0}, {"a": 1.0, "b": 2.0, "c": 3.0})
    assert found is not None
    assert found.spearman == pytest.approx(1.5 / math.sqrt(3))
    flat = find_agreement({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 2.0, "c": 3.0})
    assert flat is not None
    assert flat.spearman is None
    assert find_agreement({"a": 1.0}, {"b": 1.0}) is None


def test_the_front_holds_whom_nobody_beats_in_both():
    points = [(10, 5e-4), (12, 4e-4), (13, 4.5e-4), (20, 1e-5), (9, 8e-4), (20, 2e-5), (5, None)]
    front = pareto_front([attempt(i, us, error) for i, (us, error) in enumerate(points)], TOKENS)
    assert [(a.call[TOKENS].value) for a in front] == [9, 10, 12, 20]


def test_improvements_are_attempts_faster_than_all_before():
    own = case(attempt(1, 5.0), attempt(2, 7.0), attempt(3, 0.0, outcome="crash"), attempt(4, 3.0), attempt(5, 3.0))
    assert [(a.number, time.value) for a, time in improvements(own)] == [(1, 5.0), (4, 3.0)]
    chart = draw_progress(own)
    assert chart is not None
    assert "the fastest 3.000 µs at attempt 4" in chart.summary
    assert [key.text for key in chart.keys if "failed" in key.text] == ["failed (1), on the axis"]


def test_failures_that_differ_in_numbers_alone_are_one_group():
    base = Record(PROBLEM.name, MMA.name, "build", "constraint", "h200", 1, "0" * 64)
    reasons = ["spills 24 bytes", "spills 8 bytes", "lse is off by 0.01", ""]
    found = group_failures([base, *(replace(base, reason=reason) for reason in reasons)])
    assert [(f.count, f.reason) for f in found] == [
        (2, "no reason was recorded"), (2, "spills 24 bytes"), (1, "lse is off by 0.01"),
    ]  # fmt: skip


# ---- limits


def test_roofs_are_the_probes_where_there_is_one():
    matrix = {"wgmma_s8_ss_n128": 2000.0, "wgmma_e4m3f32_rs_n128": 1000.0}
    probed = replace(H200, measured=Rates(matrix, {"ex2": 16.0}, dram_gbs=4000.0))
    roofs = {roof.name: roof for roof in find_roofs(probed, PROBLEM, WGMMA)}
    assert {roof.basis for roof in roofs.values()} == {"probe"}
    assert roofs["matrix units"].tops == pytest.approx(2 / (1 / 2000 + 1 / 1000))
    assert roofs["device memory"].tops == 4.0
    # 16 results of 132 SMs at 1.98 GHz, 4 x 128 operations each
    assert roofs["2^x of all scores"].tops == pytest.approx(16 * 132 * 1.98e9 * 512 / 1e12)


def test_the_table_lends_no_rate_of_mma_to_wgmma():
    assert {roof.name: roof.basis for roof in find_roofs(H200, PROBLEM, WGMMA)} == {"device memory": "table"}
    ada = {roof.name: roof for roof in find_roofs(find_gpu("rtx4090"), PROBLEM, MMA)}
    assert ada["matrix units"].tops == pytest.approx(2 / (1 / 660.6 + 1 / 330.3))
    assert ada["matrix units"].basis == "table"


def test_least_bytes_by_hand():
    """Of each element: Q 1, K 1, V 1, O 2; V in 16 bits or Q quantized by the kernel itself cost one more."""
    elements = 4 * 32 * TOKENS * 128
    assert least_bytes(MMA, PROBLEM, SHAPE) == 5 * elements
    assert isinstance(MMA, MmaConfig)
    assert least_bytes(replace(MMA, pv="bf16f32"), PROBLEM, SHAPE) == 6 * elements
    prologue = parse_config(f"{WGMMA.name}_qqprologue")
    assert least_bytes(prologue, PROBLEM, SHAPE) == 6 * elements
    assert least_bytes(MMA, PROBLEM, replace(SHAPE, heads_kv=8)) == 3 * elements + 2 * elements / 4


# ---- large journals


def test_a_chart_of_very_many_attempts_says_what_it_leaves_out():
    configs = [replace(MMA, stages=2 + i % 2) for i in range(1700)]
    own = [attempt(i + 1, 100 + i, config=config) for i, config in enumerate(configs)]
    large = case(*own)
    chart = draw_parameters(large, find_influences(own, TOKENS), own)
    assert chart is not None
    # 850 in each row, every third is drawn: 284
    assert f"{2 * (850 - 284)} points are thinned out" in chart.note
    table = attempts_table(ProblemFacts(H200, PROBLEM, tuple(own), (large,), (), ()))
    assert len(table.rows) == 1500
    assert "200 further attempts" in table.note
    few = draw_parameters(case(*own[:10]), find_influences(own[:10], TOKENS), own[:10])
    assert few is not None
    assert "thinned" not in few.note


# ---- races


def write_races(path: Path, **changes: object) -> Path:
    """As `sagegen bench --peers --json` does; 4 B H L L d operations are 1.1e12 here."""
    accuracy = {"normal": {"cosine": 0.9994, "relative_l1": 0.037}, "channel_offsets": {"cosine": 0.9992}}
    own = Contender(Subject(PROBLEM, WGMMA, Path("x.cubin"), "built here"), accuracy)
    times = {"kernel 0": [1000.0], "call 0": [1250.0], "sdpa-cudnn": [2000.0]}
    absent = {"cudnn-fp8": "no <b>cudnn</b>"}
    standing = Standing(Leg(PROBLEM, SHAPE, ("kernel", "call")), (own,), sustained_us=times, absent=absent)
    values = {"machine": {"GPU": "NVIDIA H200"}, "races": [standing.as_values()], **changes}
    path.write_text(json.dumps(values))
    return path


def test_a_race_is_read_as_bench_writes_it(tmp_path):
    path = write_races(tmp_path / "race.json")
    (race,) = read_races(path, path.read_bytes())
    tera = 4 * 4 * 32 * TOKENS**2 * 128 / 1e12
    assert (race.gpu, race.problem) == ("h200", PROBLEM.name)
    assert [(r.who, r.rate.origin, pytest.approx(r.rate.value), r.config) for r in race.racers] == [
        ("sagegen kernel, fine/coarse", "measured", tera / 1000e-6, WGMMA.name),
        ("sagegen call, fine/coarse", "measured", tera / 1250e-6, WGMMA.name),
        ("cuDNN bf16", "measured", tera / 2000e-6, ""),
    ]
    assert draw_race(race).note == "cuDNN FP8 did not run: no <b>cudnn</b>"


def test_what_is_no_race_is_refused(tmp_path):
    path = tmp_path / "race.json"
    path.write_text('{"comparisons": []}')
    with pytest.raises(ArgumentError, match="holds no races"):
        read_races(path, path.read_bytes())
    write_races(path, machine={"GPU": "NVIDIA H2000"})
    with pytest.raises(ArgumentError, match="H2000"):
        read_races(path, path.read_bytes())
