"""What tests on a card share: the card, kernels built in one batch, a registry that names one kind, poisoned memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import sagegen
from kernel_kinds import KINDS, MAIN_KINDS, PROBLEMS, RELATIVES, KernelKind
from picked_configs import pick_configs
from pinned_entry import make_entry
from sagegen.build import BuildFailure, Built, build_batch
from sagegen.env import read_env
from sagegen.errors import ToolchainError
from sagegen.gpu import Gpu, match_gpu
from sagegen.launch import Program, load_program
from sagegen.problem import Problem
from sagegen.registry import save_entries
from sagegen.render import render
from sagegen.rules import Target, default_config, fitted_config
from sagegen.runtime.dispatch import dispatcher
from sagegen.runtime.varlen import varlen_dispatcher
from sagegen.space import Config
from sagegen.store import open_store
from sagegen.toolkit import Toolkit, find_toolkit

_POISON = """
extern "C" __global__ void poison(unsigned words) {
    extern __shared__ unsigned shared[];
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x) reinterpret_cast<volatile unsigned*>(shared)[i] = ~0u;
}
"""


pytest.register_assert_rewrite("public_calls")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pinned" in metafunc.fixturenames:
        metafunc.parametrize("kind", MAIN_KINDS, ids=lambda kind: kind.name, scope="module")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU (sm_80 or later) with its driver, and nvcc")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(skip)


@dataclass(frozen=True)
class Kernel:
    """A built config of a problem; see `pick_configs` for their order."""

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


@pytest.fixture(scope="session")
def kernels(gpu, toolkit):
    """Kernels by problem, built into the store that the public API looks in, so no test waits for a compiler."""
    picked = pick_configs(PROBLEMS, gpu, toolkit.version)
    sources = {problem: [render(problem, config) for config in configs] for problem, configs in picked.items()}
    batch = {source.name: source for some in sources.values() for source in some}
    built = build_batch(list(batch.values()), gpu.arch, open_store(read_env()), toolkit)
    failures = [result for result in built.values() if isinstance(result, BuildFailure)]
    assert not failures, failures[0]
    return {
        problem: [Kernel(problem, s.config, s.name, built[s.name].cubin) for s in some]
        for problem, some in sources.items()
    }


@dataclass(frozen=True)
class KindKernel:
    """What stands for a kind of kernels in one problem."""

    kind: KernelKind
    problem: Problem
    config: Config
    built: Built

    def load(self) -> Program:
        return load_program(self.built.cubin.read_bytes(), self.built.name, self.problem, self.config, 0)


@pytest.fixture(scope="session")
def kind_kernels(
    gpu: Gpu, toolkit: Toolkit, request: pytest.FixtureRequest
) -> dict[tuple[KernelKind, Problem], KindKernel]:
    """Kernels of all kinds that the card has, by kind and problem, built into the public API's store in one batch."""
    return _build_kinds(PROBLEMS, gpu, toolkit, request.config.getoption("wait_limit"))


@pytest.fixture(scope="session")
def relative_kernels(
    gpu: Gpu, toolkit: Toolkit, request: pytest.FixtureRequest
) -> dict[tuple[KernelKind, Problem], KindKernel]:
    """The same of windows and sequences of their own lengths."""
    return _build_kinds(RELATIVES, gpu, toolkit, request.config.getoption("wait_limit"))


def _build_kinds(
    problems: Iterable[Problem], gpu: Gpu, toolkit: Toolkit, limit: int
) -> dict[tuple[KernelKind, Problem], KindKernel]:
    pairs = {}
    for kind in KINDS:
        for problem in problems:
            config = kind.find_config(Target(gpu, problem, toolkit.version))
            if config is not None:
                source = render(problem, config)
                text = f"#define WAIT_LIMIT {limit}\n{source.text}" if limit else source.text
                pairs[kind, problem] = replace(source, text=text)
    built = build_batch(
        list({source.name: source for source in pairs.values()}.values()), gpu.arch, open_store(read_env()), toolkit
    )
    failures = [result for result in built.values() if isinstance(result, BuildFailure)]
    assert not failures, failures[0]
    return {key: KindKernel(*key, source.config, built[source.name]) for key, source in pairs.items()}


@pytest.fixture(scope="module")
def registry_of_kind(
    kind: KernelKind,
    kind_kernels: dict[tuple[KernelKind, Problem], KindKernel],
    gpu: Gpu,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Config]]:
    """The user's registry names one kind for every problem and length; the process asks it anew. Configs by problem."""
    own = [kernel for (of, _), kernel in kind_kernels.items() if of == kind]
    if not own:
        pytest.skip(kind.needs())
    folder = tmp_path_factory.mktemp("registry")
    save_entries(
        folder / f"{gpu.name}.yaml",
        gpu.name,
        [make_entry(k.problem, k.config, k.built.cubin_sha256, gpu) for k in own],
        {},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAGEGEN_TUNED_DIR", str(folder))
        dispatcher.cache_clear()  # a dispatcher reads the environment once
        varlen_dispatcher.cache_clear()
        yield {kernel.problem.name: kernel.config for kernel in own}
    dispatcher.cache_clear()
    varlen_dispatcher.cache_clear()


@pytest.fixture
def pinned(registry_of_kind: dict[str, Config], gpu: Gpu) -> Iterator[None]:
    """The public API answers with kernels of one kind; the test's last call is held to that.

    Windows and packed sequences have no entries: they take the kind's config where the family has them.
    """
    yield
    last = sagegen.last_dispatch()
    if last is not None:  # None: the test was skipped before it called
        assert last.answer == "kernel", last.reason
        dense = registry_of_kind[last.problem.tuned.name]
        target = Target(gpu, last.problem)
        assert last.config == (fitted_config(dense, target) or default_config(target))


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
