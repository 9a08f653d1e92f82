"""Kernels compiled for the host and run: results, errors with their lines, bank conflicts, the struct layouts."""

from __future__ import annotations

import ctypes
import importlib.resources
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sagegen.emulator import library
from sagegen.emulator.compiler import build_library, find_compiler, open_libraries
from sagegen.emulator.places import KernelText
from sagegen.emulator.program import EmulatedProgram, load_emulated, load_source
from sagegen.env import read_env
from sagegen.errors import BuildError, EmulatorError
from sagegen.gpu import GPUS
from sagegen.measuring.call import bind_call, call_program
from sagegen.problem import Problem
from sagegen.reference import quantized_attention
from sagegen.render import Source, render
from sagegen.rules import Target, default_config

pytestmark = pytest.mark.emulator

L20 = GPUS["l20"]
PROBLEM = Problem(64, "bf16", False)
CONFIG = default_config(Target(L20, PROBLEM))
SYNC = "device::block_sync();"

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def program() -> EmulatedProgram:
    return load_emulated(PROBLEM, CONFIG, L20, read_env())


def draw(*shape: int, kv: tuple[int, int] | None = None) -> Tensors:
    """q of `shape`, k and v with `kv` heads and tokens."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, tokens, dim = shape
    kv_heads, kv_len = kv or (heads, tokens)
    sizes = (shape, (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim))
    q, k, v = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    return q, k, v


def relative_l2(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    truth = quantized_attention(q, k, v, PROBLEM, CONFIG, accumulator="fp22")[0]
    return float((out.float() - truth).norm() / truth.norm())


def changed(change: Callable[[str], str]) -> Source:
    """The host source with its kernels changed."""
    source = render(PROBLEM, CONFIG, target="host")
    before, end, after = source.text.partition("// ---- device layer: end ----")
    assert change(after) != after
    return replace(source, text=before + end + change(after))


def line_of(part: str) -> int:
    """Where the CUDA text has `part`, once."""
    (number,) = (i for i, line in enumerate(render(PROBLEM, CONFIG).text.split("\n"), 1) if part in line)
    return number


# --- results


def test_a_launch_computes_what_the_kernel_should(program: EmulatedProgram) -> None:
    q, k, v = draw(1, 2, 130, 64, kv=(1, 200))
    out, lse = call_program(program, PROBLEM, CONFIG, q, k, v, want_lse=True)
    _, truth_lse = quantized_attention(q, k, v, PROBLEM, CONFIG, accumulator="fp22")
    assert relative_l2(out, q, k, v) < 2.5e-3  # of which 1.7e-3 are the rounding to bf16
    assert lse is not None
    torch.testing.assert_close(lse, truth_lse, rtol=0, atol=1e-5)


def test_a_launch_gives_the_same_bits_with_any_number_of_workers(program: EmulatedProgram) -> None:
    q, k, v = draw(1, 3, 140, 64)
    one = load_emulated(PROBLEM, CONFIG, L20, read_env(), workers=1)
    many = load_emulated(PROBLEM, CONFIG, L20, read_env(), workers=5)
    first = call_program(one, PROBLEM, CONFIG, q, k, v)[0]
    assert torch.equal(call_program(many, PROBLEM, CONFIG, q, k, v)[0], first)


@pytest.mark.parametrize("name", ["expanded", "shared", "one token"])
def test_views_with_unusual_strides(program: EmulatedProgram, name: str) -> None:
    q, k, v = draw(2, 2, 70, 64)
    if name == "expanded":
        k, v = k[:1].expand(2, 2, 70, 64), v[:, :1].expand(2, 2, 70, 64)
    elif name == "shared":
        q = k = v
    else:
        q = q[:, :, :1].as_strided((2, 2, 1, 64), (q.stride(0), q.stride(1), 8, 1))
    out = call_program(program, PROBLEM, CONFIG, q, k, v)[0]
    assert relative_l2(out, q, k, v) < 2.5e-3


def test_views_of_one_packed_tensor(program: EmulatedProgram) -> None:
    """A model's fused projection: rows of q, k and v lie between each other's."""
    packed = torch.randn(2, 70, 3, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    out = call_program(program, PROBLEM, CONFIG, q, k, v)[0]
    assert relative_l2(out, q, k, v) < 2.5e-3


def test_launches_up_to_a_role(program: EmulatedProgram) -> None:
    call = bind_call(program, PROBLEM, CONFIG, *draw(1, 1, 64, 64))
    call.out.zero_()
    call.launch_role("quantize")
    assert not call.out.any()
    call.launch_role("attention")
    wanted = call.out.clone()
    call.launch()
    assert torch.equal(call.out, wanted)


def test_threads_launch_the_same_program_at_once(program: EmulatedProgram) -> None:
    inputs = [draw(1, 1, 40 + 30 * i, 64) for i in range(4)]
    wanted = [call_program(program, PROBLEM, CONFIG, *x)[0] for x in inputs]
    found: list[torch.Tensor | None] = [None] * 4

    def work(index: int) -> None:
        found[index] = call_program(program, PROBLEM, CONFIG, *inputs[index])[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert torch.equal(one, other)


# --- errors


def fail(source: Source, *inputs: torch.Tensor) -> EmulatorError:
    program = load_source(source, 89, read_env())
    with pytest.raises(EmulatorError) as caught:
        call_program(program, PROBLEM, CONFIG, *(inputs or draw(1, 1, 130, 64)), want_lse=True)
    return caught.value


def test_an_error_names_everything_and_quotes_the_line() -> None:
    """A block that does not wait for its statistics' partial sums."""
    source = changed(lambda text: text.replace(SYNC, "", 1))
    error = fail(source)
    assert (error.kind, error.kernel, error.block, error.thread) == ("uninitialized", "stats", 0, 0)
    assert error.line == line_of("total += partial[row]")
    first, quoted, name, *_ = error.message.split("\n")
    assert first.startswith(f"uninitialized in kernel stats, block 0, thread 0, line {error.line} (stats): thread 0")
    assert quoted == f"    {error.line} | {render(PROBLEM, CONFIG).text.split(chr(10))[error.line - 1].strip()}"
    assert name == f"    in {source.name}"


