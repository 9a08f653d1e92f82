"""What all tests share: isolation from the user's settings, and reasons to skip."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from sagegen.emulator.compiler import find_compiler
from sagegen.env import VARIABLES, read_env
from sagegen.errors import ToolchainError
from sagegen.gpu import detect_gpus
from sagegen.toolkit import find_toolkit

# the same examples in every run; a slow machine is no failure
settings.register_profile("sagegen", derandomize=True, deadline=None)
settings.load_profile("sagegen")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sagegen", "tests on a card")
    group.addoption(
        "--random-calls", type=int, default=10_000, metavar="N", help="calls of tests/gpu/test_random_calls.py"
    )
    group.addoption("--first-call", type=int, default=0, metavar="I", help="number of the first of them; to replay one")
    group.addoption(
        "--wait-limit",
        type=int,
        default=0,
        metavar="N",
        help="build kernels of tests/gpu whose waits for an mbarrier trap after N failures, so that a deadlock ends",
    )


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder of this run, the same in every process that its tests are spread over."""
    base = tmp_path_factory.getbasetemp()
    is_spread = hasattr(request.config, "workerinput")  # of pytest-xdist: a folder each, in the run's
    folder = (base.parent if is_spread else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def private_settings(tmp_path_factory: pytest.TempPathFactory, shared_folder: Path) -> Iterator[Path]:
    """Every SAGEGEN_* variable unset, cache and registries in folders of this run; yields that of the registries.

    The cache is one for all processes, so that none compiles what another has: the stores in it are made for that.
    """
    folder = tmp_path_factory.mktemp("sagegen")
    with pytest.MonkeyPatch.context() as patch:
        for variable in VARIABLES:
            if variable.name != "SAGEGEN_NVCC":
                patch.delenv(variable.name, raising=False)
        patch.setenv("SAGEGEN_CACHE_DIR", str(shared_folder / "cache"))
        patch.setenv("SAGEGEN_TUNED_DIR", str(folder / "tuned"))
        yield folder


@pytest.fixture(scope="session")
def one_torch_thread() -> Iterator[None]:
    """Torch's threads wait for one another in loops: many times the time of small tensors, and the cores of others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which need not be there
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out whole groups of tests. Its own `loadgroup` groups nothing with pytest 9.2 (pytest-xdist #1386)."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return GroupScheduling(config, log)


def group_of(nodeid: str) -> str:
    """An emulated kernel, whose library is then loaded in one process; all tests on a card; else a file."""
    if kernel := re.search(r"\[(\w+-\w+-(?:mma|wgmma)_\w+)", nodeid):
        return kernel[1]
    return "tests/gpu" if nodeid.startswith("tests/gpu/") else nodeid.partition("::")[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    reasons = {"gpu": _why_no_gpu(), "compile": _why_no_compiler(), "emulator": _why_no_host_compiler()}
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    return None if detect_gpus() else "needs a CUDA GPU; NVML shows none"


def _why_no_compiler() -> str | None:
    if os.environ.get("CI"):  # there a missing compiler is a failure, not a reason to pass
        return None
    try:
        find_toolkit(read_env())
    except ToolchainError as error:
        return f"needs nvcc: {error}"
    return None


def _why_no_host_compiler() -> str | None:
    if os.environ.get("CI"):
        return None
    try:
        find_compiler()
    except ToolchainError as error:
        return f"needs a host C++ compiler: {error}"
    return None
