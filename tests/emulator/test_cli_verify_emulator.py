"""`sagegen verify --emulator`, the gate behind it, and the gate of `tune --offline`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from sagegen import registry
from sagegen.cli.main import main
from sagegen.emulator import program as program_module
from sagegen.env import read_env
from sagegen.gpu import GPUS
from sagegen.measuring.emulated import count_banks, gate_emulated, small_cases
from sagegen.measuring.inputs import EMULATED_KINDS
from sagegen.problem import Problem
from sagegen.render import render
from sagegen.rules import Target, default_config
from sagegen.tuning.gatekeeper import make_gate

pytestmark = pytest.mark.emulator

L20 = GPUS["l20"]
PROBLEM = Problem(64, "bf16", False)
CONFIG = default_config(Target(L20, PROBLEM))


@pytest.fixture(scope="module")
def cases():
    return small_cases()


@pytest.fixture
def broken_render(monkeypatch):
    """`break_text(change)`: what the emulator renders from now on."""

    def break_text(change):
        def render_changed(problem, config, target="cuda"):
            source = render(problem, config, target)
            changed = change(source.text)
            assert changed != source.text
            return type(source)(source.name, problem, config, changed)

        monkeypatch.setattr(program_module, "render", render_changed)

    return break_text


def drop_first_barrier(text):
    before, end, after = text.partition("// ---- device layer: end ----")
    return before + end + after.replace("device::block_sync();", "", 1)


@pytest.mark.parametrize(
    ("gpu", "problem"),
    [
        ("l20", Problem(64, "bf16", True)),
        ("l20", Problem(128, "fp16", False)),
        ("a100", Problem(64, "fp16", False)),
        ("h200", Problem(64, "bf16", True)),
    ],
    ids=str,
)
def test_default_configs_pass_the_small_gate(gpu, problem, cases):
    verdict = gate_emulated(problem, default_config(Target(GPUS[gpu], problem)), GPUS[gpu], cases, read_env())
    assert (verdict.outcome, verdict.reason) == ("ok", "")
    assert set(verdict.figures) == set(EMULATED_KINDS)
    assert verdict.figures["normal"]["cosine"] > 0.9992


def test_a_fault_is_a_crash_with_its_line(cases, broken_render):
    broken_render(drop_first_barrier)
    verdict = gate_emulated(PROBLEM, CONFIG, L20, cases, read_env())
    assert verdict.outcome == "crash"
    assert verdict.reason.startswith("uninitialized in kernel stats, block 0")
    assert verdict.figures == {}


def test_a_wrong_scale_misses_a_floor(cases, broken_render):
    broken_render(lambda text: text.replace("E4M3_MAX = 448.0f", "E4M3_MAX = 440.0f"))
    verdict = gate_emulated(PROBLEM, CONFIG, L20, cases, read_env())
    assert verdict.outcome == "accuracy"
    assert "v_constant: scale ratio 1.01" in verdict.reason
    assert list(verdict.figures)[-1] == "v_constant"


def test_the_gate_of_an_offline_run_is_the_same(broken_render):
    gate = make_gate(L20, read_env())
    assert gate(PROBLEM, CONFIG).outcome == "ok"
    broken_render(drop_first_barrier)
    assert gate(PROBLEM, CONFIG).outcome == "crash"


def test_banks_are_those_of_one_call(cases):
    uses = count_banks(PROBLEM, CONFIG, L20, cases, read_env())
    assert {use.kernel for use in uses} == {"stats", "quantize", "attention"}


# --- the command


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Registries of this test's own."""
    monkeypatch.setattr(registry, "shipped_dir", lambda: tmp_path / "shipped")
    monkeypatch.setenv("SAGEGEN_TUNED_DIR", str(tmp_path / "tuned"))
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(main, ["verify", "--emulator", *arguments])


@pytest.mark.usefixtures("machine")
def test_a_config_is_verified_without_a_gpu():
    result = run("--config", "default", "--problem", PROBLEM.name, "--banks")
    assert result.exit_code == 0, result.output
    assert f"ok    {PROBLEM.name} {CONFIG.name}" in result.stderr
    assert "1 of 1 kernels pass every input kind in the emulator, on small inputs." in result.stdout
    assert all(kind in result.stdout for kind in EMULATED_KINDS)
    (line,) = (line for line in result.stdout.splitlines() if "device::load_matrix_x4(k," in line)
    assert line.split()[:4] == ["attention", line.split()[1], "multiply_qk", "load"]
    assert " 0%  " in line


@pytest.mark.usefixtures("machine")
def test_json_has_figures_and_banks():
    result = run("--gpu", "h200", "--config", "default", "--problem", PROBLEM.name, "--banks", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert (values["gpu"], values["emulator"], values["failed"]) == ("h200", True, 0)
    (kernel,) = values["kernels"]
    assert set(kernel["figures"]) == set(EMULATED_KINDS)
    assert {use["kernel"] for use in kernel["banks"]} == {"stats", "quantize", "attention"}
    assert {"line", "function", "text", "bytes", "accesses", "wavefronts", "ideal", "conflict_share"} <= set(
        kernel["banks"][0]
    )


@pytest.mark.usefixtures("machine")
def test_a_kernel_that_fails_is_exit_code_one_and_told(broken_render):
    broken_render(drop_first_barrier)
    result = run("--config", "default", "--problem", PROBLEM.name, "--banks")
    assert result.exit_code == 1
    assert "FAIL" in result.stderr
    assert "crash: uninitialized in kernel stats" in result.stderr
    assert "total += partial[row]" in result.stderr
    assert "0 of 1 kernels pass" in result.stdout
