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


@pytest.mark.parametrize("plant", PLANTS)
def test_the_fault_is_the_first_statement_of_the_attention_kernel(plant: Plant) -> None:
    planted = plant_variant(HONEST, plant)
    before, _, after = planted.source.text.partition(f"{HONEST.source.entry('attention')}(")
    signature, _, body = after.partition("{")
    assert "planted" in body.lstrip().split(";")[0] + body.lstrip().split("\n")[0] + body.lstrip().split("\n")[1]
    assert "planted" not in before + signature
    assert planted.name == HONEST.name
    assert planted.planted == plant
    assert planted.blank_sha256 != HONEST.blank_sha256


def test_a_source_without_the_kernel_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no attention kernel"):
        plant_variant(Variant(replace(HONEST.source, text="int main() {}")), "crash")


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
