"""Building batches with a stand-in compiler (cases E2, E4, E5, E6, F1)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sagegen.build import BuildFailure, Built, build_batch
from sagegen.cubin import Resources
from sagegen.errors import BuildError, ToolchainError
from sagegen.gpu import GPUS
from sagegen.problem import Problem
from sagegen.render import Source
from sagegen.rules import Target, default_config
from sagegen.space import FAMILIES
from sagegen.store import Store

PROBLEM = Problem(64, "fp16", False)
CONFIG = default_config(Target(GPUS["l20"], PROBLEM))


def make_source(name: str, body: str = "") -> Source:
    kernels = "".join(
        f'extern "C" __global__ void {role}_{name}() {{}}\n' for role in ("stats", "quantize", "attention")
    )
    return Source(name, PROBLEM, CONFIG, f"// {body}\n{kernels}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "a store of $kernels")


def entries(store: Store) -> list[str]:
    return sorted(path.name for path in store.root.iterdir() if not path.name.startswith("."))


def test_a_batch_is_built_and_kept(store: Store, nvcc: Any) -> None:
    sources = [make_source("a"), make_source("b")]
    results = build_batch(sources, "sm_89", store, nvcc.toolkit)
    assert list(results) == ["a", "b"]
    built = results["a"]
    assert isinstance(built, Built)
    assert (built.name, built.arch, built.nvcc, built.cached) == ("a", "sm_89", nvcc.toolkit.build, False)
    assert built.text_sha256 == sources[0].sha256
    assert built.resources == dict.fromkeys(("stats", "quantize", "attention"), Resources(40, 8, 4, 2, 512))
    assert built.cubin.read_bytes().startswith(b"\x7fELF")
    assert built.cubin.with_name("kernel.cu").read_text() == sources[0].text
    assert len(nvcc.calls) == 2
    assert all("-arch=sm_89 -cubin -std=c++17 -O3 -lineinfo" in call for call in nvcc.calls)


def test_a_source_is_compiled_for_the_target_that_its_family_needs(store: Store, nvcc: Any) -> None:
    wgmma = replace(make_source("b"), config=next(iter(FAMILIES["wgmma"])))
    results = build_batch([make_source("a"), wgmma], "sm_90", store, nvcc.toolkit)
    for name, target in (("a", "sm_90"), ("b", "sm_90a")):
        built = results[name]
        assert isinstance(built, Built)
        assert built.arch == target
        assert [f"-arch={target} " in call for call in nvcc.calls].count(True) == 1
        assert json.loads((built.cubin.parent / "build.json").read_text())["flags"][0] == f"-arch={target}"
    assert store.find_text("b", wgmma.sha256, wgmma.target("sm_90")) == results["b"].cubin.parent  # type: ignore[union-attr]


def test_what_was_built_is_not_built_again(store: Store, nvcc: Any) -> None:
    first = build_batch([make_source("a")], "sm_89", store, nvcc.toolkit)["a"]
    second = build_batch([make_source("a"), make_source("b")], "sm_89", store, nvcc.toolkit, jobs=7)["a"]
    assert isinstance(first, Built)
    assert second == replace(first, cached=True)
    assert len(nvcc.calls) == 2


def test_one_bad_source_does_not_hold_up_the_others(store: Store, nvcc: Any) -> None:
    results = build_batch(
        [make_source("a", "BROKEN"), make_source("b", "SLEEP"), make_source("c")],
        "sm_89", store, nvcc.toolkit, jobs=3, timeout_s=4,  # of a busy machine, for the others
    )  # fmt: skip
    broken, slow, good = results["a"], results["b"], results["c"]
    assert isinstance(broken, BuildFailure)
    assert (broken.outcome, broken.reason) == ("compile", 'kernel.cu(12): error: identifier "BROKEN" is undefined')
    assert "warning #1-D" in broken.log
    assert isinstance(slow, BuildFailure)
    assert (slow.outcome, slow.reason) == ("timeout", "nvcc took more than 4 s")
    assert isinstance(good, Built)
    assert entries(store) == [good.cubin.parent.name]
    assert list((store.root / ".staging").iterdir()) == []


def test_compilers_run_side_by_side(store: Store, nvcc: Any) -> None:
    results = build_batch([make_source("a", "MEET"), make_source("b", "MEET")], "sm_89", store, nvcc.toolkit, jobs=2)
    assert all(isinstance(result, Built) for result in results.values()), results


def test_a_failure_is_tried_again(store: Store, nvcc: Any) -> None:
    for _ in range(2):
        build_batch([make_source("a", "BROKEN")], "sm_89", store, nvcc.toolkit)
    assert len(nvcc.calls) == 2


def test_a_cubin_that_lacks_a_kernel_is_a_failure(store: Store, nvcc: Any) -> None:
    source = make_source("a")
    source = replace(source, text=source.text.replace("attention_a", "attention_z"))
    result = build_batch([source], "sm_89", store, nvcc.toolkit)["a"]
    assert isinstance(result, BuildFailure)
    assert "attention_a" in result.reason


def test_one_byte_of_the_text_is_another_kernel_whatever_the_time_stamps(store: Store, nvcc: Any) -> None:
    """E4, from the text on; test_render.py has the templates."""
    first = build_batch([make_source("a", "x")], "sm_89", store, nvcc.toolkit)["a"]
    assert isinstance(first, Built)
    for file in (*first.cubin.parent.iterdir(), first.cubin.parent):
        os.utime(file, (2**31, 2**31))  # newer than anything that will be built
    second = build_batch([make_source("a", "y")], "sm_89", store, nvcc.toolkit)["a"]
    assert isinstance(second, Built)
    assert not second.cached
    assert second.cubin.parent != first.cubin.parent


def test_the_same_toolkit_elsewhere_hits(store: Store, make_nvcc: Callable[..., Any], tmp_path: Path) -> None:
    """E5: through a link, in another folder, the store moved, with another number of compilers."""
    build_batch([make_source("a")], "sm_89", store, make_nvcc("one").toolkit, jobs=2)
    (tmp_path / "link").symlink_to(tmp_path / "one")
    linked = replace(make_nvcc("two").toolkit, nvcc=tmp_path / "link" / "bin" / "nvcc")
    store.root.rename(tmp_path / "moved")
    moved = Store(tmp_path / "moved")
    for toolkit in (linked, make_nvcc("three").toolkit):
        result = build_batch([make_source("a")], "sm_89", moved, toolkit)["a"]
        assert isinstance(result, Built)
        assert result.cached


@pytest.mark.parametrize("other", [{"version": "13.0.48"}, {"build": "cuda_13.0.r13.0/compiler.2_0"}])
def test_another_toolkit_misses_and_leaves_the_old_entry(
    store: Store, make_nvcc: Callable[..., Any], other: dict[str, str]
) -> None:
    """E6."""
    build_batch([make_source("a")], "sm_89", store, make_nvcc("one").toolkit)
    result = build_batch([make_source("a")], "sm_89", store, make_nvcc("two", **other).toolkit)["a"]
    assert isinstance(result, Built)
    assert not result.cached
    assert len(entries(store)) == 2


def test_another_architecture_misses(store: Store, nvcc: Any) -> None:
    for arch in ("sm_89", "sm_90"):
        build_batch([make_source("a")], arch, store, nvcc.toolkit)
    assert len(entries(store)) == 2


def test_a_damaged_entry_is_built_anew(store: Store, nvcc: Any) -> None:
    first = build_batch([make_source("a")], "sm_89", store, nvcc.toolkit)["a"]
    assert isinstance(first, Built)
    first.cubin.write_bytes(b"")
    second = build_batch([make_source("a")], "sm_89", store, nvcc.toolkit)["a"]
    assert isinstance(second, Built)
    assert second.cubin_sha256 == first.cubin_sha256
    assert second.cubin.stat().st_size > 0


def test_options_from_the_environment_do_not_reach_the_compiler(
    store: Store, nvcc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    build_batch([make_source("a")], "sm_89", store, nvcc.toolkit)
    assert nvcc.calls[0].endswith(" None")


def test_without_ninja_the_error_names_it(store: Store, nvcc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagegen.compilers.find_ninja", lambda: None)
    with pytest.raises(ToolchainError, match="ninja"):
        build_batch([make_source("a")], "sm_89", store, nvcc.toolkit)


def test_a_cached_batch_needs_neither_compiler_nor_a_writable_store(store: Store, nvcc: Any) -> None:
    build_batch([make_source("a")], "sm_89", store, nvcc.toolkit)
    before = sorted(store.root.rglob("*"))
    nvcc.toolkit.nvcc.unlink()
    result = build_batch([make_source("a")], "sm_89", store, nvcc.toolkit)["a"]
    assert isinstance(result, Built)
    assert sorted(store.root.rglob("*")) == before
    source = make_source("a")
    assert store.find_text("a", source.sha256, "sm_89") == result.cubin.parent
    assert store.find_cubin("a", result.cubin_sha256) == result.cubin.parent


_CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs, and their children
from pathlib import Path
from sagegen.build import Built, build_batch
from sagegen.store import Store
from sagegen.toolkit import Toolkit
from sagegen.problem import Problem
from sagegen.render import Source
from sagegen.space import parse_config
name, text, config, root, nvcc, build = sys.argv[1:]
source = Source(name, Problem(64, "fp16", False), parse_config(config), text)
toolkit = Toolkit(Path(nvcc), (13, 0), build)
result = build_batch([source], "sm_89", Store(Path(root)), toolkit)
print(result[name].cubin_sha256)
"""


