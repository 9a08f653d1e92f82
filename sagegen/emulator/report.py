"""What the runtime reports, in the words of the kernel's text: errors with their line, bank conflicts by line."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sagegen.emulator.library import Report, Site
from sagegen.emulator.places import NOWHERE, KernelText, Place, find_places
from sagegen.errors import EmulatorError
from sagegen.plan import Role

_ADDRESS = re.compile(r"\{0x([0-9a-fA-F]+)\}")


@dataclass(frozen=True, slots=True)
class BankUse:
    """What the accesses of one line cost in shared memory.

    Attributes:
        kernel: its role.
        line: in the CUDA text; 0 when it is not known.
        function: the one that the line stands in.
        text: the line.
        bytes: of one lane's access.
        accesses: by whole warps.
        wavefronts: that they took: passes over the 32 banks.
        ideal: that they would have taken without conflicts.
    """

    kernel: str
    line: int
    function: str
    text: str
    bytes: int
    is_write: bool
    accesses: int
    wavefronts: int
    ideal: int

    @property
    def conflict_share(self) -> float:
        """The share of its wavefronts that conflicts cost, 0 to 1."""
        return 1 - self.ideal / self.wavefronts if self.wavefronts else 0.0


def make_error(
    report: Report, role: Role, text: KernelText, library: Path, show: Callable[[int], str]
) -> EmulatorError:
    """The error that a report stands for.

    Args:
        role: of the kernel that ran.
        library: where the report's addresses lie.
        show: says how to see the text around a line.
    """
    addresses = [int(digits, 16) for digits in _ADDRESS.findall(report.message)]
    places = find_places(library, [*addresses, report.site], text)
    place = text.place(report.line, role) if report.line else places.get(report.site, NOWHERE)
    what = _ADDRESS.sub(lambda match: _describe(places.get(int(match[1], 16), NOWHERE), match[1]), report.message)
    return EmulatorError(
        f"{report.kind} in {_where(report, role, place)}: {what}{_quote(place.line, text)}\n    in {text.source.name}",
        show(place.line) if place.line else "",
        kind=report.kind,
        kernel=role,
        block=report.block,
        thread=report.thread,
        line=place.line,
    )


def _where(report: Report, role: Role, place: Place) -> str:
    parts = [f"kernel {role}", f"block {report.block}"]
    if report.thread >= 0:
        parts.append(f"thread {report.thread}")
    if place.line:
        parts.append(str(place))
    return ", ".join(parts)


def _describe(place: Place, digits: str) -> str:
    return str(place) if place.line else f"address 0x{digits} of the library"


def _quote(line: int, text: KernelText) -> str:
    return f"\n    {line} | {text.line(line)}" if line else ""


def sum_banks(
    banks: Mapping[tuple[Role, Site], tuple[int, int, int]], text: KernelText, library: Path
) -> tuple[BankUse, ...]:
    """The sums of each line, size and direction together, in the order of the text."""
    places = find_places(library, (site.address for _, site in banks), text)
    sums: defaultdict[tuple[int, Role, str, int, bool], list[int]] = defaultdict(lambda: [0, 0, 0])
    for (role, site), values in banks.items():
        place = text.place(site.line, role) if site.line else places.get(site.address, NOWHERE)
        function = place.functions[0] if place.functions else ""
        total = sums[place.line, role, function, site.bytes, site.is_write]
        for index, value in enumerate(values):
            total[index] += value
    return tuple(
        BankUse(role, line, function, text.line(line), size, is_write, *values)
        for (line, role, function, size, is_write), values in sorted(sums.items())
        if any(values)
    )
