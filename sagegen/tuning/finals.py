"""The last word of a tuning run: the best configs of a bucket against each other, in one interleaved run.

What counts is the full call, quantizers included: that is what users wait for, and some configs move work between the
kernels of a call. A challenger takes a bucket only when its call is faster than the incumbent's by an interval, not by
a median. The winner then meets the default config again in a fresh process.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sagegen.errors import WorkerError
from sagegen.measuring.jobs import PEERS, Candidate, Finals, Reply
from sagegen.measuring.verdict import Verdict, compare
from sagegen.problem import Problem, Shape, TunedLength
from sagegen.space import Config
from sagegen.tuning.examine import Examiner, is_fatal, tuned_shape
from sagegen.tuning.journal import Outcome

_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Match:
    """Who runs against whom.

    Attributes:
        cubins: of every config that takes part, in the order of merit by the screens.
        default, incumbent: configs that a challenger is held against; in `cubins` if they work at all.
        rounds: each times everyone once.
        peers: whether torch SDPA runs along.
    """

    problem: Problem
    length: TunedLength
    cubins: Mapping[Config, Path]
    default: Config
    incumbent: Config
    rounds: int
    seed: int = 0
    peers: bool = True

    @property
    def shape(self) -> Shape:
        return tuned_shape(self.length)


@dataclass(frozen=True, slots=True)
class Bout:
    """What a match gave: times per round in microseconds, paired across everyone.

    Attributes:
        kernel_us, call_us: by config.
        peers_us: full calls of torch SDPA's backends, by name.
        failures: configs that fell out, with the outcome and why.
        cleared: how configs failed in company that did not when they were run alone; they took part after that.
        conditions: `telemetry.Conditions` of the run, as JSON has them; empty where nobody looked.
    """

    match: Match
    kernel_us: Mapping[Config, Sequence[float]]
    call_us: Mapping[Config, Sequence[float]]
    peers_us: Mapping[str, Sequence[float]]
    failures: tuple[tuple[Config, Outcome, str], ...] = ()
    cleared: Mapping[Config, str] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)


def run_match(examiner: Examiner, match: Match) -> Bout:
    """Run a match on one lane, again in a fresh process when something fails.

    Whoever ran when a run failed is run alone: if that fails too, it falls out; else it was a bystander and takes part
    again. One that fails in company a second time falls out all the same. A peer that fails is left out.

    Raises:
        WorkerError: the run fails and names nobody that is at fault.
        GpuLostError: the GPU does not work any more.
    """
    return _MatchRun(examiner, match).run()


class _MatchRun:
    """The runs that a match takes."""

    def __init__(self, examiner: Examiner, match: Match) -> None:
        self._examiner = examiner
        self._match = match
        self._left = dict(match.cubins)
        self._peers = match.peers
        self._failures: list[tuple[Config, Outcome, str]] = []
        self._cleared: dict[Config, str] = {}

    def run(self) -> Bout:
        while self._left:
            reply = self._run(self._left, self._peers)
            if reply.outcome == "ok":
                return self._bout(reply)
            running = reply.data.get("running")
            suspect = next((c for c, path in self._left.items() if self._candidate(c, path).name == running), None)
            if suspect is not None:
                self._try_alone(suspect, reply)
            elif self._peers and running in PEERS:
                self._peers = False
                self._examiner.worker.close()
            else:
                match = self._match
                raise WorkerError(f"finals of {match.problem.name} at {match.length.tokens} tokens: {reply.reason}")
        return Bout(self._match, {}, {}, {}, tuple(self._failures), self._cleared)

    def _try_alone(self, suspect: Config, reply: Reply) -> None:
        """Drop a suspect that fails alone too, or that was cleared before."""
        self._examiner.worker.close()
        reason = reply.reason
        if suspect in self._cleared:
            reason += ", for the second time in company; alone it did not"
        elif len(self._left) > 1:
            alone = self._run({suspect: self._left[suspect]}, peers=False)
            if alone.outcome == "ok":
                self._cleared[suspect] = f"{reply.outcome}: {reply.reason}"
                return
            if is_fatal(alone):
                self._examiner.renew(self._match.problem)
        self._failures.append((suspect, reply.outcome, reason))
        del self._left[suspect]

    def _run(self, cubins: Mapping[Config, Path], peers: bool) -> Reply:
        match = self._match
        candidates = tuple(self._candidate(config, path) for config, path in cubins.items())
        job = Finals(candidates, match.shape, rounds=match.rounds, seed=match.seed, peers=peers)
        return self._examiner.run(job, _TIMEOUT_S)

    def _candidate(self, config: Config, path: Path) -> Candidate:
        return Candidate(str(path), self._match.problem.name, config.name)

    def _bout(self, reply: Reply) -> Bout:
        data = reply.data
        return Bout(
            self._match,
            dict(zip(self._left, data["kernel_us"], strict=True)),
            dict(zip(self._left, data["call_us"], strict=True)),
            data.get("peers", {}),
            tuple(self._failures),
            self._cleared,
            data.get("conditions", {}),
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """The winner of a bucket.

    Attributes:
        config: the winner; None when nobody finished.
        bout: the run it won.
        against_default: speed over the default config's kernel, paired; None when the default did not run.
        against_sdpa: speed of the full call over torch's fastest backend; None when none ran.
    """

    config: Config | None
    bout: Bout
    against_default: Verdict | None = None
    against_sdpa: Verdict | None = None

    @property
    def answer(self) -> Literal["kernel", "sdpa"]:
        """`sdpa` where torch is faster beyond doubt, quantization counted in."""
        lost = self.against_sdpa is not None and self.against_sdpa.is_slower
        return "sdpa" if lost else "kernel"

    @property
    def call_against_default(self) -> Verdict | None:
        """Speed of the full call, which decided, over the default config's; None when the default did not run."""
        default, times = self.bout.match.default, self.bout.call_us
        if self.config is None or default not in self.bout.kernel_us:
            return None
        return compare(times[default], times[self.config])


