"""The CUDA toolkit: which nvcc compiles, and what tells it from any other."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sagegen.env import Env
from sagegen.errors import ToolchainError


@dataclass(frozen=True, slots=True)
class Toolkit:
    """An nvcc: where it lies, its release, and the build string that tells any two toolkits apart."""

    nvcc: Path
    version: tuple[int, int]
    build: str


def find_toolkit(env: Env, environ: Mapping[str, str] = os.environ) -> Toolkit:
    """The nvcc to compile with: SAGEGEN_NVCC, the pip wheel, CUDA_HOME, PATH, in that order.

    Raises:
        ToolchainError: there is none (the message lists where it was looked for), it cannot be run, or g++ is missing.
    """
    if env.nvcc and shutil.which(env.nvcc) is None:
        raise ToolchainError(f"SAGEGEN_NVCC={env.nvcc} is no executable file", "set it to an nvcc or unset it")
    places = list(_nvcc_places(env, environ))
    nvcc = next((found for _, candidate in places if candidate and (found := shutil.which(candidate))), None)
    if nvcc is None:
        searched = ", ".join(f"{place} ({candidate or 'not set'})" for place, candidate in places)
        raise ToolchainError(f"nvcc was not found in: {searched}", "pip install 'sagegen[nvcc]'")
    if shutil.which("g++", path=environ.get("PATH", os.defpath)) is None:
        raise ToolchainError("g++, which nvcc preprocesses with, is not on PATH", "apt-get install g++")
    return _read_toolkit(_real_nvcc(Path(nvcc)))


def find_ninja() -> str | None:
    """The ninja program: the pip wheel's, else PATH's; None when there is none."""
    import ninja

    return shutil.which("ninja", path=ninja.BIN_DIR) or shutil.which("ninja")


def _nvcc_places(env: Env, environ: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    yield "SAGEGEN_NVCC", env.nvcc
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        yield "pip wheel", str(Path(folder, "cu13", "bin", "nvcc"))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = environ.get(variable)
        yield variable, str(Path(home, "bin", "nvcc")) if home else None
    yield "PATH", shutil.which("nvcc", path=environ.get("PATH", os.defpath))


def _real_nvcc(nvcc: Path) -> Path:
    """`nvcc` with links followed, since it looks for its headers beside argv[0]; but not into ccache and its like."""
    real = nvcc.resolve()
    return real if real.name == "nvcc" else nvcc.absolute()


def _read_toolkit(nvcc: Path) -> Toolkit:
    try:
        command = [str(nvcc), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{nvcc} --version failed: {error}", "pip install 'sagegen[nvcc]'") from error
    release = re.search(r"release (\d+)\.(\d+), (V[\d.]+)", done.stdout)
    if release is None:
        raise ToolchainError(f"{nvcc} --version names no release: {done.stdout.strip()[:200]!r}", "set SAGEGEN_NVCC")
    build = re.search(r"^Build (\S+)", done.stdout, re.MULTILINE)
    return Toolkit(nvcc, (int(release[1]), int(release[2])), f"{release[3]} {build[1] if build else ''}".strip())
