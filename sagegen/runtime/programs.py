"""The kernels that a process has loaded, each once, and why it could not have others."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sagegen.env import Env
from sagegen.errors import DriverError, RegistryError, SagegenError
from sagegen.plan import Loaded
from sagegen.registry_kernels import find_cubin
from sagegen.runtime.answers import Runtime
from sagegen.runtime.choose import EMULATED_GPU
from sagegen.runtime.device import Device
from sagegen.runtime.explanation import Explanation
from sagegen.runtime.fetch import build_cubin, load_emulated


class Programs:
    """Loaded programs by kernel, cubin and device, shared by all threads.

    Args:
        runtime: the machine.
        on_registry_error: gets the error of a cubin that is not the one its registry names.
    """

    def __init__(self, runtime: Runtime, on_registry_error: Callable[[RegistryError], None]) -> None:
        self._runtime = runtime
        self._on_registry_error = on_registry_error
        self._lock = threading.Lock()
        self._found: dict[tuple[str, str | None, int], Loaded | SagegenError] = {}

    def find(self, explanation: Explanation, device: Device, env: Env) -> tuple[Loaded | SagegenError, bool]:
        """The program that `explanation` names or why there is none, and whether that holds for later calls too.

        Raises:
            RegistryError: a cubin is not the one that its registry names, and `on_registry_error` raises that.
        """
        digest = explanation.found.entry.cubin_sha256 if explanation.found else None
        key = (str(explanation.kernel), digest, device.index)
        if device.kind == "cuda" and key not in self._found and self._runtime.is_capturing():
            return DriverError("CUDA graphs are being captured", "make such a call once before capturing"), False
        with self._lock:  # threads that want the same kernel wait for one of them to build and load it
            if key not in self._found:
                try:
                    self._found[key] = self._load(explanation, device, env)
                except RegistryError:  # of a file that is not what its registry names, for who is told to be strict
                    raise
                except SagegenError as error:  # remembered: a build that failed is not tried for every new length
                    self._found[key] = error
            return self._found[key], True

    def _load(self, explanation: Explanation, device: Device, env: Env) -> Loaded:
        problem, config, name = explanation.problem, explanation.config, explanation.kernel
        assert problem is not None
        assert config is not None
        assert name is not None
        if explanation.answer == "emulator":
            return load_emulated(problem, config, EMULATED_GPU, env)
        cubin = find_cubin(explanation.found, env, self._on_registry_error)
        if cubin is None:
            cubin = build_cubin(problem, config, device, env)
        program = self._runtime.load_program(cubin, name, problem, config, device.index)
        if env.self_test:
            self._runtime.check_program(program, name, problem, device.index)
        return program
