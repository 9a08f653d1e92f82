"""The accuracy gate in the emulator: the kernels of a config on small inputs, without a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from sagegen.emulator.agreement import check_agreement
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

#: Kinds whose results are also held to the config's own numerics, far closer than to exact attention; their softmax
#: scale, None for the usual one.
_NUMERICS_KINDS: Mapping[str, float | None] = {"normal": None, "off_edge": -0.1, "gqa": None}
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
    """Run the gate on `config` as `gpu` would compute it, then hold some results to the config's own numerics.

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
        if result.passed:
            for kind, scale in _NUMERICS_KINDS.items():
                inputs = cases.get(problem, kind).inputs
                check_agreement(program, inputs.q, inputs.k, inputs.v, softmax_scale=scale)
    except EmulatorError as error:
        outcome_of_error: Literal["accuracy", "crash"] = "accuracy" if error.kind == "wrong_result" else "crash"
        return EmulatedVerdict(outcome_of_error, str(error), {}, time.monotonic() - start)
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
