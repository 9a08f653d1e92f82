"""What `verify` and `bench` run: the kernels of a registry or of one config, and the GPU they run on, if any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sagegen.build import BuildFailure, build_batch
from sagegen.entry import ASSUMED_COSINES
from sagegen.env import Env
from sagegen.errors import BuildError, GpuMismatchError, RegistryError
from sagegen.gpu import DetectedGpu, Gpu, detect_gpus
from sagegen.measuring.jobs import Candidate
from sagegen.problem import Problem
from sagegen.registry import Found, load_registry, lookup
from sagegen.registry_kernels import find_cubin
from sagegen.render import render
from sagegen.rules import DEFAULT_TOOLKIT, Target, Version, broken_rules, check_config, default_config
from sagegen.space import Config, parse_config
from sagegen.store import open_store
from sagegen.toolkit import find_toolkit


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel to run.

    Attributes:
        cubin: its file.
        origin: where it is from, in a few words.
    """

    problem: Problem
    config: Config
    cubin: Path
    origin: str

    @property
    def candidate(self) -> Candidate:
        """As a worker's job names it."""
        return Candidate(str(self.cubin), self.problem.name, self.config.name)


def require_gpu(gpu: Gpu, purpose: str) -> DetectedGpu:
    """The first GPU of this machine that is `gpu`.

    Args:
        purpose: what needs it, e.g. `verify runs kernels`; begins the message.

    Raises:
        GpuMismatchError: it has none, or another one.
    """
    present = detect_gpus()
    for device in present:
        if device.gpu == gpu:
            return device
    if not present:
        raise GpuMismatchError(
            f"{purpose} on {gpu.name}, and this machine has no GPU that a driver reports",
            f"run it on a machine with {' or '.join(gpu.products)}, or see what is missing with: sagegen doctor",
        )
    others = ", ".join(dict.fromkeys(f"{d.product} ({d.gpu.name if d.gpu else 'unknown'})" for d in present))
    known = next((d.gpu.name for d in present if d.gpu), None)
    remedy = f"say --gpu {known}" if known else "see sagegen gpus"
    raise GpuMismatchError(f"{purpose} on {gpu.name}, but this machine has {others}", remedy)


def tuned_subjects(gpu: Gpu, problems: Iterable[Problem], env: Env, folder: Path) -> list[Subject]:
    """The kernels of `gpu`'s registry, of all layers, each once; those without a cubin at hand are built.

    Args:
        problems: whose entries are wanted.
        folder: takes the cubins; must outlive the subjects.

    Raises:
        RegistryError: a registry file is malformed, or a cubin is not the one that its registry names.
        ToolchainError, BuildError: a kernel has to be built and cannot be.
    """
    wanted = {problem.name: problem for problem in problems}
    subjects: dict[tuple[str, str, str | None], Subject] = {}
    for layer in load_registry(gpu.name, env).layers:
        for entry in layer.entries:
            key = (entry.problem, str(entry.config), entry.cubin_sha256)
            if entry.config is None or entry.problem not in wanted or key in subjects:
                continue
            found = Found(entry, gpu.name, False, False, layer)
            subjects[key] = _make_subject(gpu, wanted[entry.problem], found, env, folder)
    return list(subjects.values())


@dataclass(frozen=True, slots=True)
class EmulatedSubject:
    """A config to run in the emulator; `origin` is where it is from, in a few words."""

    problem: Problem
    config: Config
    origin: str


def emulated_subjects(
    gpu: Gpu, problems: Sequence[Problem], config: Config | None, use_default: bool, env: Env
) -> list[EmulatedSubject]:
    """What `verify --emulator` runs: each config of `gpu`'s registry once per problem, of all layers; or one config.

    Args:
        problems: whose configs are wanted.
        config: this one instead, for each problem that it is valid for.
        use_default: each problem's default config instead.

    Raises:
        RegistryError: a registry file is malformed.
        ConfigError: `config` is valid for none of the problems.
    """
    if config is not None or use_default:
        pairs = valid_pairs(gpu, problems, config, DEFAULT_TOOLKIT)
        return [EmulatedSubject(problem, used, "named" if config else "default") for problem, used in pairs]
    wanted = {problem.name: problem for problem in problems}
    found: dict[tuple[str, str], EmulatedSubject] = {}
    for layer in load_registry(gpu.name, env).layers:
        for entry in layer.entries:
            if entry.config is None or entry.problem not in wanted:
                continue
            origin = f"{entry.provenance.kind} entry for {entry.lengths.name}"
            subject = EmulatedSubject(wanted[entry.problem], parse_config(entry.config), origin)
            found.setdefault((entry.problem, entry.config), subject)
    return list(found.values())


