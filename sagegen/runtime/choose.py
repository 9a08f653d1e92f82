"""Which of our kernels, torch SDPA or the reference answers a call: decided from facts, without loading anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sagegen.abi import LAUNCH_ABI
from sagegen.env import Env
from sagegen.errors import RegistryError
from sagegen.gpu import GPUS, Gpu
from sagegen.problem import Problem
from sagegen.registry import Found, lookup
from sagegen.rules import Target, default_config
from sagegen.runtime.arguments import Checked, Options
from sagegen.runtime.explanation import Explanation
from sagegen.space import parse_config

#: The GPU that backend="emulator" stands for: its default config takes FP8 for P·V, with a 22-bit accumulator.
EMULATED_GPU = GPUS["l20"]

NO_GRADIENT = "an input requires a gradient, which only torch computes"


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

    @property
    def tune_command(self) -> str:
        return f"sagegen tune --gpu {self.gpu.name}" if self.gpu else "sagegen gpus"


def choose(
    checked: Checked,
    options: Options,
    device: Device,
    env: Env,
    *,
    needs_grad: bool,
    on_registry_error: Callable[[RegistryError], None],
) -> Explanation:
    """What answers a checked call.

    Args:
        needs_grad: an input requires a gradient and grad mode is on.
        on_registry_error: gets the error of each malformed registry file, which is then left out.
    """
    backend = options.backend or env.backend
    if checked.is_empty:
        return Explanation("zeros", "there is no query, or no key to see")
    if device.kind == "meta":
        return Explanation("sdpa", "meta tensors have a shape and no values")
    if backend == "sdpa":
        return Explanation("sdpa", "backend='sdpa' was asked for")
    if backend == "reference":
        return _choose_reference(checked, "backend='reference' was asked for", needs_grad)
    if backend == "emulator":
        return _choose_emulator(checked, device, needs_grad)
    if device.kind == "cpu" and backend != "kernel":
        return _choose_reference(checked, "tensors are on the CPU", needs_grad)
    obstacle = NO_GRADIENT if needs_grad else checked.obstacle
    if device.kind != "cuda":
        obstacle = f"kernels run on CUDA tensors, these are on {device.kind}"
    if obstacle is not None or checked.problem is None:
        return Explanation("sdpa", obstacle or "no kernel", is_fallback=True, gpu=device.name)
    found = lookup(
        device.gpu,
        checked.problem,
        checked.shape.kv_len,
        env,
        arch=device.arch,
        min_cosine=options.min_cosine,
        on_error=on_registry_error,
    )
    return _choose_kernel(checked.problem, found, options, device, backend == "kernel", _copy_notes(checked))


def _choose_reference(checked: Checked, reason: str, needs_grad: bool) -> Explanation:
    """The reference does every head dim and dtype; masks, windows and gradients are left to torch."""
    if needs_grad:
        return Explanation("sdpa", f"{reason}, and {NO_GRADIENT}", is_fallback=True)
    if checked.is_masked:
        return Explanation("sdpa", f"{reason}, and a mask or window is torch's to apply")
    return Explanation("reference", reason, problem=checked.problem)


def _choose_emulator(checked: Checked, device: Device, needs_grad: bool) -> Explanation:
    """The default config of EMULATED_GPU, whatever is tuned: the same call gives the same bits on every machine."""
    obstacle = NO_GRADIENT if needs_grad else checked.obstacle
    if device.kind != "cpu":
        obstacle = f"the emulator runs on CPU tensors, these are on {device.kind}: move them with .cpu()"
    problem = checked.problem
    if obstacle is not None or problem is None:
        return Explanation("sdpa", obstacle or "no kernel", is_fallback=True)
    config = default_config(Target(EMULATED_GPU, problem))
    return Explanation(
        "emulator",
        f"backend='emulator' was asked for; it runs {EMULATED_GPU.name}'s default config on the CPU",
        gpu=EMULATED_GPU.name,
        problem=problem,
        config=config,
        notes=_copy_notes(checked),
    )


def _choose_kernel(
    problem: Problem, found: Found | None, options: Options, device: Device, forced: bool, notes: tuple[str, ...]
) -> Explanation:
    if found is None:
        if device.gpu is None:
            reason = (
                f"{device.product} ({device.arch}) is no known GPU, and no registry of its architecture has an entry"
            )
            return Explanation("sdpa", reason, is_fallback=True, gpu=device.name, problem=problem)
        notes += (f"nothing is tuned for {problem.name} at this length; to tune it: {device.tune_command}",)
        config = default_config(Target(device.gpu, problem))
        return Explanation("kernel", "the default config, untuned", False, device.name, problem, None, config, notes)
    entry = found.entry
    notes += _entry_notes(found, device)
    if entry.answer == "sdpa" and not (forced and entry.config):
        reason = "torch SDPA is faster at this length, quantization counted in"
        return Explanation("sdpa", reason, forced, device.name, problem, found, None, notes)
    if not entry.is_accurate_for(options.min_cosine):
        known = f"reaches cosine {entry.known_cosine}"
        if entry.tier == "coarse" and entry.known_cosine >= options.min_cosine:
            known = "is of the coarse tier, for its relative L1"
        reason = f"the entry {known}, which is not enough for min_cosine={options.min_cosine}"
        return Explanation("sdpa", reason, True, device.name, problem, found, None, notes)
    config = parse_config(str(entry.config))
    reason = f"tuned entry of {found.gpu_name} for {entry.lengths.name}"
    return Explanation("kernel", reason, False, device.name, problem, found, config, notes)


def _entry_notes(found: Found, device: Device) -> tuple[str, ...]:
    """What is less than ideal about an entry, each with the command that mends it."""
    entry = found.entry
    mend = f"to tune it here: {device.tune_command}"
    notes = []
    if found.borrowed:
        notes.append(f"{device.name} has no entry for {entry.problem}, {found.gpu_name}'s is borrowed; {mend}")
    if found.out_of_range:
        notes.append(f"no bucket of {entry.problem} holds this length, {entry.lengths.name} stands in; {mend}")
    if not entry.measured:
        notes.append(f"the entry of {found.gpu_name} for {entry.problem} is predicted, not measured; {mend}")
    if entry.answer == "kernel" and (entry.min_cosine is None or entry.provenance.accuracy_from):
        emulated = " and is the emulator's" if entry.provenance.accuracy_from else ""
        notes.append(f"the accuracy of {entry.problem} was never measured on {found.gpu_name}{emulated}; {mend}")
    if entry.answer == "kernel" and entry.provenance.launch_abi != LAUNCH_ABI:
        notes.append(
            f"the kernel of {entry.problem} has launch ABI {entry.provenance.launch_abi}, not {LAUNCH_ABI}; {mend}"
        )
    return tuple(notes)


def _copy_notes(checked: Checked) -> tuple[str, ...]:
    return tuple(
        f"{name} is copied in every call: its last dim is not contiguous, or rows are not 16 bytes apart"
        for name in checked.copies
    )
