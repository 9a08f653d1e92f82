"""Kernels that no registry's cubin serves: from the store, else compiled by nvcc; the emulator's by g++."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sagegen.env import Env
from sagegen.errors import BuildError
from sagegen.gpu import Gpu
from sagegen.plan import Loaded
from sagegen.problem import Problem
from sagegen.runtime.device import Device
from sagegen.runtime.fallback import LOGGER
from sagegen.space import Config
from sagegen.store import mark_used, open_store, read_cubin

#: How long a caller waits before being told for what.
_PATIENCE_S = 0.5


def build_cubin(problem: Problem, config: Config, device: Device, env: Env) -> bytes:
    """Render and compile `config` for `device`, or take what an earlier process compiled.

    Raises:
        ToolchainError, BuildError, StoreError: it cannot be built here.
        ConfigError: the config breaks a rule with the nvcc at hand.
    """
    # not at the top: most processes never build
    from sagegen.build import BuildFailure, build_batch
    from sagegen.render import render
    from sagegen.rules import Target, check_config
    from sagegen.toolkit import find_toolkit

    source = render(problem, config)
    kept = open_store(env).find_text(source.name, source.sha256, source.target(device.arch))
    if kept is not None:  # built earlier: serves on when nvcc is gone
        mark_used(kept)
        return read_cubin(kept)
    toolkit = find_toolkit(env)
    if device.gpu is not None:
        check_config(config, Target(device.gpu, problem, toolkit.version))
    start = time.monotonic()
    with _told(source.name, device.arch):
        built = build_batch([source], device.arch, open_store(env), toolkit)[source.name]
    if isinstance(built, BuildFailure):
        raise BuildError(f"{source.name} did not compile: {built.reason}", device.tune_command(problem))
    if not built.cached:
        LOGGER.warning("compiled %s in %.1f s with nvcc %s", source.name, time.monotonic() - start, toolkit.build)
    return read_cubin(built.cubin.parent)


def describe_compiler(answer: str, env: Env) -> str:
    """What a kernel for `answer`, `kernel` or `emulator`, would be compiled with.

    Raises:
        ToolchainError: this machine has no such compiler.
    """
    # not at the top: calls whose kernel is at hand need no compiler
    if answer == "emulator":
        from sagegen.emulator.compiler import find_compiler

        return f"g++ {find_compiler().build}"
    from sagegen.toolkit import find_toolkit

    return f"nvcc {find_toolkit(env).build}"


def load_emulated(problem: Problem, config: Config, gpu: Gpu, env: Env) -> Loaded:
    """`config` as it would run on `gpu`, loaded into the emulator; compiled unless an earlier process did.

    Raises:
        ToolchainError, BuildError, StoreError: it cannot be compiled here.
    """
    from sagegen.emulator.program import load_emulated  # not at the top: needs the renderer

    with _told(f"{problem.name}_{config.name}", "the emulator"):
        return load_emulated(problem, config, gpu, env)


@contextmanager
def _told(name: str, target: str) -> Iterator[None]:
    """Tell the user what a call waits for; what the store has comes at once and needs no words."""
    notice = threading.Timer(_PATIENCE_S, LOGGER.warning, ("compiling %s for %s; this happens once", name, target))
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
