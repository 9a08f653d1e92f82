"""Races against peers, as `sagegen bench --peers --json FILE` writes them: read strictly, drawn as bars of rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sagegen.errors import ArgumentError
from sagegen.gpu import GPUS
from sagegen.measuring.jobs import PEERS
from sagegen.measuring.race_report import LABELS
from sagegen.report.drawing import WIDTH, Chart, Key
from sagegen.report.figure import Figure
from sagegen.report.scale import linear_scale
from sagegen.report.text import cut_text

_ROW = 34


class _Timed(msgspec.Struct, frozen=True):
    median_us: float
    tops: float


class _Rival(msgspec.Struct, frozen=True):
    sustained: _Timed | None = None


class _Score(msgspec.Struct, frozen=True):
    part: str
    tier: str
    rival: str | None
    tops: float | None


class _Contender(msgspec.Struct, frozen=True):
    config: str


class _Race(msgspec.Struct, frozen=True):
    work: str
    problem: str
    contenders: list[_Contender]
    rivals: dict[str, _Rival]
    scores: list[_Score]
    absent: dict[str, str] = {}


class _File(msgspec.Struct, frozen=True):
    machine: dict[str, str | int | float | None]
    races: list[_Race]


@dataclass(frozen=True, slots=True)
class Racer:
    """Who ran, how fast in 1e12 operations a second, sustained; `config` is empty of a peer."""

    who: str
    rate: Figure
    config: str


@dataclass(frozen=True, slots=True)
class Race:
    """One shape's race on a GPU, the fastest first. `absent`: peers that could not run, and why."""

    gpu: str
    problem: str
    work: str
    racers: tuple[Racer, ...]
    absent: Mapping[str, str]


def read_races(path: Path, data: bytes) -> list[Race]:
    """The races of a file that have times.

    Raises:
        ArgumentError: it is no file of `sagegen bench --peers --json`, or of a GPU that sagegen does not know.
    """
    remedy = "write one with: sagegen bench --peers --json FILE"
    try:
        file = msgspec.json.decode(data, type=_File)
    except msgspec.DecodeError as error:
        raise ArgumentError(f"{path} holds no races: {error}", remedy) from error
    product = file.machine.get("GPU")
    gpu = next((known.name for known in GPUS.values() if product in known.products), None)
    if gpu is None:
        raise ArgumentError(f"{path} is of GPU {str(product)[:80]!r}, which is unknown", remedy)
    races = [
        Race(
            gpu, race.problem, cut_text(race.work), _racers(race), {n: cut_text(why) for n, why in race.absent.items()}
        )
        for race in file.races
    ]
    return [race for race in races if race.racers]


def _racers(race: _Race) -> tuple[Racer, ...]:
    return tuple(sorted((*_own(race), *_peers(race)), key=lambda racer: -racer.rate.value))


def _is_rate(tops: float) -> bool:
    """Whether any GPU can have been so fast."""
    return 1e-6 <= tops <= 1e9


def _own(race: _Race) -> Iterator[Racer]:
    """The fastest kernels and calls of each tier; one row where the tiers have the same."""
    seen = set()
    for score in race.scores:
        number = (score.rival or "").partition(" ")[2]
        is_known = number.isdecimal() and int(number) < len(race.contenders)
        if not is_known or score.tops is None or not _is_rate(score.tops) or score.rival in seen:
            continue
        seen.add(score.rival)
        same = "/".join(other.tier for other in race.scores if other.rival == score.rival)
        config = cut_text(race.contenders[int(number)].config)
        yield Racer(f"sagegen {score.part}, {same}", Figure(score.tops, "measured"), config)


def _peers(race: _Race) -> Iterator[Racer]:
    for name in PEERS:
        timed = race.rivals[name].sustained if name in race.rivals else None
        if timed is not None and _is_rate(timed.tops):
            yield Racer(LABELS[name], Figure(timed.tops, "measured"), "")


def draw_race(race: Race) -> Chart:
    """Bars of sustained rates."""
    chart = Chart(
        f"Race: {race.work}",
        "Sustained rates: " + ", ".join(f"{racer.who} {racer.rate.text('TOPS')}" for racer in race.racers) + ".",
        len(race.racers) * _ROW + 50,
        "; ".join(f"{LABELS.get(name, cut_text(name))} did not run: {why}" for name, why in race.absent.items()),
    )
    left, bottom = 10, len(race.racers) * _ROW + 14
    x = linear_scale([racer.rate.value for racer in race.racers], left, WIDTH - 12, 4)
    chart.x_axis(x, 10, bottom, "TOPS, sustained", [f"{tick:,.6g}" for tick in x.ticks])
    for place, racer in enumerate(race.racers):
        y = 12 + place * _ROW
        chart.text(left + 2, y + 11, racer.who, "row")
        chart.text(WIDTH - 12, y + 11, racer.rate.text(), "value", "end")
        chart.box(left, y + 16, x.place(racer.rate.value) - left, 11, "win" if racer.config else "peer")
    chart.keys = [Key("bar", "win", "sagegen"), Key("bar", "peer", "peers")]
    return chart
