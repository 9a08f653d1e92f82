"""Load a cubin and launch its kernels through the CUDA driver.

One parameter struct goes to all three kernels of a source by value, so a warm call writes six pointers into a prepared
buffer and makes three driver calls. A launch that may start early carries CUDA's attribute for that (programmatic
dependent launch). Everything runs in torch's primary context, on the stream it is given.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass, field
from typing import Any

from sagegen.abi import POINTER_STRUCT, SEQUENCES_FROM_END
from sagegen.errors import DriverError
from sagegen.layout import make_layout
from sagegen.plan import ROLES, Launch, Plan, Role
from sagegen.problem import Problem
from sagegen.space import Config

_SEQUENCES = struct.Struct("<Q")
_DRIVER_REMEDY = "check the machine with: sagegen doctor"


@functools.cache
def driver_problem() -> str | None:
    """Why no CUDA driver can be used here, or None. Creates no context and never blocks."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver: libcuda.so.1 was not found"
    import torch

    if not torch.cuda.is_available():
        return "an NVIDIA driver is installed, but torch sees no GPU that it can use"
    return None


def _driver() -> Any:
    """cuda.bindings.driver, imported on first use: `import sagegen` must not pay for it."""
    from cuda.bindings import driver

    return driver


def _check(result: tuple[Any, ...], doing: str) -> Any:
    """The value of a driver call, or DriverError with CUDA's own name for what went wrong."""
    status, *values = result
    if status.value != 0:
        raise DriverError(f"CUDA driver: {status.name} while {doing}", _DRIVER_REMEDY)
    return values[0] if values else None


@dataclass(frozen=True, slots=True)
class _Call:
    """One kernel's launch on a stream, but for its parameters: the driver's handle and CUlaunchConfig."""

    function: Any
    config: Any


def _make_config(launch: Launch, grid: int, stream: int) -> Any:
    """A CUlaunchConfig; where `launch` says so its kernel may start before its predecessor in the stream has ended."""
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
    config.sharedMemBytes = launch.smem_bytes
    config.hStream = driver.CUstream(stream)
    if launch.starts_early:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    return config


@dataclass(slots=True)
class PreparedCall:
    """The launches of one plan, ready but for their pointers.

    Not for concurrent use: it owns the buffer that its parameters are written to. Keep one per thread.
    """

    program: Program
    plan: Plan
    _buffer: Any = field(init=False)
    _address: int = field(init=False)
    _calls: dict[int, dict[Role, _Call]] = field(init=False, default_factory=dict)  # by stream
    _pointer: Any = field(init=False)

    def __post_init__(self) -> None:
        size = POINTER_STRUCT.size + len(self.plan.constants)
        self._buffer = ctypes.create_string_buffer(size)
        self._buffer[POINTER_STRUCT.size : size] = self.plan.constants
        self._pointer = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._address = ctypes.addressof(self._pointer)

    def _calls_on(self, stream: int) -> dict[Role, _Call]:
        """The launches on `stream` in order, made when it is first used."""
        calls = self._calls.get(stream)
        if calls is None:
            calls = {launch.role: self._make_call(launch, stream) for launch in self.plan.launches}
            self._calls[stream] = calls  # once complete: a signal may come in between
        return calls

    def _make_call(self, launch: Launch, stream: int) -> _Call:
        program = self.program
        grid = min(launch.grid, program.sms) if launch.is_persistent else launch.grid
        return _Call(program.functions[launch.role], _make_config(launch, grid, stream))

    def launch(
        self, q: int, k: int, v: int, out: int, lse: int, workspace: int, stream: int, sequences: int = 0
    ) -> None:
        """Launch all kernels in order on `stream`. Arguments are device addresses; `lse` 0 when it is not wanted.

        Args:
            sequences: of a ragged plan's lengths.

        Raises:
            DriverError: a launch was refused. Faults inside a kernel surface at the next synchronization, as ever.
        """
        POINTER_STRUCT.pack_into(self._buffer, 0, q, k, v, out, lse, workspace)
        if sequences:
            _SEQUENCES.pack_into(self._buffer, len(self._buffer) - SEQUENCES_FROM_END, sequences)
        for role, call in self._calls_on(stream).items():
            self._launch(role, call)

    def launch_role(self, role: Role, q: int, k: int, v: int, out: int, lse: int, workspace: int, stream: int) -> None:
        """Launch one kernel, for timing it: `attention` reads what `quantize` left in the workspace."""
        POINTER_STRUCT.pack_into(self._buffer, 0, q, k, v, out, lse, workspace)
        self._launch(role, self._calls_on(stream)[role])

    def _launch(self, role: Role, call: _Call) -> None:
        # cuLaunchKernel would take longer: eleven arguments to convert where a config is made once
        (status,) = self.program.launch_kernel(call.config, call.function, self._address, 0)
        if status:  # CUDA_SUCCESS is 0
            raise DriverError(
                f"CUDA driver: {status.name} while launching {role} of {self.program.name}", _DRIVER_REMEDY
            )


