"""Rules of smoothing Q, of balance and of rotation, which hold for every family."""

from __future__ import annotations

from sagegen.rule import Target
from sagegen.space import Config

SMOOTH_Q = "whole spans of means in a query tile; delta S has a type where Q is smoothed"
BALANCE = "Q is balanced against K where it is smoothed"
RAGGED = "means of Q and delta S are laid out by one length for all batch items"
SEARCHED = "INT8 reaches its floors with K smoothed alone; INT4 needs Q smoothed too, by its tile's means, and rotation"
SEARCHED_BALANCE = (
    "one large query takes the balance of all others of its KV head (docs/numerics.md): only when asked for"
)


def smooth_q_margin(config: Config, _: Target) -> float:
    if not config.smooths_q:
        return 0 if config.delta == "f32" else 1  # no delta S: one spelling only
    return config.block_q % config.mean_span


def ragged_margin(config: Config, target: Target) -> float:
    return int(target.problem.is_ragged and config.smooths_q)


def balance_margin(config: Config, _: Target) -> float:
    return int(config.balances and not config.smooths_q)


def searched_margin(config: Config, target: Target) -> float:
    """What a tuning run tries of each precision: what else is valid costs time that no floor asks for, or fails one."""
    if target.problem.precision == "int8":
        return int(config.smooths_q or config.rotates)
    return int(config.mean_span != config.block_q or not config.rotates)


def searched_balance_margin(config: Config, _: Target) -> float:
    """Apart from `searched_margin`, so that a space is pruned by that before this parameter multiplies it."""
    return int(config.balances)
