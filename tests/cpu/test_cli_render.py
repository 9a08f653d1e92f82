"""`sagegen render`, and how commands take GPU, config and problem."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sagegen.cli.main import main
from sagegen.gpu import GPUS
from sagegen.problem import Problem
from sagegen.render import render
from sagegen.rules import Target, default_config


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["render", *words])


def test_the_default_config_is_printed() -> None:
    problem = Problem(128, "bf16", False)
    result = run("--gpu", "l20", "--config", "default")
    assert result.exit_code == 0
    assert result.stdout == render(problem, default_config(Target(GPUS["l20"], problem))).text


def test_the_options_make_the_problem() -> None:
    result = run("--gpu", "a100", "--config", "default", "--head-dim", "64", "--dtype", "fp16", "--causal")
    assert "attention_d64_fp16_causal_int8_mma_" in result.stdout
    result = run("--gpu", "a100", "--config", "default", "--precision", "int4")
    assert "attention_d128_bf16_full_int4_mma_" in result.stdout
    assert "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32" in result.stdout


def test_a_config_is_taken_by_its_name() -> None:
    name = default_config(Target(GPUS["l20"], Problem(128, "bf16", False))).name
    assert run("--gpu", "l20", "--config", name).stdout == run("--gpu", "l20", "--config", "default").stdout


def test_the_source_goes_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "attention.cu"
    result = run("--gpu", "l20", "--config", "default", "-o", str(path))
    assert (result.exit_code, result.stdout) == (0, "")
    assert path.read_text() == run("--gpu", "l20", "--config", "default").stdout


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    result = run("--gpu", "l20", "--config", "default", "-o", str(tmp_path / "none" / "a.cu"))
    assert result.exit_code == 2
    assert "none/a.cu cannot be written" in result.stderr


@pytest.mark.parametrize("config", ["../../x", "a; rm", "", "mma", "mma_bq128/../..", "DEFAULT", "\x00", "mma_" * 500])
def test_a_config_that_spells_none_is_refused_and_nothing_written(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("--gpu", "l20", "--config", config, "-o", "out.cu")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: config ")
    assert "Remedy: " in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_breaks_a_rule_names_the_rule() -> None:
    name = default_config(Target(GPUS["l20"], Problem(128, "bf16", False))).name
    result = run("--gpu", "a100", "--config", name)  # FP8 needs sm_89
    assert result.exit_code == 2
    assert "pv_arch" in result.stderr


def test_an_unknown_gpu_suggests_the_nearest() -> None:
    result = run("--gpu", "4090", "--config", "default")
    assert result.exit_code == 2
    assert "GPU '4090' is unknown" in result.stderr
    assert "did you mean rtx4090?" in result.stderr


@pytest.mark.parametrize("words", [["--config", "default"], ["--gpu", "l20"]])
def test_gpu_and_config_must_be_given(words: list[str]) -> None:
    assert run(*words).exit_code == 2


@pytest.mark.parametrize("words", [["--head-dim", "96"], ["--dtype", "fp32"]])
def test_a_problem_without_kernel_is_misuse(words: list[str]) -> None:
    assert run("--gpu", "l20", "--config", "default", *words).exit_code == 2
