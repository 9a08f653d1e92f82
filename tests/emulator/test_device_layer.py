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


@pytest.fixture(scope="module")
def kernels():
    """Kernels by file, compiled when asked for."""

    class ByFile(dict):
        def __missing__(self, name):
            source = Source(name, PROBLEM, CONFIG, cases.read_source(name, "host"))
            built = build_library(source, open_libraries(read_env()), find_compiler())
            self[name] = Kernels(KernelText(source), Library(built.path))
            return self[name]

    return ByFile()


@pytest.mark.parametrize("name", cases.CASES)
def test_results(kernels, name):
    case = cases.CASES[name]()
    words = np.ascontiguousarray(case.input).reshape(-1)
    output = np.zeros_like(case.expected)
    report = kernels[case.file].run(
        case.kernels, words, output, case.blocks, case.threads, case.smem_bytes, case.architecture
    )
    assert report is None, report.message
    assert case.difference(output) <= case.tolerance


@pytest.mark.parametrize("name", [name for name in cases.CASES if name.startswith("wgmma_e4m3")])
def test_fp22_sums(kernels, name):
    """The emulator computes its model to the bit: the exact sum of 32 products and the accumulator, cut to 13 bits."""
    case = cases.CASES[name]()
    words = np.ascontiguousarray(case.input).reshape(-1)
    output = np.zeros_like(case.expected)
    kernels["wgmma"].run(case.kernels, words, output, case.blocks, case.threads, case.smem_bytes, HOPPER)
    assert np.array_equal(output, case.expected)


# fmt: off
PIPELINE_BUGS = {
    "no_init": "bad_barrier", "init_twice": "bad_barrier", "no_init_fence": "proxy", "no_init_sync": "race",
    "short_expect": "bad_barrier", "long_expect": "deadlock", "no_full_wait": "in_flight",
    "wrong_parity": "uninitialized", "no_empty_wait": "bad_barrier", "empty_count": "deadlock",
    "missing_arrival": "deadlock", "misaligned_copy": "misaligned", "odd_size": "misaligned",
    "past_source": "out_of_bounds", "past_end": "in_flight",
    "store_unfenced": "proxy", "store_unordered": "uninitialized", "store_not_waited": "in_flight",
    "store_reused": "in_flight", "no_producer": "deadlock",
}
PRODUCT_BUGS = {
    "unfenced": "proxy", "late_fence": "proxy", "no_sync": "race", "no_wgmma_fence": "fence",
    "written_after_fence": "fence", "no_commit": "in_flight", "no_wait": "in_flight", "wait_one": "in_flight",
    "overwritten": "race", "never_waited": "in_flight", "missing_warp": "deadlock",
    "other_descriptor": "divergence", "unwritten_operand": "uninitialized", "past_shared": "out_of_bounds",
    "no_swizzle": "bad_descriptor", "half_block": "divergence",
}
CONTROL_BUGS = {
    "raise_first": "deadlock", "unequal_warps": "divergence", "wrong_way": "bad_registers",
    "odd_budget": "bad_registers", "barrier_count": "bad_barrier", "barrier_id": "bad_barrier", "no_warp_sync": "race",
    "unsynced_matrix": "race", "plain_counter": "race", "unset_counter": "uninitialized",
    "no_dependency": "dependency",
}
# fmt: on
TILES, WORDS = 5, 512


def _run(kernels, name, threads, *, count_of_input, count_of_output, smem_bytes, before=()):
    words = np.random.default_rng(0).integers(0, 2**32, count_of_input, dtype=np.uint32)
    output = np.zeros(count_of_output, np.uint32)
    report = kernels["bugs"].run((*before, name), words, output, 1, threads, smem_bytes, HOPPER, bool(before))
    return report, words, output


def _check(kernels, report, kind, bug):
    assert report is not None
    assert report.kind == kind, report.message
    assert bug in kernels["bugs"].line_of(report), (kernels["bugs"].line_of(report), report.message)


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
    _check(kernels, report, PIPELINE_BUGS[bug], bug)


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
    _check(kernels, report, PRODUCT_BUGS[bug], bug)


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
    _check(kernels, report, CONTROL_BUGS[bug], bug)