def test_the_remedy_shows_the_line() -> None:
    error = fail(changed(lambda text: text.replace(SYNC, "", 1)))
    command = error.remedy.removeprefix("see it with: ")
    shown = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    assert len(shown.splitlines()) == 11
    assert "total += partial[row]" in shown.splitlines()[5]


def test_inlined_functions_are_named_from_the_inside(program: EmulatedProgram) -> None:
    """Keys that lie outside the tensor that the caller gave."""
    q, k, v = draw(1, 1, 70, 64)
    call = bind_call(program, PROBLEM, CONFIG, q, k, v)
    addresses = list(call.addresses())
    addresses[1] = 8  # a null pointer's neighbourhood
    with pytest.raises(EmulatorError, match=r"line \d+ \(load_8 < stats\)") as caught:
        call.prepared.launch(*addresses, 0)
    assert caught.value.kernel == "stats"
    assert caught.value.remedy.startswith(f"see it with: sagegen render --gpu l20 --config {CONFIG.name}")


def test_a_kernel_goes_on_after_an_error(program: EmulatedProgram) -> None:
    """Of another program, or its own: nothing of a failed launch stays."""
    source = changed(lambda text: text.replace(SYNC, "", 1))
    fail(source)
    fail(source)
    q, k, v = draw(1, 1, 130, 64)
    assert relative_l2(call_program(program, PROBLEM, CONFIG, q, k, v)[0], q, k, v) < 2.5e-3


def test_a_text_that_does_not_compile_gives_the_first_error_with_its_line() -> None:
    source = changed(lambda text: text.replace(SYNC, "no_such_function();", 1))
    text = KernelText(source)
    (line,) = (number for number in range(1, 1000) if "no_such_function" in text.line(number))
    with pytest.raises(BuildError, match=rf"{source.name}\.cu:{line}:\d+: error: .*no_such_function"):
        load_source(source, 89, read_env())


def test_a_text_that_does_not_link_says_what_is_missing() -> None:
    source = changed(lambda text: f"\nvoid no_such_function();\n{text.replace(SYNC, 'no_such_function();', 1)}")
    with pytest.raises(BuildError, match="undefined reference to `no_such_function"):
        load_source(source, 89, read_env())


# --- the library


def test_a_library_is_found_again_and_equal_text_gives_equal_bytes(tmp_path: Path) -> None:
    source = render(PROBLEM, CONFIG, target="host")
    env = read_env()
    other = replace(env, cache_dir=tmp_path)
    first = build_library(source, open_libraries(env), find_compiler())
    assert build_library(source, open_libraries(env), find_compiler()).seconds == 0
    second = build_library(source, open_libraries(other), find_compiler())
    assert second.seconds > 0
    assert second.path.read_bytes() == first.path.read_bytes()