def start_child(source: Source, store: Store, nvcc: Any) -> subprocess.Popen[str]:
    """A process, in its own process group, that builds `source` and prints its cubin's digest."""
    words = [source.name, source.text, CONFIG.name, str(store.root), str(nvcc.toolkit.nvcc), nvcc.toolkit.build]
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def test_eight_processes_compile_once_and_all_get_the_kernel(
    store: Store, make_nvcc: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2. Their cubin is the one that a process by itself builds."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    nvcc = make_nvcc(seconds=1)
    children = [start_child(make_source("a"), store, nvcc) for _ in range(8)]
    answers = {child.communicate(timeout=60)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0] * 8
    assert list(temporary.iterdir()) == []
    alone = make_nvcc("alone").toolkit
    built = build_batch([make_source("a")], "sm_89", Store(tmp_path / "other"), alone)["a"]
    assert isinstance(built, Built)
    assert answers == {built.cubin_sha256}
    nvcc.calls_file.write_text("\n".join(nvcc.calls[:-1]))  # less that of the one by itself
    assert len(nvcc.calls) == 1
    assert len(entries(store)) == 1
    assert list((store.root / ".staging").iterdir()) == []


def wait_for_call(nvcc: Any) -> int:
    """The process id of the stand-in's first compilation, once it runs."""
    deadline = time.monotonic() + 30
    while not nvcc.calls:
        assert time.monotonic() < deadline, "the compiler never started"
        time.sleep(0.02)
    return int(nvcc.calls[0].split()[0])


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.02)


