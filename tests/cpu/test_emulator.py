"""The emulator's Python side as far as it needs no compiler: which g++, lines of the text, a call's memory, reports."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from sagegen.abi import FIELDS, POINTERS, pack_constants, unpack_constants
from sagegen.emulator import compiler as compiler_module
from sagegen.emulator import places
from sagegen.emulator.compiler import HostCompiler, build_library, find_compiler, open_libraries
from sagegen.emulator.library import KernelRun, Report, Session, Site
from sagegen.emulator.places import KernelText, Place, find_places
from sagegen.emulator.program import call_buffers
from sagegen.emulator.report import make_error, sum_banks
from sagegen.env import Env
from sagegen.errors import BuildError, StoreError, ToolchainError
from sagegen.gpu import GPUS
from sagegen.plan import Strides, TensorStrides, make_plan
from sagegen.problem import Problem, Shape
from sagegen.render import Source, render
from sagegen.rules import Target, default_config
from sagegen.store import Store

PROBLEM = Problem(64, "bf16", False)
CONFIG = default_config(Target(GPUS["l20"], PROBLEM))
SOURCE = render(PROBLEM, CONFIG, target="host")
TEXT = KernelText(SOURCE)

#: Compiles a text by what it says: BROKEN fails, SLEEP hangs with a child; else the output holds the text.
_COMPILER = """#!/bin/sh
if [ "$1" = -dM ] || [ "$2" = -dM ]; then
    printf '#define __GNUC__ %s\\n#define __VERSION__ "%s.1.0"\\n{clang}' {gcc} {gcc}
    exit
fi
echo "$@" >> {calls}
output= source=
for word in "$@"; do
    case $last in -o) output=$word ;; esac
    last=$word
    case $word in *.cu|*.cpp) source=$word ;; esac
done
if [ -n "$source" ] && grep -q BROKEN $source; then
    echo "$source:3: warning: unused" >&2
    echo "$source:7: error: 'BROKEN' was not declared in this scope" >&2
    exit 1
fi
if [ -n "$source" ] && grep -q SLEEP $source; then
    sleep 600 &
    echo $! > {calls}.child
    wait
fi
echo "$@" > $output
"""


class StandIn:
    """A stand-in g++ at `path`; `calls` are the compilations' arguments."""

    def __init__(self, folder: Path, gcc: int = 12, clang: bool = False) -> None:
        self.path = folder / "g++"
        self.calls_file = folder / "calls"
        self.child_file = folder / "calls.child"
        macro = "#define __clang__ 1\\n" if clang else ""
        self.path.write_text(_COMPILER.format(gcc=gcc, clang=macro, calls=self.calls_file))
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)
        self.environ = {"PATH": f"{folder}:{os.defpath}"}

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def find(self) -> HostCompiler:
        return find_compiler(self.environ)


@pytest.fixture
def gxx(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_libraries(Env(tmp_path / "cache", tmp_path / "tuned", False, "warning", None))


def source_of(text: str) -> Source:
    return Source("kernel", PROBLEM, CONFIG, text)


# --- the compiler


def test_gxx_of_the_path_is_found(gxx: StandIn) -> None:
    found = gxx.find()
    assert found.command == (str(gxx.path),)
    assert found.build.startswith("12.1.0 ")


def test_cxx_names_another_and_may_have_options(gxx: StandIn) -> None:
    found = find_compiler({"PATH": os.defpath, "CXX": f"{gxx.path} -B/opt"})
    assert found.command == (str(gxx.path), "-B/opt")


@pytest.mark.parametrize(
    ("made", "message"),
    [({"gcc": 9}, r"GCC 10 or later, and g\+\+ is GCC 9\.1\.0"), ({"clang": True}, r"g\+\+ is clang")],
)
def test_what_cannot_compile_kernels_is_named(tmp_path: Path, made: dict[str, int], message: str) -> None:
    with pytest.raises(ToolchainError, match=message + r".*apt-get install g\+\+"):
        StandIn(tmp_path, **made).find()


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"g\+\+ was not found; apt-get install g\+\+"):
        find_compiler({"PATH": str(tmp_path)})
    with pytest.raises(ToolchainError, match="CXX=/no/such was not found"):
        find_compiler({"PATH": os.defpath, "CXX": "/no/such"})


def test_a_program_that_is_no_compiler_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="CXX=false cannot be run"):
        find_compiler({"PATH": os.defpath, "CXX": "false"})


