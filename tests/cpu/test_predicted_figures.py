"""A predicted figure can't be printed, plotted or exported as a measured one.

What holds that is the types: a predicted entry with measured figures can't be made, a predicted time can't be formatted
without its `~`, and few modules get at a prediction at all.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sagegen import registry
from sagegen.cli.main import main
from sagegen.cli.tune import _print_table
from sagegen.cli.watch import Watcher
from sagegen.entry import Entry, MeasuredTime, PredictedRatio, PredictedTime, Provenance, Range, Timing
from sagegen.errors import RegistryError
from sagegen.problem import Problem
from sagegen.registry_file import dump_entries, parse_entries
from sagegen.runtime.precision import _describe_speed
from sagegen.tuning import offline
from sagegen.tuning.events import Attempted, Decided
from sagegen.tuning.journal import Record, Samples

ROOT = Path(__file__).parents[2]
PROBLEM = Problem(128, "bf16", True)
CONFIG = "mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qoreg_mb1"
#: Figures that a GPU gives; whatever `Timing` gets next is one of them unless its name says otherwise.
MEASURED = [name for name in Timing.__struct_fields__ if not name.startswith("predicted")]
#: Digits that occur nowhere else in any output.
KERNEL_US, CALL_US = 61749.5, 83526.5


def make_entry(kind: Any = "predicted", **figures: float) -> Entry:
    return Entry(
        problem=PROBLEM.name,
        bucket=Range(kv_min=1, kv_max=None),
        answer="kernel",
        config=CONFIG,
        kernel=f"{PROBLEM.name}_{CONFIG}",
        cubin_sha256="0" * 64,
        figures=Timing(**figures),
        provenance=Provenance(
            kind=kind, gpu="l20", sms=92, launch_abi=1, protocol=1, date="2026-11-30", shape="b1 h32/32 q4096 kv4096",
            model_error=0.09 if kind == "predicted" else None,
            model_checked_on="h200" if kind == "predicted" else None,
        ),
    )  # fmt: skip


PREDICTED = make_entry(predicted_us=KERNEL_US, predicted_full_us=CALL_US)


# --- entries


@pytest.mark.parametrize("figure", MEASURED)
def test_no_predicted_entry_has_a_figure_that_only_a_gpu_gives(figure: str) -> None:
    with pytest.raises(ValueError, match=f"`{figure}` is measured, and the entry is predicted"):
        make_entry(**{figure: 1.0})
    assert getattr(make_entry("measured", **{figure: 1.0}).figures, figure) == 1.0


def test_nor_does_one_get_it_by_a_change_or_from_a_file() -> None:
    measured = make_entry("measured", kernel_us=KERNEL_US, full_us=CALL_US)
    with pytest.raises(ValueError, match="is predicted"):
        structs.replace(measured, provenance=PREDICTED.provenance)
    text = dump_entries("l20", [PREDICTED])
    assert parse_entries(text, "l20.yaml", "l20") == [PREDICTED]
    with pytest.raises(RegistryError, match=r"l20\.yaml:\d+: .*`kernel_us` is measured, and the entry is predicted"):
        parse_entries(text.replace("predicted_us:", "kernel_us:"), "l20.yaml", "l20")
    with pytest.raises(RegistryError, match="is predicted"):
        parse_entries(dump_entries("l20", [measured]).replace("kind: measured", "kind: predicted"), "l20.yaml", "l20")


def test_a_prediction_is_never_a_rate() -> None:
    assert PREDICTED.answer_tops is None
    assert not PREDICTED.is_faster_than(make_entry("measured", kernel_us=1e6, full_us=1e6, full_tops=0.1))


def test_times_of_entries_say_what_they_are() -> None:
    measured = make_entry("measured", kernel_us=KERNEL_US, full_us=CALL_US)
    assert (measured.kernel_time, measured.call_time) == (MeasuredTime(KERNEL_US), MeasuredTime(CALL_US))
    assert (PREDICTED.kernel_time, PREDICTED.call_time) == (PredictedTime(KERNEL_US), PredictedTime(CALL_US))
    # a measured entry may keep what was predicted of it; that never stands in for what is missing
    assert make_entry("measured", predicted_us=KERNEL_US).kernel_time is None
    assert make_entry("predicted").kernel_time is None


# --- times


@given(
    us=st.floats(0.01, 1e7), spec=st.sampled_from(["", ".0f", ".1f", ".3f", "g", ".2e", "10.1f", ">12.1f", "015.2f"])
)
def test_however_a_predicted_time_is_formatted_the_tilde_is_there(us: float, spec: str) -> None:
    assert format(PredictedTime(us), spec) == "~" + format(us, spec)
    assert format(MeasuredTime(us), spec) == format(us, spec)


@pytest.mark.parametrize(
    "as_number", [float, int, round, lambda time: time * 1, lambda time: time / 2, lambda t: t < 1]
)
def test_a_predicted_time_is_no_number(as_number: Any) -> None:
    with pytest.raises(TypeError):
        as_number(PredictedTime(KERNEL_US))
    with pytest.raises(TypeError):
        as_number(MeasuredTime(KERNEL_US))
    with pytest.raises(TypeError):
        "%.1f" % PredictedTime(KERNEL_US)  # noqa: UP031 - the old way of formatting takes numbers only


# --- outputs


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's registry of one predicted entry; nothing is shipped."""
    monkeypatch.setattr(registry, "shipped_dir", lambda: tmp_path / "shipped")
    monkeypatch.setenv("SAGEGEN_TUNED_DIR", str(tmp_path / "tuned"))
    registry.save_entries(tmp_path / "tuned" / "l20.yaml", "l20", [PREDICTED], {})
    return tmp_path / "tuned"


