"""Quantized attention kernels: generated, tuned and shipped per GPU.

    import sagegen
    out = sagegen.attention(q, k, v, is_causal=True)

Importing the package loads nothing; the first use of a name loads what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sagegen.errors import (
        ArgumentError,
        BuildError,
        ConfigError,
        DriverError,
        EmulatorError,
        GpuMismatchError,
        RegistryError,
        SagegenError,
        SelfTestError,
        StoreError,
        ToolchainError,
        UnknownNameError,
        UnsupportedError,
        WorkerError,
    )
    from sagegen.runtime.explanation import Explanation
    from sagegen.runtime.merging import merge_lse
    from sagegen.runtime.op import (
        attention,
        attention_varlen,
        explain,
        last_dispatch,
        warmup,
        workspace_bytes,
    )
    from sagegen.runtime.patching import patched
    from sagegen.runtime.sdpa import sdpa

    __version__: str

_MODULES = {
    "sagegen.runtime.op": (
        "attention",
        "attention_varlen",
        "explain",
        "last_dispatch",
        "warmup",
        "workspace_bytes",
    ),
    "sagegen.runtime.explanation": ("Explanation",),
    "sagegen.runtime.merging": ("merge_lse",),
    "sagegen.runtime.patching": ("patched",),
    "sagegen.runtime.sdpa": ("sdpa",),
    "sagegen.errors": (
        "SagegenError",
        "ArgumentError",
        "BuildError",
        "ConfigError",
        "DriverError",
        "EmulatorError",
        "GpuMismatchError",
        "RegistryError",
        "SelfTestError",
        "StoreError",
        "ToolchainError",
        "UnknownNameError",
        "UnsupportedError",
        "WorkerError",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "attention",
    "attention_varlen",
    "sdpa",
    "explain",
    "last_dispatch",
    "warmup",
    "workspace_bytes",
    "merge_lse",
    "patched",
    "Explanation",
    "SagegenError",
    "ArgumentError",
    "BuildError",
    "ConfigError",
    "DriverError",
    "EmulatorError",
    "GpuMismatchError",
    "RegistryError",
    "SelfTestError",
    "StoreError",
    "ToolchainError",
    "UnknownNameError",
    "UnsupportedError",
    "WorkerError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("sagegen")
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'sagegen' has no attribute {name!r}")
    globals()[name] = value  # the next use is a plain attribute
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
