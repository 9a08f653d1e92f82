"""Who runs for sagegen in a race: the registry's kernels by accuracy, or named configs, which the gate has to judge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from sagegen.entry import ASSUMED_COSINES, Entry, Tier, is_fine, reaches
from sagegen.env import Env
from sagegen.errors import RegistryError, UnknownNameError
from sagegen.gpu import Gpu
from sagegen.measuring.jobs import Gate
from sagegen.measuring.subjects import Subject, build_pairs, valid_pairs
from sagegen.measuring.worker import Worker
from sagegen.problem import DTYPES, HEAD_DIMS, Problem
from sagegen.registry import Found, Layer, load_registry
from sagegen.registry_kernels import find_cubin
from sagegen.rules import DEFAULT_TOOLKIT
from sagegen.space import Config, parse_config

TIERS: tuple[Tier, ...] = get_args(Tier)
#: What a named config is judged by; the whole gate is `sagegen verify`'s.
_JUDGED_KINDS = ("normal", "channel_offsets")
_GATE_TIMEOUT_S = 120.0

Pair = tuple[Problem, Config]


@dataclass(frozen=True, slots=True)
class Contender:
    """A kernel in a race.

    Attributes:
        figures: accuracy by input kind, as far as it is known; empty before the gate has run.
        note: what else to know of it, e.g. that the registry answers SDPA.
    """

    subject: Subject
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    note: str = ""

    @property
    def cosine(self) -> float | None:
        """On normal inputs."""
        return self.figures["normal"]["cosine"] if "normal" in self.figures else None

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Callers that it is accurate enough for: a fine kernel is for all."""
        precision = self.subject.problem.precision
        if self.cosine is None or not reaches(self.cosine, ASSUMED_COSINES[precision]):
            return ()
        return ("fine", "coarse") if is_fine(self.figures, precision) else ("coarse",)


@dataclass(frozen=True, slots=True)
class Named:
    """A config given by name: of one problem, or, where that is None, of all; config None is the default one."""

    problem: Problem | None
    config: Config | None


def parse_named(text: str) -> Named:
    """What `--config` says: `default`, a config's name, or a kernel's, which is `<problem>_<config>`.

    Raises:
        UnknownNameError: it spells neither.
    """
    problems = (Problem(d, t, c) for d in HEAD_DIMS for t in DTYPES for c in (False, True))
    problem = next((p for p in problems if text.startswith(f"{p.name}_")), None)
    name = text.removeprefix(f"{problem.name}_") if problem else text
    return Named(problem, None if name == "default" else parse_config(name))


def gather_contenders(
    gpu: Gpu, cases: Iterable[tuple[Problem, int]], named: Sequence[Named], env: Env, folder: Path
) -> dict[tuple[Problem, int], list[Contender]]:
    """Contenders of each problem and key length; what has no cubin at hand is built, all side by side.

    Problems that no named config is for, or all without any, get the registry's fastest entry that is fine and its
    fastest that is coarse; the default config where the registry has neither.

    Args:
        folder: takes cubins; must outlive the contenders.

    Raises:
        RegistryError, ConfigError, ToolchainError, BuildError: as `subjects.tuned_subjects` and `build_subjects`.
        UnknownNameError: a named config fits none of the problems.
    """
    wanted = list(cases)
    given = _named_pairs(gpu, list(dict.fromkeys(problem for problem, _ in wanted)), named)
    chosen: dict[tuple[Problem, int], list[tuple[Pair, Found | None]]] = {}
    for problem, kv_len in wanted:
        own: list[tuple[Pair, Found | None]] = [((problem, config), None) for config in given.get(problem, ())]
        chosen[problem, kv_len] = own or _tuned_pairs(gpu, problem, kv_len, env)
    found = {pair: entry for rows in chosen.values() for pair, entry in rows}
    cubins = {pair: cubin for pair, entry in found.items() if (cubin := _keep_cubin(entry, env, folder))}
    cubins |= build_pairs(gpu, [pair for pair in found if pair not in cubins], env)
    return {case: [_make_contender(p, cubins[p], entry) for p, entry in rows] for case, rows in chosen.items()}


def _named_pairs(gpu: Gpu, problems: Sequence[Problem], named: Sequence[Named]) -> dict[Problem, list[Config]]:
    given: dict[Problem, list[Config]] = {}
    for one in named:
        fitting = [problem for problem in problems if one.problem in (None, problem)]
        if not fitting:
            raise UnknownNameError(
                f"--config: no row of this race is {one.problem.name if one.problem else 'for it'}",
                "leave the problem out of the config's name, or change the rows",
            )
        for problem, config in valid_pairs(gpu, fitting, one.config, DEFAULT_TOOLKIT):
            if config not in given.setdefault(problem, []):
                given[problem].append(config)
    return given


def _tuned_pairs(gpu: Gpu, problem: Problem, kv_len: int, env: Env) -> list[tuple[Pair, Found | None]]:
    layers = load_registry(gpu.name, env).layers
    rows: dict[Pair, Found | None] = {}
    for tier in TIERS:
        if best := _best_entry(layers, problem, kv_len, tier):
            entry, layer = best
            pair = problem, parse_config(str(entry.config))
            rows.setdefault(pair, Found(entry, gpu.name, False, False, layer))
    if not rows:
        rows = dict.fromkeys(valid_pairs(gpu, [problem], None, DEFAULT_TOOLKIT))
    return list(rows.items())


def _best_entry(layers: Sequence[Layer], problem: Problem, kv_len: int, tier: Tier) -> tuple[Entry, Layer] | None:
    """As `Registry.find`, but of entries with a kernel alone, whether SDPA answers or not, and by all that is known."""
    rows = [
        (not entry.measured, rank, entry.tier == "fine", entry, layer)
        for rank, layer in enumerate(layers)
        for entry in layer.entries
        if entry.problem == problem.name
        and entry.config is not None
        and entry.lengths.holds(kv_len)
        and reaches(entry.known_cosine, ASSUMED_COSINES[problem.precision])
        and (tier == "coarse" or is_fine(entry.known_figures, problem.precision))
    ]
    best = min(rows, key=lambda row: row[:3], default=None)
    return None if best is None else best[3:]


def _keep_cubin(found: Found | None, env: Env, folder: Path) -> Path | None:
    cubin = find_cubin(found, env, _raise)
    if found is None or cubin is None:
        return None
    file = folder / f"{found.entry.cubin_sha256}.cubin"
    file.write_bytes(cubin)
    return file


def _make_contender(pair: Pair, cubin: Path, found: Found | None) -> Contender:
    if found is None:
        return Contender(Subject(*pair, cubin, "built here"))
    entry = found.entry
    subject = Subject(*pair, cubin, f"{entry.provenance.kind} entry for {entry.lengths.name}")
    return Contender(subject, entry.known_figures, "the registry answers SDPA here" if entry.answer == "sdpa" else "")


def judge(contender: Contender, worker: Worker) -> Contender:
    """The contender with figures of the accuracy gate, unless they are known; without figures when it fails."""
    if contender.figures:
        return contender
    reply = worker.run(Gate(contender.subject.candidate, kinds=_JUDGED_KINDS), _GATE_TIMEOUT_S)
    if reply.outcome != "ok":
        return replace(contender, note=f"not in the race: {reply.outcome}: {reply.reason}")
    return replace(contender, figures=reply.data["figures"])


def _raise(error: RegistryError) -> None:
    raise error
