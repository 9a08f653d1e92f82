"""SAGEGEN_PIN: the config that every kernel is built from, instead of the registry's."""

from __future__ import annotations

from sagegen.errors import ArgumentError, ConfigError, SagegenError
from sagegen.gpu import Gpu
from sagegen.problem import Problem
from sagegen.rules import Target, check_config, default_config, fitted_config
from sagegen.space import Config, parse_config

_DEFAULT = "default"


def check_pin(pin: str | None) -> None:
    """Raise ArgumentError, naming SAGEGEN_PIN, unless `pin` is None, `default` or spells a config."""
    if pin in (None, _DEFAULT):
        return
    try:
        parse_config(pin)
    except SagegenError as error:
        raise ArgumentError(
            f"SAGEGEN_PIN={pin!r}: {error.message}", error.remedy or "sagegen show lists names of configs"
        ) from error


def pinned_config(pin: str, gpu: Gpu | None, product: str, problem: Problem) -> Config:
    """The config that `pin`, which spells one, means for `problem` on `gpu`: for windows and ragged batches as they can
    have it (`rules.fitted_config`).

    Args:
        gpu: None for a product without a row in the GPU table.
        product: the driver's name of the GPU.

    Raises:
        ConfigError: it breaks a rule, or no rule can say because the GPU is not known.
    """
    if gpu is None:
        raise ConfigError(
            f"SAGEGEN_PIN={pin}: {product} is no known GPU, so no rule can say whether the config runs on it",
            "unset SAGEGEN_PIN; the known ones: sagegen gpus",
        )
    target = Target(gpu, problem)
    config = default_config(target) if pin == _DEFAULT else parse_config(pin)
    if problem != problem.tuned and (fitted := fitted_config(config, target)) is not None:
        return fitted
    try:
        check_config(config, target)
    except ConfigError as error:
        raise ConfigError(f"SAGEGEN_PIN: {error.message}", f"unset SAGEGEN_PIN, or {error.remedy}") from error
    return config
