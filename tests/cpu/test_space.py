"""The search space and the names of its points."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagegen.errors import ConfigError, UnknownNameError
from sagegen.param import Param, parse_fields, spell_name
from sagegen.space import (
    MMA_PARAMS,
    MMA_SPACE,
    MmaConfig,
    config_values,
    make_config,
    neighbours,
    parse_config,
)

configs = st.builds(MmaConfig, **{p.name: st.sampled_from(p.values) for p in MMA_PARAMS})
NAME = "mma_bq128_bk64_w4_st2_pve4m3f32_ad64_cvmagic_grthread_qs32_ks64_rsskip_qoreg_mb1"


def test_a_name_spells_every_parameter_of_a_config() -> None:
    config = parse_config(NAME)
    assert (config.block_q, config.block_k, config.warps, config.stages) == (128, 64, 4, 2)
    assert (config.pv, config.accum_depth, config.conversion, config.rescale) == ("e4m3f32", 64, "magic", "skip")
    assert config.threads == 128
    assert config.rows_per_warp == 32


@given(configs)
def test_parsing_a_configs_name_gives_the_config(config: MmaConfig) -> None:
    assert parse_config(config.name) == config
    assert make_config(MmaConfig, config_values(config)) == config


def test_a_decimal_point_is_a_p_in_names() -> None:
    name = f"{NAME.replace('pve4m3f32', 'pve4m3f16')}_pm224_vm4p5"
    config = parse_config(name)
    assert (config.p_max, config.v_max, config.name) == (224, 4.5, name)
    assert parse_config(NAME + "_vm9") == make_config(MmaConfig, {**config_values(parse_config(NAME)), "v_max": 9.0})


@given(configs)
def test_a_name_is_safe_in_a_path_and_in_a_cpp_identifier(config: MmaConfig) -> None:
    assert re.fullmatch(r"[a-z0-9_]+", config.name)
    # a folder of the store and one beside it while it is filled: 255 bytes are what file systems take
    assert len(f"d128_bf16_causal_int8_{config.name}.{'0' * 12}") + 32 <= 255


@pytest.mark.parametrize(
    "name",
    [
        "",
        "default ",
        "../../etc/passwd",
        "mma",
        NAME + "_mb1",
        NAME.replace("bq128", "bq129"),
        NAME.replace("mb1", "mb1;}"),
        NAME.replace("mb1", "mb1/../x"),
        NAME + "\n",
        NAME.upper(),
    ],
)
def test_a_string_that_spells_no_config_is_refused(name: str) -> None:
    with pytest.raises(UnknownNameError):
        parse_config(name)


def test_a_field_that_may_be_left_out_says_what_is_wrong_with_it():
    name = "wgmma_c3_bk128_st3_scplain_acone_ks64_rsskip_suones_exmufu"
    with pytest.raises(UnknownNameError, match="'ms100' does not name a mean_span; use one of ms0, ms64, ms128, ms192"):
        parse_config(name + "_ms100")
    with pytest.raises(UnknownNameError, match=r"'ms192' is out of place or one too many.* ms, ds, ro"):
        parse_config(name + "_royes_ms192")
    with pytest.raises(UnknownNameError, match="'royes' is out of place or one too many"):
        parse_config(name + "_royes_royes")


def test_a_wrong_field_is_named_with_its_choices() -> None:
    with pytest.raises(UnknownNameError, match=r"'bq96'.*block_q.*bq64, bq128"):
        parse_config(NAME.replace("bq128", "bq96"))


@pytest.mark.parametrize(
    "change",
    [{"stages": 9}, {"stages": True}, {"stages": "2"}, {"unroll": 1}],
    ids=["value", "bool", "text", "unknown"],
)
def test_values_outside_the_space_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_config(MmaConfig, {**config_values(parse_config(NAME)), **change})


def test_a_missing_parameter_is_named() -> None:
    values = config_values(parse_config(NAME))
    del values["warps"]
    with pytest.raises(ConfigError, match="warps"):
        make_config(MmaConfig, values)


def test_the_space_enumerates_each_point_once() -> None:
    first = tuple(itertools.islice(MMA_SPACE, 20_000))
    assert len({config.name for config in first}) == len(set(first)) == 20_000
    assert len(MMA_SPACE) == 2 * 2 * 3 * 3 * 4 * 4 * 2 * 3 * 3 * 2 * 2 * 2 * 3 * (4 * 5 * 2) * (3 * 2 * 2 * 2) * 3


def test_names_tell_all_configs_of_the_parameters_without_a_neutral_value_apart() -> None:
    lists = [p.values if p.neutral is None else (p.neutral,) for p in MMA_PARAMS]
    names = {MmaConfig(*values).name for values in itertools.product(*lists)}  # type: ignore[arg-type]
    assert len(names) == 2 * 2 * 3 * 3 * 4 * 4 * 2 * 3 * 3 * 2 * 2 * 2 * 3


@given(configs)
def test_neighbours_differ_in_one_parameter(config: MmaConfig) -> None:
    own = config_values(config)
    found = neighbours(config)
    assert len(set(found)) == len(found)
    for other in found:
        assert sum(own[name] != value for name, value in config_values(other).items()) == 1


@given(configs)
def test_neighbours_are_mutual(config: MmaConfig) -> None:
    assert all(config in neighbours(other) for other in neighbours(config))


LATER_PARAMS = (
    Param("tile", "t", (64, 128), "first of its family"),
    Param("order", "or", ("rows", "heads"), "came later", neutral="rows"),
    Param("unroll", "u", (1, 2), "came last", neutral=1),
)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"tile": 64, "order": "rows", "unroll": 1}, "x_t64"),
        ({"tile": 64, "order": "rows", "unroll": 2}, "x_t64_u2"),
        ({"tile": 128, "order": "heads", "unroll": 1}, "x_t128_orheads"),
    ],
)
def test_a_parameter_that_came_later_leaves_older_names_alone(values: dict[str, int | str], name: str) -> None:
    assert spell_name("x", LATER_PARAMS, values) == name
    assert parse_fields(LATER_PARAMS, name.split("_")[1:]) == values


@pytest.mark.parametrize("parts", [[], ["u2"], ["t64", "u2", "orheads"], ["t64", "u3"], ["t64", "u2", "u2"]])
def test_fields_that_are_missing_out_of_place_or_too_many_are_refused(parts: list[str]) -> None:
    with pytest.raises(UnknownNameError):
        parse_fields(LATER_PARAMS, parts)
