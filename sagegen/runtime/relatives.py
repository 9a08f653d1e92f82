"""Configs for windows and ragged batches: nobody tunes those, so they take what is tuned for dense calls."""

from __future__ import annotations

from sagegen.entry import Entry
from sagegen.gpu import Gpu
from sagegen.problem import Problem
from sagegen.rules import Target, fitted_config
from sagegen.space import Config, parse_config


def relative_config(entry: Entry, problem: Problem, gpu: Gpu | None, min_cosine: float) -> Config | None:
    """The config of `entry`, which is for `problem.tuned`, as `problem` can have it; None where it can't.

    A mask takes nothing from a kernel's accuracy, so the entry's cosine holds for it.
    """
    if gpu is None or entry.config is None or not entry.is_accurate_for(min_cosine):
        return None
    return fitted_config(parse_config(entry.config), Target(gpu, problem))
