"""The device that a call's tensors are on."""

from __future__ import annotations

from dataclasses import dataclass

from sagegen.gpu import Gpu
from sagegen.problem import TUNED_HEAD_DIMS, Problem


@dataclass(frozen=True, slots=True)
class Device:
    """Where a call's tensors are.

    Attributes:
        kind: torch's device type.
        index: torch's device index, -1 for the CPU.
        product, arch: the driver's name and e.g. `sm_89`; empty off CUDA.
        gpu: the known GPU that it is.
    """

    kind: str
    index: int
    product: str = ""
    arch: str = ""
    gpu: Gpu | None = None

    @property
    def name(self) -> str | None:
        return self.gpu.name if self.gpu else self.product or None

    def tune_command(self, problem: Problem) -> str:
        """What to run for a kernel of `problem` and its like; for an unknown GPU, to see the known ones.

        Without options a run takes the usual head dims and both masks, in bf16 and INT8.
        """
        if self.gpu is None:
            return "sagegen gpus"
        head_dim = "" if problem.head_dim in TUNED_HEAD_DIMS else f" --head-dim {problem.head_dim}"
        dtype = "" if problem.dtype == "bf16" else f" --dtype {problem.dtype}"
        precision = "" if problem.precision == "int8" else f" --precision {problem.precision}"
        return f"sagegen tune --gpu {self.gpu.name}{head_dim}{dtype}{precision}"
