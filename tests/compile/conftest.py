"""What tests with the real nvcc share: building sources, and reading what it made of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sagegen.build import Built, build_batch, find_toolkit
from sagegen.env import read_env
from sagegen.render import Source
from sagegen.store import Store


@pytest.fixture(scope="session")
def build(shared_folder: Path) -> Callable[[str, Sequence[Source]], list[Built]]:
    """Builds sources for an architecture, each once in a run, whichever process asks first."""
    store = Store(shared_folder / "store")

    def build_all(arch: str, sources: Sequence[Source]) -> list[Built]:
        results = build_batch(sources, arch, store, find_toolkit(read_env()))
        for result in results.values():
            assert isinstance(result, Built), result
        return list(results.values())  # type: ignore[arg-type]

    return build_all


@pytest.fixture(scope="session")
def sass() -> Callable[[Built, str], str]:
    """Disassembles one kernel of a build."""
    return disassemble


@pytest.fixture(scope="session")
def sass_of_file() -> Callable[[Path], dict[str, str]]:
    """Disassembles all kernels of a cubin, by name."""
    return list_kernels


def disassemble(built: Built, role: str) -> str:
    return list_kernels(built.cubin)[f"{role}_{built.name}"]


def list_kernels(cubin: Path) -> dict[str, str]:
    listing = subprocess.run(
        [find_tool("cuobjdump"), "-sass", str(cubin)],
        capture_output=True,
        text=True,
        check=True,
        env=dict.fromkeys(("NVDISASM_PATH", "PATH"), str(Path(find_tool("nvdisasm")).parent)),
    ).stdout
    return dict(re.findall(r"Function : (\w+)\n(.*?)(?=\n\s*Function :|\Z)", listing, re.S))


def find_tool(name: str) -> str:
    """The cuobjdump or nvdisasm of the `test` extra, else one on PATH."""
    wheel = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages", "nvidia", "cu13", "bin", name)
    found = str(wheel) if wheel.exists() else shutil.which(name)
    assert found, f"{name} comes with: pip install 'sagegen[test]'"
    return found