def test_machine_flags_follow_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(compiler_module, "Path", lambda name: info)
    monkeypatch.setattr(compiler_module.platform, "machine", lambda: "x86_64")
    for flags, wanted in (("fpu avx2 fma bmi2 f16c", ("-march=x86-64-v3",)), ("fpu avx2 fma bmi2", ())):
        info.write_text(f"processor : 0\nflags\t\t: {flags}\n")
        assert compiler_module._machine_flags(12) == wanted
    info.write_text("flags : avx2 fma bmi2 f16c\n")
    assert compiler_module._machine_flags(10) == ()  # GCC 11 brought the level
    monkeypatch.setattr(compiler_module.platform, "machine", lambda: "aarch64")
    assert compiler_module._machine_flags(12) == ()


# --- building


def test_a_library_is_compiled_once_and_the_runtime_once_for_all(gxx: StandIn, store: Store) -> None:
    first = build_library(source_of("one"), store, gxx.find())
    assert first.path.is_file()
    assert first.folder.joinpath("kernel.cu").read_text() == "one"
    assert first.seconds > 0
    units = sum(" -c " in f" {call} " and ".cpp" in call for call in gxx.calls)
    assert units > 3
    count = len(gxx.calls)
    again = build_library(source_of("one"), store, gxx.find())
    assert (again.folder, again.seconds) == (first.folder, 0)
    assert len(gxx.calls) == count
    build_library(source_of("two"), store, gxx.find())
    assert len(gxx.calls) == count + 2  # compile and link


def test_of_those_that_want_the_same_library_one_compiles_it(gxx: StandIn, store: Store) -> None:
    compiler = gxx.find()
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda i: build_library(source_of("ab"[i % 2]), store, compiler), range(8)))
    assert len({library.folder for library in built}) == 2
    assert sum("kernel.cu" in call for call in gxx.calls) == 2
    assert sum("engine.cpp" in call for call in gxx.calls) == 1


def test_instrumentation_is_compiled_in_and_its_libraries_are_not_linked(gxx: StandIn, store: Store) -> None:
    build_library(source_of("one"), store, gxx.find())
    (compile_kernel,) = (call for call in gxx.calls if "kernel.cu" in call)
    (link,) = (call for call in gxx.calls if "-shared" in call)
    assert "-fsanitize=thread -fsanitize=bounds" in compile_kernel
    assert "-fsanitize" not in link
    assert not any("-fsanitize" in call for call in gxx.calls if ".cpp" in call)


def test_whatever_decides_the_library_is_in_its_key(
    gxx: StandIn, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_library(source_of("one"), store, gxx.find())
    other = tmp_path / "other"
    other.mkdir()
    assert build_library(source_of("one"), store, StandIn(other, gcc=13).find()).folder != first.folder
    monkeypatch.setattr(compiler_module, "KERNEL_FLAGS", ("-O3",))
    assert build_library(source_of("one"), store, gxx.find()).folder != first.folder
    monkeypatch.undo()
    read = compiler_module._read_runtime
    monkeypatch.setattr(compiler_module, "_read_runtime", lambda: {**read(), "more.hpp": b"// more"})
    assert build_library(source_of("one"), store, gxx.find()).folder != first.folder


def test_a_damaged_library_is_built_again(gxx: StandIn, store: Store) -> None:
    first = build_library(source_of("one"), store, gxx.find())
    first.path.write_bytes(b"damaged")
    again = build_library(source_of("one"), store, gxx.find())
    assert again.folder == first.folder
    assert again.path.read_bytes() != b"damaged"


def test_the_compilers_first_error_is_told(gxx: StandIn, store: Store) -> None:
    with pytest.raises(BuildError, match=r"host text of kernel did not compile: kernel.cu:7: error: 'BROKEN' was not"):
        build_library(source_of("BROKEN"), store, gxx.find())
    assert not list(store.root.glob("kernel.*"))
    assert list((store.root / ".staging").iterdir()) == []


def test_a_compiler_that_hangs_is_ended_with_its_children(gxx: StandIn, store: Store) -> None:
    with pytest.raises(BuildError, match="took more than 2 s"):
        build_library(source_of("SLEEP"), store, gxx.find(), timeout_s=2)
    child = int(gxx.child_file.read_text())
    for _ in range(50):
        if not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes():
            return
        time.sleep(0.1)
    pytest.fail("the compiler's child still runs")


def test_an_unwritable_store_is_named(gxx: StandIn, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    env = Env(tmp_path / "file" / "cache", tmp_path, False, "warning", None)
    with pytest.raises(StoreError, match="SAGEGEN_CACHE_DIR"):
        build_library(source_of("one"), open_libraries(env), gxx.find())


# --- places


def test_lines_of_the_kernel_are_those_of_the_cuda_text() -> None:
    cuda = render(PROBLEM, CONFIG).text.split("\n")
    end = cuda.index("// ---- device layer: end ----") + 1
    assert TEXT.line(end - 5) == ""  # the device layer is not the kernel's
    for number in range(end + 1, len(cuda) + 1):
        assert TEXT.line(number) == cuda[number - 1].strip()
    host = SOURCE.text.split("\n")
    assert host[TEXT.host_line(400) - 1] == cuda[399]


def test_a_line_knows_its_function() -> None:
    cuda = render(PROBLEM, CONFIG).text.split("\n")

    def number_of(part: str) -> int:
        return next(i for i, line in enumerate(cuda, 1) if part in line)

    line = number_of("device::load_matrix_x4(k,")
    assert TEXT.place(line, "attention") == Place(line, ("multiply_qk", "attention"))
    line = number_of("total += partial[row]")
    assert str(TEXT.place(line, "stats")) == f"line {line} (stats)"


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("float* region<float>(Params const&, long)", "region"),
        ("int device::load<int>(int const*, int)", "load"),
        ("step(Params const&, float (&) [4]) [clone .isra.0]", "step"),
        ("operator()", "operator"),
        ("??", "??"),
    ],
)
def test_functions_are_called_by_their_plain_names(name: str, plain: str) -> None:
    assert places._plain_name(name) == plain


