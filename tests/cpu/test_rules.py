"""Validity rules: each refuses what it is for, and nothing valid."""

import itertools
import re
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagegen.errors import ConfigError
from sagegen.gpu import GPUS, find_gpu
from sagegen.mma_rules import MMA_RULES, MMA_SEARCH_RULES, default_mma_config
from sagegen.problem import DTYPES, HEAD_DIMS, PRECISIONS, Problem
from sagegen.rules import (
    RULES,
    SEARCH_RULES,
    Rule,
    Target,
    all_searched_configs,
    broken_rules,
    check_config,
    default_config,
    default_config_with,
    searched_configs,
    valid_configs,
)
from sagegen.space import (
    MMA_PARAMS,
    MMA_SPACE,
    WGMMA_PARAMS,
    Config,
    MmaConfig,
    WgmmaConfig,
    config_values,
    parse_config,
)
from sagegen.wgmma_rules import WGMMA_RULES, default_wgmma_config

L20_BF16 = Target(find_gpu("l20"), Problem(128, "bf16", is_causal=True))
BASE = default_mma_config(L20_BF16)
FP16_SUM = replace(BASE, pv="e4m3f16", p_max=224, v_max=4.5)

INT4 = Problem(128, "bf16", is_causal=True, precision="int4")
L20_INT4 = replace(L20_BF16, problem=INT4)

problems = st.builds(
    Problem, st.sampled_from(HEAD_DIMS), st.sampled_from(DTYPES), st.booleans(), st.sampled_from(PRECISIONS)
)
targets = st.builds(Target, st.sampled_from(sorted(GPUS)).map(find_gpu), problems)
configs = st.builds(MmaConfig, **{p.name: st.sampled_from(p.values) for p in MMA_PARAMS})


def broken(config: Config, target: Target = L20_BF16) -> set[str]:
    return {b.rule.name for b in broken_rules(config, target)}


@given(targets)
def test_the_default_config_is_valid_everywhere(target: Target) -> None:
    assert not broken(default_config(target), target)
    assert default_config_with(target, {}) == default_config(target)


STEPS = ("smooths_q", "smooths_v", "rotates")


@given(targets, st.dictionaries(st.sampled_from(STEPS), st.booleans()))
def test_a_default_config_with_steps_takes_just_those(target: Target, steps: dict[str, bool]) -> None:
    config = default_config_with(target, steps)
    if config is None:  # V in 16 bits is never smoothed; nothing else is out of reach
        assert steps["smooths_v"]
        assert default_config(target).pv in ("f16f32", "bf16f32")
        return
    assert not broken(config, target)
    assert {step: getattr(config, step) for step in steps} == steps
    if steps.items() <= {step: getattr(default_config(target), step) for step in STEPS}.items():
        assert config == default_config(target)


def test_rotation_brings_smoothing_of_q_and_goes_with_it() -> None:
    """Rotation of what is not smoothed is worth nothing (docs/numerics.md)."""
    h200 = Target(find_gpu("h200"), Problem(128, "bf16", is_causal=False))
    rotated = default_config_with(h200, {"rotates": True})
    assert (rotated.mean_span, rotated.rotate) == (192, "yes")
    int4 = replace(h200, problem=INT4)
    assert default_config(int4).rotates
    plain = default_config_with(int4, {"smooths_q": False})
    assert (plain.mean_span, plain.delta, plain.rotate) == (0, "f32", "no")
    alone = default_config_with(int4, {"smooths_q": False, "rotates": True})
    assert (alone.mean_span, alone.rotate) == (0, "yes")


