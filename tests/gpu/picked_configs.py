"""Which configs tests on a card look at one by one: always the same few of every problem."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from sagegen.gpu import Gpu
from sagegen.problem import Problem
from sagegen.rules import Target, broken_rules, default_config, searched_configs
from sagegen.space import FAMILIES, Config

#: Configs of a problem that tuning tries, the default first; and those after them that it leaves alone.
TRIED, LEFT_ALONE = 1 + len(FAMILIES), len(FAMILIES)
_DRAWN = 100

_Value = tuple[str, str, object]


def pick_configs(problems: Sequence[Problem], gpu: Gpu, nvcc: tuple[int, int]) -> dict[Problem, list[Config]]:
    """By problem: the default; of each family one that tuning tries; each of these with values that it leaves alone."""
    searched: dict[int, list[list[Config]]] = {}
    seen: set[_Value] = set()
    picked = {}
    for problem in problems:
        target, rng = Target(gpu, problem, nvcc), random.Random(problem.name)
        if problem.head_dim not in searched:  # seconds each, and nearly the same for all problems of a head dim
            searched[problem.head_dim] = [searched_configs(space, target) for space in FAMILIES.values()]
        tried = [_pick(own, target, rng, seen) for own in searched[problem.head_dim]]
        picked[problem] = [default_config(target), *tried, *(_vary(config, target, rng) for config in tried)]
    return picked


def _pick(configs: Sequence[Config], target: Target, rng: random.Random, seen: set[_Value]) -> Config:
    """Of random ones that `target` has, the one with the most values that are not among `seen`; they are then."""
    drawn = [config for config in rng.sample(configs, min(_DRAWN, len(configs))) if not broken_rules(config, target)]
    picked = max(drawn, key=lambda config: len(_values(config) - seen))
    seen |= _values(picked)
    return picked


def _vary(config: Config, target: Target, rng: random.Random) -> Config:
    """`config` with other values of what tuning leaves alone, one parameter after another, as far as it stays valid."""
    for param in rng.sample(config.params, len(config.params)):
        changed = replace(config, **{param.name: rng.choice(param.values)})
        if param.neutral is not None and not broken_rules(changed, target):
            config = changed
    return config


def _values(config: Config) -> Collection[_Value]:
    return {(config.family, param.name, getattr(config, param.name)) for param in config.params}
