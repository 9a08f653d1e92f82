"""`sagegen show`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sagegen import registry
from sagegen.cli.main import main
from sagegen.problem import Problem
from sagegen.registry import Accuracy, Entry, Provenance, Range, Timing
from sagegen.render import render
from sagegen.space import parse_config

PROBLEM = Problem(128, "bf16", True)
CONFIG = parse_config("mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qoreg_mb1")
TEXT = render(PROBLEM, CONFIG).sha256


def make_entry(kv=(1, None), kind="measured", text=TEXT, answer="kernel", **rest) -> Entry:
    return Entry(
        problem=PROBLEM.name,
        bucket=Range(kv_min=kv[0], kv_max=kv[1]),
        answer=answer,
        config=CONFIG.name,
        kernel=f"{PROBLEM.name}_{CONFIG.name}",
        cubin_sha256=hashlib.sha256(b"cubin").hexdigest(),
        provenance=Provenance(
            kind=kind, gpu="l20", sms=92, launch_abi=1, protocol=1, date="2025-11-29", shape="b1", text_sha256=text
        ),
        **rest,
    )


@pytest.fixture
def tuned(tmp_path, monkeypatch) -> Path:
    """The user's folder of registries; none is shipped."""
    monkeypatch.setattr(registry, "shipped_dir", lambda: tmp_path / "shipped")
    monkeypatch.setenv("SAGEGEN_TUNED_DIR", str(tmp_path / "tuned"))
    return tmp_path / "tuned"


def show(*arguments: str):
    return CliRunner().invoke(main, ["show", *arguments])


def row_of(output: str, part: str) -> list[str]:
    return next(line for line in output.splitlines() if part in line).split()


def test_the_table_has_figures_and_origin(tuned):
    measured = make_entry(
        (1, 2047), figures=Timing(kernel_us=123.44, tops=456.7, speed_vs_sdpa=1.234), min_cosine=0.99953
    )
    predicted = make_entry((2048, 8191), kind="predicted", figures=Timing(predicted_us=77.06))
    slower = make_entry((8192, None), answer="sdpa", text="0" * 64)
    registry.save_entries(tuned / "l20.yaml", "l20", [measured, predicted, slower], {})
    output = show("--gpu", "l20").output
    assert row_of(output, "kv1-2047") == [
        "l20", PROBLEM.name, "kv1-2047", "457", "123.4", "1.23x", "0.99953", "measured,", "user",
        CONFIG.name,
    ]  # fmt: skip
    assert row_of(output, "kv2048-8191") == [
        "l20", PROBLEM.name, "kv2048-8191", "-", "~77.1", "-", "-", "predicted,", "user",
        CONFIG.name,
    ]  # fmt: skip
    assert row_of(output, "kv8192-")[7:] == ["answers", "sdpa,", "measured,", "user,", "stale", CONFIG.name]


def test_json_has_every_field_and_the_layer(tuned):
    accuracy = {"normal": Accuracy(cosine=0.9995, relative_l1=0.02, relative_l2=0.03, max_error=0.1, scale_ratio=1.0)}
    registry.save_entries(tuned / "l20.yaml", "l20", [make_entry(accuracy=accuracy)], {})
    registry.save_entries(registry.shipped_dir() / "l20.yaml", "l20", [make_entry(text=None)], {})
    (user, shipped) = json.loads(show("--json").output)["entries"]
    assert (user["layer"], shipped["layer"]) == ("user", "shipped")
    assert (user["stale"], shipped["stale"]) == (False, None)
    assert user["accuracy"]["normal"]["relative_l1"] == 0.02
    assert user["gpu"] == "l20"


def test_one_problem_is_printed_in_full(tuned):
    registry.save_entries(tuned / "l20.yaml", "l20", [make_entry()], {})
    result = show("--gpu", "l20", "--problem", PROBLEM.name)
    assert "# l20, measured, user" in result.output
    assert f"  kernel: {PROBLEM.name}_{CONFIG.name}\n" in result.output
    assert show("--problem", "d64_fp16_full_int8").output.startswith("Nothing is tuned")
    assert show("--problem", "d65").exit_code == 2


def test_nothing_tuned_says_how_to_tune(tuned):
    result = show("--gpu", "l20")
    assert result.output == "Nothing is tuned for l20; to tune: sagegen tune --gpu l20\n"
    assert result.exit_code == 0


def test_a_problem_that_is_not_tuned_says_what_tunes_it(tuned, monkeypatch):
    """Beside entries of other problems, and by options that are no defaults."""
    registry.save_entries(tuned / "l20.yaml", "l20", [make_entry()], {})
    asked = []
    monkeypatch.setattr("sagegen.cli.tune._make_request", lambda gpu, options, *_, **__: asked.append(options.problems))
    for name in ("d128_bf16_full_int4", "d64_fp16_causal_int8"):
        said = show("--gpu", "l20", "--problem", name).output
        assert said.startswith(f"Nothing is tuned for l20 and {name}; to tune: sagegen tune --gpu l20 ")
        CliRunner().invoke(main, [*said.split("to tune: sagegen ")[1].split(), "--offline"])
        assert [problem.name for problem in asked.pop()] == [name]


def test_a_broken_registry_is_named_and_the_others_are_shown(tuned):
    """E11."""
    registry.save_entries(tuned / "l20.yaml", "l20", [make_entry()], {})
    (tuned / "h200.yaml").write_text("schema: 1\ngpu: h200\n")
    result = show()
    assert result.exit_code == 2
    assert "h200.yaml:3: the file is cut short" in result.stderr
    assert "kv1-" in result.stdout
    assert "h200.yaml:3" in json.loads(show("--json").stdout)["errors"][0]


def test_an_unknown_gpu_is_misuse(tuned):
    result = show("--gpu", "l21")
    assert result.exit_code == 2
    assert "did you mean l20" in result.stderr


def test_the_space_lists_parameters_with_their_values():
    output = show("--space").output
    assert row_of(output, "block_q")[:4] == ["block_q", "bq", "64,", "128"]
    assert (
        "716636160 configs; --gpu NAME counts those that a tuning run tries" in output
    )  # the product of the lists' lengths


def test_the_space_counts_what_a_tuning_run_tries(monkeypatch):
    seen = []

    def searched_configs(space, target):
        seen.append(target)
        return [CONFIG] * 7

    monkeypatch.setattr("sagegen.rules.searched_configs", searched_configs)
    output = show("--space", "--gpu", "l20", "--head-dim", "64", "--dtype", "fp16").output
    assert "7 of 716636160 configs are valid and tried by a tuning run on l20 for d64_fp16_full_int8" in output
    assert (seen[0].gpu.name, seen[0].problem) == ("l20", Problem(64, "fp16", False))
    family = json.loads(show("--space", "--gpu", "l20", "--json").output)["families"][0]
    assert (family["searched"], family["params"][0]["values"]) == (7, [64, 128])
