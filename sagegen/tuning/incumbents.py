"""The config that a tuning run must beat in each case."""

from __future__ import annotations

from collections.abc import Sequence

from sagegen.entry import FINE_COSINES
from sagegen.env import Env
from sagegen.gpu import Gpu
from sagegen.problem import TUNED_LENGTHS, Problem, TunedLength
from sagegen.registry import load_registry
from sagegen.rules import Target, all_searched_configs, broken_rules, check_config
from sagegen.space import Config, parse_config
from sagegen.toolkit import Toolkit
from sagegen.tuning.examine import tuned_shape
from sagegen.tuning.ranking import rank_configs

Incumbents = dict[tuple[Problem, TunedLength], Config]


def find_incumbents(gpu: Gpu, problems: Sequence[Problem], name: str | None, toolkit: Toolkit, env: Env) -> Incumbents:
    """The config to beat, by case; a case that is left out has the default config to beat.

    Args:
        name: of a config, for all cases; `default`; `worst`: the one that the model ranks last, a start that any
            search must improve on; None: what the GPU's registry has.

    Raises:
        UnknownNameError, ConfigError: `name` spells no config, or one that is not valid for a problem.
        RegistryError: the GPU's registry is malformed.
    """
    targets = {problem: Target(gpu, problem, toolkit.version) for problem in problems}
    if name == "default":
        return {}
    if name is None:
        return _registry_incumbents(targets, env)
    if name == "worst":
        held = {problem: _worst_config(target) for problem, target in targets.items()}
    else:
        held = dict.fromkeys(problems, parse_config(name))
    for problem, config in held.items():
        check_config(config, targets[problem])
    return {(problem, length): held[problem] for problem in problems for length in TUNED_LENGTHS}


def find_fine_incumbents(gpu: Gpu, problems: Sequence[Problem], toolkit: Toolkit, env: Env) -> Incumbents:
    """The registry's fine config, by case that has one.

    Raises:
        RegistryError: the GPU's registry is malformed.
    """
    targets = {problem: Target(gpu, problem, toolkit.version) for problem in problems}
    return _registry_incumbents(targets, env, fine=True)


def _registry_incumbents(targets: dict[Problem, Target], env: Env, *, fine: bool = False) -> Incumbents:
    incumbents = {}
    for problem, target in targets.items():
        registry = load_registry(target.gpu.name, env)
        for length in TUNED_LENGTHS:
            found = registry.find(problem, length.tokens, FINE_COSINES[problem.precision]["normal"] if fine else 0.0)
            if fine and found and found[0].tier != "fine":
                continue
            config = parse_config(found[0].config) if found and found[0].config else None
            if config and not broken_rules(config, target):  # an older release may have allowed more
                incumbents[problem, length] = config
    return incumbents


def _worst_config(target: Target) -> Config:
    configs = all_searched_configs(target)
    return rank_configs(configs, target, [tuned_shape(length) for length in TUNED_LENGTHS])[-1]
