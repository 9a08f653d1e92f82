"""Whether a GPU is ours alone: times on one that others use are worth little."""

from __future__ import annotations

from collections.abc import Sequence

from sagegen.errors import GpuBusyError
from sagegen.gpu import DetectedGpu
from sagegen.measuring.telemetry import find_others
from sagegen.tuning.events import Listener, Warned


def look_for_others(devices: Sequence[DetectedGpu], force: bool, listen: Listener) -> None:
    """Make sure, before anything of ours runs there, that nobody else uses `devices`.

    Args:
        force: a warning is enough.

    Raises:
        GpuBusyError: somebody does, seen by their processes, or by the load where those are hidden.
    """
    for device in devices:
        others = find_others(device.index)
        if others and not force:
            raise GpuBusyError(f"GPU {device.index}: {others}", "wait for them, or measure all the same with --force")
        if others:
            listen(Warned(f"GPU {device.index}: {others}"))
