"""`sagegen build` with a stand-in compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sagegen.cli.main import main


@pytest.fixture
def cache(nvcc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and the stand-in as the compiler."""
    monkeypatch.setenv("SAGEGEN_NVCC", str(nvcc.toolkit.nvcc))
    monkeypatch.setenv("SAGEGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["build", "--gpu", "l20", *words])


def test_resources_time_and_path_are_printed(cache: Path) -> None:
    result = run("--config", "default")
    assert result.exit_code == 0, result.output
    for role in ("stats", "quantize", "attention"):
        assert f"{role:9}  40 registers, 4 + 2 bytes spilled (stores + loads), 8 bytes stack" in result.stdout
    assert "compiled in" in result.stdout
    path = Path(result.stdout.splitlines()[-1].strip())
    assert path.is_relative_to(cache)
    assert path.is_file()


def test_a_second_build_comes_from_the_store(cache: Path, nvcc: Any) -> None:
    run("--config", "default")
    assert "from the kernel store" in run("--config", "default").stdout
    assert len(nvcc.calls) == 1


def test_json_names_the_cubin_and_its_resources(cache: Path) -> None:
    answer = json.loads(run("--config", "default", "--json").stdout)
    assert Path(answer["cubin"]).is_file()
    assert answer["resources"]["attention"]["registers"] == 40


def test_a_kernel_that_does_not_compile_is_found_wrong(cache: Path, nvcc: Any) -> None:
    script = nvcc.toolkit.nvcc
    script.write_text(script.read_text().replace('"BROKEN" in text', "True"))
    result = run("--config", "default")
    assert result.exit_code == 1
    assert "did not compile (compile): kernel.cu(12): error: identifier" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("config", ["../../x", "a; rm"])
def test_a_config_that_spells_none_is_refused_before_anything_is_written(cache: Path, nvcc: Any, config: str) -> None:
    result = run("--config", config)
    assert result.exit_code == 2
    assert repr(config) in result.stderr
    assert not cache.exists()
    assert nvcc.calls == []


def test_without_nvcc_the_error_says_how_to_get_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SAGEGEN_NVCC")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sagegen.toolkit.importlib.util.find_spec", lambda name: None)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    result = run("--config", "default")
    assert result.exit_code == 2
    assert "nvcc was not found in" in result.stderr
    assert "Remedy: pip install 'sagegen[nvcc]'" in result.stderr


_WITHOUT_NVCC = """
import sys, torch
from click.testing import CliRunner
from sagegen import toolkit
toolkit.importlib.util.find_spec = lambda name: None  # nvcc's wheel
import sagegen
from sagegen.cli.main import main
q = torch.ones(1, 1, 4, 64)
assert sagegen.attention(q, q, q).shape == q.shape
assert "reference" in str(sagegen.explain(q, q, q))
for command, code in (("show --gpu l20", 0), ("gpus", 0), ("build --gpu l20 --config default", 2)):
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == code, result.output
print(result.stderr)
"""


def test_without_nvcc_all_but_building_works(tmp_path: Path) -> None:
    """E1; that a cached binary serves there, test_dispatch.py and test_shipping.py say."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SAGEGEN_NVCC", "CUDA_PATH"))}
    variables = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path), "SAGEGEN_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_NVCC], env={**kept, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for place in ("SAGEGEN_NVCC (not set)", f"CUDA_HOME ({tmp_path}/bin/nvcc)", "PATH (not set)"):
        assert place in done.stdout
    assert "pip install 'sagegen[nvcc]'" in done.stdout
