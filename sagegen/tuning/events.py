"""What a tuning run tells whoever watches it. Frozen facts; the command line draws them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sagegen.entry import PredictedRatio
from sagegen.tuning.journal import Outcome, Record


@dataclass(frozen=True, slots=True)
class Preparing:
    """The configs are being listed and the workers started, which takes seconds, on a loaded machine many.

    Attributes:
        problem: of an offline run, which takes one after another and has no workers.
    """

    gpu: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The search begins.

    Attributes:
        gpu: name of the GPU tuned for.
        problems: names.
        configs: configs that may be tried, of all problems together.
        known: attempts that a journal already answers.
        offline: nothing is measured, only compiled and ranked.
    """

    gpu: str
    problems: tuple[str, ...]
    configs: int
    known: int
    offline: bool


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that the user should know but that does not stop the run."""

    message: str


@dataclass(frozen=True, slots=True)
class Attempted:
    """One more attempt is in the journal.

    Attributes:
        record: its record.
        best_config: the best of its problem so far, by the geometric mean over the lengths; None before a success.
        best_speed: how many times faster than the default config that is; 1.0 when it is the default, None if unknown.
            Offline it is the model's word.
        counts: attempts by outcome in this run and those resumed, all problems.
        progress: share of the search that is done, 0 to 1.
        left_s: seconds until the run ends, finals included; None when no budget was given.
    """

    record: Record
    best_config: str | None
    best_speed: float | PredictedRatio | None
    counts: Mapping[Outcome, int] = field(default_factory=dict)
    progress: float = 0.0
    left_s: float | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """Another machine of a shared search found what is better than all that is known here.

    Attributes:
        speed: over the default config on that machine.
    """

    problem: str
    config: str
    speed: float
    machine: str


@dataclass(frozen=True, slots=True)
class FinalsStarted:
    """The best of one problem at one length run against each other."""

    problem: str
    tokens: int
    configs: tuple[str, ...]
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class GateStarted:
    """The accuracy gate of a config runs in the emulator."""

    problem: str
    config: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The winner of one problem's bucket, as it goes into the registry; speeds are those of full calls."""

    problem: str
    bucket: str
    answer: str
    config: str | None
    speed_vs_default: float | PredictedRatio | None
    speed_vs_sdpa: float | None


Event = Preparing | Started | Warned | Attempted | Heard | FinalsStarted | GateStarted | Decided
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of a run that nobody watches."""