@pytest.mark.parametrize("to_group", [False, True], ids=["kill -INT", "Ctrl+C"])
def test_an_interrupt_ends_the_compilers_and_leaves_no_folder(store: Store, nvcc: Any, to_group: bool) -> None:
    child = start_child(make_source("a", "SLEEP"), store, nvcc)
    compiler = wait_for_call(nvcc)
    (os.killpg if to_group else os.kill)(child.pid, signal.SIGINT)
    _, said = child.communicate(timeout=30)
    assert "KeyboardInterrupt" in said
    wait_for_end(compiler)
    assert list((store.root / ".staging").iterdir()) == []


def test_stop_ends_a_build_in_another_thread(store: Store, nvcc: Any) -> None:
    stop = threading.Event()
    caught: list[BaseException] = []

    def work() -> None:
        try:
            build_batch([make_source("a", "SLEEP")], "sm_89", store, nvcc.toolkit, stop=stop)
        except BuildError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    compiler = wait_for_call(nvcc)
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    assert "stopped" in str(caught[0])
    wait_for_end(compiler)
    assert list((store.root / ".staging").iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.pop("resources"),
        lambda record: record["resources"].pop("attention"),
        lambda record: record["resources"]["attention"].update(registers="x"),
        lambda record: record.update(seconds=None),
    ],
    ids=["no resources", "a role less", "text for a number", "no time"],
)
def test_an_edited_record_is_built_again_and_healed(nvcc, tmp_path, damage) -> None:
    store = Store(tmp_path / "store")
    source = make_source("edited")
    built = build_batch([source], "sm_89", store, nvcc.toolkit)[source.name]
    path = built.cubin.parent / "build.json"
    whole = json.loads(path.read_text())
    record = json.loads(path.read_text())
    damage(record)
    path.write_text(json.dumps(record))
    again = build_batch([source], "sm_89", store, nvcc.toolkit)[source.name]
    assert not again.cached
    assert json.loads(path.read_text())["resources"] == whole["resources"]
