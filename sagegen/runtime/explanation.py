"""Why a call was, or would be, answered the way it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sagegen.problem import Precision, Problem
from sagegen.registry import Found
from sagegen.space import Config

Answer = Literal["kernel", "emulator", "sdpa", "reference", "zeros"]
#: The answers that a kernel of ours computes: on a GPU, or in the emulator.
KERNEL_ANSWERS = ("kernel", "emulator")


@dataclass(frozen=True, slots=True)
class Explanation:
    """One call's answer and its reasons; print it.

    Attributes:
        answer: `kernel` of ours, the `emulator` that runs one on the CPU, torch `sdpa`, the exact `reference`, or
            `zeros` for a call without queries or keys.
        reason: why that one.
        is_fallback: torch answers because no kernel could, not because it was asked for or is faster.
        gpu: name of the GPU, or the driver's for one without a row in the GPU table; the emulated one's for the
            emulator; else None on the CPU.
        problem: what was asked, when a kernel could be asked it.
        found: the registry entry that was looked up; None when nothing was tuned, or nothing was looked up.
        config: what the kernel is built from.
        notes: what else the caller should know, such as a borrowed entry or a copied tensor.
        passed_over: with precision="auto", which other precision does not answer, and why.
    """

    answer: Answer
    reason: str
    is_fallback: bool = False
    gpu: str | None = None
    problem: Problem | None = None
    found: Found | None = None
    config: Config | None = None
    notes: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()

    @property
    def precision(self) -> Precision | None:
        """How the kernel that runs quantizes Q and K; None without one."""
        return self.problem.precision if self.problem is not None and self.answer in KERNEL_ANSWERS else None

    @property
    def kernel(self) -> str | None:
        """Name of the kernel that runs."""
        if self.answer not in KERNEL_ANSWERS or self.problem is None or self.config is None:
            return None
        entry = self.found.entry if self.found else None
        return (entry.kernel if entry else None) or f"{self.problem.name}_{self.config.name}"

    @property
    def provenance(self) -> str | None:
        """`measured` or `predicted` by the registry entry, `untuned` for a default config; None without a kernel."""
        if self.answer not in KERNEL_ANSWERS:
            return None
        return self.found.entry.provenance.kind if self.found else "untuned"

    def __str__(self) -> str:
        lines = [f"{self.answer}: {self.reason}"]
        facts: list[tuple[str, object]] = [
            ("gpu", self.gpu),
            ("problem", self.problem.name if self.problem else None),
            ("kernel", self.kernel),
            ("provenance", self.provenance),
        ]
        if self.found is not None:
            entry = self.found.entry
            facts += [
                ("entry", f"{self.found.gpu_name} {entry.problem} {entry.lengths.name}"),
                ("registry", self.found.layer.label),
                ("min_cosine", entry.min_cosine),
                ("speed vs SDPA", entry.figures.speed_vs_sdpa),
            ]
        lines += [f"  {name}: {value}" for name, value in facts if value is not None]
        lines += [f"  passed over: {other}" for other in self.passed_over]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
