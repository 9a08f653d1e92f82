"""The rendered text: deterministic, complete, and free of what a config does not use."""

import importlib.resources
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagegen.problem import PRECISIONS, Precision, Problem
from sagegen.render import render
from sagegen.space import MMA_PARAMS, MmaConfig, parse_config
from sagegen.store import make_key

FP8 = parse_config("mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qoreg_mb1")
BF16 = replace(FP8, pv="bf16f32", accum_depth=0)
PROBLEM = Problem(128, "bf16", is_causal=True)
configs = st.builds(MmaConfig, **{p.name: st.sampled_from(p.values) for p in MMA_PARAMS})


def device_layer(text: str) -> str:
    return text.split("// ---- device layer: begin")[1].split("// ---- device layer: end")[0]


def test_the_same_inputs_give_the_same_bytes() -> None:
    assert render(PROBLEM, FP8).text == render(PROBLEM, FP8).text


_CHANGE = """
import importlib.resources, os, pathlib, shutil, sys
from sagegen import render
from sagegen.problem import Problem
from sagegen.space import parse_config
from sagegen.store import make_key

copy, name = pathlib.Path(sys.argv[1]), sys.argv[2]
if name:
    head, _, tail = (copy / name).read_bytes().rpartition(b";")
    (copy / name).write_bytes(head + b" ;" + tail)
    for file in copy.rglob("*"):
        os.utime(file, (1, 1))  # older than anything
real = importlib.resources.files
importlib.resources.files = lambda package: copy if package == "sagegen.templates" else real(package)
text = render.render(Problem(128, "bf16", True), parse_config(sys.argv[3])).text
print(make_key("kernel", text, "sm_89", "V13", ()).digest)
"""


def test_one_byte_of_a_template_or_header_is_another_kernel_whatever_the_time_stamps(tmp_path: Path) -> None:
    """E4: the store's key, each time in a fresh process."""
    templates = Path(str(importlib.resources.files("sagegen.templates")))
    keys = []
    for name in ("", "attention_mma.cu.j2", "include/cuda/thread.cuh"):
        copy = tmp_path / (name.replace("/", "_") or "same")
        shutil.copytree(templates, copy, ignore=shutil.ignore_patterns("__pycache__"))
        command = [sys.executable, "-c", _CHANGE, str(copy), name, FP8.name]
        keys.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    assert keys[0] == make_key("kernel", render(PROBLEM, FP8).text, "sm_89", "V13", ()).digest
    assert len(set(keys)) == 3


@given(configs, st.sampled_from(PRECISIONS))
@settings(max_examples=25)
def test_every_config_renders_tidy_self_contained_text(config: MmaConfig, precision: Precision) -> None:
    source = render(replace(PROBLEM, precision=precision), config)
    assert not re.search(r"\{\{|\{% |\{#", source.text), "Jinja left in the text"
    assert re.findall(r"#include.*", source.text) == ["#include <cstdint>"]
    for role in ("stats", "quantize", "attention"):
        assert source.text.count(f"\n{source.entry(role)}(\n") == 1  # type: ignore[arg-type]
    names = {f"// {source.name}", *(f"{source.entry(role)}(" for role in source.roles)}  # cannot be broken
    assert all(len(line) <= 120 or line in names for line in source.text.splitlines())
    assert "\n\n\n" not in source.text
    assert not re.search(r"[ \t]+\n", source.text)


@given(configs)
@settings(max_examples=25)
def test_ptx_stays_in_the_device_layer(config: MmaConfig) -> None:
    text = render(PROBLEM, config).text
    outside = text.replace(device_layer(text), "")
    assert "asm" not in outside
    assert not re.search(r"\b(__shfl|__any|__ballot|__syncthreads|threadIdx|blockIdx)", outside)


def test_constants_are_the_configs() -> None:
    text = render(PROBLEM, replace(FP8, stages=3)).text
    for line in (
        "constexpr int HEAD_DIM = 128;",
        "constexpr int BLOCK_Q = 128;",
        "constexpr int BLOCK_K = 64;",
        "constexpr int WARPS = 8;",
        "constexpr int STAGES = 3;",
    ):
        assert line in text


def test_a_feature_that_is_off_renders_nothing() -> None:
    plain = render(PROBLEM, BF16).text
    assert "pack_e4m3" not in plain
    assert "quantize_v_tile" not in plain
    assert "MAGIC" not in plain
    assert "warp_any(grew)" not in plain
    assert "INT4" not in plain
    assert "pack_e4m3" in render(PROBLEM, FP8).text
    assert "INT4" in render(replace(PROBLEM, precision="int4"), BF16).text
    assert "MAGIC" in render(PROBLEM, replace(BF16, conversion="magic")).text
    assert "warp_any(grew)" in render(PROBLEM, replace(BF16, rescale="skip")).text


@pytest.mark.parametrize("param", [p for p in MMA_PARAMS if p.name != "pv"], ids=lambda p: p.name)
def test_every_parameter_reaches_the_text(param) -> None:  # type: ignore[no-untyped-def]
    """The kernels' names blanked, another value must give another text; else it would be tuned in vain."""
    texts = set()
    for value in param.values:
        source = render(PROBLEM, replace(FP8, **{param.name: value}))
        texts.add(source.text.replace(source.name, "NAME"))
    assert len(texts) == len(param.values)


def test_bf16_values_never_pass_through_fp16() -> None:
    assert "f16x2" not in render(PROBLEM, BF16).text.replace("bf16x2", "")