def line_of(piece: str) -> int:
    """The line of the CUDA text that holds `piece`."""
    return next(number for number, line in enumerate(CUDA_LINES, 1) if piece in line)


CUDA_LINES = render(PROBLEM, CONFIG).text.split("\n")
#: Of a device function, and of a kernel's own body.
LOAD, SUMS = line_of("uint4 load_8("), line_of("float* const k_sums")
ADDR2LINE = f"""\
0x000000000000122f
uint4::uint4(uint4 const&)
/sagegen/device_layer:77
load_8(unsigned short const*)
/sagegen/{SOURCE.name}.cu:{LOAD}
operator()
/sagegen/{SOURCE.name}.cu:300 (discriminator 4)
stats_{SOURCE.name}
/sagegen/{SOURCE.name}.cu:310
0x0000000000002000
emulator::block_barrier(int)
/sagegen/collectives.cpp:12
"""


@pytest.fixture
def addr2line(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """addr2line with a fixed answer; the commands it got."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, ADDR2LINE, "")

    monkeypatch.setattr(places.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(places.subprocess, "run", run)
    return commands


def test_a_place_is_the_first_frame_of_the_kernels_own_text(addr2line: list[list[str]]) -> None:
    found = find_places(Path("kernel.so"), [0x1230, 0x2001, 0x1230, 0], TEXT)
    assert addr2line[0][-2:] == ["0x122f", "0x2000"]  # the call is before its return address
    assert found == {0x1230: Place(LOAD, ("load_8", "stats")), 0x2001: Place(0, ())}


def test_without_addr2line_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places.shutil, "which", lambda name: None)
    assert find_places(Path("kernel.so"), [0x1230], TEXT) == {}


def test_a_failing_addr2line_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places.shutil, "which", lambda name: "/bin/false")
    assert find_places(Path("kernel.so"), [0x1230], TEXT) == {}


# --- reports


@pytest.mark.usefixtures("addr2line")
def test_an_error_names_kind_kernel_block_thread_and_line_and_quotes_it() -> None:
    report = Report("race", 3, 45, 0, 0x1230, "thread 45 reads at {0x1230}, thread 2 writes at {0x2001}")
    error = make_error(report, "stats", TEXT, Path("kernel.so"), "see line {}".format)
    assert (error.kind, error.kernel, error.block, error.thread, error.line) == ("race", "stats", 3, 45, LOAD)
    first, quoted, source = error.message.split("\n")
    assert first == (
        f"race in kernel stats, block 3, thread 45, line {LOAD} (load_8 < stats): thread 45 reads at line {LOAD} "
        "(load_8 < stats), thread 2 writes at address 0x2001 of the library"
    )
    assert quoted == f"    {LOAD} | {TEXT.line(LOAD)}"
    assert source == f"    in {SOURCE.name}"
    assert error.remedy == f"see line {LOAD}"


def test_a_line_from_the_wrapper_needs_no_address() -> None:
    error = make_error(Report("deadlock", 0, 0, SUMS, 0, "stuck"), "stats", TEXT, Path("kernel.so"), str)
    assert error.line == SUMS
    assert f"line {SUMS} (stats): stuck" in error.message


def test_without_any_place_the_rest_is_told() -> None:
    error = make_error(Report("deadlock", 2, -1, 0, 0, "stuck"), "attention", TEXT, Path("kernel.so"), str)
    assert str(error) == f"deadlock in kernel attention, block 2: stuck\n    in {SOURCE.name}"
    assert (error.line, error.thread, error.remedy) == (0, -1, "")


@pytest.mark.usefixtures("addr2line")
def test_bank_counts_of_a_line_are_summed() -> None:
    banks = {
        ("stats", Site(0x1230, 0, 16, False)): (10, 80, 40),
        ("stats", Site(0x2001, LOAD, 16, False)): (1, 8, 4),  # the same line from another instruction
        ("stats", Site(0, SUMS, 4, True)): (5, 5, 5),
        ("quantize", Site(0, SUMS, 4, True)): (0, 0, 0),
    }
    uses = sum_banks(banks, TEXT, Path("kernel.so"))  # type: ignore[arg-type]
    assert [(u.kernel, u.line, u.bytes, u.is_write, u.accesses, u.wavefronts, u.ideal) for u in uses] == [
        ("stats", LOAD, 16, False, 11, 88, 44),
        ("stats", SUMS, 4, True, 5, 5, 5),
    ]
    assert [use.conflict_share for use in uses] == [0.5, 0.0]
    assert uses[0].text == TEXT.line(LOAD)


# --- a call's memory


def test_constants_come_back() -> None:
    names = [field.name for field in FIELDS[len(POINTERS) :] if field.name != "padding"]
    values: dict[str, int | float] = {name: number for number, name in enumerate(names, 1)}
    assert unpack_constants(pack_constants(values)) == {**values, "padding": 0}


def test_buffers_are_the_calls_tensors() -> None:
    strides = TensorStrides(Strides(1000, 100, 64), Strides(0, 640, 64), Strides(2000, 64, 128), Strides(64, 6400, 64))
    plan = make_plan(PROBLEM, CONFIG, Shape(2, 4, 2, 5, 7), strides, 0.125, want_lse=True)
    buffers = {b.name: b for b in call_buffers(PROBLEM, CONFIG, plan, (16, 32, 48, 64, 80, 96))}
    assert list(buffers) == ["q", "k", "v", "out", "lse", "workspace"]
    assert [b.address for b in buffers.values()] == [16, 32, 48, 64, 80, 96]
    assert [name for name, b in buffers.items() if b.is_writable] == ["out", "lse", "workspace"]
    assert (buffers["q"].sizes, buffers["q"].strides) == ((2, 4, 5, 64), (1000, 100, 64, 1))
    assert (buffers["k"].sizes, buffers["k"].strides) == ((2, 2, 7, 64), (0, 640, 64, 1))
    assert (buffers["v"].sizes, buffers["v"].strides) == ((2, 2, 7, 64), (2000, 64, 128, 1))
    assert (buffers["lse"].sizes, buffers["lse"].item_bytes) == ((2 * 4 * 5,), 4)
    assert (buffers["workspace"].sizes, buffers["workspace"].item_bytes) == ((plan.workspace_bytes,), 1)
    without = call_buffers(PROBLEM, CONFIG, plan, (16, 32, 48, 64, 0, 96))
    assert [b.name for b in without] == ["q", "k", "v", "out", "workspace"]


# --- interrupts


def test_a_session_whose_launch_an_interrupt_ended_closes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes while the launch's thread starts."""
    events: list[str] = []
    stopped = threading.Event()

    def run(*_: object) -> int:
        assert stopped.wait(20)
        events.append("ended")
        return 0

    def stop(handle: int) -> None:
        events.append("stop")
        stopped.set()

    def start(thread: threading.Thread) -> None:
        begin(thread)
        signal.raise_signal(signal.SIGINT)

    begin = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    library = SimpleNamespace(_run=run, _stop=stop, _close=lambda handle: events.append("close"))
    launch = KernelRun("kernel", 0, 1, 32, 0, b"", 89, 1, count_banks=False)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Session(library, 1) as session:  # type: ignore[arg-type]
            session.run(launch)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert events == ["stop", "ended", "close"]
