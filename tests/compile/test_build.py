"""Building with the real nvcc."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from sagegen.build import BuildFailure, Built, build_batch
from sagegen.cubin import read_sections
from sagegen.env import read_env
from sagegen.gpu import GPUS
from sagegen.problem import Problem
from sagegen.render import Source, render
from sagegen.rules import Target, default_config
from sagegen.space import parse_config
from sagegen.store import Store, read_cubin
from sagegen.toolkit import Toolkit, find_toolkit

pytestmark = pytest.mark.compile

PROBLEM = Problem(64, "fp16", False)
CONFIG = default_config(Target(GPUS["a100"], PROBLEM))
#: `stats` keeps a run-time indexed array on its stack, `quantize` has 256 bytes of shared memory.
TEXT = """\
extern "C" __global__ void stats_k(float* p, const int* at, int n) {
    float a[64];
    for (int j = 0; j < 64; ++j) a[j] = p[j];
    for (int j = 0; j < n; ++j) a[at[j]] += 1.f;
    p[0] = a[at[n]];
}
extern "C" __global__ void quantize_k(float* p) {
    __shared__ float s[64];
    s[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void attention_k(float* p) { p[threadIdx.x] += 1.f; }
"""
SOURCE = Source("k", PROBLEM, CONFIG, TEXT)


@pytest.fixture(scope="module")
def toolkit() -> Toolkit:
    return find_toolkit(read_env())


def build(store: Store, toolkit: Toolkit, source: Source = SOURCE, arch: str = "sm_89") -> Built | BuildFailure:
    return build_batch([source], arch, store, toolkit)[source.name]


def test_resources_agree_with_the_toolkits_own_reader(tmp_path: Path, toolkit: Toolkit) -> None:
    built = build(Store(tmp_path), toolkit)
    assert isinstance(built, Built)
    assert built.resources["stats"].stack_bytes == 256
    assert built.resources["quantize"].smem_bytes == 256
    cuobjdump = find_cuobjdump(toolkit)
    said = subprocess.run(
        [cuobjdump, "--dump-resource-usage", built.cubin], capture_output=True, text=True, check=True
    ).stdout
    for role, used in built.resources.items():
        line = said.split(f"Function {role}_k:")[1].splitlines()[1]
        assert f"REG:{used.registers} STACK:{used.stack_bytes} " in line


def find_cuobjdump(toolkit: Toolkit) -> str:
    path = f"{toolkit.nvcc.parent}:{sysconfig.get_path('scripts')}"
    found = shutil.which("cuobjdump", path=path) or shutil.which("cuobjdump")
    if found is None:
        pytest.skip("needs cuobjdump")
    return found


def test_two_builds_in_two_places_are_equal_to_the_byte(tmp_path: Path, toolkit: Toolkit) -> None:
    one, two = (build(Store(tmp_path / name), toolkit) for name in ("one", "a longer/path"))
    assert isinstance(one, Built)
    assert isinstance(two, Built)
    assert one.cubin_sha256 == two.cubin_sha256
    assert str(tmp_path).encode() not in one.cubin.read_bytes()


def test_a_comment_changes_the_text_but_not_the_code(tmp_path: Path, toolkit: Toolkit) -> None:
    store = Store(tmp_path)
    one, two = (build(store, toolkit, replace(SOURCE, text=text)) for text in (TEXT, TEXT + "// remark\n"))
    three = build(store, toolkit, replace(SOURCE, text=TEXT.replace("1.f", "2.f")))
    assert isinstance(one, Built)
    assert isinstance(two, Built)
    assert isinstance(three, Built)
    assert one.text_sha256 != two.text_sha256
    assert one.code_sha256 == two.code_sha256 != three.code_sha256


def test_the_first_error_names_the_line_of_the_source(tmp_path: Path, toolkit: Toolkit) -> None:
    lines = TEXT.splitlines()
    lines[7] = "    __shared__ float s[no_such_name];"
    failure = build(Store(tmp_path), toolkit, replace(SOURCE, text="\n".join(lines)))
    assert isinstance(failure, BuildFailure)
    assert failure.outcome == "compile"
    assert "k.cu(8): error" in failure.reason
    assert "no_such_name" in failure.reason


def test_an_assembler_error_is_found_too(tmp_path: Path, toolkit: Toolkit) -> None:
    # the e4m3 conversion needs sm_89: nvcc lets it through, ptxas refuses
    text = TEXT.replace(
        "p[threadIdx.x] += 1.f;",
        'unsigned short x; asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(x) : "f"(p[0])); p[1] = x;',
    )
    assert isinstance(build(Store(tmp_path), toolkit, replace(SOURCE, text=text)), Built)
    failure = build(Store(tmp_path), toolkit, replace(SOURCE, text=text), arch="sm_80")
    assert isinstance(failure, BuildFailure)
    assert "ptxas" in failure.reason
    assert "error" in failure.reason


def test_a_link_to_the_compiler_hits_what_the_compiler_built(
    tmp_path: Path, toolkit: Toolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    assert isinstance(build(store, toolkit), Built)
    (tmp_path / "nvcc").symlink_to(toolkit.nvcc)
    monkeypatch.setenv("SAGEGEN_NVCC", str(tmp_path / "nvcc"))
    linked = find_toolkit(read_env())
    hit = build(store, linked)
    assert isinstance(hit, Built)
    assert hit.cached
    missed = build(store, linked, replace(SOURCE, text=TEXT + "\n"))
    assert isinstance(missed, Built)
    assert not missed.cached


def test_the_cubin_is_elf_with_one_code_section_per_kernel(tmp_path: Path, toolkit: Toolkit) -> None:
    built = build(Store(tmp_path), toolkit)
    assert isinstance(built, Built)
    sections = read_sections(read_cubin(built.cubin.parent))
    assert {name for name in sections if name.startswith(".text.")} == {
        ".text.stats_k",
        ".text.quantize_k",
        ".text.attention_k",
    }
    assert len(sections[".text.attention_k"]) % 128 == 0  # ptxas pads code to its alignment


def test_configs_with_another_quantizer_are_other_code(tmp_path: Path, toolkit: Toolkit) -> None:
    """The attention kernel of a scale per warp's rows can be that of a scale per thread's; the call is not as long."""
    name = "mma_bq128_bk64_w4_st2_pvbf16f32_ad0_cvi2f_gr{}_qs32_ks64_rsskip_qosmem_mb1"
    store, problem = Store(tmp_path), Problem(64, "bf16", False)
    thread, warp = (build(store, toolkit, render(problem, parse_config(name.format(g)))) for g in ("thread", "warp"))
    assert isinstance(thread, Built)
    assert isinstance(warp, Built)
    assert thread.code_sha256 != warp.code_sha256
