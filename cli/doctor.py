"""`sagegen doctor`: what this machine has of what sagegen needs."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from sagegen.cli.options import json_option
from sagegen.env import Env, is_writable, read_env
from sagegen.errors import RegistryError, ToolchainError
from sagegen.registry import shipped_dir
from sagegen.registry_places import find_places
from sagegen.toolkit import find_ninja, find_toolkit

#: Cubins of any 13.x toolkit load from this driver on (CUDA minor-version compatibility).
MINIMUM_DRIVER = 580


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Attributes:
        needed_to: what fails without it: running kernels, or building and tuning them.
        found: what there is: a version, a path, or the reason why there is nothing.
        remedy: what to do when it is missing.
    """

    name: str
    needed_to: Literal["run", "build"]
    is_ok: bool
    found: str
    remedy: str = ""


@click.command("doctor")
@json_option
def command(as_json: bool) -> None:
    """Check what running and building kernels needs on this machine.

    Exit code 1 when something that running needs is missing; kernels that are shipped or cached need no nvcc.

    \b
    Example:
      sagegen doctor
      sagegen doctor --json | jq '.[] | select(.is_ok | not)'
    """
    checks = list(make_checks(read_env()))
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks]))
    else:
        for check in checks:
            status = "ok     " if check.is_ok else "missing"
            click.echo(f"{status}  {check.name:13} {check.found}")
            if not check.is_ok:
                click.echo(f"{'':9}needed to {check.needed_to} kernels; {check.remedy}")
    if any(not check.is_ok and check.needed_to == "run" for check in checks):
        sys.exit(1)


def make_checks(env: Env) -> Iterator[Check]:
    """All checks, in the order they are printed."""
    yield Check("python", "run", sys.version_info >= (3, 10), platform.python_version(), "install Python 3.10 or later")
    for package in ("torch", "cuda-bindings"):
        yield _package(package, "run")
    yield _driver()
    yield _gpus()
    yield _folder("cache folder", env.cache_dir, "SAGEGEN_CACHE_DIR")
    yield _folder("tuned folder", env.tuned_dir, "SAGEGEN_TUNED_DIR")
    yield _bundles(env)
    yield _nvcc(env)
    yield _program("g++", shutil.which("g++"), "apt-get install g++")
    yield _program("ninja", find_ninja(), "pip install ninja")
    yield _package("optuna", "build")


def _package(name: str, needed_to: Literal["run", "build"]) -> Check:
    try:
        return Check(name, needed_to, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, needed_to, False, "not installed", f"pip install {name}")


def _driver() -> Check:
    from sagegen.launch import driver_problem

    problem = driver_problem()
    if problem is None:
        return Check("driver", "run", True, "an NVIDIA driver that torch can use")
    return Check("driver", "run", False, problem, "install the NVIDIA driver, and a torch built for its CUDA version")


def _gpus() -> Check:
    from sagegen.gpu import detect_gpus

    present = detect_gpus()
    if not present:
        return Check("GPU", "run", False, "none visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    old = [gpu.driver for gpu in present if _major(gpu.driver) < MINIMUM_DRIVER]
    if old:
        remedy = f"install a driver of {MINIMUM_DRIVER} or later: shipped cubins are of toolkit 13"
        return Check("GPU", "run", False, f"driver {old[0]} is older than {MINIMUM_DRIVER}", remedy)
    found = (f"{gpu.product} ({gpu.gpu.name if gpu.gpu else gpu.arch}), driver {gpu.driver}" for gpu in present)
    return Check("GPU", "run", True, "; ".join(found))


def _major(driver: str) -> int:
    """First number of a driver's version; a version that is spelled otherwise is taken for a new one."""
    number = driver.partition(".")[0]
    return int(number) if number.isdecimal() else MINIMUM_DRIVER


def _folder(name: str, path: Path, variable: str) -> Check:
    if not is_writable(path):
        return Check(name, "build", False, f"{path} (read-only)", f"set {variable} to a writable folder")
    return Check(name, "build", True, str(path))


def _bundles(env: Env) -> Check:
    """What SAGEGEN_REGISTRY names and pip installed, whatever it holds."""
    errors: list[RegistryError] = []
    places = [
        place for place in find_places(env, shipped_dir(), errors.append) if place.origin in ("named", "installed")
    ]
    if errors:
        return Check("bundles", "run", False, errors[0].message, errors[0].remedy)
    return Check("bundles", "run", True, "; ".join(p.package or str(p.folder) for p in places) or "none but what ships")


def _nvcc(env: Env) -> Check:
    try:
        toolkit = find_toolkit(env)
    except ToolchainError as error:
        return Check("nvcc", "build", False, error.message, error.remedy)
    return Check("nvcc", "build", True, f"{toolkit.build} at {toolkit.nvcc}")


def _program(name: str, found: str | None, remedy: str) -> Check:
    return Check(name, "build", found is not None, found or "not on PATH", remedy)
