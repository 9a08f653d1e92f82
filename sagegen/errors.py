"""Every exception that sagegen raises on purpose.

A message names the thing that is wrong; `remedy` is the command or change that mends it and always comes last.
"""

from __future__ import annotations


class SagegenError(Exception):
    """Base of all errors of this package.

    Args:
        message: what is wrong, naming the argument, file or GPU.
        remedy: the command or change that fixes it; printed after the message.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy


class ArgumentError(SagegenError, ValueError):
    """A caller's argument has a wrong value, shape, dtype or device."""


class UnknownNameError(SagegenError, ValueError):
    """A GPU, parameter, config or problem of that name does not exist."""


class ConfigError(SagegenError, ValueError):
    """A config breaks a rule for the GPU and problem at hand."""


class GpuMismatchError(SagegenError, RuntimeError):
    """The GPU that was named is not the GPU that is present."""


class ToolchainError(SagegenError, RuntimeError):
    """nvcc, the host C++ compiler or ninja is missing or too old."""


class BuildError(SagegenError, RuntimeError):
    """A kernel did not compile; the message carries the compiler's first error."""


class DriverError(SagegenError, RuntimeError):
    """The CUDA driver is missing or refused a call."""


class SelfTestError(SagegenError, RuntimeError):
    """A kernel gave wrong results on a tiny problem right after it was loaded."""


class RegistryError(SagegenError, ValueError):
    """A tuned registry file is malformed, of another schema version, or disagrees with its cubin."""


class ProbeError(SagegenError, ValueError):
    """A probe's file is malformed or of another GPU, or a probe's kernel gave what no GPU can give."""


class StoreError(SagegenError, RuntimeError):
    """The kernel store cannot be written, or what it holds does not match its digest."""


class WorkerError(SagegenError, RuntimeError):
    """The measuring worker could not be started or spoke out of turn."""


class EmulatorError(SagegenError, RuntimeError):
    """A kernel in the emulator did what no kernel may do; the message quotes the source line.

    Attributes:
        kind: `race`, `deadlock`, `out_of_bounds`, `misaligned`, ...: the runtime's word for it.
        kernel: role of the kernel: `stats`, `quantize` or `attention`.
        block, thread: who did it first; -1 when no single one did.
        line: of the kernel's CUDA text; 0 when it is not known.
    """

    def __init__(
        self,
        message: str,
        remedy: str = "",
        *,
        kind: str = "",
        kernel: str = "",
        block: int = -1,
        thread: int = -1,
        line: int = 0,
    ) -> None:
        super().__init__(message, remedy)
        self.kind = kind
        self.kernel = kernel
        self.block = block
        self.thread = thread
        self.line = line


class GpuBusyError(SagegenError, RuntimeError):
    """Others use the GPU that is to be measured on, which makes every time wrong."""


class GpuLostError(SagegenError, RuntimeError):
    """The GPU does not answer any more, not even to a fresh process."""


class JournalError(SagegenError, RuntimeError):
    """A record could not be written to the journal; what was written before is whole."""


class UnsupportedError(SagegenError, NotImplementedError):
    """No kernel can answer the call and SAGEGEN_STRICT=1 forbids the torch SDPA fallback."""
