"""Finals of a tuning run and the registry entries that come of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from sagegen.build import Built
from sagegen.cubin import Resources
from sagegen.entry import Entry, Tier
from sagegen.measuring.telemetry import GpuState, kept_slowdowns, read_state
from sagegen.plan import ROLES
from sagegen.problem import Problem, TunedLength
from sagegen.space import Config
from sagegen.store import CUBIN_FILE, Store
from sagegen.tuning.entries import Place, decided_entry, screened_entry
from sagegen.tuning.events import Decided, FinalsStarted, Listener, Warned
from sagegen.tuning.examine import Attempt, Examiner, Lanes, make_samples
from sagegen.tuning.finals import Bout, Decision, Match, confirm, confirmation, decide, restrict, run_match
from sagegen.tuning.journal import Phase, Record
from sagegen.tuning.ledger import Ledger
from sagegen.tuning.request import Request
from sagegen.tuning.variants import BuildAhead, Renderer, Variant

_FINALS_SHARE = 0.6  # of the time left when finals begin; setting up, peers and confirmation take the rest
_FLUSH_US = 300.0  # of L2, before each timed launch

_Case = tuple[Problem, TunedLength]
#: Whom a bucket's winner is for; None: everyone, since the fastest config is fine or none is.
_TieredCase = tuple[Problem, TunedLength, Tier | None]


class Judge:
    """Decides every (problem, length) of a request: the fastest config, and the fastest fine one where it is another.

    Args:
        defaults: the default config of each problem.
    """

    def __init__(
        self,
        request: Request,
        defaults: Mapping[Problem, Config],
        ledger: Ledger,
        renderer: Renderer,
        builder: BuildAhead,
        lanes: Lanes,
        store: Store,
        place: Place,
        listen: Listener,
    ) -> None:
        self._request = request
        self._defaults = defaults
        self._ledger = ledger
        self._renderer = renderer
        self._builder = builder
        self._lanes = lanes
        self._store = store
        self._place = place
        self._listen = listen
        self._decisions: dict[_TieredCase, Decision] = {}
        self._places: dict[_Case, Place] = {}
        self._built: dict[tuple[Problem, Config], Built] = {}

    def run_finals(self, deadline: float | None) -> None:
        """Decide every case, then confirm in fresh processes what changed hands.

        Args:
            deadline: on the monotonic clock; fewer rounds are run when it is near.
        """
        matches = self._make_matches(deadline)
        for match, (bout, state) in self._lanes.map(_run_and_look, self._announced(matches)):
            case = (match.problem, match.length)
            self._decisions.update({(*case, tier): decide(own) for tier, own in self._split(bout)})
            self._places[case] = replace(self._place, state=state)
            if len(state.processes) > 1:  # one is the worker's, whatever its id is called outside of a container
                where = f"{match.problem.name} at {match.length.tokens} tokens"
                self._listen(Warned(f"{where}: {len(state.processes) - 1} other processes use the GPU by now"))
            self._enter(bout, "final")
        for examiner in self._lanes.examiners:
            examiner.worker.close()  # the next job starts a fresh process
        confirm_rounds = self._request.effort.confirm_rounds
        again = [(key, m) for key, d in self._decisions.items() if (m := confirmation(d, confirm_rounds)) is not None]
        for (key, _), bout in self._lanes.map(lambda examiner, pair: run_match(examiner, pair[1]), again):
            self._decisions[key] = confirm(self._decisions[key], bout)
            self._enter(bout, "confirm")
        self._join_tiers()
        for key, decision in self._decisions.items():
            self._report(key, decision)

    def entries(self) -> tuple[tuple[Entry, ...], dict[str, Path]]:
        """Entries of all cases that have a winner, with their cubins; of undecided ones by the screens alone."""
        entries, cubins = [], {}
        for case in self._cases():
            for tier, config in self._winners(case).items():
                built = self._find_built(case[0], config) if config else None
                if config is None or built is None:
                    continue
                entries.append(structs.replace(self._entry((*case, tier), config, built), tier=tier))
                cubins[built.cubin_sha256] = built.cubin
        return tuple(entries), cubins

    def _split(self, bout: Bout) -> Iterator[tuple[Tier | None, Bout]]:
        """The bouts that a run decides: of all, and of the fine configs where not all are."""
        case = (bout.match.problem, bout.match.length)
        fine = [config for config in bout.kernel_us if self._ledger.is_fine(case[0], config)]
        if len(fine) in (0, len(bout.kernel_us)):
            yield None, bout
            return
        yield "coarse", bout
        yield "fine", restrict(bout, fine, self._request.fine_incumbents.get(case, self._incumbent(case)))

    def _join_tiers(self) -> None:
        """One decision where the fastest config is fine, or no fine one finished."""
        for case in self._cases():
            problem, length = case
            coarse = self._decisions.get((problem, length, "coarse"))
            fine = self._decisions.get((problem, length, "fine"))
            if coarse is None:
                continue
            if coarse.config and fine and fine.config and not self._ledger.is_fine(problem, coarse.config):
                continue
            self._decisions = {key: d for key, d in self._decisions.items() if key[:2] != case}
            self._decisions[problem, length, None] = coarse

    def _winners(self, case: _Case) -> dict[Tier | None, Config | None]:
        """By tier: what finals decided, else the best by the screens."""
        decided = {key[2]: d.config for key, d in self._decisions.items() if key[:2] == case}
        return decided or self._best_screened(case)

    def _cases(self) -> Iterator[_Case]:
        return ((problem, length) for problem in self._request.problems for length in self._request.lengths)

    def _incumbent(self, case: _Case) -> Config:
        return self._request.incumbents.get(case, self._defaults[case[0]])

    def _make_matches(self, deadline: float | None) -> list[Match]:
        """A match per case with a config that works: the best by the screens, the incumbent and the default."""
        entrants: dict[_Case, list[Config]] = {}
        for case in self._cases():
            problem, length = case
            best = [config for fine in (False, True) for config in self._finalists(case, fine=fine)]
            held = [self._incumbent(case), self._request.fine_incumbents.get(case), self._defaults[problem]]
            wanted = dict.fromkeys([*best, *(config for config in held if config)])
            entrants[case] = [config for config in wanted if self._ledger.works(problem, config)]
        self._build({(case[0], config) for case, configs in entrants.items() for config in configs})
        rounds = self._rounds(entrants, deadline)
        matches = []
        for case, configs in entrants.items():
            problem, length = case
            cubins = {c: self._built[problem, c].cubin for c in configs if (problem, c) in self._built}
            if cubins:
                default, incumbent = self._defaults[problem], self._incumbent(case)
                matches.append(Match(problem, length, cubins, default, incumbent, rounds, self._request.seed))
        return matches

    def _finalists(self, case: _Case, *, fine: bool) -> list[Config]:
        """The best by full calls, and the best but one by their kernels.

        At an H200's power limit calls take what its clock is at that moment: in two screens one config's took 3594 and
        3984 us, its kernel 3790 and 3789 (docs/gpu-runs/2026-11-30g-h200.md). Who wins finals may be far down by calls.
        """
        (problem, length), count = case, self._request.effort.finalists
        by_call = self._ledger.best(problem, length.tokens, count, fine=fine)
        by_kernel = self._ledger.best(problem, length.tokens, count - 1, fine=fine, part="kernel")
        return [*by_call, *by_kernel]

    def _build(self, wanted: set[tuple[Problem, Config]]) -> None:
        """Have everyone's cubin at hand: the store has those of this run, not always those of a resumed one."""
        variants = [self._variant(problem, config) for problem, config in sorted(wanted, key=str)]
        builds = self._builder.submit(variants).result()
        for variant in variants:
            built = builds[variant.name]
            if isinstance(built, Built):
                self._built[variant.problem, variant.config] = built

    def _rounds(self, entrants: Mapping[_Case, list[Config]], deadline: float | None) -> int:
        """Rounds that all finals together have time for."""
        fewest, most = self._request.effort.rounds
        if deadline is None:
            return most
        round_us = 0.0
        for (problem, length), configs in entrants.items():
            for config in configs:
                samples = next(s for s in self._ledger.records[problem, config].samples if s.tokens == length.tokens)
                round_us += samples.median_us + statistics.median(samples.call_us) + 2 * _FLUSH_US
        spare_us = (deadline - time.monotonic()) * _FINALS_SHARE * 1e6 * len(self._lanes.examiners)
        return max(fewest, min(most, int(spare_us / max(round_us, 1.0))))

    def _announced(self, matches: list[Match]) -> Iterator[Match]:
        for index, match in enumerate(matches):
            configs = tuple(config.name for config in match.cubins)
            self._listen(FinalsStarted(match.problem.name, match.length.tokens, configs, index, len(matches)))
            yield match

    def _enter(self, bout: Bout, phase: Phase) -> None:
        """Journal what everyone of a bout did."""
        problem = bout.match.problem
        for config, outcome, reason in bout.failures:
            self._ledger.enter(self._variant(problem, config), phase, Attempt(outcome, reason))
            self._listen(Warned(f"{problem.name} {config.name} fell out of the finals: {outcome}: {reason}"))
        if reasons := kept_slowdowns(bout.conditions):
            tokens = bout.match.length.tokens
            self._listen(Warned(f"{problem.name} at {tokens} tokens: times of a GPU that throttled ({reasons})"))
        for config, times in bout.kernel_us.items():
            data = {"kernel_us": times, "call_us": bout.call_us[config], "conditions": bout.conditions or None}
            attempt = Attempt(
                "ok",
                samples=(make_samples(bout.match.shape, data),),
                first_failure=bout.cleared.get(config, ""),
            )
            self._ledger.enter(self._variant(problem, config), phase, attempt, self._built[problem, config])

    def _report(self, key: _TieredCase, decision: Decision) -> None:
        problem, length, tier = key
        default, sdpa = decision.call_against_default, decision.against_sdpa
        self._listen(
            Decided(
                problem.name,
                f"{length.bucket.name} ({tier})" if tier else length.bucket.name,
                decision.answer,
                decision.config.name if decision.config else None,
                default.ratio if default else None,
                sdpa.ratio if sdpa else None,
            )
        )

    def _best_screened(self, case: _Case) -> dict[Tier | None, Config | None]:
        """The best by the screens where that is news: an entry of finals says more than one of screens."""
        problem, length = case
        best, fine = (next(iter(self._ledger.best(problem, length.tokens, 1, fine=f)), None) for f in (False, True))
        held = (self._request.incumbents.get(case), self._request.fine_incumbents.get(case))
        if best is None or (best == held[0] and fine in (best, held[1], None)):
            return {}
        return {None: best} if fine in (best, None) else {"coarse": best, "fine": fine}

    def _entry(self, key: _TieredCase, config: Config, built: Built) -> Entry:
        problem, length, _ = key
        variant, record = self._variant(problem, config), self._ledger.records[problem, config]
        if key in self._decisions:
            return decided_entry(self._decisions[key], variant, built, record, self._places[problem, length])
        default = self._ledger.records.get((problem, self._defaults[problem]))
        return screened_entry(variant, built, length, record, default, self._place)

    def _find_built(self, problem: Problem, config: Config) -> Built | None:
        """What was built for finals, else what the record of the screen says, if the store still has its cubin."""
        if (problem, config) in self._built:
            return self._built[problem, config]
        record = self._ledger.records[problem, config]
        variant = self._variant(problem, config)
        folder = self._store.find_cubin(variant.name, record.cubin_sha256)
        if folder is None:
            return None
        return _built_from(variant, record, folder / CUBIN_FILE, variant.source.target(self._request.gpu.arch))

    def _variant(self, problem: Problem, config: Config) -> Variant:
        return self._renderer.variant(problem, config)


def _run_and_look(examiner: Examiner, match: Match) -> tuple[Bout, GpuState]:
    """A match, and the GPU's clocks right after it, before they fall."""
    bout = run_match(examiner, match)
    return bout, read_state(examiner.worker.gpu_index)


def _built_from(variant: Variant, record: Record, cubin: Path, arch: str) -> Built:
    return Built(
        name=variant.name,
        arch=arch,
        cubin=cubin,
        cubin_sha256=record.cubin_sha256,
        text_sha256=record.text_sha256,
        code_sha256=record.code_sha256,
        resources={role: Resources(**record.resources[role]) for role in ROLES},
        seconds=0.0,
        nvcc=record.nvcc,
        cached=True,
    )
