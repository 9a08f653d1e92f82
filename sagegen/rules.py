"""What makes a config valid on a GPU: named conditions with a margin, refused before anything is rendered."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from sagegen.errors import ConfigError
from sagegen.mma_rules import MMA_RULES, MMA_SEARCH_RULES, default_mma_config, mma_with_steps
from sagegen.rule import DEFAULT_TOOLKIT, Broken, Rule, Target, Version
from sagegen.space import FAMILIES, Config, Space, Value, WgmmaConfig, config_values
from sagegen.wgmma_rules import WGMMA_RULES, WGMMA_SEARCH_RULES, default_wgmma_config, wgmma_with_steps

__all__ = [
    "DEFAULT_TOOLKIT",
    "RULES",
    "Broken",
    "Rule",
    "Target",
    "Version",
    "all_searched_configs",
    "broken_rules",
    "check_config",
    "default_config",
    "default_config_with",
    "fitted_config",
    "is_searched",
    "searched_configs",
    "valid_configs",
]

#: By family.
RULES: Mapping[str, tuple[Rule[Any], ...]] = {"mma": MMA_RULES, "wgmma": WGMMA_RULES}
#: By family: what a tuning run leaves out although it is valid, since times cannot tell it from what it tries.
SEARCH_RULES: Mapping[str, tuple[Rule[Any], ...]] = {"mma": MMA_SEARCH_RULES, "wgmma": WGMMA_SEARCH_RULES}


def broken_rules(config: Config, target: Target) -> list[Broken]:
    """The rules that `config` breaks on `target`; an empty list means valid."""
    margins = ((rule, rule.margin(config, target)) for rule in RULES[config.family])
    return [Broken(rule, margin) for rule, margin in margins if margin > 0]


def check_config(config: Config, target: Target) -> None:
    """Raise ConfigError, naming every broken rule, unless `config` is valid on `target`."""
    if broken := broken_rules(config, target):
        reasons = "; ".join(_explain(b, config, target) for b in broken)
        near = _nearest_valid(config, target)
        remedy = f"take the default: {default_config(target).name}"
        raise ConfigError(
            f"config {config.name} is not valid for {target.gpu.name} and {target.problem.name}: {reasons}",
            f"take the nearest valid one: {near.name}" if near else remedy,
        )


def _explain(broken: Broken, config: Config, target: Target) -> str:
    rule = broken.rule
    numbers = f" ({rule.numbers(config, target)}, over by {broken.margin:.9g})" if rule.numbers else ""
    return f"{rule.name}{numbers}: {rule.why}"


def _nearest_valid(config: Config, target: Target) -> Config | None:
    """A valid config that differs in one parameter or, if there is none, in two; None without such."""
    own = config_values(config)
    params = FAMILIES[config.family].params
    for count in (1, 2):
        for chosen in itertools.combinations(params, count):
            others = ([value for value in param.values if value != own[param.name]] for param in chosen)
            for values in itertools.product(*others):
                changes: dict[str, Any] = {param.name: value for param, value in zip(chosen, values, strict=True)}
                changed = replace(config, **changes)
                if not broken_rules(changed, target):
                    return changed
    return None


def valid_configs(space: Space, target: Target, fixed: Mapping[str, Value] | None = None) -> list[Config]:
    """Every valid config of `space` on `target`, in the space's order.

    Args:
        fixed: values of parameters that all of them have. Without any there are millions of the larger spaces.
    """
    return _allowed_configs(space, RULES[space.config_type.family], target, fixed or {})


def searched_configs(space: Space, target: Target) -> list[Config]:
    """The valid configs of `space` that a tuning run on `target` may try, in the space's order."""
    family = space.config_type.family
    return _allowed_configs(space, RULES[family] + SEARCH_RULES[family], target, {})


def is_searched(config: Config, target: Target) -> bool:
    """Whether a tuning run may try `config`, which is valid on `target`."""
    return all(rule.margin(config, target) <= 0 for rule in SEARCH_RULES[config.family])


def all_searched_configs(target: Target) -> list[Config]:
    """Every config that a tuning run on `target` may try, of one family after another."""
    return [config for space in FAMILIES.values() for config in searched_configs(space, target)]


def _allowed_configs(
    space: Space, rules: Iterable[Rule[Any]], target: Target, fixed: Mapping[str, Value]
) -> list[Config]:
    """The configs of `space` that keep `rules`, each rule judged as soon as the parameters that it reads are chosen."""
    values = {param.name: (fixed[param.name],) if param.name in fixed else param.values for param in space.params}
    names = list(values)
    due: list[list[Rule[Any]]] = [[] for _ in names]
    for rule in rules:
        due[max(names.index(name) for name in rule.reads or names)].append(rule)
    # judged once for the values that its rules read: what was chosen beside them may be anything
    read = [sorted({name for rule in own for name in rule.reads or names}) for own in due]
    key_of = [operator.itemgetter(*own) if own else (lambda _: None) for own in read]
    allowed: list[dict[Any, list[Value]]] = [{} for _ in names]
    chosen: dict[str, Any] = {name: own[0] for name, own in values.items()}
    found: list[Config] = []

    def judge(place: int, value: Value) -> bool:
        config = space.config_type(**{**chosen, names[place]: value})
        return all(rule.margin(config, target) <= 0 for rule in due[place])

    def choose(place: int) -> None:
        if place == len(names):
            found.append(space.config_type(**chosen))
            return
        name = names[place]
        chosen[name] = values[name][0]  # not what an earlier branch left, so that equal keys are found again
        key = key_of[place](chosen)
        if key not in allowed[place]:
            allowed[place][key] = [value for value in values[name] if judge(place, value)]
        for value in allowed[place][key]:
            chosen[name] = value
            choose(place + 1)

    choose(0)
    return found


def default_config(target: Target) -> Config:
    """The config that is measured first and used where nothing was tuned: of the family made for the GPU."""
    own = default_wgmma_config(target.problem.precision)
    return default_mma_config(target) if broken_rules(own, target) else own


def fitted_config(config: Config, target: Target) -> Config | None:
    """`config`, changed only in what makes no difference to results where a rule asks for it; None if that won't do."""
    fitted = replace(config, q_quantizer="kernel") if isinstance(config, WgmmaConfig) else config
    return next((choice for choice in (config, fitted) if not broken_rules(choice, target)), None)


def default_config_with(target: Target, steps: Mapping[str, bool]) -> Config | None:
    """The default config, changed where it must be to take steps of the quantizer or leave them out; None without one.

    Args:
        steps: by the config's property that says so: `smooths_q`, `smooths_v`, `rotates`.
    """
    own = default_config(target)
    wanted = {step: getattr(own, step) for step in ("smooths_q", "smooths_v", "rotates")} | dict(steps)
    if not wanted["smooths_q"] and "rotates" not in steps:
        wanted["rotates"] = False  # worth nothing without
    if wanted["rotates"] and "smooths_q" not in steps:
        wanted["smooths_q"] = True
    changed = wgmma_with_steps(own, wanted) if isinstance(own, WgmmaConfig) else mma_with_steps(own, wanted)
    takes_all = all(getattr(changed, step) == value for step, value in wanted.items())
    return changed if takes_all and not broken_rules(changed, target) else None