def subject_for(
    gpu: Gpu, problem: Problem, kv_len: int, env: Env, folder: Path, min_cosine: float | None = None
) -> Subject:
    """What a call with `kv_len` keys would run, SDPA aside: the registry's kernel, else the default config.

    Args:
        min_cosine: the call's; a kernel below it is told by its origin. None: what all kernels of the precision reach.

    Raises:
        RegistryError, ToolchainError, BuildError: as `tuned_subjects`.
    """
    min_cosine = ASSUMED_COSINES[problem.precision] if min_cosine is None else min_cosine
    found = lookup(gpu, problem, kv_len, env, min_cosine=min_cosine)
    if found is None or found.entry.config is None:
        return build_subjects(gpu, [problem], None, env)[0]
    subject = _make_subject(gpu, problem, found, env, folder)
    if found.entry.is_accurate_for(min_cosine):
        return subject
    return replace(subject, origin=f"{subject.origin}, too coarse for {min_cosine:g}")


def _make_subject(gpu: Gpu, problem: Problem, found: Found, env: Env, folder: Path) -> Subject:
    entry = found.entry
    config = parse_config(str(entry.config))
    cubin = find_cubin(found, env, _raise)
    if cubin is None:
        return build_subjects(gpu, [problem], config, env)[0]
    file = folder / f"{entry.cubin_sha256}.cubin"
    file.write_bytes(cubin)
    owner = f"{found.gpu_name}'s " if found.borrowed else ""
    return Subject(problem, config, file, f"{owner}{entry.provenance.kind} entry for {entry.lengths.name}")


def build_subjects(gpu: Gpu, problems: Sequence[Problem], config: Config | None, env: Env) -> list[Subject]:
    """One config built for each problem that it is valid for; None is each problem's default config.

    Raises:
        ConfigError: the config is valid for none of them.
        ToolchainError, BuildError: it cannot be built.
    """
    pairs = valid_pairs(gpu, problems, config, find_toolkit(env).version)
    origin = "built here" if config else "default, built here"
    return [Subject(*pair, cubin, origin) for pair, cubin in build_pairs(gpu, pairs, env).items()]


def build_pairs(gpu: Gpu, pairs: Iterable[tuple[Problem, Config]], env: Env) -> dict[tuple[Problem, Config], Path]:
    """The cubins of kernels, compiled side by side; all must be valid on `gpu`.

    Raises:
        ToolchainError, BuildError: one cannot be built.
    """
    sources = {pair: render(*pair) for pair in pairs}
    built = build_batch(list(sources.values()), gpu.arch, open_store(env), find_toolkit(env)) if sources else {}
    cubins = {}
    for pair, source in sources.items():
        result = built[source.name]
        if isinstance(result, BuildFailure):
            raise BuildError(f"{result.name} did not compile: {result.reason}", "try another --config")
        cubins[pair] = result.cubin
    return cubins


def valid_pairs(
    gpu: Gpu, problems: Sequence[Problem], config: Config | None, toolkit: Version
) -> list[tuple[Problem, Config]]:
    """The problems that `config` is valid for, or all with their default configs; ConfigError when there is none."""
    targets = [Target(gpu, problem, toolkit) for problem in problems]
    pairs = [(target.problem, config or default_config(target)) for target in targets]
    valid = [pair for pair, target in zip(pairs, targets, strict=True) if not broken_rules(pair[1], target)]
    if not valid:
        check_config(pairs[0][1], targets[0])
    return valid


def _raise(error: RegistryError) -> None:
    raise error