@pytest.mark.parametrize(
    ("rule", "config", "target"),
    [
        ("pv_arch", BASE, Target(find_gpu("a100"), L20_BF16.problem)),
        ("pv_arch", BASE, Target(find_gpu("rtx3090"), L20_BF16.problem)),
        ("pv_dtype", replace(BASE, pv="f16f32", accum_depth=0), L20_BF16),
        ("pv_dtype", replace(BASE, pv="bf16f32", accum_depth=0), Target(find_gpu("l20"), Problem(64, "fp16", False))),
        ("int4_operands", replace(BASE, qk="s4"), L20_BF16),
        ("int4_units", replace(BASE, qk="s4"), Target(find_gpu("h200"), INT4)),
        ("int4_units", replace(BASE, qk="s4"), Target(find_gpu("rtx5090"), INT4)),
        ("int4_magic", replace(BASE, conversion="magic"), L20_INT4),
        ("int4_magic", replace(BASE, conversion="magic", qk="s4"), L20_INT4),
        (
            "e4m3_arch",
            replace(BASE, pv="bf16f32", accum_depth=0, qk="e4m3"),
            Target(find_gpu("a100"), L20_BF16.problem),
        ),
        ("e4m3_operands", replace(BASE, qk="e4m3"), L20_INT4),
        ("e4m3_conversion", replace(BASE, conversion="magic", qk="e4m3"), L20_BF16),
        ("toolkit", BASE, replace(L20_BF16, toolkit=(12, 3))),
        ("toolkit", replace(BASE, pv="bf16f32", accum_depth=0, qk="e4m3"), replace(L20_BF16, toolkit=(12, 3))),
        ("toolkit", BASE, Target(find_gpu("rtx5090"), L20_BF16.problem, (12, 6))),
        ("toolkit", FP16_SUM, replace(L20_BF16, toolkit=(12, 6))),
        ("rows_low", replace(BASE, block_q=64), L20_BF16),
        ("rows_high", replace(BASE, warps=2), L20_BF16),
        ("accum_depth", replace(BASE, accum_depth=0), L20_BF16),
        ("accum_depth", replace(BASE, accum_depth=128), L20_BF16),
        ("accum_depth", replace(BASE, pv="bf16f32", accum_depth=32), L20_BF16),
        ("spans", replace(BASE, k_span=128), L20_BF16),
        ("spans", replace(BASE, granularity="block", q_span=16), L20_BF16),
        # 4 stages of (8 KiB + 16 KiB) at bf16 P.V and block_k 128: far beyond the 99 KiB of sm_89
        ("smem", replace(BASE, pv="bf16f32", accum_depth=0, block_k=128, stages=4), L20_BF16),
        ("residency", replace(BASE, pv="bf16f32", accum_depth=0, stages=4, min_blocks=2), L20_BF16),
        (
            "threads",
            replace(BASE, min_blocks=3),
            Target(replace(find_gpu("l20"), threads_per_sm=512), L20_BF16.problem),
        ),
        # O and the scores of a 32 x 128 tile alone are 256 registers
        ("registers", replace(BASE, warps=4, block_k=128), L20_BF16),
        ("peaks", replace(BASE, p_max=224), L20_BF16),
        ("peaks", replace(BASE, v_max=4.5), L20_BF16),
        ("peaks", replace(BASE, pv="bf16f32", accum_depth=0, v_max=4.5), L20_BF16),
        ("fp16_sum", replace(BASE, pv="e4m3f16"), L20_BF16),
        # 224 * 9 * 64 = 129024; one instruction alone has half of that
        ("fp16_sum", replace(FP16_SUM, v_max=9), L20_BF16),
        ("fp16_sum", replace(FP16_SUM, block_k=128, accum_depth=128), L20_BF16),
        ("accum_depth", replace(FP16_SUM, accum_depth=0), L20_BF16),
        ("accum_depth", replace(FP16_SUM, accum_depth=0, smooth_v="yes"), L20_BF16),
        ("smooth_v", replace(BASE, pv="bf16f32", accum_depth=0, smooth_v="yes"), L20_BF16),
        ("smooth_q", replace(BASE, block_q=64, warps=4, mean_span=128), L20_BF16),
        ("smooth_q", replace(BASE, delta="f16"), L20_BF16),
        ("balance", replace(BASE, balance="yes"), L20_BF16),
        ("balance", replace(BASE, balance="yes", rotate="yes"), L20_BF16),
        ("ragged", replace(BASE, mean_span=128), replace(L20_BF16, problem=replace(L20_BF16.problem, is_ragged=True))),
    ],
)
def test_a_rule_refuses_what_it_is_for(rule: str, config: MmaConfig, target: Target) -> None:
    assert rule in broken(config, target)


