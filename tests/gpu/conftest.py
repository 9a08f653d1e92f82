"""What tests on a card share: the card, kernels built in one batch, and poisoned memory."""

from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sagegen.build import BuildFailure, build_batch
from sagegen.env import read_env
from sagegen.errors import ToolchainError
from sagegen.gpu import match_gpu
from sagegen.problem import DTYPES, HEAD_DIMS, Problem
from sagegen.render import render
from sagegen.rules import Target, default_config, valid_configs
from sagegen.space import FAMILIES
from sagegen.store import open_store
from sagegen.toolkit import find_toolkit

PROBLEMS = [Problem(d, t, causal) for d in HEAD_DIMS for t in DTYPES for causal in (False, True)]
CONFIGS_PER_PROBLEM = 2
_POISON = """
extern "C" __global__ void poison(unsigned words) {
    extern __shared__ unsigned shared[];
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x) reinterpret_cast<volatile unsigned*>(shared)[i] = ~0u;
}
"""


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU (sm_80 or later) with its driver, and nvcc")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(skip)


@dataclass(frozen=True)
class Kernel:
    """A built config of a problem; the first of each problem is its default config."""

    problem: Problem
    config: object
    name: str
    cubin: Path


@pytest.fixture(scope="session")
def gpu():
    """The GPU table's row of the card."""
    properties = torch.cuda.get_device_properties(0)
    found = match_gpu(properties.name, properties.multi_processor_count)
    if found is None:
        pytest.skip(f"{properties.name} is no GPU of sagegen's table")
    return found


@pytest.fixture(scope="session")
def toolkit():
    try:
        return find_toolkit(read_env())
    except ToolchainError as error:
        pytest.skip(str(error))


def pick_configs(problem, target, count):
    """The default config, then valid ones that add the most values of parameters not seen yet; always the same ones."""
    picked = [default_config(target)]
    rng = random.Random(problem.name)
    valid = [valid_configs(space, target) for space in FAMILIES.values()]
    rest = [config for own in valid for config in rng.sample(own, min(300, len(own)))]
    seen = set()
    while len(picked) <= count:
        seen |= values(picked[-1])
        fresh = [(len(values(config) - seen), -i) for i, config in enumerate(rest)]
        picked.append(rest[-max(fresh)[1]])
    return picked


def values(config):
    return {(config.family, p.name, getattr(config, p.name)) for p in config.params}


@pytest.fixture(scope="session")
def kernels(gpu, toolkit):
    """Kernels by problem, built into the store that the public API looks in, so no test waits for a compiler."""
    sources = {}
    for problem in PROBLEMS:
        target = Target(gpu, problem, toolkit.version)
        sources[problem] = [render(problem, config) for config in pick_configs(problem, target, CONFIGS_PER_PROBLEM)]
    batch = [source for some in sources.values() for source in some]
    built = build_batch(batch, gpu.arch, open_store(read_env()), toolkit)
    failures = [result for result in built.values() if isinstance(result, BuildFailure)]
    assert not failures, failures[0]
    return {
        problem: [Kernel(problem, s.config, s.name, built[s.name].cubin) for s in some]
        for problem, some in sources.items()
    }


@pytest.fixture(scope="session")
def poison(gpu, toolkit, tmp_path_factory):
    """Leaves NaN in 1 GiB of free device memory and in all shared memory."""
    from cuda.bindings import driver

    folder = tmp_path_factory.mktemp("poison")
    (folder / "poison.cu").write_text(_POISON)
    command = [toolkit.nvcc, "-cubin", f"-arch={gpu.arch}", "poison.cu", "-o", "poison.cubin"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    torch.cuda.init()
    torch.cuda.synchronize()
    (status, module) = driver.cuModuleLoadData((folder / "poison.cubin").read_bytes())
    assert status == 0, status
    (status, function) = driver.cuModuleGetFunction(module, b"poison")
    assert status == 0, status
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuFuncSetAttribute(function, attribute, gpu.smem_per_block)
    assert status == 0, status
    from ctypes import c_uint

    def run():
        memory = torch.full((1 << 28,), torch.nan, device="cuda")
        del memory
        arguments = ((gpu.smem_per_block // 4,), (c_uint,))
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        (status,) = driver.cuLaunchKernel(
            function, gpu.sms * 4, 1, 1, 1024, 1, 1, gpu.smem_per_block, stream, arguments, 0
        )
        assert status == 0, status

    return run
