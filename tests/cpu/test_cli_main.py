"""The `sagegen` command itself."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest
from click.testing import CliRunner

from sagegen.cli.main import COMMANDS, main
from sagegen.errors import ConfigError


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def test_help_lists_every_command_with_its_line(runner: CliRunner) -> None:
    result = runner.invoke(main, ["--help"])
    assert result.exit_code == 0
    for name in ("gpus", "doctor", "render", "build", "tune", "verify", "bench", "show"):
        assert f"  {name} " in result.output
        assert COMMANDS[name] in result.output


def test_help_imports_no_command() -> None:
    script = (
        "import sys; from sagegen.cli.main import COMMANDS, main; main(['--help'], standalone_mode=False);"
        "print([m for m in sys.modules if m.split('.')[-1] in COMMANDS or m in ('torch', 'optuna', 'rich', 'jinja2')])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(runner: CliRunner, name: str) -> None:
    result = runner.invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert f"sagegen {name}" in result.output.partition("Example")[2]


def test_an_unknown_command_is_misuse(runner: CliRunner) -> None:
    result = runner.invoke(main, ["tuna"])
    assert result.exit_code == 2
    assert "No such command 'tuna'" in result.stderr


def test_our_errors_are_one_message_on_stderr_and_misuse(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ConfigError("config x is not valid", "take y")

    monkeypatch.setattr("sagegen.cli.gpus.detect_gpus", fail)
    result = runner.invoke(main, ["gpus"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == "Error: config x is not valid\nRemedy: take y\n"


def test_other_errors_are_not_hidden(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("sagegen.cli.gpus.detect_gpus", fail)
    assert isinstance(runner.invoke(main, ["gpus"]).exception, ZeroDivisionError)


def test_an_error_of_the_file_system_is_a_message_that_names_the_path(monkeypatch, tmp_path) -> None:
    def fill_up(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "kernel.cu"))

    monkeypatch.setattr("sagegen.gpu.find_gpu", fill_up)
    result = CliRunner().invoke(main, ["build", "--gpu", "l20", "--config", "default"])
    assert result.exit_code == 2
    assert str(tmp_path / "kernel.cu") in result.stderr
    assert "No space left on device" in result.stderr
    assert "Remedy: check the path" in result.stderr


def test_an_interrupt_before_there_is_anything_to_keep_ends_as_shells_have_it(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sagegen.cli.gpus.detect_gpus", interrupt)
    result = runner.invoke(main, ["gpus"])
    assert (result.exit_code, result.stderr) == (130, "Interrupted.\n")


@pytest.mark.parametrize("arguments", [("gc", "--days"), ("bench", "--gpu", "l20", "--min-cosine")])
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_what_is_no_finite_number_is_misuse(runner: CliRunner, arguments: tuple[str, ...], number: str) -> None:
    result = runner.invoke(main, [*arguments, number])
    assert result.exit_code == 2
    assert "finite" in result.stderr or "range" in result.stderr
