"""A config's variations: for every other value of every parameter the config nearest to it that has that value."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sagegen.rule import Target
from sagegen.rules import broken_rules
from sagegen.space import Config, Param, Value, config_values, make_config

#: Most parameters that may have to change beside the one that is varied.
_MOST_CHANGES = 3


@dataclass(frozen=True, slots=True)
class Variation:
    """One value of one parameter.

    Attributes:
        param: the parameter's name.
        base: the value that the varied config has.
        value: another one.
        config: has `value` and keeps all rules; None where no config near does.
        changes: other parameters that had to change with it, each with its value in `config`.
    """

    param: str
    base: Value
    value: Value
    config: Config | None
    changes: Mapping[str, Value] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """`exponent=mufu (with k_span=64)`."""
        return f"{self.param}={self.value}{self.with_text}"

    @property
    def with_text(self) -> str:
        """` (with k_span=64)`; empty where nothing else had to change."""
        changed = ", ".join(f"{name}={value}" for name, value in self.changes.items())
        return f" (with {changed})" if changed else ""


def find_variations(config: Config, target: Target) -> list[Variation]:
    """Every other value of every parameter of `config`, in the space's order.

    Where that one change breaks a rule of `target`, the fewest other parameters change with it; of those the values
    nearest in their lists, then the first in the space's order.
    """
    return [
        _vary(config, param, value, target)
        for param in config.params
        for value in param.values
        if value != getattr(config, param.name)
    ]


def _vary(config: Config, param: Param, value: Value, target: Target) -> Variation:
    own = config_values(config)
    others = [other for other in config.params if other != param]
    for count in range(_MOST_CHANGES + 1):
        valid = [
            (_steps(own, changes, others), changes, near)
            for changes in _changes(own, others, count)
            if not broken_rules(near := make_config(type(config), {**own, param.name: value, **changes}), target)
        ]
        if valid:
            _, changes, near = min(valid, key=lambda row: row[0])  # the first of equals
            return Variation(param.name, own[param.name], value, near, changes)
    return Variation(param.name, own[param.name], value, None)


def _changes(own: Mapping[str, Any], params: Sequence[Param], count: int) -> Iterator[dict[str, Value]]:
    """All ways to change so many of `params`."""
    for changed in itertools.combinations(params, count):
        choices = [[value for value in param.values if value != own[param.name]] for param in changed]
        for values in itertools.product(*choices):
            yield dict(zip((param.name for param in changed), values, strict=True))


def _steps(own: Mapping[str, Any], changes: Mapping[str, Value], params: Sequence[Param]) -> int:
    """Steps along the lists of values that changes take together."""
    by_name = {param.name: param.values for param in params}
    return sum(abs(by_name[name].index(value) - by_name[name].index(own[name])) for name, value in changes.items())