def decide(bout: Bout) -> Decision:
    """The winner of a bout."""
    times = {config: bout.call_us[config] for config in bout.kernel_us}
    ranked = sorted(times, key=lambda config: statistics.median(times[config]))
    held = _holder(bout)
    return decision_for(bout, next((c for c in ranked if held is None or c == held or _beats(bout, c, held)), None))


def restrict(bout: Bout, configs: Collection[Config], incumbent: Config) -> Bout:
    """The same run as if only `configs` had taken part, with `incumbent` to beat."""
    return replace(
        bout,
        match=replace(bout.match, incumbent=incumbent),
        kernel_us={config: us for config, us in bout.kernel_us.items() if config in configs},
    )


def decision_for(bout: Bout, config: Config | None) -> Decision:
    """The decision that makes `config` the winner of a bout it ran in."""
    if config is None:
        return Decision(None, bout)
    default, peers = bout.match.default, bout.peers_us
    fastest = min(peers, key=lambda name: statistics.median(peers[name]), default=None)
    return Decision(
        config,
        bout,
        compare(bout.kernel_us[default], bout.kernel_us[config]) if default in bout.kernel_us else None,
        compare(peers[fastest], bout.call_us[config]) if fastest is not None else None,
    )


def confirmation(decision: Decision, rounds: int) -> Match | None:
    """The match that a fresh process runs to confirm a decision; None when nothing changed hands."""
    match, config, held = decision.bout.match, decision.config, _holder(decision.bout)
    if config is None or held is None or config == held:
        return None
    cubins = {c: match.cubins[c] for c in (config, held)}
    return replace(match, cubins=cubins, rounds=rounds, seed=match.seed + 1, peers=False)


def confirm(decision: Decision, again: Bout) -> Decision:
    """The decision after its confirmation: who held the bucket gets it back unless the winner wins again."""
    winner, held = again.match.cubins
    times = again.call_us
    wins = winner in times and (held not in times or compare(times[held], times[winner]).ratio > 1)
    return decision if wins else decision_for(decision.bout, held)


def _holder(bout: Bout) -> Config | None:
    """Whom a challenger must beat: the incumbent, or the default where that did not finish."""
    return next((c for c in (bout.match.incumbent, bout.match.default) if c in bout.kernel_us), None)


def _beats(bout: Bout, challenger: Config, held: Config) -> bool:
    return compare(bout.call_us[held], bout.call_us[challenger]).is_faster
