"""What nvcc makes of the templates: matrix instructions in the SASS, registers, spills."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sagegen.build import BuildFailure, Built, build_batch, find_toolkit
from sagegen.env import read_env
from sagegen.gpu import GPUS, find_gpu
from sagegen.problem import DTYPES, HEAD_DIMS, TUNED_HEAD_DIMS, Problem
from sagegen.render import Source, render
from sagegen.rules import Target, broken_rules, default_config
from sagegen.space import parse_config
from sagegen.store import Store

pytestmark = pytest.mark.compile

Build = Callable[[str, Sequence[Source]], list[Built]]
Sass = Callable[[Built, str], str]

#: One GPU per architecture.
ONE_PER_ARCH = {GPUS[name].arch: name for name in ("a100", "rtx3090", "l20", "h200", "rtx5090")}
PROBLEMS = [Problem(d, t, causal) for d in TUNED_HEAD_DIMS for t in DTYPES for causal in (False, True)]
INT4 = Problem(128, "bf16", is_causal=False, precision="int4")
#: Configs that differ in every structural parameter, beside the defaults.
DIVERSE = (
    "mma_bq64_bk64_w4_st3_pvbf16f32_ad0_cvmagic_grwarp_qs16_ks64_rsskip_qosmem_mb2",
    "mma_bq128_bk128_w8_st2_pve4m3f32_ad32_cvmagic_grthread_qs32_ks128_rsskip_qoreg_mb1",
    "mma_bq128_bk64_w4_st2_pve4m3f32_ad64_cvi2f_grblock_qs32_ks64_rsalways_qosmem_mb1",
    "mma_bq64_bk64_w2_st2_pvbf16f32_ad0_cvi2f_grthread_qs32_ks64_rsalways_qosmem_mb2",
    "mma_bq128_bk128_w8_st2_pve4m3f16_ad128_cvmagic_grwarp_qs16_ks64_rsskip_qoreg_mb1_pm56_vm9_svyes",
)


@pytest.mark.parametrize("arch", ONE_PER_ARCH)
def test_own_and_l20_default_configs_compile_without_spills(build: Build, arch: str) -> None:
    gpu = find_gpu(ONE_PER_ARCH[arch])
    sources = {}
    for problem in PROBLEMS:
        for name in (gpu.name, "l20"):
            config = default_config(Target(find_gpu(name), problem))
            if not broken_rules(config, Target(gpu, problem)):
                sources[render(problem, config).name] = render(problem, config)
    assert len(sources) == (16 if arch == "sm_90" else 8)  # its own takes 16-bit P V, FP8 is emulated there
    for built in build(arch, list(sources.values())):
        for role, used in built.resources.items():
            assert used.spill_store_bytes == used.spill_load_bytes == 0, (built.name, role)


@pytest.mark.parametrize("arch", ONE_PER_ARCH)
def test_defaults_for_256_channels_compile_without_spills(build: Build, arch: str) -> None:
    gpu = find_gpu(ONE_PER_ARCH[arch])
    problems = [Problem(256, dtype, causal) for dtype in DTYPES for causal in (False, True)]
    sources = [render(problem, default_config(Target(gpu, problem))) for problem in problems]
    for built in build(arch, sources):
        for role, used in built.resources.items():
            assert used.spill_store_bytes == used.spill_load_bytes == 0, (built.name, role)


@pytest.mark.parametrize(
    ("arch", "pv", "qk_instruction", "pv_instruction"),
    [
        ("sm_80", "f16f32", r"IMMA\.16832\.S8\.S8", r"HMMA\.16816\.F32 "),
        ("sm_86", "bf16f32", r"IMMA\.16832\.S8\.S8", r"HMMA\.16816\.F32\.BF16"),
        ("sm_89", "e4m3f32", r"IMMA\.16832\.S8\.S8", r"QMMA\.16832\.F32\.E4M3\.E4M3"),
        ("sm_120", "e4m3f32", r"IMMA\.16832\.S8\.S8", r"QMMA\.16832\.F32\.E4M3\.E4M3"),
        ("sm_89", "e4m3f16", r"IMMA\.16832\.S8\.S8", r"QMMA\.16832\.F16\.E4M3\.E4M3"),
        ("sm_120", "e4m3f16", r"IMMA\.16832\.S8\.S8", r"QMMA\.16832\.F16\.E4M3\.E4M3"),
        ("sm_90", "bf16f32", r"IMMA\.16832\.S8\.S8", r"HMMA\.16816\.F32\.BF16"),
        ("sm_90", "e4m3f16", r"IMMA\.16832\.S8\.S8", r"HMMA\.16816\.F16 "),
        ("sm_90", "e4m3f32", r"IMMA\.16832\.S8\.S8", r"HMMA\.16816\.F32 "),  # FP8 is emulated there
    ],
)
def test_sass_has_the_matrix_instructions_the_config_names(
    build: Build, sass: Sass, arch: str, pv: str, qk_instruction: str, pv_instruction: str
) -> None:
    problem = Problem(128, "fp16" if pv == "f16f32" else "bf16", is_causal=False)
    peaks = (224, 4.5) if pv == "e4m3f16" else (448, 448)  # SageAttention2++
    config = replace(
        default_config(Target(find_gpu("l20"), problem)),
        pv=pv, accum_depth=64 if pv.startswith("e4m3") else 0, p_max=peaks[0], v_max=peaks[1],
    )  # fmt: skip
    text = sass(build(arch, [render(problem, config)])[0], "attention")
    # per warp and tile: 8 key tiles x 4 channel steps of Q K^T; P V is 16 channel tiles x 2 or 4 token steps
    assert len(re.findall(qk_instruction, text)) == 8 * 4
    assert len(re.findall(pv_instruction, text)) == 16 * (2 if pv.startswith("e4m3") and arch != "sm_90" else 4)
    assert ("QMMA" in text) == (pv.startswith("e4m3") and arch != "sm_90")


@pytest.mark.parametrize("arch", ["sm_89", "sm_120"])
def test_fp16_sums_and_smooth_v_compile_without_spills(build: Build, arch: str) -> None:
    sources = []
    for head_dim in HEAD_DIMS:
        problem = Problem(head_dim, "bf16", is_causal=True)
        target = Target(find_gpu(ONE_PER_ARCH[arch]), problem)
        sums = replace(default_config(target), pv="e4m3f16", p_max=224, v_max=4.5)
        configs = [sums, replace(sums, smooth_v="yes"), replace(default_config(target), accum_depth=0, smooth_v="yes")]
        assert not any(broken_rules(config, target) for config in configs)
        sources += [render(problem, config) for config in configs]
    for built in build(arch, sources):
        for role, used in built.resources.items():
            assert used.spill_store_bytes == used.spill_load_bytes == 0, (built.name, role)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_smoothed_rotated_and_balanced_queries_cost_no_spills(build: Build, sass: Sass, arch: str) -> None:
    sources = []
    for problem in (Problem(128, "bf16", is_causal=True), Problem(64, "fp16", is_causal=False)):
        target = Target(find_gpu(ONE_PER_ARCH[arch]), problem)
        smoothed = replace(default_config(target), mean_span=64)
        rotated = replace(smoothed, mean_span=128, delta="f16", rotate="yes")
        configs = [smoothed, rotated, replace(rotated, balance="yes"), replace(smoothed, balance="yes")]
        assert not any(broken_rules(config, target) for config in configs)
        sources += [render(problem, config) for config in configs]
    for source, built in zip(sources, build(arch, sources), strict=True):
        for role, used in built.resources.items():
            assert used.spill_store_bytes == used.spill_load_bytes == 0, (built.name, role)
        # delta S: a warp multiplies 16 means with two tiles of 8 keys, 16 channels at a time
        dtype = r"\.BF16" if source.problem.dtype == "bf16" else ""
        products = re.findall(rf"HMMA\.16816\.F32{dtype} ", sass(built, "quantize"))
        assert len(products) == 2 * source.problem.head_dim // 16


def test_the_compiler_refuses_sums_beyond_fp16(tmp_path: Path) -> None:
    problem = Problem(64, "bf16", is_causal=False)
    config = replace(default_config(Target(find_gpu("l20"), problem)), pv="e4m3f16", p_max=224, v_max=9)
    (failure,) = build_batch([render(problem, config)], "sm_89", Store(tmp_path), find_toolkit(read_env())).values()
    assert isinstance(failure, BuildFailure)
    assert "a sum of products of P and V leaves the range of FP16" in str(failure)


@pytest.mark.parametrize("gpu", ["a100", "rtx3090", "l20"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_int4_by_default_is_the_native_instruction_without_spills(
    build: Build, sass: Sass, gpu: str, head_dim: int
) -> None:
    problem = replace(INT4, head_dim=head_dim, is_causal=True)
    config = default_config(Target(find_gpu(gpu), problem))
    built = build(find_gpu(gpu).arch, [render(problem, config)])[0]
    for role, used in built.resources.items():
        assert used.spill_store_bytes == used.spill_load_bytes == 0, role
    text = sass(built, "attention")
    assert "IMMA.16832" not in text
    # per warp and tile: 8 key tiles x half the channel steps of INT8
    assert len(re.findall(r"IMMA\.16864\.S4\.S4", text)) == 8 * head_dim // 64


def test_int4_in_int8_operands_is_int8s_instruction(build: Build, sass: Sass) -> None:
    config = replace(default_config(Target(find_gpu("l20"), INT4)), qk="s8")
    text = sass(build("sm_89", [render(INT4, config)])[0], "attention")
    assert len(re.findall(r"IMMA\.16832\.S8\.S8", text)) == 8 * 4
    assert "S4" not in text


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_packed_int4_is_a_routine_where_there_are_no_units(build: Build, sass: Sass, arch: str) -> None:
    """Why the rule refuses it there; it still compiles, to be checked for its results."""
    text = sass(build(arch, [render(INT4, default_config(Target(find_gpu("a100"), INT4)))])[0], "attention")
    assert "IMMA.16864" not in text
    assert "CALL" in text


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("options", [{}, {"mean_span": 128, "delta": "f16", "rotate": "yes"}], ids=["plain", "smooth"])
def test_e4m3_scores_are_fp8_products_without_conversions(
    build: Build, sass: Sass, arch: str, options: dict[str, int | str]
) -> None:
    problem = Problem(128, "bf16", is_causal=True)
    config = replace(default_config(Target(find_gpu("l20"), problem)), qk="e4m3", **options)  # type: ignore[arg-type]
    built = build(arch, [render(problem, config)])[0]
    text = sass(built, "attention")
    assert "IMMA" not in text
    assert not re.search(r"I2FP?\.F32\.S32", text)
    if arch == "sm_90":  # FP8 is emulated there
        assert "QMMA" not in text
        assert "HMMA.16816.F32 " in text
        return
    for role, used in built.resources.items():
        assert used.spill_store_bytes == used.spill_load_bytes == 0, role
    # per warp and tile: 8 key tiles x 4 channel steps of Q K^T; P V is 16 channel tiles x 2 token steps
    assert len(re.findall(r"QMMA\.16832\.F32\.E4M3\.E4M3", text)) == 8 * 4 + 16 * 2


@pytest.mark.parametrize("conversion", ["i2f", "magic"])
def test_the_magic_bias_replaces_the_conversion_instruction(build: Build, sass: Sass, conversion: str) -> None:
    problem = Problem(64, "bf16", is_causal=False)
    config = replace(default_config(Target(find_gpu("l20"), problem)), conversion=conversion)
    text = sass(build("sm_89", [render(problem, config)])[0], "attention")
    scores = 8 * 4  # per thread and tile; the plain I2F of integer divisions are others
    assert len(re.findall(r"I2FP\.F32\.S32", text)) == (scores if conversion == "i2f" else 0)


def test_global_loads_of_the_quantizers_are_vectors(build: Build, sass: Sass) -> None:
    problem = Problem(128, "bf16", is_causal=False)
    text = sass(build("sm_89", [render(problem, default_config(Target(find_gpu("l20"), problem)))])[0], "quantize")
    loads = re.findall(r"LDG\.E\S*", text)
    assert sum(".128" in load for load in loads) >= 4
    assert sum(".64" in load for load in loads) >= 16


@pytest.mark.parametrize("name", DIVERSE)
def test_diverse_configs_compile_wherever_their_rules_allow(build: Build, name: str) -> None:
    config = parse_config(name)
    problem = Problem(64, "bf16", is_causal=True)
    allowed = [gpu for gpu in ONE_PER_ARCH.values() if not broken_rules(config, Target(find_gpu(gpu), problem))]
    assert allowed
    for gpu in allowed:
        build(find_gpu(gpu).arch, [render(problem, config)])
