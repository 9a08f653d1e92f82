"""The accuracy gate of an offline run: its winners are held to it in the emulator, each config once."""

from __future__ import annotations

from collections.abc import Callable

from sagegen.env import Env
from sagegen.errors import BuildError, StoreError, ToolchainError
from sagegen.gpu import Gpu
from sagegen.measuring.emulated import EmulatedVerdict, gate_emulated, small_cases
from sagegen.problem import Problem
from sagegen.space import Config
from sagegen.tuning.events import GateStarted, Listener, Warned

Gate = Callable[[Problem, Config], EmulatedVerdict]


def make_gate(gpu: Gpu, env: Env) -> Gate:
    """The gate for configs of `gpu`; raises as `gate_emulated`."""
    cases = small_cases()
    return lambda problem, config: gate_emulated(problem, config, gpu, cases, env)


class Gatekeeper:
    """Judges configs, and stops judging rather than ending the run.

    Args:
        gate: None judges nothing.
        left_s: seconds of the run's budget; None without one.

    Attributes:
        interrupt: what made it stop, when that was Ctrl+C.
    """

    def __init__(self, gate: Gate | None, left_s: Callable[[], float | None], listen: Listener) -> None:
        self.interrupt: KeyboardInterrupt | None = None
        self._gate = gate
        self._left_s = left_s
        self._listen = listen
        self._verdicts: dict[tuple[Problem, Config], EmulatedVerdict | None] = {}

    @property
    def is_open(self) -> bool:
        return self._gate is not None

    def stop(self) -> None:
        """Judge nothing from now on."""
        self._gate = None

    def judge(self, problem: Problem, config: Config) -> EmulatedVerdict | None:
        """The gate's verdict; None when there is none, which was said."""
        key = (problem, config)
        if key not in self._verdicts:
            self._verdicts[key] = self._run(problem, config)
        return self._verdicts[key]

    def _run(self, problem: Problem, config: Config) -> EmulatedVerdict | None:
        if self._gate is None:
            return None
        if self._left_s() == 0:
            self._skip("the budget is spent")
            return None
        self._listen(GateStarted(problem.name, config.name))
        try:
            return self._gate(problem, config)
        except ToolchainError as error:
            self._skip(str(error))
        except (BuildError, StoreError) as error:  # the emulator's fault, not the config's
            self._listen(Warned(f"the accuracy of {problem.name} {config.name} was not checked: {error}"))
        except KeyboardInterrupt as error:
            self.interrupt = error
            self.stop()
        return None

    def _skip(self, reason: str) -> None:
        self._listen(Warned(f"the accuracy gate in the emulator was skipped: {reason}"))
        self.stop()
