"""The probes' kernels in the emulator, and what a worker makes of them: bits that are known, memory that is guarded."""

from __future__ import annotations

import ctypes
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from sagegen.emulator.compiler import build_library, find_compiler, open_libraries
from sagegen.emulator.library import Buffer, KernelRun, Library
from sagegen.env import read_env
from sagegen.measuring.telemetry import GpuState
from sagegen.probing import run as probe_run
from sagegen.probing.accumulator import (
    A_WORD,
    B_WORD,
    ZERO_WORD,
    AccumulatorBits,
    make_accumulators,
    read_accumulators,
)
from sagegen.probing.probes import PROBES
from sagegen.probing.run import PARAMS, run_probe
from sagegen.probing.source import kernel_entry, render_probe
from sagegen.problem import Problem
from sagegen.render import Source
from sagegen.space import parse_config

pytestmark = pytest.mark.emulator

#: A source must name a problem and a config; a probe has neither.
PROBLEM = Problem(64, "fp16", False)
CONFIG = parse_config("mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qosmem_mb1")
FP22 = AccumulatorBits(alone=13, with_products=12, rounding="truncates")
#: Of instructions, but for the one that settles on one number within a turn.
LOOPS = [name for name, probe in PROBES.items() if probe.kind in ("mma", "unit") and name != "i2f"]
FP32 = AccumulatorBits(alone=23, with_products=22, rounding="keeps all")


def load(probe):
    source = Source(probe.name, PROBLEM, CONFIG, render_probe(probe, "host").text)
    return Library(build_library(source, open_libraries(read_env()), find_compiler()).path)


def launch(library, probe, given, output, *, blocks=1, architecture=89, elements=0, loops=1, words=(0, 0)):
    """Run a probe's kernel; what the emulator reports fails the test."""
    cycles = np.full(blocks, -1, np.int64)
    buffers = [
        Buffer("input", given.ctypes.data, 4, given.shape, (1,)),
        Buffer("output", output.ctypes.data, 4, output.shape, (1,), is_writable=True),
        Buffer("cycles", cycles.ctypes.data, 8, cycles.shape, (1,), is_writable=True),
    ]
    addresses = (given.ctypes.data, output.ctypes.data, cycles.ctypes.data)
    params = PARAMS.pack(*addresses, elements, loops, *words, 0)
    entry = kernel_entry(probe)
    function = library.function(entry)
    run = KernelRun(entry, function, blocks, probe.threads, probe.shared_bytes, params, architecture, 1, False)
    with library.open(buffers) as session:
        report = session.run(run)
    assert report is None, report.message
    return cycles


def multiply(library, probe, architecture, a_word, b_word):
    """D of one product."""
    c = make_accumulators(probe.accumulators)
    d = np.full_like(c, np.nan)
    launch(library, probe, c, d, architecture=architecture, words=(a_word, b_word))
    return d


@pytest.mark.parametrize(
    ("name", "architecture", "expected"),
    [
        ("wgmma_e4m3f32_ss_bits", 90, FP22),
        ("wgmma_e4m3f32_rs_bits", 90, FP22),
        ("mma_e4m3f32_bits", 89, FP22),
        ("mma_e4m3f32_bits", 90, FP32),  # emulated there, added in FP32
    ],
)
def test_the_probe_finds_the_bits_that_the_emulator_keeps(name, architecture, expected):
    probe = PROBES[name]
    library = load(probe)
    alone = multiply(library, probe, architecture, ZERO_WORD, ZERO_WORD)
    with_products = multiply(library, probe, architecture, A_WORD, B_WORD)
    assert read_accumulators(alone, with_products) == expected


@pytest.mark.parametrize("name", ["mma_s8", "mma_e4m3f32", "ex2", "dram", "l2", "wgmma_e4m3f32_rs_bits"])
def test_the_hosts_text_of_a_probe_differs_in_the_device_layer_only(name):
    cuda, host = (render_probe(PROBES[name], target).text for target in ("cuda", "host"))
    assert [cuda.split("// ---- device layer")[i] for i in (0, 2)] == [
        host.split("// ---- device layer")[i] for i in (0, 2)
    ]
    assert "asm" not in host


@pytest.mark.parametrize("name", ["dram", "l2"])
def test_copies_stay_inside_of_their_buffers(name):
    probe, blocks = PROBES[name], 2
    part = probe.threads * int(probe.values["unroll"])
    elements = 3 * part * (blocks if name == "dram" else 1)
    given = np.random.default_rng(0).integers(0, 2**32, elements * 4, dtype=np.uint32)
    words = blocks * probe.threads
    output = np.zeros(words + (elements * 4 if name == "dram" else 0), np.uint32)
    cycles = launch(load(probe), probe, given, output, blocks=blocks, elements=elements, loops=3)
    assert (cycles == 0).all()  # the emulator's clock stands still; every block wrote its own
    if name == "dram":
        assert np.array_equal(output[words:], given)
    else:  # after three turns each block has read all three parts
        xor = np.bitwise_xor.reduce(given.reshape(-1, probe.threads, 4), axis=(0, 2))
        assert np.array_equal(output, np.tile(xor, blocks))


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_instructions_write_a_word_per_thread_that_depends_on_the_turns(name):
    probe = PROBES[name]
    library, outputs = load(probe), []
    for loops in (1, 2):
        outputs.append(np.zeros(2 * probe.threads, np.uint32))
        launch(library, probe, np.zeros(4, np.uint32), outputs[-1], blocks=2, loops=loops)
    changed = np.mean(outputs[0] != outputs[1])
    assert changed > 0.5  # operands change in every turn
    assert len(np.unique(outputs[0])) > 8  # and from thread to thread, as far as an e4m3 tells them apart


