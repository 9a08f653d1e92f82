"""Planted faults: in the attention kernel's body, nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sagegen.errors import ArgumentError
from sagegen.gpu import find_gpu
from sagegen.problem import Problem
from sagegen.render import render
from sagegen.rules import Target, default_config
from sagegen.tuning.plant import PLANTS, Plant, plant_variant
from sagegen.tuning.variants import Renderer, Variant

PROBLEM = Problem(64, "fp16", True)
CONFIG = default_config(Target(find_gpu("l20"), PROBLEM))
HONEST = Variant(render(PROBLEM, CONFIG))
HOPPER = Variant(render(PROBLEM, default_config(Target(find_gpu("h200"), PROBLEM))))


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("honest", [HONEST, HOPPER], ids=["mma", "wgmma"])
def test_a_fault_is_in_the_attention_kernel_alone_and_its_name_stays(honest: Variant, plant: Plant) -> None:
    planted = plant_variant(honest, plant)
    entry = f"{honest.source.entry('attention')}("
    before, _, after = planted.source.text.partition(entry)
    honest_before, _, honest_after = honest.source.text.partition(entry)
    if plant in ("wrong", "half"):  # where the kernel writes its output
        changed = [line for line in before.split("\n") if line not in honest_before.split("\n")]
        assert len(changed) == 1
        assert "out_row" in changed[0]
        assert after == honest_after
    else:
        assert before.startswith(honest_before.rpartition('extern "C"')[0])
        assert after.partition("{")[2].lstrip().lower().split("\n    extern")[0].count("planted") >= 1
    assert planted.name == honest.name
    assert planted.planted == plant
    assert planted.blank_sha256 != honest.blank_sha256


def test_a_source_without_the_kernel_is_refused() -> None:
    for plant in PLANTS:
        with pytest.raises(ArgumentError, match="no attention kernel"):
            plant_variant(Variant(replace(HONEST.source, text="int main() {}")), plant)


def test_the_blanked_digest_does_not_see_the_kernels_name() -> None:
    source = HONEST.source
    renamed = replace(source, name="a_new_name", text=source.text.replace(source.name, "a_new_name"))
    assert Variant(renamed).blank_sha256 == HONEST.blank_sha256
    assert renamed.sha256 != source.sha256


def test_names_that_say_nothing_any_more_have_no_text() -> None:
    renderer = Renderer()
    assert renderer.text_sha256(PROBLEM.name, CONFIG.name) == HONEST.source.sha256
    assert renderer.text_sha256(PROBLEM.name, "mma_of_old") is None
    assert renderer.text_sha256("d96_fp16_full_int8", CONFIG.name) is None
