"""What compute-sanitizer said, as data: errors by place, hazards of racecheck by the pair of source lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")

_MARK = "========="
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed)")
_ACCESS = re.compile(r"(?P<verb>\w+) access (?:by .*?)?at (?P<place>.*?)(?: \[(?P<count>\d+) hazards?\])?$")
# `kernel(Params)+0x40 in /sagegen/name.cu:12`, and of older versions `0x40 in /sagegen/name.cu:12:kernel(Params)`
_LINE = re.compile(r"(?P<file>[^\s:]+\.cuh?):(?P<line>\d+)")
_KERNEL = re.compile(r"\b((?:stats|quantize|attention)_\w+)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a source something happened; file is empty and line 0 where the tool does not say."""

    file: str
    line: int
    kernel: str
    text: str

    @property
    def name(self) -> str:
        return f"{PurePosixPath(self.file).name}:{self.line}" if self.file else self.text

    def quote(self, sources: Mapping[str, Sequence[str]]) -> str:
        """The line of the source, whose lines are given by its file's stem; the place itself if it is not there."""
        lines = sources.get(PurePosixPath(self.file).stem, ())
        return lines[self.line - 1].strip() if 0 < self.line <= len(lines) else self.name


@dataclass(frozen=True, slots=True)
class Access:
    """One side of a hazard: `Write` or `Read`, and where."""

    verb: str
    place: Place


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two accesses of shared memory that racecheck sees no order between; `count` times."""

    severity: str
    first: Access
    second: Access
    count: int


@dataclass(frozen=True, slots=True)
class Fault:
    """One error of another tool: its first line, and where it happened."""

    message: str
    place: Place


@dataclass(frozen=True, slots=True)
class Report:
    """What one tool said.

    Attributes:
        counted: errors or hazards by the tool's own summary; None when it never came to one.
    """

    tool: str
    counted: int | None
    faults: tuple[Fault, ...]
    hazards: tuple[Hazard, ...]


@dataclass(frozen=True, slots=True)
class HazardGroup:
    """All hazards between two lines that read the same, in whichever kernels."""

    lines: tuple[str, str]
    count: int
    kernels: tuple[str, ...]
    example: Hazard


def parse_report(tool: str, output: str) -> Report:
    """Read a tool's output; what the program itself printed is skipped."""
    blocks: list[list[str]] = []
    counted = None
    for line in output.splitlines():
        if not line.startswith(_MARK):
            continue
        text = line.removeprefix(_MARK)
        if summary := _SUMMARY.search(text):
            counted = int(summary[1] or summary[2])
        elif text.startswith("     ") and blocks:
            blocks[-1].append(text.strip())
        elif text.strip():
            blocks.append([text.strip()])
    if tool == "racecheck":
        return Report(tool, counted, (), tuple(hazard for block in blocks for hazard in _read_hazards(block)))
    return Report(tool, counted, tuple(_read_fault(block) for block in blocks if len(block) > 1), ())


def group_hazards(hazards: Iterable[Hazard], sources: Mapping[str, Sequence[str]]) -> list[HazardGroup]:
    """Hazards by their pair of source lines, most frequent first: kernels of many configs share these."""
    groups: dict[tuple[str, str], list[Hazard]] = {}
    for hazard in hazards:
        first, second = (f"{side.verb}: {side.place.quote(sources)}" for side in (hazard.first, hazard.second))
        groups.setdefault((min(first, second), max(first, second)), []).append(hazard)
    found = [
        HazardGroup(lines, sum(h.count for h in own), tuple(sorted({h.first.place.kernel for h in own})), own[0])
        for lines, own in groups.items()
    ]
    return sorted(found, key=lambda group: -group.count)


def _read_hazards(block: list[str]) -> Iterable[Hazard]:
    """`Error: Race reported between Write access at ...`, then a line `and Read access at ... [n hazards]` for each."""
    head = re.match(r"(\w+): Race reported between (.*)", block[0])
    first = head and _ACCESS.match(head[2])
    if not head or not first:
        return
    for line in block[1:]:
        second = _ACCESS.match(line.removeprefix("and "))
        if line.startswith("and ") and second:
            sides = (Access(side["verb"], _read_place(side["place"])) for side in (first, second))
            yield Hazard(head[1], *sides, count=int(second["count"] or 1))


def _read_fault(block: list[str]) -> Fault:
    at = next((line.removeprefix("at ") for line in block[1:] if line.startswith("at ")), "")
    return Fault(block[0], _read_place(at))


def _read_place(text: str) -> Place:
    line, kernel = _LINE.search(text), _KERNEL.search(text)
    return Place(line["file"] if line else "", int(line["line"]) if line else 0, kernel[1] if kernel else "", text)
