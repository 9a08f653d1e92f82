"""The device layer's parts beyond what today's templates use: what they compute, and the misuse that they report."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from sagegen.emulator.compiler import build_library, find_compiler, open_libraries
from sagegen.emulator.library import Buffer, KernelRun, Library
from sagegen.emulator.places import KernelText, find_places
from sagegen.env import read_env
from sagegen.problem import Problem
from sagegen.render import Source
from sagegen.space import parse_config

pytestmark = pytest.mark.emulator

CASES_FILE = Path(__file__).parents[1] / "device_layer" / "cases.py"
HOPPER = 90
#: A source must name a problem and a config; these kernels have neither.
PROBLEM = Problem(64, "fp16", False)
CONFIG = parse_config("mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qosmem_mb1")


def _load_cases():
    spec = importlib.util.spec_from_file_location("device_layer_cases", CASES_FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


cases = _load_cases()


@dataclass
class Kernels:
    """The kernels of one file, in the emulator."""

    text: KernelText
    library: Library

    def run(self, names, words, output, blocks, threads, smem_bytes, architecture, programmatic=False):
        """Launch kernels in order; what went wrong, or None."""
        buffers = [
            Buffer("input", words.ctypes.data, 4, words.shape, (1,)),
            Buffer("output", output.ctypes.data, 4, output.shape, (1,), is_writable=True),
        ]
        params = np.array([words.ctypes.data, output.ctypes.data, 0], np.uint64).tobytes()
        with self.library.open(buffers) as session:
            for name in names:
                function = self.library.function(name)
                run = KernelRun(
                    name, function, blocks, threads, smem_bytes, params, architecture, 2, False, programmatic
                )
                if report := session.run(run):
                    return report
        return None

    def line_of(self, report):
        """The text of the line that a report is about."""
        if report.line:
            return self.text.line(report.line)
        place = find_places(self.library.path, [report.site], self.text).get(report.site)
        return self.text.line(place.line) if place else ""


def compile_kernels(name, text):
    source = Source(name, PROBLEM, CONFIG, text)
    built = build_library(source, open_libraries(read_env()), find_compiler())
    return Kernels(KernelText(source), Library(built.path))


@pytest.fixture(scope="module")
def kernels():
    """Kernels by file, compiled when asked for."""

    class ByFile(dict):
        def __missing__(self, name):
            self[name] = compile_kernels(name, cases.read_source(name, "host"))
            return self[name]

    return ByFile()


def run_case(kernels, case):
    words = np.ascontiguousarray(case.input).reshape(-1)
    output = np.zeros_like(case.expected)
    report = kernels.run(case.kernels, words, output, case.blocks, case.threads, case.smem_bytes, case.architecture)
    return report, output


@pytest.mark.parametrize("name", cases.CASES)
def test_results(kernels, name):
    case = cases.CASES[name]()
    report, output = run_case(kernels[case.file], case)
    assert report is None, report.message
    assert case.difference(output) <= case.tolerance


PV_WAIT = "        device::wgmma_wait<0>(out, weights);\n"
V_RELEASE = "        if (is_first) device::mbarrier_arrive(&barriers.v_empty[s]);\n"
#: Replacements in flow.cu, the error's kind and a piece of the line that it names.
FLOW_BUGS = {
    "early_release": (PV_WAIT + V_RELEASE, V_RELEASE + PV_WAIT, "race", "bulk_load(v"),
    "no_pv_wait": (PV_WAIT, "", "in_flight", "bulk_load(v"),
    "no_qk_wait": ("        device::wgmma_wait<1>(scores);\n", "", "in_flight", "scaled[i] ="),
    "no_q_wait": ("    device::mbarrier_wait(&barriers.q_full, 0);\n", "", "in_flight", "wgmma_s8("),
    "no_v_wait": (
        "        device::mbarrier_wait(&barriers.v_full[s], tile / STAGES % 2);\n", "", "in_flight", "wgmma_e4m3(",
    ),
    "old_parity": ("(tile + 1) / STAGES % 2);", "tile / STAGES % 2);", "in_flight", "wgmma_s8("),
    "empty_too_soon": (
        "mbarrier_init(&barriers.v_empty[s], 2);", "mbarrier_init(&barriers.v_empty[s], 1);", "in_flight",
        "wgmma_e4m3(",
    ),
    "no_registers": ("        device::lower_registers<24>();\n", "", "deadlock", "mbarrier_wait(&barriers.k_empty"),
    "no_first_turn": ("if (device::warp_index() >= 8)", "if (false)", "deadlock", "mbarrier_wait(&barriers.v_empty"),
    "unfenced_weights": ("wgmma_fence(out, weights);\n        multiply", "wgmma_fence(out);\n        multiply",
                         "fence", "wgmma_e4m3("),
    "unfenced_result": ("    device::fence_proxy_async();\n", "", "proxy", "bulk_store("),
}  # fmt: skip


@pytest.mark.parametrize("bug", FLOW_BUGS)
def test_flow_bugs(bug):
    old, new, kind, line = FLOW_BUGS[bug]
    text = cases.read_source("flow", "host")
    assert old in text
    kernels = compile_kernels("flow", text.replace(old, new))
    report, _ = run_case(kernels, cases.CASES["flow"]())
    _check(kernels, report, kind, line)


LOAD, EXPECT, STORE = "bulk_load(stage", "mbarrier_arrive_expect_tx(", "bulk_store("
FULL_WAIT, EMPTY_WAIT = "mbarrier_wait(&full[s]", "mbarrier_wait(&empty[s]"
MULTIPLY, RESULT = "wgmma_s8(d, a, b", "static_cast<uint32_t>(d[i])"
# fmt: off
#: The error's kind and a piece of the line that it names, by bug of bugs.cu.
PIPELINE_BUGS = {
    "no_init": ("bad_barrier", EXPECT), "init_twice": ("bad_barrier", "init_twice"), "no_init_fence": ("proxy", LOAD),
    "no_init_sync": ("race", EMPTY_WAIT), "short_expect": ("bad_barrier", LOAD), "long_expect": ("deadlock", FULL_WAIT),
    "no_full_wait": ("in_flight", "sum[i] +="), "wrong_parity": ("uninitialized", "sum[i] +="),
    "no_empty_wait": ("bad_barrier", EXPECT), "empty_count": ("deadlock", FULL_WAIT),
    "missing_arrival": ("deadlock", FULL_WAIT), "misaligned_copy": ("misaligned", LOAD),
    "odd_size": ("misaligned", LOAD), "past_source": ("out_of_bounds", LOAD), "past_end": ("in_flight", LOAD),
    "store_unfenced": ("proxy", STORE), "store_unordered": ("uninitialized", STORE),
    "store_not_waited": ("in_flight", STORE), "store_reused": ("in_flight", "sums[5] = 0"),
    "no_producer": ("deadlock", FULL_WAIT),
}
PRODUCT_BUGS = {
    "unfenced": ("proxy", MULTIPLY), "late_fence": ("proxy", MULTIPLY), "no_sync": ("race", MULTIPLY),
    "no_wgmma_fence": ("fence", MULTIPLY), "written_after_fence": ("fence", MULTIPLY),
    "no_commit": ("in_flight", RESULT), "no_wait": ("in_flight", RESULT), "wait_one": ("in_flight", RESULT),
    "overwritten": ("race", "words[WORDS_A] = 0"), "never_waited": ("in_flight", MULTIPLY),
    "missing_warp": ("deadlock", "wgmma_wait<0>"), "other_descriptor": ("divergence", MULTIPLY),
    "unwritten_operand": ("uninitialized", MULTIPLY), "past_shared": ("out_of_bounds", MULTIPLY),
    "no_swizzle": ("bad_descriptor", MULTIPLY), "half_block": ("divergence", MULTIPLY),
}
CONTROL_BUGS = {
    "raise_first": ("deadlock", "block_sync"), "unequal_warps": ("divergence", "lower_registers<24>"),
    "wrong_way": ("bad_registers", "lower_registers<240>"), "odd_budget": ("bad_registers", "lower_registers<100>"),
    "barrier_count": ("bad_barrier", "named_barrier_sync(1,"), "barrier_id": ("bad_barrier", "named_barrier_sync(16,"),
    "no_warp_sync": ("race", "words[thread] = p.input"), "unsynced_matrix": ("race", "rows[31 - thread]"),
    "plain_counter": ("race", "== 77) return"), "unset_counter": ("uninitialized", "unset_counter"),
    "no_dependency": ("dependency", "p.output[thread] ="),
}
# fmt: on
TILES, WORDS = 5, 512


def _run(kernels, name, threads, *, count_of_input, count_of_output, smem_bytes, before=()):
    words = np.random.default_rng(0).integers(0, 2**32, count_of_input, dtype=np.uint32)
    output = np.zeros(count_of_output, np.uint32)
    report = kernels["bugs"].run((*before, name), words, output, 1, threads, smem_bytes, HOPPER, bool(before))
    return report, words, output


def _check(kernels, report, kind, line):
    assert report is not None
    assert report.kind == kind, report.message
    assert line in kernels.line_of(report), report.message


def _run_pipeline(kernels, bug):
    sizes = {"count_of_input": TILES * WORDS, "count_of_output": WORDS, "smem_bytes": 3 * 4 * WORDS}
    return _run(kernels, f"pipeline_{bug}", 160, **sizes)


def test_right_pipeline(kernels):
    report, words, output = _run_pipeline(kernels, "NONE")
    assert report is None, report.message
    assert np.array_equal(output, words.reshape(TILES, WORDS).sum(0, dtype=np.uint32))


@pytest.mark.parametrize("bug", PIPELINE_BUGS)
def test_pipeline_bugs(kernels, bug):
    report, *_ = _run_pipeline(kernels, bug)
    _check(kernels["bugs"], report, *PIPELINE_BUGS[bug])


def _run_product(kernels, bug):
    sizes = {"count_of_input": 2048, "count_of_output": 4096, "smem_bytes": 8192}
    return _run(kernels, f"product_{bug}", 64 if bug == "half_block" else 128, **sizes)


def test_right_product(kernels):
    report, _, output = _run_product(kernels, "NONE")
    assert report is None, report.message
    assert output.any()


@pytest.mark.parametrize("bug", PRODUCT_BUGS)
def test_product_bugs(kernels, bug):
    report, *_ = _run_product(kernels, bug)
    _check(kernels["bugs"], report, *PRODUCT_BUGS[bug])


def _run_control(kernels, bug):
    sizes = {"count_of_input": 384, "count_of_output": 385, "smem_bytes": 0}
    return _run(kernels, f"control_{bug}", 384, before=("control_NONE",), **sizes)


def test_right_control(kernels):
    report, words, output = _run_control(kernels, "NONE")
    assert report is None, report.message
    assert np.array_equal(output[:384], words.reshape(-1, 2)[:, ::-1].reshape(-1))


@pytest.mark.parametrize("bug", CONTROL_BUGS)
def test_control_bugs(kernels, bug):
    report, *_ = _run_control(kernels, bug)
    _check(kernels["bugs"], report, *CONTROL_BUGS[bug])
