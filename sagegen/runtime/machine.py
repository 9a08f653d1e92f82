"""The machines that kernels run on: torch's CUDA state with the driver, and the CPU for the emulator."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from sagegen.gpu import match_gpu
from sagegen.launch import Program, load_program
from sagegen.plan import Loaded
from sagegen.problem import Problem
from sagegen.runtime.device import Device
from sagegen.runtime.self_test import check_program
from sagegen.space import Config


class CudaRuntime:
    """torch's CUDA state and the driver."""

    @functools.cache  # noqa: B019  one instance lives as long as the process
    def device(self, device: torch.device) -> Device:
        if device.type != "cuda":
            return Device(device.type, -1)
        properties = torch.cuda.get_device_properties(device)
        arch = f"sm_{properties.major}{properties.minor}"
        gpu = match_gpu(properties.name, properties.multi_processor_count)
        return Device("cuda", device.index or 0, properties.name, arch, gpu)

    def load_program(self, cubin: bytes, name: str, problem: Problem, config: Config, index: int) -> Program:
        return load_program(cubin, name, problem, config, index)

    def check_program(self, program: Loaded, name: str, problem: Problem, index: int) -> None:
        with torch.cuda.device(index):
            check_program(program, name, problem, torch.device("cuda", index), partial(self.raw_stream, index))

    def raw_stream(self, index: int) -> int:
        """Handle of torch's current stream. `torch.cuda.current_stream()` would build an object: 5 us a call."""
        handle: int = torch._C._cuda_getCurrentRawStream(index)
        return handle

    def current_device(self) -> int:
        """As `torch.cuda.current_device()`, without its check that CUDA is initialized: the inputs are there."""
        index: int = torch._C._cuda_getDevice()
        return index

    def guard(self, index: int) -> AbstractContextManager[Any]:
        return torch.cuda.device(index)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class NoStreams:
    """The emulator's machine: one device, on which a launch has run when it returns."""

    DEVICE = -1

    def raw_stream(self, index: int) -> int:
        return 0

    def current_device(self) -> int:
        return self.DEVICE

    def guard(self, index: int) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()
