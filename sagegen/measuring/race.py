"""Holding a race at each shape, and its standing: who is how fast, sustained and in bursts, and which goals are met."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sagegen.entry import Tier
from sagegen.measuring.contenders import TIERS, Contender, judge
from sagegen.measuring.goals import Goal, Leg, find_goal
from sagegen.measuring.jobs import PEERS, SETTLE_S, Part, Race, Reply
from sagegen.measuring.verdict import Summary, Verdict, compare, summarize
from sagegen.measuring.worker import Worker

Mode = Literal["sustained", "burst"]
#: Of a race, beside thrice its estimate: loading, cuDNN's plans, launches that are longer than a sample.
_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How a race is timed; the members of `jobs.Race` of the same names."""

    rounds: int = 3
    sustained_s: float = 0.3
    burst_rounds: int = 2
    idle_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Score:
    """One row of the table: the fastest kernel of a tier, by its sustained time.

    Attributes:
        rival: its name in the standing; None when no contender is accurate enough.
        tops: sustained.
        speeds: over each peer, sustained, from paired rounds.
        goal: what is asked of the row, if anything.
    """

    leg: Leg
    part: Part
    tier: Tier
    rival: str | None = None
    tops: float = 0.0
    speeds: Mapping[str, Verdict] = field(default_factory=dict)
    goal: Goal | None = None

    @property
    def meets_target(self) -> bool | None:
        """None where there is no goal, or no kernel."""
        return self.tops >= self.goal.tops if self.goal and self.rival else None

    @property
    def meets_floor(self) -> bool | None:
        """None where there is no goal, no kernel, or its peer could not run."""
        speed = self.speeds.get(self.goal.peer) if self.goal else None
        return speed.ratio >= self.goal.floor if self.goal and speed else None


@dataclass(frozen=True, slots=True)
class Standing:
    """Times of everyone at one shape.

    Attributes:
        contenders: in the order of the rivals' numbers.
        sustained_us, burst_us: per round, by rival: `kernel i`, `call i`, peers.
        clock_mhz: of the SMs in each sustained round; None where NVML does not say.
        agreement: cosine of a rival's output with torch's.
        absent: who could not run, and why.
        versions: of the peers' libraries.
        failure: why there are no times; empty otherwise.
    """

    leg: Leg
    contenders: tuple[Contender, ...]
    sustained_us: Mapping[str, Sequence[float]] = field(default_factory=dict)
    burst_us: Mapping[str, Sequence[float]] = field(default_factory=dict)
    clock_mhz: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    agreement: Mapping[str, float] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""

    def time(self, rival: str, mode: Mode = "sustained") -> Summary | None:
        """Median and spread, None where it was not measured."""
        times = (self.sustained_us if mode == "sustained" else self.burst_us).get(rival)
        return summarize(times) if times else None

    def tops(self, rival: str, mode: Mode = "sustained") -> float | None:
        """1e12 operations per second by the median time."""
        time = self.time(rival, mode)
        return self.leg.shape.flops(self.leg.problem) / time.median_us / 1e6 if time else None

    def clock(self, rival: str) -> float | None:
        """Median over the sustained rounds."""
        known = [clock for clock in self.clock_mhz.get(rival, ()) if clock is not None]
        return summarize(known).median_us if known else None

    def contender(self, rival: str) -> Contender | None:
        """Whose kernel a rival is; None for a peer."""
        part, _, index = rival.partition(" ")
        return self.contenders[int(index)] if part in ("kernel", "call") else None

    def scores(self) -> list[Score]:
        """The rows of this shape."""
        return [self._score(part, tier) for part in self.leg.parts for tier in TIERS]

    def _score(self, part: Part, tier: Tier) -> Score:
        goal = find_goal(self.leg, part, tier)
        names = [f"{part} {i}" for i, contender in enumerate(self.contenders) if tier in contender.tiers]
        rates = {name: tops for name in names if (tops := self.tops(name)) is not None}
        if not rates:
            return Score(self.leg, part, tier, goal=goal)
        best = max(rates, key=lambda name: rates[name])
        own = self.sustained_us[best]
        speeds = {peer: compare(self.sustained_us[peer], own) for peer in PEERS if peer in self.sustained_us}
        return Score(self.leg, part, tier, best, rates[best], speeds, goal)

    def as_values(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "work": self.leg.work,
            "problem": self.leg.problem.name,
            "shape": asdict(self.leg.shape),
            "contenders": [_contender_values(contender) for contender in self.contenders],
            "rivals": {name: self._rival_values(name) for name in self.sustained_us},
            "scores": [_score_values(score) for score in self.scores()],
            "absent": dict(self.absent),
            "versions": dict(self.versions),
            "failure": self.failure,
        }

    def _rival_values(self, rival: str) -> dict[str, Any]:
        modes: dict[str, Any] = {}
        for mode, times in (("sustained", self.sustained_us), ("burst", self.burst_us)):
            if times.get(rival):
                summary = asdict(summarize(times[rival]))
                flops = self.leg.shape.flops(self.leg.problem)
                modes[mode] = {**summary, "tops": flops / summary["median_us"] / 1e6, "times_us": list(times[rival])}
        return {**modes, "clock_mhz": self.clock(rival), "agreement": self.agreement.get(rival)}


