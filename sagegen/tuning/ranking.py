"""Configs by what the model makes of them, and by how far they are apart."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from sagegen.problem import Shape
from sagegen.rules import Target, default_config
from sagegen.space import Config
from sagegen.tuning.model import predict

#: Of what the model tells apart at the middle length, how many times as many as are wanted are ranked over all lengths.
_MARGIN = 3


def promising_configs(configs: Sequence[Config], target: Target, shapes: Sequence[Shape], count: int) -> list[Config]:
    """The configs that the model ranks best; of those that it cannot tell apart one, as long as there are others.

    That one is the nearest to the default: what the model does not see is not changed without a reason.

    Args:
        shapes: shortest first. To spare time, what is far behind at the middle one is not looked at further.
    """
    if len(shapes) > 1:
        at_middle = _group_by_cost(configs, target, [shapes[len(shapes) // 2]])
        configs = [config for group in at_middle[: _MARGIN * count] for config in group]
    home = default_config(target)
    groups = _group_by_cost(configs, target, shapes)
    rows = itertools.zip_longest(*(sorted(group, key=lambda config: distance(config, home)) for group in groups))
    # the first of every group, then the second, ...
    return list(itertools.islice((config for row in rows for config in row if config is not None), count))


def _group_by_cost(configs: Sequence[Config], target: Target, shapes: Sequence[Shape]) -> list[list[Config]]:
    """Configs that the model cannot tell apart, fastest first."""
    alike: dict[float, list[Config]] = {}
    for config in configs:
        alike.setdefault(round(_predicted_cost(config, target, shapes), 9), []).append(config)
    return [alike[cost] for cost in sorted(alike)]


def rank_configs(configs: Sequence[Config], target: Target, shapes: Sequence[Shape]) -> list[Config]:
    """`configs` by the model's geometric mean time over `shapes`, fastest first; equals keep their order."""
    return sorted(configs, key=lambda config: _predicted_cost(config, target, shapes))


def _predicted_cost(config: Config, target: Target, shapes: Sequence[Shape]) -> float:
    """Logarithm of the geometric mean of the predicted times of calls, times the number of shapes."""
    return sum(math.log(predict(config, target.problem, shape, target.gpu).call_us) for shape in shapes)


def distance(a: Config, b: Config) -> float:
    """Sum over the parameters of how far apart the values' positions are, each scaled to 0..1; inf between families."""
    if a.family != b.family:
        return math.inf
    return sum(abs(x - y) for x, y in zip(_point(a), _point(b), strict=True))


def count_differences(a: Config, b: Config) -> int:
    """Parameters in which two configs of one family differ."""
    return sum(getattr(a, param.name) != getattr(b, param.name) for param in a.params)


@functools.cache
def _point(config: Config) -> tuple[float, ...]:
    """Positions of a config's values in their lists, scaled to 0..1."""
    return tuple(
        param.values.index(getattr(config, param.name)) / max(1, len(param.values) - 1) for param in config.params
    )
