"""From addresses in a compiled kernel to lines of its text and the functions that were inlined there."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sagegen.plan import ROLES, Role
from sagegen.render import Source

_LINE_DIRECTIVE = re.compile(r'#line (\d+) "(.+)"')
#: The header of a device function; that of a kernel has its name on another line.
_FUNCTION = re.compile(r"__device__ [^(]*?(\w+)\(|extern \"C\" __global__()")
#: What addr2line calls a lambda's body.
_LAMBDA = "operator"
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the kernel's text.

    Attributes:
        line: its number in the CUDA text, which is the host text's after the device layer.
        functions: those that it was inlined into, innermost first; the last one is the kernel, by its role.
    """

    line: int
    functions: tuple[str, ...]

    def __str__(self) -> str:
        return f"line {self.line} ({' < '.join(self.functions)})" if self.functions else f"line {self.line}"


NOWHERE = Place(0, ())


class KernelText:
    """The lines of a host text that are also the CUDA text's: those after the device layer."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.file = ""
        self._host_offset = 0
        self._lines: dict[int, str] = {}
        number = 0
        for host_number, text in enumerate(source.text.split("\n"), 1):
            number += 1
            if directive := _LINE_DIRECTIVE.match(text):
                number, self.file = int(directive[1]) - 1, directive[2]
                self._host_offset = host_number - number
                self._lines.clear()  # so far it was the header or the device layer
            else:
                self._lines[number] = text

    def line(self, number: int) -> str:
        """The text of a line, stripped; empty when the kernel has no such line."""
        return self._lines.get(number, "").strip()

    def host_line(self, number: int) -> int:
        """Where in the host text the CUDA text's line is."""
        return number + self._host_offset

    def role_of(self, function: str) -> str:
        """A kernel's role by its name; other functions are called what they are called."""
        return next((role for role in ROLES if function == self.source.entry(role)), function)

    def place(self, number: int, role: Role) -> Place:
        """The place at a line that ran as part of a kernel; what was called in between is not known."""
        function = self._function_at(number)
        return Place(number, (function, role) if function else (role,))

    def _function_at(self, number: int) -> str:
        """The device function that a line stands in; empty for a kernel's own lines."""
        for before in range(number, 0, -1):
            if header := _FUNCTION.match(self._lines.get(before, "")):
                return header[1] or ""
        return ""


def find_places(library: Path, addresses: Iterable[int], text: KernelText) -> Mapping[int, Place]:
    """Where the calls are that return to `addresses`; NOWHERE for those that addr2line knows nothing of.

    Frames inside the device layer and the runtime are dropped: a place is the first line of the kernel's own.
    """
    wanted = sorted(set(addresses) - {0})
    program = shutil.which("addr2line")
    if not wanted or program is None:
        return {}
    command = [program, "-a", "-i", "-f", "-C", "-e", str(library), *(hex(a - 1) for a in wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}  # an error message without lines is better than none
    chunks = re.split(r"^0x[0-9a-f]+\n", done.stdout, flags=re.MULTILINE)[1:]
    return {address: _read_place(chunk, text) for address, chunk in zip(wanted, chunks, strict=True)}


def _read_place(chunk: str, text: KernelText) -> Place:
    """The place that addr2line's pairs of lines, function and `file:line`, describe."""
    lines = chunk.splitlines()
    frames = []
    for function, where in zip(lines[::2], lines[1::2], strict=False):
        file, _, number = where.rpartition(":")
        if Path(file).name == text.file and (digits := re.match(r"\d+", number)):
            frames.append((int(digits[0]), text.role_of(_plain_name(function))))
    if not frames:
        return NOWHERE
    return Place(frames[0][0], tuple(function for _, function in frames if function != _LAMBDA))


def _plain_name(function: str) -> str:
    """`region` from `float* region<float>(Params const&, long)`."""
    name = function
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    words = name.partition("(")[0].split()
    return words[-1].rpartition("::")[2] if words else function
