"""The options of `sagegen tune`, and what they ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from sagegen.cli.options import json_option, make_problem, mask_options, precision_option
from sagegen.cli.values import Choices, DeviceCount, Duration, JournalFiles, RegistryFile
from sagegen.problem import DTYPES, HEAD_DIMS, TUNED_LENGTHS, Problem, TunedLength
from sagegen.tuning.effort import EFFORT_NAMES, EFFORTS, Effort, EffortName
from sagegen.tuning.plant import PLANTS, Plant
from sagegen.tuning.replay import DEFAULT_TRIALS
from sagegen.tuning.strategy import DEFAULT_SAMPLER, SAMPLERS, Sampler, Strategy

_TOKENS = tuple(str(length.tokens) for length in TUNED_LENGTHS)
#: What `--replay` looks at; other options are of runs that measure or compile.
_REPLAY_OPTIONS = (
    "replay",
    "head_dims",
    "dtypes",
    "mask",
    "precision",
    "trials",
    "sampler",
    "seed",
    "seeds",
    "starts",
    "as_json",
)


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The command line, as it was written; None and () where an option was left out.

    Attributes:
        mask: `causal`, `full` or `both`.
        devices: how many GPUs measure; None: all of the machine.
        storage: journal file or RDB URL of Optuna's that machines share.
        replay: journals to search instead of measuring.
        seeds: searches per landscape and sampler of a replay.
        starts: configs of the model's choice that each of them begins with.
    """

    gpu_name: str
    head_dims: tuple[str, ...]
    dtypes: tuple[str, ...]
    mask: str | None
    precision: str
    tokens: tuple[str, ...]
    effort_name: EffortName
    budget_s: float | None
    trials: int | None
    patience: int | None
    offline: bool
    resume: bool
    journal_path: Path | None
    incumbent: str | None
    sampler: Sampler | None
    seed: int
    devices: int | None
    storage: str | None
    jobs: int | None
    output: Path | None
    probe_file: Path | None
    replay: tuple[Path, ...]
    seeds: int
    starts: int
    plants: tuple[Plant, ...]
    force: bool
    verify: bool
    as_json: bool

    @property
    def problems(self) -> tuple[Problem, ...]:
        masks = {"causal": (True,), "full": (False,), "both": (False, True)}[self.mask or "both"]
        return tuple(
            make_problem(head_dim, dtype, causal, self.precision)
            for head_dim in self.head_dims
            for dtype in self.dtypes
            for causal in masks
        )

    @property
    def lengths(self) -> tuple[TunedLength, ...]:
        return tuple(length for length in TUNED_LENGTHS if str(length.tokens) in self.tokens)

    @property
    def effort(self) -> Effort:
        return EFFORTS[self.effort_name]

    def run_budget_s(self, measures: bool) -> float | None:
        """The budget that was given, else the effort's; None where trials were given instead."""
        if self.budget_s is None and self.trials is None:
            return self.effort.budget_s if measures else self.effort.offline_budget_s
        return self.budget_s


