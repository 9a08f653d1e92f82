"""Each parameter's effect around one config: its variations in one race, kernel alone, with what each was built to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sagegen.build import BuildFailure, Built, build_batch
from sagegen.cubin import Resources
from sagegen.env import Env
from sagegen.gpu import Gpu
from sagegen.measuring.contenders import Contender
from sagegen.measuring.goals import Leg
from sagegen.measuring.race import Pace, Standing, hold_races
from sagegen.measuring.subjects import Subject
from sagegen.measuring.variations import Variation, find_variations
from sagegen.measuring.verdict import Verdict, compare
from sagegen.measuring.worker import Worker
from sagegen.problem import Problem
from sagegen.render import render
from sagegen.rules import Target, check_config, default_config, is_searched
from sagegen.space import Config
from sagegen.store import open_store
from sagegen.toolkit import find_toolkit


@dataclass(frozen=True, slots=True)
class Field:
    """Who races around a config of one problem.

    Attributes:
        winner: the config whose parameters are varied.
        variations: of every parameter, also those that no config near can show.
        contenders: the winner, then each config of the variations once; those that compiled.
        resources: of the attention kernel, by config.
        failures: why a config did not compile.
    """

    problem: Problem
    winner: Config
    variations: tuple[Variation, ...]
    contenders: tuple[Contender, ...]
    resources: Mapping[Config, Resources] = field(default_factory=dict)
    failures: Mapping[Config, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `variation` is None for the winner.

    Attributes:
        speed: over the winner's kernel, sustained, from paired rounds; None when one of them has no times.
        note: why there are no times.
    """

    variation: Variation | None
    config: Config | None
    rival: str | None
    contender: Contender | None
    resources: Resources | None
    speed: Verdict | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Around:
    """A field and how its race ended."""

    field: Field
    standing: Standing

    def rows(self) -> list[Row]:
        """The winner, then its variations by parameter."""
        rivals = {c.subject.config: f"kernel {i}" for i, c in enumerate(self.standing.contenders)}
        varied = [self._row(v, v.config, rivals) for v in self.field.variations]
        return [self._row(None, self.field.winner, rivals), *varied]

    def _row(self, variation: Variation | None, config: Config | None, rivals: Mapping[Config, str]) -> Row:
        if config is None:
            return Row(variation, None, None, None, None, None, "no config near has this value")
        times = self.standing.sustained_us
        rival, base = rivals.get(config), times.get(rivals.get(self.field.winner, ""))
        rival = rival if rival in times else None
        return Row(
            variation,
            config,
            rival,
            self.standing.contender(rival) if rival else None,
            self.field.resources.get(config),
            compare(base, times[rival]) if rival and base else None,
            "" if rival else self._why_absent(config),
        )

    def _why_absent(self, config: Config) -> str:
        absent = self.standing.absent.get(config.name, "")
        return self.field.failures.get(config) or absent or self.standing.failure or "it was not timed"

    def as_values(self) -> dict[str, Any]:
        """Plain values for JSON."""
        standing = self.standing
        return {
            "work": standing.leg.work,
            "problem": self.field.problem.name,
            "shape": asdict(standing.leg.shape),
            "winner": self.field.winner.name,
            "rows": [self._row_values(row) for row in self.rows()],
            "rivals": standing.as_values()["rivals"],
            "absent": dict(standing.absent),
            "failure": standing.failure,
        }

    def _row_values(self, row: Row) -> dict[str, Any]:
        variation, standing = row.variation, self.standing
        known = row.contender.figures if row.contender else {}
        return {
            "parameter": variation.param if variation else None,
            "base": variation.base if variation else None,
            "value": variation.value if variation else None,
            "changes": dict(variation.changes) if variation else {},
            "config": row.config.name if row.config else None,
            "rival": row.rival,
            "tops": standing.tops(row.rival) if row.rival else None,
            "burst_tops": standing.tops(row.rival, "burst") if row.rival else None,
            "speed": asdict(row.speed) if row.speed else None,
            "figures": {kind: dict(values) for kind, values in known.items()},
            "resources": asdict(row.resources) if row.resources else None,
            "clock_mhz": standing.clock(row.rival) if row.rival else None,
            "note": row.note,
        }


def gather_field(gpu: Gpu, problem: Problem, config: Config | None, env: Env) -> Field:
    """The winner and its variations, built side by side; what does not compile is left out with the reason.

    Args:
        config: the winner; None is the default config.

    Raises:
        ConfigError: the winner is not valid for the problem.
        ToolchainError: there is no nvcc.
    """
    toolkit = find_toolkit(env)
    target = Target(gpu, problem, toolkit.version)
    winner = config or default_config(target)
    check_config(winner, target)
    # what tuning leaves alone would make the race half as long again
    variations = [v for v in find_variations(winner, target) if not v.config or is_searched(v.config, target)]
    configs = list(dict.fromkeys([winner, *(v.config for v in variations if v.config)]))
    sources = {one: render(problem, one) for one in configs}
    results = build_batch(list(sources.values()), gpu.arch, open_store(env), toolkit)
    built: dict[Config, Built] = {}
    failures: dict[Config, str] = {}
    for one, source in sources.items():
        result = results[source.name]
        if isinstance(result, BuildFailure):
            failures[one] = f"{result.outcome}: {result.reason}"
        else:
            built[one] = result
    return Field(
        problem,
        winner,
        tuple(variations),
        tuple(Contender(Subject(problem, one, made.cubin, "built here")) for one, made in built.items()),
        {one: made.resources["attention"] for one, made in built.items()},
        failures,
    )


def race_around(worker: Worker, legs: Sequence[tuple[Leg, Field]], pace: Pace) -> Iterator[Around]:
    """One race per leg, without peers; everyone meets the accuracy gate first."""
    fields = [own for _, own in legs]
    standings = hold_races(worker, [(leg, own.contenders) for leg, own in legs], pace, peers=())
    return (Around(own, standing) for own, standing in zip(fields, standings, strict=True))
