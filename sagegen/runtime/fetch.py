"""Where a kernel comes from: its cubin from beside its registry, else the store, else nvcc; the emulator's from g++."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sagegen.abi import LAUNCH_ABI
from sagegen.env import Env
from sagegen.errors import BuildError, RegistryError
from sagegen.gpu import Gpu
from sagegen.plan import Loaded
from sagegen.problem import Problem
from sagegen.registry import Found, read_cubin
from sagegen.runtime.device import Device
from sagegen.runtime.fallback import LOGGER
from sagegen.space import Config
from sagegen.store import open_store
from sagegen.store import read_cubin as read_stored_cubin

#: How long a caller waits before being told for what.
_PATIENCE_S = 0.5


def find_cubin(found: Found | None, env: Env, on_registry_error: Callable[[RegistryError], None]) -> bytes | None:
    """The cubin that a registry entry names, from beside its registry or from the store; None when it is in neither.

    Args:
        found: the entry; None has no cubin, nor has an entry of another launch ABI.
        on_registry_error: gets the error when the cubin beside the registry is not the one that it names.
    """
    if found is None or found.entry.provenance.launch_abi != LAUNCH_ABI:
        return None
    try:
        cubin = read_cubin(found)
    except RegistryError as error:
        on_registry_error(error)
        cubin = None
    if cubin is not None:
        return cubin
    folder = open_store(env).find_cubin(str(found.entry.kernel), str(found.entry.cubin_sha256))
    return None if folder is None else read_stored_cubin(folder)


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
        return read_stored_cubin(kept)
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
    return read_stored_cubin(built.cubin.parent)


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