@dataclass(frozen=True, slots=True)
class Program:
    """A loaded cubin on one device.

    Attributes:
        name: the source's name.
        device: torch's device index.
        functions: CUDA function handle per role.
        registers: registers per thread of each kernel, as loaded.
        sms: streaming multiprocessors of the device.
        launch_kernel: the driver's cuLaunchKernelEx.
    """

    name: str
    problem: Problem
    config: Config
    device: int
    functions: dict[Role, Any]
    registers: dict[Role, int]
    launch_kernel: Any
    module: Any
    sms: int

    def prepare(self, plan: Plan) -> PreparedCall:
        return PreparedCall(self, plan)

    def unload(self) -> None:
        """Give the module's memory back; the program and its prepared calls are unusable afterwards."""
        _check(_driver().cuModuleUnload(self.module), f"unloading {self.name}")


def load_program(cubin: bytes, source_name: str, problem: Problem, config: Config, device: int) -> Program:
    """Load `cubin` into torch's primary context of `device`.

    Args:
        cubin: SASS built for the device's architecture.
        source_name: name of the source it was built from; its kernels are `<role>_<source_name>`.

    Raises:
        DriverError: no usable driver, the cubin is for another architecture or damaged, or a kernel is missing.
    """
    if problem_text := driver_problem():
        raise DriverError(problem_text, _DRIVER_REMEDY)
    import torch

    driver = _driver()
    functions: dict[Role, Any] = {}
    registers: dict[Role, int] = {}
    attribute = driver.CUfunction_attribute
    smem_bytes = make_layout(config, problem).smem_bytes
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the primary context current in this thread
        torch.cuda.synchronize()
        module = _check(driver.cuModuleLoadData(cubin), f"loading {source_name}")
        for role in ROLES:
            entry = f"{role}_{source_name}"
            function = _check(driver.cuModuleGetFunction(module, entry.encode()), f"looking up {entry}")
            registers[role] = _check(
                driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function), f"inspecting {entry}"
            )
            functions[role] = function
        _check(
            driver.cuFuncSetAttribute(
                functions["attention"], attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes
            ),
            f"reserving {smem_bytes} bytes of shared memory for {source_name}",
        )
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Program(
        name=source_name,
        problem=problem,
        config=config,
        device=device,
        functions=functions,
        registers=registers,
        launch_kernel=driver.cuLaunchKernelEx,
        module=module,
        sms=sms,
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a cubin, loaded on one device; takes a struct by value.

    Attributes:
        module, function: the driver's handles.
        smem_bytes: dynamic shared memory of a block.
    """

    name: str
    module: Any
    function: Any
    smem_bytes: int

    def launch(self, grid: int, threads: int, params: bytes, stream: int) -> None:
        """Launch `grid` blocks of `threads` on `stream`; `params` are the struct's bytes.

        Raises:
            DriverError: the launch was refused.
        """
        driver = _driver()
        buffer = ctypes.create_string_buffer(params, len(params))
        pointer = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))  # the driver copies what it points at
        sizes = (grid, 1, 1, threads, 1, 1, self.smem_bytes)
        result = driver.cuLaunchKernel(self.function, *sizes, driver.CUstream(stream), ctypes.addressof(pointer), 0)
        _check(result, f"launching {self.name}")

    def unload(self) -> None:
        """Give the module's memory back; the kernel is unusable afterwards."""
        _check(_driver().cuModuleUnload(self.module), f"unloading {self.name}")


def load_kernel(cubin: bytes, entry: str, smem_bytes: int, device: int) -> Kernel:
    """Load the kernel `entry` of `cubin` into torch's primary context of `device`.

    Args:
        smem_bytes: dynamic shared memory that a block of it shall have.

    Raises:
        DriverError: no usable driver, the cubin is for another architecture, or the device has not so much memory.
    """
    if problem_text := driver_problem():
        raise DriverError(problem_text, _DRIVER_REMEDY)
    import torch

    driver = _driver()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the primary context current in this thread
        torch.cuda.synchronize()
        module = _check(driver.cuModuleLoadData(cubin), f"loading {entry}")
        function = _check(driver.cuModuleGetFunction(module, entry.encode()), f"looking up {entry}")
        _check(
            driver.cuFuncSetAttribute(function, attribute, smem_bytes),
            f"reserving {smem_bytes} bytes of shared memory for {entry}",
        )
    return Kernel(entry, module, function, smem_bytes)


def shared_memory_per_sm(device: int) -> int:
    """Bytes of shared memory of one SM of the CUDA device, whose context exists."""
    driver = _driver()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    handle = _check(driver.cuDeviceGet(device), f"asking for device {device}")
    return int(_check(driver.cuDeviceGetAttribute(attribute, handle), "asking for an SM's shared memory"))
