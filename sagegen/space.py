"""The search space: of each family all configs, made of values, read from names, and beside one another.

A config's name spells every parameter, so a kernel's name in a profiler says how it was built.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from sagegen.errors import ConfigError, UnknownNameError
from sagegen.mma_space import MMA_PARAMS, MmaConfig
from sagegen.param import Param, Value, parse_fields
from sagegen.wgmma_space import WGMMA_PARAMS, WgmmaConfig

__all__ = [
    "FAMILIES",
    "MMA_PARAMS",
    "MMA_SPACE",
    "WGMMA_PARAMS",
    "WGMMA_SPACE",
    "Config",
    "MmaConfig",
    "Param",
    "Space",
    "Value",
    "WgmmaConfig",
    "config_values",
    "make_config",
    "neighbours",
    "parse_config",
]

Config = MmaConfig | WgmmaConfig


@dataclass(frozen=True, slots=True)
class Space:
    """All configs of one family, valid or not; `rules.searched_configs` prunes it."""

    config_type: type[Config]

    @property
    def params(self) -> tuple[Param, ...]:
        return self.config_type.params

    def __iter__(self) -> Iterator[Config]:
        for values in itertools.product(*(p.values for p in self.params)):
            yield make_config(self.config_type, dict(zip((p.name for p in self.params), values, strict=True)))

    def __len__(self) -> int:
        size = 1
        for param in self.params:
            size *= len(param.values)
        return size


MMA_SPACE = Space(MmaConfig)
WGMMA_SPACE = Space(WgmmaConfig)
FAMILIES = {"mma": MMA_SPACE, "wgmma": WGMMA_SPACE}


def make_config(config_type: type[Config], values: dict[str, Any]) -> Config:
    """A config from a mapping of every parameter to a value of its list.

    Raises:
        ConfigError: a parameter is missing, unknown, or has a value that is not in its list.
    """
    known = {p.name: p for p in config_type.params}
    if wrong := sorted(set(values) ^ set(known)):
        raise ConfigError(f"config parameters missing or unknown: {', '.join(wrong)}", f"give {', '.join(known)}")
    for name, value in values.items():
        # bool is an int to Python; YAML's `true` must not pass for 1
        if isinstance(value, bool) or value not in known[name].values:
            raise ConfigError(
                f"config parameter {name}={value!r} is not in the space",
                f"use one of {', '.join(map(str, known[name].values))}",
            )
    # the list's own 9, not an equal 9.0, which names would spell otherwise
    listed: dict[str, Any] = {name: known[name].values[known[name].values.index(values[name])] for name in values}
    return config_type(**listed)


def config_values(config: Config) -> dict[str, Value]:
    """The inverse of `make_config`: parameter name to value, in the space's order."""
    return {f.name: getattr(config, f.name) for f in fields(config)}


def parse_config(name: str) -> Config:
    """The config that `name` spells.

    Raises:
        UnknownNameError: the family is unknown, or a field is missing, misspelled or has a value outside its list.
    """
    family, *parts = name.split("_")
    if family not in FAMILIES:
        raise UnknownNameError(
            f"config {name!r} names no kernel family", f"start it with one of {', '.join(FAMILIES)}, or say `default`"
        )
    space = FAMILIES[family]
    return make_config(space.config_type, parse_fields(space.params, parts))


def neighbours(config: Config) -> list[Config]:
    """Configs one step away along one parameter; steps of unordered parameters reach every value."""
    own = config_values(config)
    found = []
    for param in config.params:
        index = param.values.index(getattr(config, param.name))
        if isinstance(param.values[0], int | float):
            reach = [i for i in (index - 1, index + 1) if 0 <= i < len(param.values)]
        else:
            reach = [i for i in range(len(param.values)) if i != index]
        found += [make_config(type(config), {**own, param.name: param.values[i]}) for i in reach]
    return found
