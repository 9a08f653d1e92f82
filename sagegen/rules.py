"""What makes a config valid on a GPU: named conditions with a margin, refused before anything is rendered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sagegen.errors import ConfigError
from sagegen.mma_rules import MMA_RULES, default_mma_config
from sagegen.rule import DEFAULT_TOOLKIT, Broken, Rule, Target, Version
from sagegen.space import FAMILIES, Config, Space
from sagegen.wgmma_rules import WGMMA_RULES, default_wgmma_config

__all__ = [
    "DEFAULT_TOOLKIT",
    "RULES",
    "Broken",
    "Rule",
    "Target",
    "Version",
    "all_valid_configs",
    "broken_rules",
    "check_config",
    "default_config",
    "valid_configs",
]

#: By family.
RULES: Mapping[str, tuple[Rule[Any], ...]] = {"mma": MMA_RULES, "wgmma": WGMMA_RULES}


def broken_rules(config: Config, target: Target) -> list[Broken]:
    """The rules that `config` breaks on `target`; an empty list means valid."""
    margins = ((rule, rule.margin(config, target)) for rule in RULES[config.family])
    return [Broken(rule, margin) for rule, margin in margins if margin > 0]


def check_config(config: Config, target: Target) -> None:
    """Raise ConfigError, naming every broken rule, unless `config` is valid on `target`."""
    if broken := broken_rules(config, target):
        reasons = "; ".join(f"{b.rule.name} (over by {b.margin:g}): {b.rule.why}" for b in broken)
        raise ConfigError(
            f"config {config.name} is not valid for {target.gpu.name} and {target.problem.name}: {reasons}",
            f"list valid ones with: sagegen show --space --gpu {target.gpu.name}",
        )


def _is_valid(config: Config, target: Target) -> bool:
    """Whether `broken_rules` is empty, by the first rule that is broken: most of a space breaks an early one."""
    return all(rule.margin(config, target) <= 0 for rule in RULES[config.family])


def valid_configs(space: Space, target: Target) -> list[Config]:
    """Every valid config of `space` on `target`, in the space's order."""
    return [config for config in space if _is_valid(config, target)]


def all_valid_configs(target: Target) -> list[Config]:
    """Every valid config on `target`, of one family after another."""
    return [config for space in FAMILIES.values() for config in valid_configs(space, target)]


def default_config(target: Target) -> Config:
    """The config that is measured first and used where nothing was tuned: of the family made for the GPU."""
    own = default_wgmma_config()
    return default_mma_config(target) if broken_rules(own, target) else own