SMS, TURN_S, CYCLES = 2, 0.06, 1000


class EmulatedKernel:
    """What `launch.load_kernel` gives on a GPU; memory is as large as the probe's buffers are."""

    def __init__(self, name, architecture):
        self.probe, self.architecture, self.grids = PROBES[name], architecture, []
        self.library = load(self.probe)

    def launch(self, grid, threads, params, stream):
        probe = self.probe
        assert threads == probe.threads
        self.grids.append(grid)
        given, output, cycles, elements, loops, *rest = PARAMS.unpack(params)
        is_product = probe.kind == "accumulator"
        read = probe.accumulators if is_product else 4 * elements
        written = read if is_product else grid * threads + (4 * elements if probe.name == "dram" else 0)
        sizes = {given: (4, read), output: (4, written), cycles: (8, grid)}
        buffers = [
            Buffer("memory", at, size, (count,), (1,), at != given) for at, (size, count) in sizes.items() if count
        ]
        few = PARAMS.pack(given, output, cycles, elements, min(loops, 2), *rest)
        entry = kernel_entry(probe)
        function = self.library.function(entry)
        run = KernelRun(entry, function, grid, threads, probe.shared_bytes, few, self.architecture, 1, False)
        with self.library.open(buffers) as session:
            report = session.run(run)
        assert report is None, report.message
        if not is_product:  # where the emulator's clock stands still
            ctypes.memmove(cycles, np.full(grid, CYCLES, np.int64).ctypes.data, 8 * grid)

    def unload(self):
        pass


class FakeEvent:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self): ...

    def synchronize(self): ...

    def elapsed_time(self, end):
        return TURN_S * 1e3


@pytest.fixture
def emulated_card(monkeypatch):
    """`run_probe` with the emulator for a card; takes probe and architecture."""

    def start(name, architecture=89):
        kernel = EmulatedKernel(name, architecture)
        properties = types.SimpleNamespace(multi_processor_count=SMS, L2_cache_size=1 << 18)
        for attribute, value in {
            "init": lambda: None,
            "synchronize": lambda device=None: None,
            "current_stream": lambda: types.SimpleNamespace(cuda_stream=0),
            "get_device_properties": lambda device: properties,
            "mem_get_info": lambda device: (6 << 20, 1 << 30),
            "Event": FakeEvent,
        }.items():
            monkeypatch.setattr(torch.cuda, attribute, value)
        monkeypatch.setattr(probe_run, "load_kernel", lambda cubin, entry, smem_bytes, device: kernel)
        monkeypatch.setattr(probe_run, "shared_memory_per_sm", lambda device: 100 << 10)
        monkeypatch.setattr(probe_run, "read_state", lambda index: GpuState(clock_mhz=1500.0, power_w=float(index)))
        monkeypatch.setattr(Path, "read_bytes", lambda path: b"")
        return kernel, run_probe(name, Path("kernel.cubin"), 3, torch.device("cpu"))

    return start


def test_a_workers_answer_about_an_accumulator(emulated_card):
    kernel, answer = emulated_card("wgmma_e4m3f32_ss_bits", 90)
    alone, added = (np.array(answer[name], np.float32) for name in ("alone", "with_products"))
    assert read_accumulators(alone, added) == FP22
    assert kernel.grids == [1, 1]


@pytest.mark.parametrize("name", ["ex2", "mma_s8", "dram", "l2"])
def test_a_workers_answer_about_a_rate(emulated_card, name):
    probe = PROBES[name]
    kernel, answer = emulated_card(name)
    assert set(kernel.grids) == {SMS * probe.blocks_per_sm}
    assert len(kernel.grids) == 1 + 5 + 5 + 1  # to size the loop, to settle, that count, to look
    figures = answer["figures"]
    assert figures["clock_mhz"] == pytest.approx(CYCLES / TURN_S / 1e6)
    assert figures["per_clock"] == pytest.approx(figures["per_second"] / (SMS * figures["clock_mhz"] * 1e6))
    assert (answer["nvml_mhz"], answer["power_w"], answer["power_limit_w"]) == (1500.0, 3.0, None)
    if name == "dram":  # 6 MiB free: an eighth of it is copied, in whole steps of the grid
        assert figures["per_second"] * TURN_S == pytest.approx(64 * 2 * (786432 // (6 * 2048 * 16)) * 6 * 2048 * 16)