# fmt: off
_OPTIONS = (
    click.option("--gpu", "gpu_name", default="l20", show_default=True, metavar="NAME", help="GPU to tune for."),
    click.option("--head-dim", "head_dims", type=Choices(tuple(map(str, HEAD_DIMS))), default="64,128",
                 show_default=True, help="Head dims, separated by commas."),
    click.option("--dtype", "dtypes", type=Choices(DTYPES), default="bf16", show_default=True, help="Input dtypes."),
    mask_options(both_note="; the default"),
    precision_option,
    click.option("--tokens", type=Choices(_TOKENS), default=",".join(_TOKENS), show_default=True,
                 help="Lengths to tune at, each with the bucket around it, separated by commas."),
    click.option("--effort", "effort_name", type=click.Choice(EFFORT_NAMES), default="full", show_default=True,
                 help="quick: budget 3m (offline 2m), patience 24, short screens, finals of two with few rounds."),
    click.option("--budget", "budget_s", type=Duration(),
                 help="Time for everything: 90s, 6m, 1h30m. [10m; offline 6m; none with --trials]"),
    click.option("--trials", type=click.IntRange(min=1),
                 help=f"Configs tried per problem. [with --replay {DEFAULT_TRIALS}]"),
    click.option("--patience", type=click.IntRange(min=2), metavar="N",
                 help="End a problem's search when N configs in a row brought no gain of 0.5 % at any length. "
                 "[none; quick 24]"),
    click.option("--offline", is_flag=True, help="Compile and rank for a GPU that is absent; measures nothing."),
    click.option("--resume/--fresh", default=True, show_default=True, help="Go on from the journal, or set it aside."),
    click.option("--journal", "journal_path", type=click.Path(dir_okay=False, path_type=Path),
                 help="Journal of measurements. [<cache folder>/journals/<gpu>.jsonl]"),
    click.option("--incumbent", metavar="NAME",
                 help="Config to beat: a name, `default` or `worst`; the search then begins with no winners of "
                 "registries. [the registry's]"),
    click.option("--sampler", type=click.Choice(SAMPLERS),
                 help="How configs are chosen: Optuna's TPE or Gaussian process; neighbours of the best; at random. "
                 f"[{DEFAULT_SAMPLER}; with --replay all]"),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the sampler and of the order of finals."),
    click.option("--devices", type=DeviceCount(), default="all", show_default=True,
                 help="How many GPUs of this machine measure side by side, of those CUDA_VISIBLE_DEVICES shows."),
    click.option("--storage", metavar="FILE|URL",
                 help="Search together with other machines through Optuna's journal file, or its RDB at a sqlite:/// "
                 "or postgresql+psycopg:// URL."),
    click.option("--jobs", type=click.IntRange(min=1),
                 help="Compilers at a time. [all cores; two fewer while measuring]"),
    click.option("-o", "--output", type=RegistryFile(), metavar="FILE",
                 help="Registry file to write. [<tuned folder>/<gpu>.yaml]"),
    click.option("--probe", "probe_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
                 help="What `sagegen probe -o FILE` measured on that GPU: the model prefers it to the table of GPUs."),
    click.option("--replay", type=JournalFiles(), default=(), metavar="FILE[,FILE]",
                 help="Search recorded journals instead, without a GPU: how many configs each sampler tries until it "
                 "is within 2 % of the best recorded. Writes nothing."),
    click.option("--seeds", type=click.IntRange(min=1), default=20, show_default=True,
                 help="With --replay: searches per problem and sampler."),
    click.option("--starts", type=click.IntRange(min=0), default=Strategy().starts, show_default=True,
                 help="With --replay: configs of the model's choice that each search begins with; 0 compares the "
                 "samplers alone."),
    click.option("--plant", "plants", type=click.Choice(PLANTS), multiple=True, hidden=True,
                 help="Self-test: add a candidate with that fault."),
    click.option("--force", is_flag=True, help="Measure although others use the GPU; times will be off."),
    click.option("--verify", is_flag=True,
                 help="Tune nothing: repeat the finals of registry and journal in a fresh process; 1 where they "
                 "disagree."),
    json_option,
)
# fmt: on


def tune_options(command: Callable[[TuneOptions], None]) -> Callable[..., None]:
    """Adds the options of `tune` to a command, which gets them as one TuneOptions."""

    def collect(**values: Any) -> None:
        options = TuneOptions(**values)
        if options.replay:
            _require_only_replay_options(click.get_current_context())
        command(options)

    collect.__doc__ = command.__doc__
    for option in reversed(_OPTIONS):
        collect = option(collect)
    return collect


def _require_only_replay_options(ctx: click.Context) -> None:
    """Raise UsageError for an option that a replay would not look at."""
    for param in ctx.command.params:
        name = param.name or ""
        if name not in _REPLAY_OPTIONS and ctx.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--replay searches what was recorded: leave out {param.opts[-1]}")


def was_given(name: str) -> bool:
    """Whether the running command was given that parameter, and does not just have its default."""
    source = click.get_current_context().get_parameter_source(name)
    return source == click.core.ParameterSource.COMMANDLINE
