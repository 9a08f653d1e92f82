"""The device layer's CUDA bodies on a card, held to what the emulator's bodies are held to in tests/emulator.

With OUT set, the raw accumulators of FP8 wgmma go to $OUT/fp22.npz, for tests/device_layer/fit_accumulator.py.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu

CASES_FILE = Path(__file__).parents[1] / "device_layer" / "cases.py"
WGMMA_ONLY = 90  # and no later architecture
#: A wait that fails this often ends the kernel with an error instead of hanging the card.
FLAGS = ("-cubin", "-std=c++17", "-O3", "-DWAIT_LIMIT=100000000")
PROBE_BLOCKS = 64
SPREADS = (0, 2, 4, 8, 12)


def _load_cases():
    spec = importlib.util.spec_from_file_location("device_layer_cases", CASES_FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


cases = _load_cases()


def _find_nvcc():
    found = os.environ.get("SAGEGEN_NVCC") or shutil.which("nvcc")
    if not found:
        from sagegen.env import read_env
        from sagegen.toolkit import find_toolkit

        found = find_toolkit(read_env()).nvcc
    return found


def _check(result):
    status, *values = result
    assert status.value == 0, status.name
    return values[0] if values else None


class Card:
    """Kernels by file, built for the card when asked for, and launching them."""

    def __init__(self, folder):
        from cuda.bindings import driver

        self.driver = driver
        self.folder = folder
        major, minor = torch.cuda.get_device_capability(0)
        self.architecture = 10 * major + minor
        self.target = f"sm_{self.architecture}{'a' if major >= 9 else ''}"
        self.modules = {}
        torch.cuda.init()
        torch.cuda.synchronize()

    def module(self, name):
        if name not in self.modules:
            source, cubin = self.folder / f"{name}.cu", self.folder / f"{name}.cubin"
            source.write_text(cases.read_source(name, "cuda"))
            command = [_find_nvcc(), *FLAGS, f"-arch={self.target}", source, "-o", cubin]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            self.modules[name] = _check(self.driver.cuModuleLoadData(cubin.read_bytes()))
        return self.modules[name]

    def run(self, case):
        """The words that a case's kernels write."""
        words = np.ascontiguousarray(case.input).reshape(-1).view(np.int32)
        given = torch.from_numpy(words).cuda()
        output = torch.full(case.expected.shape, 0x7F7F7F7F, dtype=torch.int32, device="cuda")
        params = ctypes.create_string_buffer(np.array([given.data_ptr(), output.data_ptr(), 0], np.uint64).tobytes())
        for index, kernel in enumerate(case.kernels):
            self._launch(case, kernel, params, is_dependent=index > 0 and case.file == "hopper")
        torch.cuda.synchronize()
        return output.cpu().numpy().view(np.uint32)

    def _launch(self, case, kernel, params, is_dependent):
        driver = self.driver
        function = _check(driver.cuModuleGetFunction(self.module(case.file), kernel.encode()))
        if case.smem_bytes:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, attribute, case.smem_bytes))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = case.blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = case.threads, 1, 1
        config.sharedMemBytes = case.smem_bytes
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        if is_dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        pointer = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        _check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointer), 0))


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return Card(tmp_path_factory.mktemp("device_layer"))


@pytest.mark.parametrize("name", cases.CASES)
def test_results(card, name):
    case = cases.CASES[name]()
    if case.architecture > card.architecture or (case.file in cases.WGMMA_FILES and card.architecture != WGMMA_ONLY):
        pytest.skip(f"{card.target} has not what {case.file}.cu wraps")
    output = card.run(case)
    if case.tolerance:
        equal = np.mean(output == case.expected)
        print(f"{name}: difference {case.difference(output):.2e} of {case.tolerance:.2e}, {equal:.1%} bit for bit")
    assert case.difference(output) <= case.tolerance


def test_accumulators_for_the_model(card):
    """One product of 32 bytes on many kinds of numbers: how the sum is cut, to the bit."""
    if card.architecture != WGMMA_ONLY:
        pytest.skip("wgmma is sm_90a's")
    rng = np.random.default_rng(0)
    arrays, equal = {}, []
    for spread in SPREADS:
        a, b, c = cases.draw_e4m3(rng, PROBE_BLOCKS, 64, 32, spread)
        d = card.run(cases.make_probe(a, b, c)).view(np.float32).reshape(c.shape)
        equal.append(np.mean(d == cases.fp22_sums(a, b, c)))
        print(f"spread {spread}: {equal[-1]:.2%} as the model says")
        arrays |= {f"a{spread}": a, f"b{spread}": b, f"c{spread}": c, f"d{spread}": d}
    if "OUT" in os.environ:
        np.savez_compressed(Path(os.environ["OUT"], "fp22.npz"), **arrays)
    assert min(equal) == 1
