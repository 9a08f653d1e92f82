"""Machines that share one search per problem and GPU, through a storage of Optuna's: a journal file or a database.

The storage coordinates and nothing more: what is being measured or was measured elsewhere is not asked again, and a
search learns from it. What was measured here, the local journal says.

A study's trials are numbered in the order in which they were made, whoever made them. A machine makes a running trial
for a config, then looks: where an earlier one has the same config, that machine measures it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, TypeVar

from sagegen.errors import ArgumentError
from sagegen.problem import Problem
from sagegen.space import FAMILIES, Config, config_values, parse_config
from sagegen.tuning.journal import Record

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, TrialState

#: A config that a machine has had so long without a word is free again: that machine is gone.
ABANDONED_AFTER = timedelta(minutes=15)
_SQLITE_TIMEOUT_S = 60.0
_OPEN_TRIES, _OPEN_PAUSE_S = 4, 0.5

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What another machine found of a config.

    Attributes:
        value: its objective, relative to the default config on that machine; None for a failure.
        machine: who measured it.
    """

    problem: Problem
    config: Config
    text_sha256: str
    value: float | None
    machine: str


def open_storage(place: str) -> BaseStorage:
    """Optuna's storage at a path of a journal file, or at an RDB's URL; made if missing.

    Raises:
        ArgumentError: it cannot be opened.
    """
    import optuna
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend
    from sqlalchemy.exc import ArgumentError as UrlError
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    remedy = (
        "give --storage a file that can be written, or a URL as sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
    )
    try:
        if "://" not in place:
            return JournalStorage(JournalFileBackend(place))
        connect = {"timeout": _SQLITE_TIMEOUT_S} if place.startswith("sqlite") else {}
        return _patiently(lambda: RDBStorage(place, engine_kwargs={"connect_args": connect}))
    except ImportError as error:
        raise ArgumentError(
            f"storage {_without_password(place)} needs a database driver that is not installed",
            "pip install 'sagegen[postgresql]' and write postgresql+psycopg://USER@HOST/NAME, or another URL's driver",
        ) from error
    except (OSError, UrlError, SQLAlchemyError) as error:
        reason = str(error).partition("\n")[0]
        raise ArgumentError(f"storage {_without_password(place)} cannot be opened: {reason}", remedy) from error


def _patiently(open_database: Callable[[], BaseStorage]) -> BaseStorage:
    """The storage; machines that start together may all be making its tables, and all but one of them fail."""
    from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

    for _ in range(_OPEN_TRIES - 1):
        try:
            return open_database()
        except (IntegrityError, OperationalError, ProgrammingError):
            time.sleep(_OPEN_PAUSE_S)
    return open_database()


def _without_password(place: str) -> str:
    """A URL as it may be printed."""
    scheme, mark, rest = place.partition("://")
    user, at, host = rest.rpartition("@")
    return f"{scheme}{mark}{user.partition(':')[0]}{at}{host}" if mark else place