def check(output: str) -> None:
    """Every occurrence of a predicted time has its mark right before it: `~`, or the member that says so."""
    assert "predicted" in output
    found = 0
    for digits in ("61749", "61750", "83526", "83527"):
        for place in re.finditer(digits, output):
            before = output[: place.start()]
            assert re.search(r'~$|"?predicted(_full)?_us"?: ?$', before), output[max(0, place.start() - 60) :]
            found += 1
    assert found


@pytest.mark.parametrize(
    "words", [["--gpu", "l20"], [], ["--gpu", "l20", "--problem", PROBLEM.name], ["--gpu", "l20", "--json"]]
)
def test_show_marks_predicted_times(tuned: Path, words: list[str]) -> None:
    result = CliRunner().invoke(main, ["show", *words])
    assert result.exit_code == 0
    check(result.stdout)
    if "--json" not in words and "--problem" not in words:
        assert "never measured there" in result.stderr
        assert "9 of 10 full calls within 9%, checked on h200 alone" in result.stderr


def test_show_says_nothing_of_predictions_where_there_are_none(tuned: Path) -> None:
    registry.save_entries(tuned / "l20.yaml", "l20", [make_entry("measured", kernel_us=KERNEL_US)], {})
    result = CliRunner().invoke(main, ["show", "--gpu", "l20"])
    assert ("61749.5" in result.stdout, "~" in result.stdout, result.stderr) == (True, False, "")


def test_tune_marks_predicted_times(capsys: pytest.CaptureFixture[str]) -> None:
    _print_table((PREDICTED,))
    check(capsys.readouterr().out)


def test_explain_marks_predicted_times() -> None:
    assert _describe_speed(PREDICTED) == "~83526 us"
    assert "predicted" in json.dumps(msgspec.to_builtins(PREDICTED))
    check(json.dumps(msgspec.to_builtins(PREDICTED)))


def test_what_a_run_says_while_it_ranks_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """Offline, the best so far and the decisions are the model's; the types of the events say so."""
    record = Record(PROBLEM.name, CONFIG, "build", "ok", "l20", 1, "")
    with Watcher() as watch:
        watch(Attempted(record, CONFIG, PredictedRatio(1.625), {"ok": 1}, progress=0.0))
        watch(Attempted(record, CONFIG, PredictedRatio(1.5), {"ok": 2}, progress=0.0))
        watch(Decided(PROBLEM.name, "kv1-", "kernel", CONFIG, PredictedRatio(1.625), None))
    said = capsys.readouterr().err
    assert len(re.findall(r"~1\.62", said)) == len(re.findall(r"1\.62", said)) >= 3
    assert "best so far ~1.5" not in said


def test_an_offline_run_has_no_speed_that_is_a_number() -> None:
    hints = get_type_hints(offline._OfflineRun._best_so_far)
    assert hints["return"] == tuple[str | None, PredictedRatio | None]
    with pytest.raises(TypeError):
        float(PredictedRatio(1.5))  # type: ignore[arg-type]


# --- journals


def test_a_journal_has_no_times_of_what_never_ran() -> None:
    record = Record("p", "c", "screen", "ok", "l20", 1, "", samples=(Samples(1024, 1, 1, 1, (KERNEL_US,)),))
    with pytest.raises(ValueError, match="nothing ran"):
        replace(record, phase="build")


# --- who gets at a prediction

#: Modules that may call the model: they order configs, make predicted entries, or set it beside what was measured.
MAY_PREDICT = {
    "sagegen.report.collection",
    "sagegen.tuning.entries",
    "sagegen.tuning.offline",
    "sagegen.tuning.ranking",
    "sagegen.tuning.validation",
}
#: Modules that may touch an entry's bare figures of time; all others take `kernel_time` and `call_time`.
MAY_TOUCH_FIGURES = {"sagegen.entry", "sagegen.tuning.entries"}
TIMES = {"kernel_us", "kernel_us_low", "kernel_us_high", "full_us", "predicted_us", "predicted_full_us"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for folder, package in (("sagegen", "sagegen"), ("cli", "sagegen.cli")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((package, *parts)), ast.parse(path.read_text())


def imported(tree: ast.Module) -> set[str]:
    found = {f"{n.module}.{a.name}" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    return found | {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}


def test_few_modules_can_predict() -> None:
    able = {
        name
        for name, tree in modules()
        if {f"sagegen.tuning.model.{what}" for what in ("predict", "Prediction")} & imported(tree)
        or "sagegen.tuning.model" in imported(tree)
    }
    assert able == MAY_PREDICT


def test_few_modules_touch_the_times_of_an_entry() -> None:
    """`entry.figures.predicted_us`, or of a name `figures`: formatted bare it would look measured."""

    def is_figures(node: ast.expr) -> bool:
        return (isinstance(node, ast.Attribute) and node.attr == "figures") or (
            isinstance(node, ast.Name) and node.id == "figures"
        )

    touching = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in TIMES and is_figures(node.value)
    }
    assert touching <= MAY_TOUCH_FIGURES
