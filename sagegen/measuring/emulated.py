"""The accuracy gate in the emulator: the kernels of a config on small inputs, without a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from sagegen.emulator.program import EmulatedProgram, load_emulated
from sagegen.emulator.report import BankUse
from sagegen.env import Env
from sagegen.errors import EmulatorError
from sagegen.gpu import Gpu
from sagegen.measuring.call import call_program
from sagegen.measuring.gate import Cases, run_gate
from sagegen.measuring.inputs import EMULATED_KINDS
from sagegen.problem import Problem
from sagegen.space import Config

#: The kind that bank conflicts are counted on.
_BANKS_KIND = "normal"


@dataclass(frozen=True, slots=True)
class EmulatedVerdict:
    """What the gate says of a config in the emulator.

    Attributes:
        outcome: `crash` when a kernel did what no kernel may do: a race, a deadlock, an access outside its memory.
        reason: what failed and how; empty when all passed.
        figures: by input kind, as `GateResult.figure_values`.
        seconds: compiling included.
    """

    outcome: Literal["ok", "accuracy", "crash"]
    reason: str
    figures: Mapping[str, Mapping[str, float]]
    seconds: float


def small_cases() -> Cases:
    """The gate's cases at the emulator's sizes, on the CPU."""
    return Cases("cpu", EMULATED_KINDS)


def gate_emulated(
    problem: Problem,
    config: Config,
    gpu: Gpu,
    cases: Cases,
    env: Env,
    *,
    captured: Iterable[str] = (),
    workers: int | None = None,
) -> EmulatedVerdict:
    """Run the gate on `config` as `gpu` would compute it.

    Args:
        cases: from `small_cases`, kept between configs.
        captured: kinds that were added to `cases`.
        workers: operating system threads; None: one per core.

    Raises:
        ToolchainError: this machine has no C++ compiler that will do.
        BuildError, StoreError: the kernel cannot be compiled or kept.
    """
    start = time.monotonic()
    program = load_emulated(problem, config, gpu, env, workers=workers)
    try:
        result = run_gate(program, problem, config, cases, kinds=(*EMULATED_KINDS, *captured))
    except EmulatorError as error:
        return EmulatedVerdict("crash", str(error), {}, time.monotonic() - start)
    outcome: Literal["ok", "accuracy"] = "ok" if result.passed else "accuracy"
    return EmulatedVerdict(outcome, result.reason, result.figure_values(), time.monotonic() - start)


def count_banks(problem: Problem, config: Config, gpu: Gpu, cases: Cases, env: Env) -> tuple[BankUse, ...]:
    """Shared-memory traffic of one call on normal inputs, by line.

    Raises:
        EmulatorError: a kernel did what no kernel may do.
        ToolchainError, BuildError, StoreError: as `gate_emulated`.
    """
    program: EmulatedProgram = load_emulated(problem, config, gpu, env, count_banks=True)
    inputs = cases.get(problem, _BANKS_KIND).inputs
    call_program(program, problem, config, inputs.q, inputs.k, inputs.v, want_lse=True)
    return program.bank_counts()