def test_every_rule_has_a_config_that_breaks_it() -> None:
    marker = next(m for m in test_a_rule_refuses_what_it_is_for.pytestmark if m.name == "parametrize")
    assert {row[0] for row in marker.args[1]} == {rule.name for rule in MMA_RULES}


def test_a_refusal_names_config_gpu_rule_and_remedy() -> None:
    with pytest.raises(ConfigError, match=r"mma_bq128.*a100.*pv_arch.*take the nearest valid one: mma_bq128_"):
        check_config(BASE, Target(find_gpu("a100"), L20_BF16.problem))


@pytest.mark.parametrize(
    ("config", "target", "changes"),
    [
        (BASE, Target(find_gpu("a100"), L20_BF16.problem), 2),  # V in 16 bits, and no sums to promote
        (replace(BASE, k_span=128), L20_BF16, 1),
        (replace(FP16_SUM, p_max=448), L20_BF16, 1),
        (replace(BASE, block_q=64), L20_BF16, 1),
        (default_wgmma_config(), L20_BF16, None),  # no config of that family is valid there: the default
    ],
)
def test_the_remedy_of_a_refusal_is_a_valid_config_close_by(
    config: Config, target: Target, changes: int | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(config, target)
    found = parse_config(caught.value.remedy.split()[-1])
    assert not broken(found, target)
    if changes is None:
        assert found == default_config(target)
        return
    own, others = config_values(config), config_values(found)
    assert sum(own[name] != others[name] for name in own) == changes


@pytest.mark.parametrize(
    ("rule", "config", "target", "numbers"),
    [
        # 128 query rows of 128 bytes are 16384; more stages of K and V than 99 KiB hold; the rest by arithmetic
        ("threads", replace(BASE, warps=16, min_blocks=4), L20_BF16, "2048 of 1536 threads, over by 512"),
        ("rows_high", replace(BASE, block_q=128, warps=2), L20_BF16, "64 of 32 rows, over by 32"),
        ("smem", replace(BASE, block_k=128, stages=4), L20_BF16, r"\d+ of 101376 bytes, over by \d+"),
        ("residency", replace(BASE, stages=3, min_blocks=4), L20_BF16, r"\d+ of 102400 bytes, over by \d+"),
        ("registers", replace(BASE, min_blocks=2), L20_BF16, r"\d+ of 128 registers, over by \d+"),
    ],
)
def test_a_rule_with_a_limit_tells_size_and_limit(rule: str, config: Config, target: Target, numbers: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(config, target)
    found = re.search(rf"{rule} \(({numbers})\)", caught.value.message)
    assert found, caught.value.message
    taken, limit, over = map(int, re.findall(r"\d+", found[1]))
    assert taken - limit == over > 0


def test_what_tuning_tries_are_hundreds_and_all_fit_the_problem() -> None:
    found = searched_configs(MMA_SPACE, L20_BF16)
    assert len(found) > 200
    assert {c.pv for c in found} == {"e4m3f32", "e4m3f16", "bf16f32"}
    assert {c.accum_depth for c in found if c.pv == "bf16f32"} == {0}


def test_fp8_sums_are_never_promoted_only_where_v_is_smoothed() -> None:
    assert broken(replace(BASE, accum_depth=0)) == {"accum_depth"}
    assert not broken(replace(BASE, accum_depth=0, smooth_v="yes"))


def test_the_bound_of_fp16_sums_is_the_papers() -> None:
    # SageAttention2++: P_r 224 and V_r 4.5 for two k32 steps, P_r * V_r <= 2047 / 2; for one step twice that
    assert not broken(FP16_SUM)
    assert not broken(replace(FP16_SUM, v_max=9, accum_depth=32))
    with pytest.raises(ConfigError, match=r"fp16_sum \(448 \* 4\.5 \* 64 keys = 129024, over by 63520\).*65504"):
        check_config(replace(FP16_SUM, p_max=448), L20_BF16)


@pytest.mark.parametrize("depth", [32, 64, 128])
@pytest.mark.parametrize("block_k", [64, 128])
def test_every_peak_over_the_bound_is_refused_with_its_numbers_and_no_other(depth: int, block_k: int) -> None:
    values = {p.name: p.values for p in MMA_PARAMS}
    for p_max, v_max in itertools.product(values["p_max"], values["v_max"]):
        config = replace(FP16_SUM, block_k=block_k, accum_depth=depth, p_max=p_max, v_max=v_max)  # type: ignore[arg-type]
        total = Fraction(p_max) * Fraction(v_max) * depth
        assert ("fp16_sum" in broken(config)) == (total > 65504)
        if total > 65504:
            with pytest.raises(
                ConfigError, match=rf"fp16_sum \({p_max} \* {v_max} \* {depth} keys = {total}, over by "
            ):
                check_config(config, L20_BF16)


@given(configs, targets)
def test_fp16_sums_are_within_the_bound_wherever_all_rules_are_kept(config: MmaConfig, target: Target) -> None:
    sums = replace(config, pv="e4m3f16")
    if sums.p_max * sums.v_max * sums.accum_depth > 65504:
        assert "fp16_sum" in broken(sums, target)


@pytest.mark.parametrize("rule", [*MMA_RULES, *MMA_SEARCH_RULES], ids=lambda rule: rule.name)
@given(configs, configs, targets)
def test_a_margin_depends_on_what_its_rule_says_it_reads(
    rule: Rule[MmaConfig], config: MmaConfig, other: MmaConfig, target: Target
) -> None:
    read = {p.name: getattr(config, p.name) for p in MMA_PARAMS if p.name in rule.reads}
    assert rule.margin(replace(other, **read), target) == rule.margin(config, target)


@given(configs, targets)
@settings(max_examples=6)
def test_the_valid_configs_are_those_that_break_no_rule(config: MmaConfig, target: Target) -> None:
    near = replace(BASE, pv=config.pv, accum_depth=config.accum_depth, p_max=config.p_max, v_max=config.v_max)
    for asked in (config, near, default_mma_config(target)):
        # all but its tiles as they are: the whole space has millions
        fixed = {
            name: value for name, value in config_values(asked).items() if name not in ("block_q", "block_k", "warps")
        }
        found = valid_configs(MMA_SPACE, target, fixed)
        assert len(set(found)) == len(found)
        assert {c for c in found if replace(asked, block_q=c.block_q, block_k=c.block_k, warps=c.warps) != c} == set()
        assert (asked in found) == (not broken(asked, target))


def test_tuning_tries_one_pair_of_peaks_for_each_depth_of_fp16_sums() -> None:
    found = [c for c in all_searched_configs(L20_BF16) if isinstance(c, MmaConfig) and c.pv == "e4m3f16"]
    peaks = {(c.accum_depth, c.p_max, c.v_max) for c in found}
    assert {depth for depth, _, _ in peaks} == {32, 64, 128}
    assert len(peaks) == 3
    assert (64, 224, 4.5) in peaks  # SageAttention2++'s


@given(configs, targets)
def test_a_smaller_gpu_never_accepts_more(config: MmaConfig, target: Target) -> None:
    smaller = replace(
        target.gpu, smem_per_block=target.gpu.smem_per_block // 2, smem_per_sm=target.gpu.smem_per_sm // 2
    )
    assert broken(config, target) <= broken(config, replace(target, gpu=smaller))


@given(configs, targets)
def test_an_older_toolkit_never_accepts_more(config: MmaConfig, target: Target) -> None:
    assert broken(config, target) <= broken(config, replace(target, toolkit=(12, 2)))


def test_nvcc_12_4_offers_all_but_fp16_sums_on_ada() -> None:
    """E8. What is searched there is what is searched with a new nvcc, less the kernels that only that can build."""
    space = [BASE, FP16_SUM, replace(BASE, pv="bf16f32", accum_depth=0)]
    old, new = (replace(L20_BF16, toolkit=version) for version in ((12, 4), (13, 0)))
    assert [bool(broken(config, old)) for config in space] == [False, True, False]
    assert not any(broken(config, new) for config in space)
    assert not broken(default_config(old), old)


@given(configs, targets)
def test_packed_int4_is_valid_where_its_container_is_and_the_gpu_has_the_units(
    config: MmaConfig, target: Target
) -> None:
    target = replace(target, problem=replace(target.problem, precision="int4"))
    packed, container = (broken(replace(config, qk=qk), target) for qk in ("s4", "s8"))
    # "native on sm_80, 86, 89" (hardware.md); tiles of half the bytes fit wherever whole ones do
    assert ("int4_units" in packed) == (target.gpu.compute_capability not in (80, 86, 89))
    assert packed - {"int4_units"} <= container


def test_the_default_of_int4_is_packed_where_there_are_units_and_a_container_elsewhere() -> None:
    defaults = {name: default_config(Target(gpu, INT4)) for name, gpu in GPUS.items()}
    assert {name for name, config in defaults.items() if config.qk == "s4"} == {
        "a100",
        "rtx3090",
        "l20",
        "l40",
        "l40s",
        "rtx4090",
    }
    assert {defaults[name].family for name in ("h20", "h100", "h200")} == {"wgmma"}
    # what INT8 has, but for what makes 15 values enough
    int8 = default_config(Target(find_gpu("rtx5090"), replace(INT4, precision="int8")))
    assert defaults["rtx5090"] == replace(int8, mean_span=128, delta="f16", rotate="yes")
    assert all(config.smooths_q and config.rotates and not config.balances for config in defaults.values())
    assert not any(broken_rules(config, Target(GPUS[name], INT4)) for name, config in defaults.items())


@pytest.mark.parametrize("gpu", ["l20", "h200"])
def test_tuning_smooths_q_and_rotates_for_int4_alone(gpu: str) -> None:
    int4, int8 = (Target(find_gpu(gpu), replace(INT4, head_dim=64, precision=p)) for p in ("int4", "int8"))
    for config in all_searched_configs(int4):
        assert config.mean_span == config.block_q
        assert config.rotates
        assert not config.balances
    assert not any(config.smooths_q or config.rotates or config.balances for config in all_searched_configs(int8))


# --- wgmma

H200 = Target(find_gpu("h200"), Problem(128, "bf16", is_causal=False))
WGMMA = default_wgmma_config()
PACKED = replace(WGMMA, exponent="packed", k_span=128)
wgmma_configs = st.builds(WgmmaConfig, **{p.name: st.sampled_from(p.values) for p in WGMMA_PARAMS})


@pytest.mark.parametrize(
    ("rule", "config", "target"),
    [
        ("arch", WGMMA, replace(H200, gpu=find_gpu("l20"))),
        ("arch", WGMMA, replace(H200, gpu=find_gpu("rtx5090"))),
        ("toolkit", WGMMA, replace(H200, toolkit=(12, 6))),
        ("spans", replace(WGMMA, block_k=64, k_span=128), H200),
        ("spans", replace(WGMMA, consumers=2, block_k=192, k_span=128), H200),
        ("spans", replace(PACKED, k_span=64), H200),
        ("two_level", replace(WGMMA, accumulation="two"), H200),
        ("two_level", replace(WGMMA, accumulation="two", consumers=2, block_k=192), H200),
        ("overlap", replace(WGMMA, schedule="overlap"), H200),
        ("overlap", replace(WGMMA, schedule="overlap", consumers=2, accumulation="two"), H200),
        ("overlap", replace(WGMMA, schedule="overlap", consumers=2, row_sum="fadd"), H200),
        ("overlap", replace(WGMMA, schedule="overlap", consumers=2, rescale="always"), H200),
        ("packed", replace(PACKED, row_sum="fadd"), H200),
        ("e4m3_operands", replace(WGMMA, qk="e4m3"), replace(H200, problem=INT4)),
        ("e4m3_exponent", replace(PACKED, qk="e4m3"), H200),
        ("e4m3_exponent", replace(PACKED, exponent="mixed2", qk="e4m3"), H200),
        ("exponent", PACKED, replace(H200, problem=INT4)),
        ("exponent", replace(PACKED, exponent="mixed4"), replace(H200, problem=INT4)),
        ("smooth_q", replace(WGMMA, mean_span=128), H200),
        ("smooth_q", replace(WGMMA, delta="f16"), H200),
        ("plain_scores", replace(PACKED, mean_span=64), H200),
        ("plain_scores", replace(WGMMA, rotate="yes", q_quantizer="prologue"), H200),
        ("balance", replace(WGMMA, balance="yes"), H200),
        ("ragged", replace(WGMMA, mean_span=192), replace(H200, problem=replace(H200.problem, is_ragged=True))),
        (
            "ragged_queries",
            replace(WGMMA, q_quantizer="prologue"),
            replace(H200, problem=replace(H200.problem, is_ragged=True)),
        ),
        # four stages of 32 KiB each for K and V
        ("smem", replace(WGMMA, consumers=2, block_k=256, stages=4), H200),
        # what ptxas said of these: 1628 bytes spilled and C7512; 408 and C7512; more registers than there are
        ("registers", replace(WGMMA, block_k=192), H200),
        ("registers", replace(PACKED, consumers=2, block_k=256, k_span=256, schedule="overlap"), H200),
        ("registers", replace(WGMMA, block_k=256), replace(H200, problem=Problem(64, "fp16", True))),
        ("head_dim", WGMMA, replace(H200, problem=Problem(256, "fp16", True))),
    ],
)
def test_a_wgmma_rule_refuses_what_it_is_for(rule: str, config: WgmmaConfig, target: Target) -> None:
    assert rule in broken(config, target)


def test_every_wgmma_rule_has_a_config_that_breaks_it() -> None:
    marker = next(m for m in test_a_wgmma_rule_refuses_what_it_is_for.pytestmark if m.name == "parametrize")
    assert {row[0] for row in marker.args[1]} == {rule.name for rule in WGMMA_RULES}


@pytest.mark.parametrize(
    "config",
    [
        replace(PACKED, consumers=2, block_k=192, k_span=192, stages=2, schedule="overlap"),
        replace(PACKED, consumers=2, block_k=256, k_span=256, stages=2),
        PACKED,
        replace(WGMMA, consumers=2, accumulation="two"),
        replace(WGMMA, consumers=2, accumulation="two", row_sum="fadd"),
    ],
    ids=lambda config: config.name,
)
def test_what_the_prototype_showed_to_be_fast_is_valid(config: WgmmaConfig) -> None:
    assert not broken(config, H200)


def test_the_default_of_hopper_is_wgmma_unless_the_toolkit_is_too_old() -> None:
    assert default_config(H200) == default_wgmma_config()
    assert default_config(replace(H200, toolkit=(12, 6))).family == "mma"
    assert {name for name, gpu in GPUS.items() if default_config(replace(H200, gpu=gpu)).family == "wgmma"} == {
        "h20",
        "h100",
        "h200",
    }


@given(wgmma_configs, problems)
def test_a_wgmma_config_is_as_valid_causal_as_not_and_in_either_dtype(config: WgmmaConfig, problem: Problem) -> None:
    other = replace(H200, problem=replace(problem, dtype="fp16", is_causal=not problem.is_causal))
    assert broken(config, replace(H200, problem=problem)) == broken(config, other)


# --- what rules read


@given(st.data())
@settings(max_examples=300)
@pytest.mark.parametrize("family", RULES)
def test_a_rule_depends_on_the_parameters_that_it_reads_alone(family: str, data: st.DataObject) -> None:
    """A space is pruned by a rule before the others are chosen."""
    target = data.draw(targets)
    config, other = (data.draw({"mma": configs, "wgmma": wgmma_configs}[family]) for _ in range(2))
    for rule in RULES[family] + SEARCH_RULES[family]:
        assert rule.reads, rule.name
        mixed = replace(other, **{name: getattr(config, name) for name in rule.reads})
        assert (rule.margin(mixed, target) > 0) == (rule.margin(config, target) > 0), rule.name
