"""Planted faults are what they say: those of the GPU compile, those of the compiler end in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sagegen.build import BuildFailure, Built, build_batch
from sagegen.env import read_env
from sagegen.gpu import find_gpu
from sagegen.problem import Problem
from sagegen.render import render
from sagegen.rules import Target, default_config
from sagegen.store import Store
from sagegen.toolkit import find_toolkit
from sagegen.tuning.plant import Plant, plant_variant
from sagegen.tuning.variants import BuildAhead, Variant

GPU = find_gpu("l20")
PROBLEM = Problem(64, "bf16", False)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("gpu_name", "plants"),
    [("l20", ("crash", "late", "hang", "memory", "badcompile")), ("h200", ("late", "hang", "memory", "badcompile"))],
)
def test_f1_faults_of_the_gpu_compile_and_those_of_the_compiler_are_named(
    tmp_path: Path, gpu_name: str, plants: tuple[Plant, ...], sass_of_file: Callable[[Path], dict[str, str]]
) -> None:
    gpu = find_gpu(gpu_name)
    honest = Variant(render(PROBLEM, default_config(Target(gpu, PROBLEM))))
    builder = BuildAhead(gpu.arch, Store(tmp_path), find_toolkit(read_env()), jobs=4)
    planted = {plant: plant_variant(honest, plant) for plant in plants}
    results = {plant: builder.submit([variant]).result()[variant.name] for plant, variant in planted.items()}
    builder.close()
    failure = results.pop("badcompile")
    assert isinstance(failure, BuildFailure)
    assert "planted_compile_error" in failure.reason
    assert all(isinstance(result, Built) for result in results.values()), results
    # a loop that the compiler left out is an honest kernel: seen on an H200
    hung = sass_of_file(results["hang"].cubin)
    assert "SR_CLOCKLO" in next(text for name, text in hung.items() if name.startswith("attention_"))


def processes_below(folder: Path) -> list[str]:
    """Command lines of processes that work in `folder` or below."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.joinpath("cwd").readlink().is_relative_to(folder):
                found.append(process.joinpath("cmdline").read_text())
        except OSError:  # it ended, or is another user's
            continue
    return found


@pytest.mark.compile
def test_f1_a_compile_bomb_is_killed_within_its_timeout_with_all_its_processes(tmp_path: Path) -> None:
    source = plant_variant(Variant(render(PROBLEM, default_config(Target(GPU, PROBLEM)))), "bomb").source
    start = time.monotonic()
    built = build_batch([source], GPU.arch, Store(tmp_path), find_toolkit(read_env()), timeout_s=2)[source.name]
    assert isinstance(built, BuildFailure)
    assert (built.outcome, built.reason) == ("timeout", "nvcc took more than 2 s")
    assert time.monotonic() - start < 30
    assert processes_below(tmp_path) == []


@pytest.mark.compile
def test_f1_a_compile_bomb_that_takes_too_much_memory_is_a_compile_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sagegen.compilers._MOST_MEMORY_KIB", 400 << 10)
    source = plant_variant(Variant(render(PROBLEM, default_config(Target(GPU, PROBLEM)))), "bomb").source
    built = build_batch([source], GPU.arch, Store(tmp_path), find_toolkit(read_env()))[source.name]
    assert isinstance(built, BuildFailure)
    assert built.outcome == "compile"
    assert "out of memory" in built.reason
