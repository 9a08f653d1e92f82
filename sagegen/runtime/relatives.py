"""Windows and ragged batches: nobody tunes those, so they take what is tuned for dense calls."""

from __future__ import annotations

from sagegen.problem import Problem
from sagegen.registry import Found
from sagegen.rules import Target, fitted_config
from sagegen.runtime.device import Device
from sagegen.runtime.explanation import Explanation
from sagegen.runtime.options import Options
from sagegen.space import parse_config

#: Keys from which on a mask of keys goes to a kernel where torch SDPA wins without one. On an H200, 4 x 32 heads of 128
#: channels, torch takes 484 us for such a call, a kernel 232, the host 338 (docs/gpu-runs/2026-11-30f-h200.md).
_MASKED_TOKENS = 1024


def choose_relative(
    problem: Problem,
    found: Found | None,
    options: Options,
    device: Device,
    notes: tuple[str, ...],
    *,
    torch_masks: bool,
    kv_len: int,
) -> Explanation | None:
    """What answers a windowed or ragged problem by the entry of its dense relative; None where that says nothing.

    Args:
        found: of `problem.tuned`.
        torch_masks: torch may answer: the call has a mask, which torch takes too. Windows and packed sequences cost it
            far more.
        kv_len: keys of the call.
    """
    if found is None:
        return None
    if torch_masks and found.entry.answer == "sdpa" and kv_len < _MASKED_TOKENS:
        reason = f"below {_MASKED_TOKENS} keys the host takes longer for a mask of keys than torch SDPA on the GPU"
        return Explanation("sdpa", reason, False, device.name, problem, found)
    if found.entry.config is None or device.gpu is None:
        return None
    if not found.entry.is_accurate_for(options.min_cosine):
        known = f"{found.entry.problem}, its dense relative, reaches cosine {found.entry.known_cosine}"
        reason = f"{known}, which is not enough for min_cosine={options.min_cosine}"
        return Explanation("sdpa", reason, True, device.name, problem, found, None, notes)
    # a mask takes nothing from a kernel's accuracy, so the entry's cosine holds
    config = fitted_config(parse_config(found.entry.config), Target(device.gpu, problem))
    if config is None:
        return None
    reason = f"the config that {found.gpu_name} has for {found.entry.problem}, {found.entry.lengths.name}"
    return Explanation("kernel", reason, False, device.name, problem, None, config, notes)
