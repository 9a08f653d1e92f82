"""Optuna's proposals for one family of configs."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from sagegen.errors import ArgumentError
from sagegen.space import Config, config_values, make_config

if TYPE_CHECKING:
    import optuna


class Proposer:
    """An in-memory Optuna study over one family's parameters, one trial per attempt.

    Args:
        configs: of the family, at least one; each parameter takes the values that some of them has.
        sampler: `tpe`: tree-structured Parzen estimators; `gp`: a Gaussian process, which needs SciPy.

    Raises:
        ArgumentError: `gp` without SciPy.
    """

    def __init__(self, configs: Sequence[Config], seed: int, sampler: Literal["tpe", "gp"] = "tpe") -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._discarded = optuna.trial.TrialState.FAIL
        self._type = type(configs[0])
        self._study = optuna.create_study(sampler=_make_sampler(sampler, seed))
        self._distributions = _distributions(configs)
        self._trials: dict[Config, optuna.trial.Trial] = {}
        self._proposed: optuna.trial.Trial | None = None

    def propose(self) -> Config:
        """A point of the whole product space, valid or not; `start` or `dismiss` it next."""
        with warnings.catch_warnings():
            # failures are infinite on purpose
            warnings.filterwarnings("ignore", message="Clip non-finite values", category=UserWarning)
            self._proposed = self._study.ask(self._distributions)
        return make_config(self._type, self._proposed.params)

    def dismiss(self, violation: float, known: float | None) -> None:
        """Tell the last proposal what is known of it: its objective, else that it is infeasible."""
        assert self._proposed is not None
        trial, self._proposed = self._proposed, None
        self._tell(trial, known, violation or 1.0)

    def start(self, config: Config) -> None:
        """Hold a running trial for `config`: the pending proposal if it is that config, else one made for it."""
        proposed, self._proposed = self._proposed, None
        if proposed is not None and make_config(self._type, proposed.params) == config:
            self._trials[config] = proposed
            return
        if proposed is not None:  # says nothing of any config, so nothing must be learned from it
            self._study.tell(proposed, state=self._discarded)
        self._study.enqueue_trial(config_values(config))
        self._trials[config] = self._study.ask(self._distributions)

    def finish(self, config: Config, value: float | None) -> None:
        """Tell `config`'s trial its objective, or None for a failure."""
        if config not in self._trials:
            self.start(config)
        self._tell(self._trials.pop(config), value, 1.0)

    def _tell(self, trial: optuna.trial.Trial, value: float | None, violation: float) -> None:
        trial.set_constraint("violation", 0.0 if value is not None else violation)
        self._study.tell(trial, math.inf if value is None else value)


def check_sampler(sampler: str) -> None:
    """Raise ArgumentError where this installation lacks what `sampler` needs."""
    if sampler == "gp" and importlib.util.find_spec("scipy") is None:
        raise ArgumentError("--sampler gp needs SciPy, which is not installed", "pip install 'sagegen[gp]'")


def _make_sampler(sampler: Literal["tpe", "gp"], seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    check_sampler(sampler)
    if sampler == "gp":
        return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    return optuna.samplers.TPESampler(seed=seed)


def _distributions(configs: Sequence[Config]) -> dict[str, optuna.distributions.BaseDistribution]:
    """One categorical per parameter, of the values that some valid config has.

    Numbers are few and far between (2, 4, 8), so categories lose little of their order and need no mapping.
    """
    from optuna.distributions import CategoricalDistribution

    return {
        param.name: CategoricalDistribution(
            [v for v in param.values if any(getattr(c, param.name) == v for c in configs)]
        )
        for param in configs[0].params
    }
