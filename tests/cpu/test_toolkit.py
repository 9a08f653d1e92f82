"""Which nvcc is taken (cases E1, E5, E6)."""

from __future__ import annotations

import stat
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from sagegen import toolkit as toolkit_module
from sagegen.env import Env
from sagegen.errors import ToolchainError
from sagegen.toolkit import find_ninja, find_toolkit


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter without the nvcc wheel."""
    monkeypatch.setattr(toolkit_module.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH folder that holds only g++."""
    folder = tmp_path / "path"
    folder.mkdir()
    make_program(folder / "g++", "")
    return folder


def make_env(nvcc: Path | str | None = None) -> Env:
    return Env(Path("cache"), Path("tuned"), False, "warning", None if nvcc is None else str(nvcc))


def make_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.usefixtures("no_wheel")
def test_release_and_build_come_from_nvcc_itself(make_nvcc: Callable[..., SimpleNamespace], path: Path) -> None:
    nvcc = make_nvcc(version="13.2.51", build="cuda_13.2.r13.2/compiler.1_0").toolkit.nvcc
    found = find_toolkit(make_env(nvcc), {"PATH": str(path)})
    assert (found.nvcc, found.version) == (nvcc, (13, 2))
    assert found.build == "V13.2.51 cuda_13.2.r13.2/compiler.1_0"


def test_the_order_is_variable_wheel_cuda_home_path(
    make_nvcc: Callable[..., SimpleNamespace], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, home = (make_nvcc(folder).toolkit.nvcc for folder in ("asked", "home"))
    wheel = make_nvcc("site/nvidia/cu13").toolkit.nvcc
    on_path = make_nvcc("system").toolkit.nvcc
    (path / "nvcc").symlink_to(on_path)
    spec = ModuleSpec("nvidia", None)
    spec.submodule_search_locations = [str(tmp_path / "site" / "nvidia")]
    monkeypatch.setattr(toolkit_module.importlib.util, "find_spec", lambda name: spec)
    environ = {"PATH": str(path), "CUDA_HOME": str(home.parent.parent)}
    assert find_toolkit(make_env(asked), environ).nvcc == asked
    assert find_toolkit(make_env(), environ).nvcc == wheel
    wheel.unlink()
    assert find_toolkit(make_env(), environ).nvcc == home
    home.unlink()
    assert find_toolkit(make_env(), environ).nvcc == on_path


@pytest.mark.usefixtures("no_wheel")
def test_a_machine_without_nvcc_is_told_all_places(path: Path) -> None:
    with pytest.raises(ToolchainError) as caught:
        find_toolkit(make_env(), {"PATH": str(path), "CUDA_HOME": "/opt/none"})
    message = str(caught.value)
    for place in ("SAGEGEN_NVCC (not set)", "CUDA_HOME (/opt/none/bin/nvcc)", "CUDA_PATH (not set)", "PATH (not set)"):
        assert place in message
    assert message.endswith("pip install 'sagegen[nvcc]'")


def test_a_wrong_variable_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=f"SAGEGEN_NVCC={tmp_path}/nvcc"):
        find_toolkit(make_env(tmp_path / "nvcc"))


def test_a_missing_host_compiler_is_named(nvcc: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"g\+\+"):
        find_toolkit(make_env(nvcc.toolkit.nvcc), {"PATH": str(tmp_path)})


@pytest.mark.parametrize("script", ["exit 3", "echo 'Build of something else'"])
def test_a_program_that_is_no_nvcc_is_named(tmp_path: Path, script: str) -> None:
    make_program(tmp_path / "nvcc", script)
    with pytest.raises(ToolchainError, match=f"{tmp_path}/nvcc --version"):
        find_toolkit(make_env(tmp_path / "nvcc"))


def test_a_link_to_nvcc_is_followed_because_nvcc_looks_beside_itself(nvcc: SimpleNamespace, tmp_path: Path) -> None:
    link = tmp_path / "nvcc"
    link.symlink_to(nvcc.toolkit.nvcc)
    assert find_toolkit(make_env(link)) == nvcc.toolkit


def test_a_link_to_a_compiler_cache_is_called_by_its_own_name(nvcc: SimpleNamespace, tmp_path: Path) -> None:
    cache = tmp_path / "ccache"
    cache.write_text(nvcc.toolkit.nvcc.read_text())
    cache.chmod(0o755)
    (tmp_path / "nvcc").symlink_to(cache)
    assert find_toolkit(make_env(tmp_path / "nvcc")).nvcc == tmp_path / "nvcc"


def test_ninja_is_found() -> None:
    assert find_ninja() is not None
