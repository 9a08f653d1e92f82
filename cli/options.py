"""Options that several commands share, and the values they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, get_args

import click

from sagegen.problem import DTYPES, HEAD_DIMS, PRECISIONS, Dtype, Precision, Problem
from sagegen.rules import Target, check_config, default_config
from sagegen.space import Config, parse_config

Command = TypeVar("Command", bound=Callable[..., Any])

gpu_option = click.option("--gpu", "gpu_name", required=True, metavar="NAME", help="GPU, as `sagegen gpus` names it.")
config_option = click.option(
    "--config", "config_name", required=True, metavar="NAME", help="Config by its name, or `default`."
)
precision_option = click.option(
    "--precision", type=click.Choice(PRECISIONS), default="int8", show_default=True, help="How Q and K are quantized."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def mask_options(*, full_note: str = "", both_note: str = "") -> Callable[[Command], Command]:
    """Adds --causal, --full and --both as the parameter `mask`: the one that was given, None without any.

    Args:
        full_note, both_note: what their help says of defaults.
    """
    helps = {
        "both": f"With and without{both_note}.",
        "full": f"Only without a mask{full_note}.",
        "causal": "Only with the causal mask.",
    }

    def add(command: Command) -> Command:
        for name, text in helps.items():
            option = click.option(
                f"--{name}", "mask", flag_value=name, multiple=True, callback=_take_one_mask, help=text
            )
            command = option(command)
        return command

    return add


def _take_one_mask(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> str | None:
    """The mask that was given; UsageError for several, of which click alone would silently take the last."""
    several = [f"--{name}" for name in dict.fromkeys(names)]
    if len(several) > 1:
        raise click.UsageError(f"{' and '.join(several)} exclude each other: give one of --causal, --full and --both")
    return names[0] if names else None


def problem_options(command: Command) -> Command:
    """Adds --head-dim, --dtype, --causal and --precision; `make_problem` takes their values."""
    for option in (
        precision_option,
        click.option("--causal", "is_causal", is_flag=True, help="Causal mask."),
        click.option("--dtype", type=click.Choice(DTYPES), default="bf16", show_default=True, help="Input dtype."),
        click.option(
            "--head-dim",
            type=click.Choice([str(d) for d in HEAD_DIMS]),
            default="128",
            show_default=True,
            help="Channels per head.",
        ),
    ):
        command = option(command)
    return command


def make_problem(head_dim: str, dtype: str, is_causal: bool, precision: str = "int8") -> Problem:
    known: dict[str, Dtype] = {name: name for name in get_args(Dtype)}
    precisions: dict[str, Precision] = {name: name for name in get_args(Precision)}
    return Problem(int(head_dim), known[dtype], is_causal, precisions[precision])


def tune_command(gpu_name: str, problems: Iterable[Problem] = ()) -> str:
    """What tunes these problems, all that tuning takes by default if none is named."""
    commands = [
        f"sagegen tune --gpu {gpu_name} --head-dim {p.head_dim} --dtype {p.dtype} "
        f"--{'causal' if p.is_causal else 'full'} --precision {p.precision}"
        for p in problems
    ]
    return " && ".join(commands) or f"sagegen tune --gpu {gpu_name}"


def make_config(name: str, target: Target) -> Config:
    """The config that `name` spells, valid on `target`; `default` is the target's default config.

    Raises:
        UnknownNameError: the name spells no config.
        ConfigError: the config breaks a rule.
    """
    if name == "default":
        return default_config(target)
    config = parse_config(name)
    check_config(config, target)
    return config


class FiniteRange(click.FloatRange):
    """A range of floats without NaN, which no comparison refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number
