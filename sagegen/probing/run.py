"""Runs one probe's kernel on the GPU: what a measuring worker does with a `Probe` job."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sagegen.launch import Kernel, load_kernel, shared_memory_per_sm
from sagegen.measuring.telemetry import GpuState, read_state
from sagegen.probing.accumulator import A_WORD, B_WORD, ZERO_WORD, make_accumulators
from sagegen.probing.probes import PROBES, Probe
from sagegen.probing.source import kernel_entry
from sagegen.probing.timing import Run, make_figures, sample

#: The templates' struct: input, output, cycles, elements, loops, words of A and of B, padding.
PARAMS = struct.Struct("<QQQqiIII")
_ELEMENT_BYTES = 16
#: Copied at a time, far beyond any L2; less where the GPU has less to spare.
_COPY_BYTES = 1 << 30
_COPY_SHARE = 8  # of free memory
#: Of L2, so that it holds what is read though it keeps some lines twice.
_L2_SHARE = 4
_RESERVED_SMEM = 1024  # the driver's own, in every block


@dataclass(frozen=True, slots=True)
class Buffers:
    """Device memory of a probe.

    Attributes:
        input: what it reads, int32; may be empty.
        output: what it writes, int32.
        cycles: [grid] int64.
        elements: of 16 bytes that it moves.
    """

    input: torch.Tensor
    output: torch.Tensor
    cycles: torch.Tensor
    elements: int = 0

    def params(self, loops: int, a_word: int = 0, b_word: int = 0) -> bytes:
        addresses = (self.input.data_ptr(), self.output.data_ptr(), self.cycles.data_ptr())
        return PARAMS.pack(*addresses, self.elements, loops, a_word, b_word, 0)


class GpuLauncher:
    """Launches a probe's kernel on the current stream; a `timing.Launcher`."""

    def __init__(self, probe: Probe, kernel: Kernel, buffers: Buffers, gpu_index: int) -> None:
        self._probe, self._kernel, self._buffers, self._gpu_index = probe, kernel, buffers, gpu_index
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def run(self, loops: int) -> Run:
        self._start.record()
        self._launch(loops)
        self._end.record()
        self._end.synchronize()
        seconds = float(self._start.elapsed_time(self._end)) / 1e3
        return Run(seconds, tuple(self._buffers.cycles.tolist()))

    def look(self, loops: int) -> GpuState:
        self._launch(loops)
        state = read_state(self._gpu_index)
        torch.cuda.synchronize(self._buffers.cycles.device)
        return state

    def _launch(self, loops: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._kernel.launch(len(self._buffers.cycles), self._probe.threads, self._buffers.params(loops), stream)


def run_probe(name: str, cubin: Path, gpu_index: int, device: torch.device) -> dict[str, Any]:
    """What the probe `name`, compiled to `cubin`, gives on `device`: see `jobs.Probe`.

    Raises:
        DriverError: the driver refused the cubin or a launch.
    """
    probe = PROBES[name]
    with _loaded(probe, cubin, device) as kernel:
        if probe.kind == "accumulator":
            return _multiply(probe, kernel, device)
        buffers = _make_buffers(probe, device)
        sampled = sample(GpuLauncher(probe, kernel, buffers, gpu_index))
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    work = sampled.loops * work_per_loop(probe, len(buffers.cycles), buffers.elements)
    state = sampled.state
    return {
        "figures": asdict(make_figures(sampled.runs, work, sms)),
        "nvml_mhz": state.clock_mhz,
        "power_w": state.power_w,
        "power_limit_w": state.power_limit_w,
    }


def work_per_loop(probe: Probe, grid: int, elements: int) -> float:
    """Operations, results or bytes of the whole grid in one turn of the kernel's loop."""
    if probe.kind != "copy":
        return grid * probe.work_per_loop
    if probe.values["through_l2"]:
        return float(grid * _part(probe) * _ELEMENT_BYTES)
    return 2.0 * elements * _ELEMENT_BYTES


@contextmanager
def _loaded(probe: Probe, cubin: Path, device: torch.device) -> Iterator[Kernel]:
    smem_bytes = probe.shared_bytes
    if probe.kind not in ("copy", "accumulator"):
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        # more than half an SM's: then no SM gets two blocks while another has none
        smem_bytes = max(smem_bytes, shared_memory_per_sm(device.index or 0) // 2 + _RESERVED_SMEM)
    kernel = load_kernel(cubin.read_bytes(), kernel_entry(probe), smem_bytes, device.index or 0)
    yield kernel
    kernel.unload()  # not after an error: the context may be gone, and with it the module


def _make_buffers(probe: Probe, device: torch.device) -> Buffers:
    properties = torch.cuda.get_device_properties(device)
    grid = properties.multi_processor_count * probe.blocks_per_sm
    words = grid * probe.threads
    elements = input_elements = 0
    if probe.kind == "copy":
        free, _ = torch.cuda.mem_get_info(device)
        wanted = min(_COPY_BYTES, free // _COPY_SHARE)
        step = _part(probe) * grid
        if probe.values["through_l2"]:
            wanted, step = properties.L2_cache_size // _L2_SHARE, _part(probe)
        input_elements = max(1, wanted // _ELEMENT_BYTES // step) * step
        elements = input_elements
        if not probe.values["through_l2"]:
            words += elements * 4
    limits = torch.iinfo(torch.int32)
    generator = torch.Generator(device).manual_seed(0)
    return Buffers(
        torch.randint(limits.min, limits.max, (input_elements * 4,), dtype=torch.int32, device=device,
                      generator=generator),
        torch.zeros(words, dtype=torch.int32, device=device),
        torch.zeros(grid, dtype=torch.int64, device=device),
        elements,
    )  # fmt: skip


def _part(probe: Probe) -> int:
    """Elements that a block moves at a time."""
    return probe.threads * int(str(probe.values["unroll"]))


def _multiply(probe: Probe, kernel: Kernel, device: torch.device) -> dict[str, Any]:
    """D of a product of zeros, and of products that sum to 1, for the accumulators of `make_accumulators`."""
    c = torch.from_numpy(make_accumulators(probe.accumulators)).to(device)
    cycles = torch.zeros(1, dtype=torch.int64, device=device)
    results: dict[str, Any] = {}
    for name, (a_word, b_word) in {"alone": (ZERO_WORD, ZERO_WORD), "with_products": (A_WORD, B_WORD)}.items():
        d = torch.full_like(c, torch.nan)
        buffers = Buffers(c.view(torch.int32), d.view(torch.int32), cycles)
        params = buffers.params(1, a_word, b_word)
        kernel.launch(1, probe.threads, params, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize(device)
        results[name] = d.tolist()
    return results