class SharedStudies:
    """A run's studies in a storage, one per problem.

    A storage that fails is reported once; the run then goes on alone.

    Args:
        gpu: name of the GPU; its product is the same for all machines of a study.
        protocol: number of the measuring protocol.
        machine: that no other running process has; a journal's place is, since one run at a time has it.
        clock: UTC now, for tests.
    """

    def __init__(
        self,
        storage: BaseStorage,
        gpu: str,
        protocol: int,
        machine: str,
        clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._storage = storage
        self._gpu = gpu
        self._protocol = protocol
        self._machine = machine
        self._clock = clock
        self._studies: dict[Problem, Study] = {}
        self._claims: dict[tuple[Problem, Config], int] = {}  # ids of trials
        self._heard: set[tuple[Problem, int]] = set()
        self._failed = False

    def open(self, problems: Iterable[Problem]) -> None:
        """Join or found the study of each problem; what an earlier run of this machine left unfinished is given up."""
        for problem in problems:
            self._safely(functools.partial(self._open, problem), None)

    def claim(self, problem: Problem, config: Config, text_sha256: str, *, always: bool = False) -> bool:
        """Whether this machine is to measure `config`; if so, others know from now on.

        Args:
            always: measure it whatever others do, as the default config, which all are held against.
        """
        return self._safely(lambda: self._claim(problem, config, text_sha256, always), True)

    def finish(self, problem: Problem, config: Config, record: Record, value: float | None) -> None:
        """Tell the others what came of a config, claimed or known from this machine's journal.

        Args:
            value: the objective, None for a failure.
        """
        self._safely(lambda: self._finish(problem, config, record, value), None)

    def news(self) -> list[Elsewhere]:
        """What other machines finished since the last look."""
        return self._safely(lambda: [found for problem in self._studies for found in self._news(problem)], [])

    def release(self) -> None:
        """Give up what was claimed and not finished, so that others may take it."""
        from optuna.trial import TrialState

        claims, self._claims = self._claims, {}
        for (problem, _), trial_id in claims.items():
            self._safely(functools.partial(self._end, problem, trial_id, TrialState.FAIL), None)

    def _open(self, problem: Problem) -> None:
        import optuna
        from optuna.trial import TrialState

        name = f"sagegen {self._gpu} {problem.name} protocol {self._protocol} space {_space_digest()}"
        sampler = optuna.samplers.RandomSampler()  # proposes nothing here: the searchers do
        study = optuna.create_study(storage=self._storage, study_name=name, load_if_exists=True, sampler=sampler)
        self._studies[problem] = study
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.user_attrs.get("machine") == self._machine:
                study.tell(trial.number, state=TrialState.FAIL)

    def _claim(self, problem: Problem, config: Config, text_sha256: str, always: bool) -> bool:
        from optuna.trial import TrialState

        trial_id = self._make_trial(problem, config, text_sha256)
        number = self._storage.get_trial(trial_id).number
        if not always and any(
            trial.number < number and self._is_taken(trial, config.name, text_sha256)
            for trial in self._studies[problem].get_trials(deepcopy=False)
        ):
            self._end(problem, trial_id, TrialState.FAIL)
            return False
        self._claims[problem, config] = trial_id
        return True

    def _make_trial(self, problem: Problem, config: Config, text_sha256: str) -> int:
        import optuna
        from optuna.trial import TrialState

        values, distributions = _as_params(config)
        facts = {
            "config": config.name,
            "text_sha256": text_sha256,
            "machine": self._machine,
            "claimed": self._clock().isoformat(timespec="seconds"),
        }
        trial = optuna.trial.create_trial(
            state=TrialState.RUNNING, params=values, distributions=distributions, user_attrs=facts
        )
        study_id = self._storage.get_study_id_from_name(self._studies[problem].study_name)
        return self._storage.create_new_trial(study_id, template_trial=trial)

    def _is_taken(self, trial: FrozenTrial, config_name: str, text_sha256: str) -> bool:
        """Whether a trial is of that config and text, and done or being done."""
        facts = trial.user_attrs
        if (facts.get("config"), facts.get("text_sha256")) != (config_name, text_sha256):
            return False
        if trial.state.is_finished():
            return trial.state.name == "COMPLETE"
        return self._clock() - datetime.fromisoformat(facts["claimed"]) < ABANDONED_AFTER

    def _finish(self, problem: Problem, config: Config, record: Record, value: float | None) -> None:
        from optuna.trial import Trial, TrialState

        trial_id = self._claims.pop((problem, config), None)
        if trial_id is None:
            if self._is_known(problem, config, record.text_sha256):
                return
            trial_id = self._make_trial(problem, config, record.text_sha256)
        trial = Trial(self._studies[problem], trial_id)
        trial.set_user_attr("outcome", record.outcome)
        trial.set_user_attr("reason", record.reason)
        trial.set_user_attr("call_us", {str(samples.tokens): samples.median_call_us for samples in record.samples})
        trial.set_constraint("failed", float(value is None))
        self._end(problem, trial_id, TrialState.COMPLETE, math.inf if value is None else value)

    def _is_known(self, problem: Problem, config: Config, text_sha256: str) -> bool:
        return any(
            trial.user_attrs.get("machine") == self._machine and self._is_taken(trial, config.name, text_sha256)
            for trial in self._studies[problem].get_trials(deepcopy=False)
        )

    def _end(self, problem: Problem, trial_id: int, state: TrialState, value: float | None = None) -> None:
        number = self._storage.get_trial(trial_id).number
        self._studies[problem].tell(number, value, state=state)

    def _news(self, problem: Problem) -> Iterator[Elsewhere]:
        from optuna.trial import TrialState

        for trial in self._studies[problem].get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            facts = trial.user_attrs
            if (problem, trial.number) in self._heard or "config" not in facts:
                continue
            self._heard.add((problem, trial.number))
            if facts["machine"] != self._machine and trial.value is not None:
                value = trial.value if math.isfinite(trial.value) else None
                yield Elsewhere(problem, parse_config(facts["config"]), facts["text_sha256"], value, facts["machine"])

    def _safely(self, work: Callable[[], Answer], otherwise: Answer) -> Answer:
        """What `work` gives, or `otherwise` once the storage has failed."""
        from optuna.exceptions import OptunaError
        from sqlalchemy.exc import SQLAlchemyError

        if self._failed:
            return otherwise
        try:
            return work()
        except (OptunaError, SQLAlchemyError, OSError) as error:
            self._failed = True
            _log.warning("the shared storage failed, this machine goes on alone: %s", str(error).partition("\n")[0])
            return otherwise


def _as_params(config: Config) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    """A config as Optuna's parameters; families have names of their own, since their values differ."""
    from optuna.distributions import CategoricalDistribution

    prefix = f"{config.family}."
    values = {prefix + name: value for name, value in config_values(config).items()}
    return values, {prefix + param.name: CategoricalDistribution(param.values) for param in config.params}


def _space_digest() -> str:
    """Of all parameters and their values: a study's parameters must not change."""
    space = [(family, param.name, param.values) for family, own in FAMILIES.items() for param in own.params]
    return hashlib.sha256(repr(space).encode()).hexdigest()[:8]
