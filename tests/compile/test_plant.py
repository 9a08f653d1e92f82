"""Planted faults are what they say: two compile, one does not."""

from __future__ import annotations

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
from sagegen.tuning.plant import PLANTS, plant_variant
from sagegen.tuning.variants import Variant

GPU = find_gpu("l20")
PROBLEM = Problem(64, "bf16", False)


@pytest.mark.compile
def test_crash_and_hang_compile_and_badcompile_names_its_line(tmp_path: Path) -> None:
    honest = Variant(render(PROBLEM, default_config(Target(GPU, PROBLEM))))
    toolkit = find_toolkit(read_env())
    for plant in PLANTS:
        source = plant_variant(honest, plant).source
        built = build_batch([source], GPU.arch, Store(tmp_path), toolkit)[source.name]
        if plant == "badcompile":
            assert isinstance(built, BuildFailure)
            assert "planted_compile_error" in built.reason
        else:
            assert isinstance(built, Built), built