def _contender_values(contender: Contender) -> dict[str, Any]:
    return {
        "config": contender.subject.config.name,
        "origin": contender.subject.origin,
        "tiers": list(contender.tiers),
        "figures": {kind: dict(values) for kind, values in contender.figures.items()},
        "note": contender.note,
    }


def _score_values(score: Score) -> dict[str, Any]:
    return {
        "part": score.part,
        "tier": score.tier,
        "rival": score.rival,
        "tops": score.tops if score.rival else None,
        "speeds": {peer: asdict(verdict) for peer, verdict in score.speeds.items()},
        "goal": asdict(score.goal) if score.goal else None,
        "meets_target": score.meets_target,
        "meets_floor": score.meets_floor,
    }


def hold_races(
    worker: Worker, field: Iterable[tuple[Leg, Sequence[Contender]]], pace: Pace, peers: Sequence[str] = PEERS
) -> Iterator[Standing]:
    """One race after another, in the worker's one process; contenders of unknown accuracy meet the gate first, once."""
    judged: dict[str, Contender] = {}
    for leg, contenders in field:
        for contender in contenders:
            name = contender.subject.candidate.name
            if not contender.figures and name not in judged:
                judged[name] = judge(contender, worker)
        own = [c if c.figures else judged[c.subject.candidate.name] for c in contenders]
        yield hold_race(worker, leg, own, pace, peers)


def hold_race(
    worker: Worker, leg: Leg, contenders: Sequence[Contender], pace: Pace, peers: Sequence[str] = PEERS
) -> Standing:
    """Race at one shape. Who fails is left out, with the reason, and the race is held again without it."""
    running = [contender for contender in contenders if contender.tiers]
    absent = {c.subject.config.name: c.note or "accurate enough for no tier" for c in contenders if not c.tiers}
    timeout_s = 3 * estimate_seconds([(leg, running)], pace, peers) + _GRACE_S
    others = list(peers)
    while True:
        job = Race(
            tuple(contender.subject.candidate for contender in running), leg.problem.name, leg.shape, worker.gpu_index,
            leg.parts, tuple(others), pace.rounds, pace.sustained_s, pace.burst_rounds, pace.idle_s,
        )  # fmt: skip
        reply = worker.run(job, timeout_s)
        if reply.outcome == "ok":
            return _make_standing(leg, running, absent, reply)
        failure = f"{reply.outcome}: {reply.reason}"
        guilty = str(reply.data.get("running", ""))
        if guilty in others:
            others.remove(guilty)
            absent[guilty] = failure
        elif guilty in (names := [contender.subject.candidate.name for contender in running]):
            absent[running.pop(names.index(guilty)).subject.config.name] = failure
        else:
            return Standing(leg, tuple(running), absent=absent, failure=failure)


def _make_standing(leg: Leg, contenders: Sequence[Contender], absent: Mapping[str, str], reply: Reply) -> Standing:
    data = reply.data
    return Standing(
        leg,
        tuple(contenders),
        sustained_us=data["sustained_us"],
        burst_us=data["burst_us"],
        clock_mhz=data["clock_mhz"],
        agreement=data["agreement"],
        absent={**absent, **data["absent"]},
        versions=data["versions"],
    )


def estimate_seconds(
    legs: Sequence[tuple[Leg, Sequence[Contender]]], pace: Pace, peers: Sequence[str] = PEERS
) -> float:
    """Seconds of the GPU that races take, those of starting up not counted."""
    rivals = sum(len(leg.parts) * len(contenders) + len(peers) for leg, contenders in legs)
    return rivals * (pace.rounds * (SETTLE_S + pace.sustained_s) + pace.burst_rounds * pace.idle_s)
