"""What a wheel holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The files of a wheel built from a copy of the work tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("sagegen", "cli", "templates", "tuned"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tuned" / "l20").mkdir(exist_ok=True)
    (copy / "tuned" / "l20" / "kernel.cubin.gz").write_bytes(b"")
    script = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(copy / "out")], cwd=copy, check=True, capture_output=True)
    (wheel,) = (copy / "out").glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_nothing_but_the_package_lands_in_site_packages(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert tops - {top for top in tops if top.endswith(".dist-info")} == {"sagegen"}


def test_every_module_template_and_registry_is_in_it(names: list[str]) -> None:
    wanted = {
        f"sagegen/{'' if folder == 'sagegen' else folder + '/'}{path.relative_to(ROOT / folder)}"
        for folder in ("sagegen", "cli", "templates", "tuned")
        for pattern in ("*.py", "*.j2", "*.css", "*.cuh", "*.cpp", "*.hpp", "*.yaml", "*.cubin.gz", "py.typed")
        for path in (ROOT / folder).rglob(pattern)
    }
    assert wanted - set(names) == set()
    assert "sagegen/templates/quantize.cu.j2" in wanted
    assert "sagegen/report/templates/style.css" in wanted
    assert "sagegen/templates/include/cuda/thread.cuh" in wanted
    assert "sagegen/templates/include/host/thread.cuh" in wanted
    assert "sagegen/emulator/runtime/engine.cpp" in wanted


def test_cubins_of_a_gpu_are_in_it(names: list[str]) -> None:
    assert "sagegen/tuned/l20/kernel.cubin.gz" in names
