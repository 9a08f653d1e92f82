"""A stand-in for nvcc, so that tests of building need no toolkit."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sagegen.toolkit import Toolkit

#: Compiles the "source" by what it says: entries become sections of an ELF64 file, BROKEN fails, SLEEP hangs,
#: MEET waits for a second compilation.
_COMPILER = """#!{python}
import os, re, struct, sys, time

if "--version" in sys.argv:
    print("Cuda compilation tools, release {release}, V{version}\\nBuild {build}")
    raise SystemExit
source, output = sys.argv[-1], sys.argv[sys.argv.index("-o") + 1]
text = open(source).read()
with open({calls!r}, "a") as calls:
    calls.write(f"{{os.getpid()}} {{' '.join(sys.argv[1:])}} {{os.environ.get('NVCC_APPEND_FLAGS')}}\\n")
if "SLEEP" in text:
    time.sleep(600)
if "MEET" in text:
    for _ in range(500):
        if len(open({calls!r}).readlines()) == 2:
            break
        time.sleep(0.02)
    else:
        raise SystemExit("error: the other compilation never started")
if "BROKEN" in text:
    print("kernel.cu(7): warning #1-D: last line", file=sys.stderr)
    print('kernel.cu(12): error: identifier "BROKEN" is undefined', file=sys.stderr)
    raise SystemExit(2)
time.sleep({seconds})
sections = [("", b""), (".strtab", b"")]
for entry in re.findall(r"__global__ void (?:__launch_bounds__\\(.*?\\)\\s+)?(\\w+)\\(", text):
    sections.append((".text." + entry, entry.encode() + b"/" + text.encode()))
    print(f"ptxas info    : Compiling entry function '{{entry}}' for 'sm_89'", file=sys.stderr)
    print(f"ptxas info    : Function properties for {{entry}}", file=sys.stderr)
    print("    8 bytes stack frame, 4 bytes spill stores, 2 bytes spill loads", file=sys.stderr)
    print("ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 400 bytes cmem[0]", file=sys.stderr)
names = b"".join(name.encode() + b"\\0" for name, _ in sections)
sections[1] = (".strtab", names)
body, headers, at = b"", b"", 64
for name, data in sections:
    name_at = names.index(name.encode() + b"\\0")
    headers += struct.pack("<IIQQQQIIQQ", name_at, 1, 0, 0, at + len(body), len(data), 0, 0, 1, 0)
    body += data
head = b"\\x7fELF\\x02\\x01\\x01" + bytes(9) + struct.pack(
    "<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(sections), 1)
open(output, "wb").write(head + body + headers)
"""


@dataclass(frozen=True)
class StandIn:
    """A stand-in nvcc and the file it notes its compilations in."""

    toolkit: Toolkit
    calls_file: Path

    @property
    def calls(self) -> list[str]:
        """One line per compilation: process id, arguments, NVCC_APPEND_FLAGS."""
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def make_nvcc(tmp_path: Path) -> Callable[..., StandIn]:
    """Makes stand-ins; `folder` tells several apart, `seconds` is what a compilation takes."""

    def make(
        folder: str = "cuda", version: str = "13.0.88", build: str = "cuda_13.0.r13.0", seconds: float = 0
    ) -> StandIn:
        path = tmp_path / folder / "bin" / "nvcc"
        path.parent.mkdir(parents=True)
        release = ".".join(version.split(".")[:2])
        calls = tmp_path / "calls"
        path.write_text(
            _COMPILER.format(
                python=sys.executable, release=release, version=version, build=build, calls=str(calls), seconds=seconds
            )
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        major, minor = (int(part) for part in release.split("."))
        return StandIn(Toolkit(path, (major, minor), f"V{version} {build}"), calls)

    return make


@pytest.fixture
def nvcc(make_nvcc: Callable[..., StandIn]) -> StandIn:
    return make_nvcc()


@pytest.fixture(scope="session", autouse=True)
def calm_torch(one_torch_thread: None) -> None:
    """Most tensors here are small."""
