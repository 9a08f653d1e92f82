"""Which of our kernels, torch SDPA or the reference answers a call: decided from facts, without loading anything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from sagegen.abi import LAUNCH_ABI
from sagegen.entry import ASSUMED_COSINES, Entry, reaches
from sagegen.env import Env
from sagegen.errors import RegistryError
from sagegen.gpu import GPUS, Gpu
from sagegen.problem import Problem
from sagegen.registry import Found, lookup
from sagegen.rules import Target, default_config_with
from sagegen.runtime.arguments import Checked
from sagegen.runtime.device import Device
from sagegen.runtime.explanation import KERNEL_ANSWERS, Explanation
from sagegen.runtime.options import STEPS, Options
from sagegen.runtime.padding import is_padding_worth_it
from sagegen.runtime.pinning import pinned_config
from sagegen.runtime.precision import prefer
from sagegen.runtime.relatives import choose_relative
from sagegen.space import Config, parse_config

#: The GPU that backend="emulator" stands for: its default config takes FP8 for P·V, with a 22-bit accumulator.
EMULATED_GPU = GPUS["l20"]

DISABLED = "SAGEGEN_DISABLE=1 is set"
NO_GRADIENT = "an input requires a gradient, which only torch computes"


def choose(
    checked: Checked,
    options: Options,
    device: Device,
    env: Env,
    *,
    needs_grad: bool,
    refused: Collection[str] = (),
    on_registry_error: Callable[[RegistryError], None],
) -> Explanation:
    """What answers a checked call.

    Args:
        needs_grad: an input requires a gradient and grad mode is on.
        refused: digests of cubins that cannot be had; their entries do not answer.
        on_registry_error: gets the error of each malformed registry file, which is then left out.

    Raises:
        ConfigError: the config that SAGEGEN_PIN names breaks a rule for this GPU and problem.
    """
    backend = options.backend or env.backend
    if checked.is_empty:
        return Explanation("zeros", "there is no query, or no key to see")
    if device.kind == "meta":
        return Explanation("sdpa", "meta tensors have a shape and no values")
    if env.disabled:
        # who names a kernel in the call must not take torch's answer for one
        return Explanation("sdpa", DISABLED, is_fallback=options.backend in KERNEL_ANSWERS)
    if backend == "sdpa":
        return Explanation("sdpa", "backend='sdpa' was asked for")
    if backend == "reference":
        return _choose_reference(checked, "backend='reference' was asked for", needs_grad)
    if backend == "emulator":
        return _choose_emulator(checked, options, device, needs_grad)
    if device.kind == "cpu" and backend != "kernel":
        return _choose_reference(checked, "tensors are on the CPU", needs_grad)
    obstacle = NO_GRADIENT if needs_grad else checked.obstacle
    if device.kind != "cuda":
        obstacle = f"kernels run on CUDA tensors, these are on {device.kind}"
    if obstacle is not None or checked.problem is None:
        return Explanation("sdpa", obstacle or "no kernel", is_fallback=True, gpu=device.name)
    find = partial(
        lookup, device.gpu, kv_len=checked.shape.kv_len, env=env, arch=device.arch, on_error=on_registry_error
    )
    forced, notes = backend == "kernel", _copy_notes(checked)
    if env.pin is not None:
        return _choose_pinned(checked.problem, env.pin, find, options, device, refused, notes)
    answer = partial(
        _choose_tuned, find=find, options=options, device=device, forced=forced, refused=refused, notes=notes,
        is_masked=checked.is_masked, kv_len=checked.shape.kv_len,
    )  # fmt: skip
    explanation = _choose_precision(checked.problem, answer, options)
    return explanation if forced else _weigh_padding(explanation, checked, device)


def _choose_precision(problem: Problem, answer: Callable[[Problem], Explanation], options: Options) -> Explanation:
    """What `answer` gives for `problem`, or for the same in INT4 where that is left open and goes first."""
    own = answer(problem)
    return prefer(own, answer(replace(problem, precision="int4"))) if options.precision == "auto" else own


def _weigh_padding(explanation: Explanation, checked: Checked, device: Device) -> Explanation:
    """`explanation`, or torch SDPA where it is likely faster at a head dim that the kernel must be padded from."""
    found, problem = explanation.found, explanation.problem
    if explanation.answer != "kernel" or checked.padded_width is None or not (found and problem and device.gpu):
        return explanation
    if is_padding_worth_it(found.entry, device.gpu, problem, checked.shape, checked.head_dim):
        return explanation
    reason = f"torch SDPA is likely faster at head_dim {checked.head_dim} than a kernel of {checked.padded_width}"
    return replace(explanation, answer="sdpa", reason=reason, config=None)


def _choose_reference(checked: Checked, reason: str, needs_grad: bool) -> Explanation:
    """The reference does every head dim and dtype; masks and gradients are left to torch."""
    if needs_grad:
        return Explanation("sdpa", f"{reason}, and {NO_GRADIENT}", is_fallback=True)
    if checked.is_masked:
        return Explanation("sdpa", f"{reason}, and a mask is torch's to apply")
    return Explanation("reference", reason, problem=checked.problem)


def _choose_emulator(checked: Checked, options: Options, device: Device, needs_grad: bool) -> Explanation:
    """The default config of EMULATED_GPU, whatever is tuned: the same call gives the same bits on every machine."""
    obstacle = NO_GRADIENT if needs_grad else checked.obstacle
    if device.kind != "cpu":
        obstacle = f"the emulator runs on CPU tensors, these are on {device.kind}: move them with .cpu()"
    problem = checked.problem
    if obstacle is not None or problem is None:
        return Explanation("sdpa", obstacle or "no kernel", is_fallback=True)
    config = _default_with_steps(EMULATED_GPU, problem, options)
    if config is None:
        what = _spell(options.steps) or _spell_precision(problem)
        reason = f"{what} has no kernel in the emulator, which runs default configs alone"
        return Explanation("sdpa", reason, is_fallback=True)
    what = _describe_default(options, EMULATED_GPU.name + "'s")
    return Explanation(
        "emulator",
        f"backend='emulator' was asked for; it runs {what} on the CPU",
        gpu=EMULATED_GPU.name,
        problem=problem,
        config=config,
        notes=_copy_notes(checked),
    )


def _choose_tuned(
    problem: Problem,
    find: Callable[..., Found | None],
    options: Options,
    device: Device,
    forced: bool,
    refused: Collection[str],
    notes: tuple[str, ...],
    is_masked: bool,
    kv_len: int,
) -> Explanation:
    """What answers `problem`: of the entries that `find` looks up, one that takes the steps that are asked for."""

    def admits(entry: Entry) -> bool:
        if entry.cubin_sha256 in refused and (forced or entry.answer == "kernel"):
            return False
        return entry.config is None or not _contradicted(parse_config(entry.config), options)

    if problem != problem.tuned:
        dense = find(problem.tuned, min_cosine=options.min_cosine, admits=admits)
        relative = choose_relative(
            problem, dense, options, device, notes, torch_masks=is_masked and not forced, kv_len=kv_len
        )
        return relative or _choose_default(problem, options, device, notes, has_others=False)
    find = partial(find, problem, min_cosine=options.min_cosine)
    found = find(admits=admits)
    other = find() if found is None and options.steps else None
    if other is not None and other.entry.answer == "sdpa" and not forced:
        reason = f"torch SDPA is faster at this length than kernels without {_spell(options.steps)}"
        return Explanation("sdpa", reason, False, device.name, problem, other)
    if found is None:
        return _choose_default(problem, options, device, notes, has_others=other is not None)
    return _choose_kernel(problem, found, options, device, forced, notes)


def _choose_pinned(
    problem: Problem,
    pin: str,
    find: Callable[..., Found | None],
    options: Options,
    device: Device,
    refused: Collection[str],
    notes: tuple[str, ...],
) -> Explanation:
    """The config that SAGEGEN_PIN names; an entry of the same config lends its cubin, which serves all lengths."""
    config = pinned_config(pin, device.gpu, device.product, problem)
    if contradicted := _contradicted(config, options):
        reason = f"{_spell(contradicted)} is not what the config of SAGEGEN_PIN does"
        return Explanation("sdpa", reason, is_fallback=True, gpu=device.name, problem=problem)

    def admits(entry: Entry) -> bool:
        return entry.config == config.name and entry.cubin_sha256 not in refused

    found = find(problem, admits=admits) or find(problem, kv_len=1, admits=admits)
    reason = "pinned by SAGEGEN_PIN" + (f"; the cubin is that of an entry of {found.gpu_name}" if found else "")
    notes += ("SAGEGEN_PIN decides on the config, whatever is tuned and whatever min_cosine asks",)
    return Explanation("kernel", reason, False, device.name, problem, found, config, notes)


def _contradicted(config: Config, options: Options) -> dict[str, bool]:
    """The steps that the caller wants and `config` does not take, or the other way round, by argument."""
    return {arg: wanted for arg, wanted in options.steps.items() if getattr(config, STEPS[arg]) != wanted}


def _spell(steps: Mapping[str, bool]) -> str:
    return ", ".join(f"{argument}={wanted}" for argument, wanted in steps.items())


def _choose_default(
    problem: Problem, options: Options, device: Device, notes: tuple[str, ...], *, has_others: bool
) -> Explanation:
    """What answers where nothing is tuned that does as asked: the default config, or one made from it that does."""
    untuned = f"nothing is tuned for {problem.name} at this length; to tune it: {device.tune_command(problem)}"
    if problem != problem.tuned:
        untuned = f"{problem.name} takes the default config: windows and ragged batches are not tuned"
    if has_others:
        untuned = f"{_spell(options.steps)} has no kernel among those tuned for {problem.name} at this length"
    refuse = partial(Explanation, "sdpa", is_fallback=True, gpu=device.name, problem=problem)
    if device.gpu is None:
        return refuse(
            f"{device.product} ({device.arch}) is no known GPU, and no registry of its architecture has an entry"
        )
    if problem.precision == "int4" and options.precision == "auto":  # nobody asked for it by name
        return refuse(untuned)
    config = _default_with_steps(device.gpu, problem, options)
    if config is None and problem != problem.tuned:
        return refuse(f"{_spell(options.steps) or _spell_precision(problem)} has no kernel for {problem.name}")
    if config is None:
        return refuse(f"{_spell(options.steps)} has no kernel: {untuned}")
    assumed = ASSUMED_COSINES[problem.precision]
    # in INT8 nothing is known against it; INT4 is coarser than most callers ask
    if problem.precision == "int4" and not reaches(assumed, options.min_cosine):
        return refuse(f"{_describe_shortfall(f'an untuned kernel counts as cosine {assumed}', options)}; {untuned}")
    notes += (untuned,)
    reason = f"{_describe_default(options, 'the')}, untuned"
    return Explanation("kernel", reason, False, device.name, problem, None, config, notes)


def _default_with_steps(gpu: Gpu, problem: Problem, options: Options) -> Config | None:
    return default_config_with(Target(gpu, problem), {STEPS[arg]: wanted for arg, wanted in options.steps.items()})


def _spell_precision(problem: Problem) -> str:
    return f"precision={problem.precision!r}"


def _describe_default(options: Options, whose: str) -> str:
    return f"{whose} default config" + (f" with {_spell(options.steps)}" if options.steps else "")


def _describe_shortfall(known: str, options: Options) -> str:
    """That what is known of a kernel is not enough; who asked for INT4 by name is told how to get it."""
    remedy = ": give a lower one to take int4" if options.precision == "int4" else ""
    return f"{known}, which is not enough for min_cosine={options.min_cosine}{remedy}"


def _choose_kernel(
    problem: Problem, found: Found, options: Options, device: Device, forced: bool, notes: tuple[str, ...]
) -> Explanation:
    """What the entry that was found says, if it is accurate enough."""
    entry = found.entry
    notes += _entry_notes(found, device, problem)
    if entry.answer == "sdpa" and not (forced and entry.config):
        reason = "torch SDPA is faster at this length, quantization counted in"
        return Explanation("sdpa", reason, forced, device.name, problem, found, None, notes)
    if not entry.is_accurate_for(options.min_cosine):
        known = f"the entry reaches cosine {entry.known_cosine}"
        if entry.tier == "coarse" and entry.known_cosine >= options.min_cosine:
            known = "the entry is of the coarse tier, for its relative L1"
        reason = _describe_shortfall(known, options)
        return Explanation("sdpa", reason, True, device.name, problem, found, None, notes)
    config = parse_config(str(entry.config))
    reason = f"tuned entry of {found.gpu_name} for {entry.lengths.name}"
    return Explanation("kernel", reason, False, device.name, problem, found, config, notes)


def _entry_notes(found: Found, device: Device, problem: Problem) -> tuple[str, ...]:
    """What is less than ideal about an entry, each with the command that mends it."""
    entry = found.entry
    mend = f"to tune it here: {device.tune_command(problem)}"
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
    if checked.padded_width is not None:
        return (f"head_dim {checked.head_dim} is padded to {checked.padded_width}: q, k, v and out are copied",)
    return tuple(
        f"{name} is copied in every call: its last dim is not contiguous, or rows are not 16 bytes apart"
        for name in checked.copies
    )
