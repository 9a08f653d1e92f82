"""Where a search begins: winners of sibling GPUs, of other buckets and of related problems."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from sagegen.entry import FINE_COSINES
from sagegen.env import Env
from sagegen.errors import RegistryError
from sagegen.gpu import Gpu
from sagegen.problem import DTYPES, TUNED_LENGTHS, Problem
from sagegen.registry import load_registry
from sagegen.rules import Target, broken_rules, is_searched
from sagegen.space import Config, parse_config
from sagegen.toolkit import Toolkit
from sagegen.tuning.journal import attempts, read_journal

_log = logging.getLogger(__name__)

#: Most configs of others that a search of a problem begins with.
MOST_STARTS = 8


def find_starts(
    gpu: Gpu, problems: Sequence[Problem], toolkit: Toolkit, env: Env, most: int = MOST_STARTS
) -> dict[Problem, tuple[Config, ...]]:
    """By problem, configs that won elsewhere and may be tried here, the likeliest first, at most `most`.

    In this order: the GPU's own winners at any length, what sibling GPUs' registries have, the best that this machine's
    journals have of the siblings, then the GPU's winners for the same head dim with another mask or dtype. Predicted
    entries are left out: the model has favourites of its own here. A registry that is malformed is, with a warning.
    """
    found = {}
    for problem in problems:
        target = Target(gpu, problem, toolkit.version)
        fit = (c for c in _won_elsewhere(target, env) if not broken_rules(c, target) and is_searched(c, target))
        found[problem] = tuple(dict.fromkeys(fit))[:most]
    return found


def _won_elsewhere(target: Target, env: Env) -> Iterator[Config]:
    gpu, problem = target.gpu, target.problem
    yield from _winners(gpu.name, problem, env)
    for sibling in gpu.siblings:
        yield from _winners(sibling, problem, env)
        yield from _best_of_journal(env.cache_dir / "journals" / f"{sibling}.jsonl", sibling, problem)
    for related in _related(problem):
        yield from _winners(gpu.name, related, env)


def _winners(gpu_name: str, problem: Problem, env: Env) -> Iterator[Config]:
    """What a registry measured to be the fastest, length by length, longest first; the coarse and the fine ones."""
    try:
        registry = load_registry(gpu_name, env)
    except RegistryError as error:  # of a sibling: it says nothing, and must not stop this GPU's tuning
        _log.warning("no starts from %s: %s", gpu_name, error)
        return
    for length in reversed(TUNED_LENGTHS):
        for min_cosine in (0.0, FINE_COSINES[problem.precision]["normal"]):
            found = registry.find(problem, length.tokens, min_cosine, lambda entry: entry.measured)
            if found and found[0].config:
                yield parse_config(found[0].config)


def _best_of_journal(path: Path, gpu_name: str, problem: Problem) -> Iterator[Config]:
    """The fastest screened config at each length that a sibling's journal has, longest first."""
    records = [r for (name, _), r in attempts(read_journal(path)).items() if name == problem.name and r.outcome == "ok"]
    for length in reversed(TUNED_LENGTHS):
        timed = [(us, r.config) for r in records if (us := r.median_call_us(length.tokens)) and r.gpu == gpu_name]
        if timed:
            yield parse_config(min(timed)[1])


def _related(problem: Problem) -> Iterator[Problem]:
    """Problems of the same head dim and precision: the same dtype with the other mask first."""
    for dtype in sorted(DTYPES, key=lambda name: name != problem.dtype):
        for is_causal in (problem.is_causal, not problem.is_causal):
            related = Problem(problem.head_dim, dtype, is_causal, problem.precision)
            if related != problem:
                yield related
