"""Variations of a config: every other value of every parameter, and what had to change with it."""

from __future__ import annotations

import pytest

from sagegen.gpu import find_gpu
from sagegen.measuring.variations import find_variations
from sagegen.problem import Problem
from sagegen.rules import Target, broken_rules
from sagegen.space import config_values, parse_config

TARGET = Target(find_gpu("h200"), Problem(128, "bf16", False))
EXACT = "wgmma_c3_bk128_st3_scplain_acone_ks64_rsskip_suones_exmufu"
PACKED = "wgmma_c3_bk128_st3_scplain_acone_ks128_rsskip_suones_expacked"
MMA = "mma_bq128_bk128_w8_st2_pvbf16f32_ad0_cvmagic_grthread_qs16_ks128_rsalways_qoreg_mb1"


def variations(name):
    return {(v.param, v.value): v for v in find_variations(parse_config(name), TARGET)}


@pytest.mark.parametrize("name", [EXACT, PACKED, MMA])
def test_every_other_value_of_every_parameter_is_there_once(name):
    config = parse_config(name)
    found = find_variations(config, TARGET)
    expected = [(p.name, v) for p in config.params for v in p.values if v != getattr(config, p.name)]
    assert [(v.param, v.value) for v in found] == expected
    assert all(v.base == getattr(config, v.param) for v in found)


@pytest.mark.parametrize("name", [EXACT, PACKED, MMA])
def test_a_variation_keeps_the_rules_and_differs_in_what_it_says(name):
    own = config_values(parse_config(name))
    for variation in find_variations(parse_config(name), TARGET):
        if variation.config is None:
            continue
        assert not broken_rules(variation.config, TARGET)
        assert config_values(variation.config) == {**own, variation.param: variation.value, **variation.changes}
        assert variation.param not in variation.changes


def test_one_change_is_enough_where_the_rules_allow_it():
    found = variations(EXACT)
    assert found["stages", 4].config.name == "wgmma_c3_bk128_st4_scplain_acone_ks64_rsskip_suones_exmufu"
    assert found["stages", 4].label == "stages=4"
    assert found["rescale", "always"].changes == {}


def test_a_value_that_breaks_a_rule_brings_the_fewest_changes_with_it():
    found = variations(EXACT)
    # three consumers have 160 registers a thread, which tiles of 192 keys do not leave room in
    assert found["block_k", 192].label == "block_k=192 (with consumers=2)"
    # a packed exponent has one span of scales for a tile; a tile of 64 keys and a span of 128 are one change each
    assert found["exponent", "packed"].changes in ({"block_k": 64}, {"k_span": 128})
    # three at once: a span of 256 needs a tile of 256, that two consumers, and shared memory then holds two stages
    assert found["k_span", 256].label == "k_span=256 (with consumers=2, block_k=256, stages=2)"


def test_two_parameters_bound_together_vary_to_the_same_config():
    found = variations(PACKED)
    assert found["block_k", 64].config == found["k_span", 64].config
    assert found["block_k", 64].changes == {"k_span": 64}


def test_a_value_that_no_config_near_has_is_named_without_one():
    # P·V in FP16 is for FP16 inputs alone
    found = variations(MMA)["pv", "f16f32"]
    assert (found.config, found.label) == (None, "pv=f16f32")
