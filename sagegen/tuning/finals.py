"""The last word of a tuning run: the best configs of a bucket against each other, in one interleaved run.

What counts is the full call, quantizers included: that is what users wait for, and some configs move work between the
kernels of a call. A challenger takes a bucket only when its call is faster than the incumbent's by an interval, not by
a median. The winner then meets the default config again in a fresh process.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sagegen.errors import WorkerError
from sagegen.measuring.jobs import Candidate, Finals
from sagegen.measuring.verdict import Verdict, compare
from sagegen.problem import Problem, Shape, TunedLength
from sagegen.space import Config
from sagegen.tuning.examine import Examiner, tuned_shape
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
    """

    match: Match
    kernel_us: Mapping[Config, Sequence[float]]
    call_us: Mapping[Config, Sequence[float]]
    peers_us: Mapping[str, Sequence[float]]
    failures: tuple[tuple[Config, Outcome, str], ...] = ()


def run_match(examiner: Examiner, match: Match) -> Bout:
    """Run a match on one lane; a config that crashes falls out and the others run again without it.

    Raises:
        WorkerError: the run fails and names no config that is at fault.
    """
    failures: list[tuple[Config, Outcome, str]] = []
    left = dict(match.cubins)
    while left:
        candidates = tuple(Candidate(str(path), match.problem.name, config.name) for config, path in left.items())
        job = Finals(candidates, match.shape, rounds=match.rounds, seed=match.seed, peers=match.peers)
        reply = examiner.run(job, _TIMEOUT_S)
        if reply.outcome == "ok":
            kernel_us = dict(zip(left, reply.data["kernel_us"], strict=True))
            call_us = dict(zip(left, reply.data["call_us"], strict=True))
            return Bout(match, kernel_us, call_us, reply.data.get("peers", {}), tuple(failures))
        running = reply.data.get("running")
        culprit = next((c for c, candidate in zip(left, candidates, strict=True) if candidate.name == running), None)
        if culprit is None:
            raise WorkerError(f"finals of {match.problem.name} at {match.length.tokens} tokens: {reply.reason}")
        failures.append((culprit, reply.outcome, reply.reason))
        del left[culprit]
        examiner.worker.close()
    return Bout(match, {}, {}, {}, tuple(failures))


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