def test_structs_are_laid_out_as_the_compiler_does(tmp_path: Path) -> None:
    runtime = Path(str(importlib.resources.files("sagegen.emulator"))) / "runtime"
    structs = {"Buffer": library._Buffer, "Launch": library._Launch, "Report": library._Report}
    structs["BankCount"] = library._BankCount
    lines = [
        f'printf("{name}.{field[0]} %zu %zu\\n", offsetof(emulator::{name}, {field[0]}), '
        f"sizeof(emulator::{name}::{field[0]}));"
        for name, struct in structs.items()
        for field in struct._fields_
    ]
    lines += [f'printf("{name} 0 %zu\\n", sizeof(emulator::{name}));' for name in structs]
    (tmp_path / "layout.cpp").write_text(
        '#include <cstddef>\n#include <cstdio>\n#include "interface.hpp"\nint main() {\n' + "\n".join(lines) + "\n}\n"
    )
    command = [*find_compiler().command, "-std=c++17", f"-I{runtime}", "layout.cpp", "-o", "layout"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    said = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout.split("\n")
    for name, struct in structs.items():
        assert f"{name} 0 {ctypes.sizeof(struct)}" in said
        for field in struct._fields_:
            member = getattr(struct, field[0])
            assert f"{name}.{field[0]} {member.offset} {member.size}" in said


# --- bank conflicts


def test_bank_conflicts_are_counted_by_line() -> None:
    program = load_emulated(PROBLEM, CONFIG, L20, read_env(), count_banks=True)
    assert program.bank_counts() == ()
    q, k, v = draw(1, 1, 128, 64)
    call_program(program, PROBLEM, CONFIG, q, k, v)
    uses = program.bank_counts()
    assert {use.kernel for use in uses} == {"stats", "quantize", "attention"}
    assert [use.line for use in uses] == sorted(use.line for use in uses)
    assert all(use.text and use.function and use.wavefronts >= use.ideal > 0 for use in uses)
    # ldmatrix out of swizzled tiles: 4 matrices of 8 rows, no conflict
    (k_loads,) = (use for use in uses if "load_matrix_x4(k" in use.text)
    assert (k_loads.function, k_loads.kernel, k_loads.bytes, k_loads.is_write) == (
        "multiply_qk",
        "attention",
        16,
        False,
    )
    assert k_loads.conflict_share == 0
    call_program(program, PROBLEM, CONFIG, q, k, v)
    assert [use.accesses for use in program.bank_counts()] == [2 * use.accesses for use in uses]


def test_without_its_swizzle_a_tile_conflicts() -> None:
    """Rows of 64 bytes without the swizzle: 8 rows meet in 2 groups of banks."""
    source = changed(lambda text: text.replace("((chunk ^ phase) * 16)", "(chunk * 16)"))
    program = load_source(source, 89, read_env(), count_banks=True)
    q, k, v = draw(1, 1, 128, 64)
    out = call_program(program, PROBLEM, CONFIG, q, k, v)[0]
    assert out.isfinite().all()
    (k_loads,) = (use for use in program.bank_counts() if "load_matrix_x4(k" in use.text)
    assert k_loads.conflict_share >= 0.5


_INTERRUPTED = """
import signal, sys, threading, time, torch
from sagegen.emulator.program import load_emulated
from sagegen.env import read_env
from sagegen.gpu import GPUS
from sagegen.measuring.call import call_program
from sagegen.problem import Problem
from sagegen.rules import Target, default_config

problem = Problem(64, "bf16", False)
config = default_config(Target(GPUS["l20"], problem))
program = load_emulated(problem, config, GPUS["l20"], read_env())
signal.signal(signal.SIGINT, signal.default_int_handler)
for _ in range(5):
    q = torch.randn(1, 8, 16384, 64).bfloat16()  # minutes
    for delay in (0.3, 0.31):  # the second while the first is being handled, or a little later
        threading.Timer(delay, signal.raise_signal, (signal.SIGINT,)).start()
    try:
        call_program(program, problem, config, q, q, q)
    except KeyboardInterrupt:
        try:
            time.sleep(0.2)
        except KeyboardInterrupt:
            pass
    else:
        sys.exit("it ran to its end")
small = torch.randn(1, 1, 70, 64).bfloat16()
assert call_program(program, problem, config, small, small, small)[0].isfinite().all()
print("well", len(threading.enumerate()))
"""


def test_ctrl_c_ends_a_running_kernel() -> None:
    """In a process of its own: what an interrupt breaks may break all that comes after."""
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "well 1\n"), done.stderr[-2000:]
