"""Tuning for a GPU that is absent: compile for it, let ptxas say what each config takes, rank with the model.

The winners must pass the accuracy gate in the emulator. Entries are `predicted`: nothing here ran on the GPU, and
nothing goes into the journal of measurements. What was compiled stays in the store, so a second run is quick.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from msgspec import structs

from sagegen.build import BuildFailure, Built
from sagegen.entry import Entry, PredictedRatio, Tier, is_fine
from sagegen.errors import ArgumentError, BuildError
from sagegen.layout import make_layout
from sagegen.measuring.verdict import PROTOCOL
from sagegen.problem import Problem, TunedLength
from sagegen.rules import all_searched_configs, default_config
from sagegen.store import Store
from sagegen.toolkit import Toolkit
from sagegen.tuning.disassembly import count_tile, find_disassembler
from sagegen.tuning.entries import predicted_entry
from sagegen.tuning.events import Attempted, Decided, Listener, Preparing, Started, Warned, ignore
from sagegen.tuning.examine import tuned_shape
from sagegen.tuning.gatekeeper import Gate, Gatekeeper
from sagegen.tuning.journal import Outcome, Record
from sagegen.tuning.model import Measured, predict
from sagegen.tuning.ranking import promising_configs
from sagegen.tuning.request import Request, Result, make_target
from sagegen.tuning.variants import BuildAhead, Renderer, Variant

#: Configs compiled per problem when the request says nothing: some two minutes for four problems on two cores.
DEFAULT_TRIALS = 40
_BATCH_PER_PROBLEM = 3
#: Of the budget, kept for the accuracy gate: some seconds per winner.
_GATE_SHARE = 0.25
#: Configs that the gate judges in search of a fine one, for each case whose best is coarse.
_FINE_TRIES = 6


@dataclass(frozen=True, slots=True)
class _Survivor:
    """A variant that compiled and neither spills nor is too large, with what ptxas said of it."""

    variant: Variant
    built: Built
    measured: Measured


def tune_offline(
    request: Request,
    store: Store,
    toolkit: Toolkit,
    listen: Listener = ignore,
    *,
    jobs: int | None = None,
    gate: Gate | None = None,
) -> Result:
    """Compile the configs that the model favours, drop those that spill, rank the rest with their real registers.

    The default config always takes part. Ends early when the budget is spent or on Ctrl+C, with what it has.

    Args:
        gate: what winners must pass, see `make_gate`; one that fails gives way to the next best. None: no gate.

    Raises:
        BuildError: nothing compiled; the message carries the compiler's first error.
        ArgumentError: the budget ended before anything was compiled.
    """
    run = _OfflineRun(request, toolkit, listen, gate)
    builder = BuildAhead(request.gpu.arch, store, toolkit, jobs=jobs, timeout_s=request.build_timeout_s)
    cause: BaseException | None = None
    try:
        run.compile(builder)
    except KeyboardInterrupt as error:
        cause = error
    finally:
        builder.close()
    run.fail_if_nothing_compiled(cause)
    if cause is not None:
        run.keeper.stop()  # whoever ended the run does not want to wait
    entries, cubins = run.decide()
    return Result(entries, cubins, tuple(run.records), cause or run.keeper.interrupt)


class _OfflineRun:
    """One offline run."""

    def __init__(self, request: Request, toolkit: Toolkit, listen: Listener, gate: Gate | None) -> None:
        self.start = time.monotonic()
        self.request = request
        self.toolkit = toolkit
        self.listen = listen
        self.renderer = Renderer()
        self.records: list[Record] = []
        self.survivors: dict[Problem, list[_Survivor]] = {problem: [] for problem in request.problems}
        self.defaults = {p: default_config(make_target(request, p, toolkit)) for p in request.problems}
        self.keeper = Gatekeeper(gate, self._left_s, listen)
        self.disassembler = find_disassembler(toolkit)
        self._counts: Counter[Outcome] = Counter()
        self._total = 0

    def compile(self, builder: BuildAhead) -> None:
        """Compile batch after batch until the configs or the budget run out."""
        chosen = self._choose()
        self._total = sum(map(len, chosen.values()))
        turns = [variant for row in itertools.zip_longest(*chosen.values()) for variant in row if variant]
        size = _BATCH_PER_PROBLEM * len(chosen)
        for first in range(0, len(turns), size):
            if self._compiling_left_s() == 0:
                return
            batch = turns[first : first + size]
            builds = builder.submit(batch).result()
            for variant in batch:
                self._enter(variant, builds[variant.name])

    def fail_if_nothing_compiled(self, cause: BaseException | None) -> None:
        if any(self.survivors.values()):
            return
        if cause is not None:
            raise cause
        if not self.records:
            spent = f"the budget of {self.request.budget_s:g} s" if self.request.budget_s else "the run"
            raise ArgumentError(
                f"{spent} ended before any config was tried for {self.request.gpu.name}", "raise --budget, as to 6m"
            )
        failures = [record for record in self.records if record.outcome != "ok"]
        first = f"; the first: {failures[0].reason}" if failures else ""
        raise BuildError(
            f"none of {len(self.records)} configs compiled for {self.request.gpu.name}{first}",
            "check the toolkit with: sagegen doctor",
        )

    def decide(self) -> tuple[tuple[Entry, ...], dict[str, Path]]:
        """The best survivor of every case by the predicted full call, of those that pass the accuracy gate.

        Where that is not fine, the best one that is fine too.
        """
        entries, cubins = [], {}
        for problem, survivors in self.survivors.items():
            if not survivors:
                self.listen(Warned(self._why_nothing(problem)))
            defaults = [s for s in survivors if s.variant.config == self.defaults[problem]]
            for length in self.request.lengths if survivors else ():
                winners = self._winners(problem, length)
                if not winners:
                    self.listen(Decided(problem.name, length.bucket.name, "kernel", None, None, None))
                for tier, best in winners.items():
                    entries.append(self._entry(problem, length, tier, best))
                    cubins[best.built.cubin_sha256] = best.built.cubin
                    ratio = self._call_us(defaults[0], length) / self._call_us(best, length) if defaults else None
                    speed = None if ratio is None else PredictedRatio(ratio)
                    bucket = f"{length.bucket.name} ({tier})" if tier else length.bucket.name
                    self.listen(Decided(problem.name, bucket, "kernel", best.variant.config.name, speed, None))
        return tuple(entries), cubins

    def _why_nothing(self, problem: Problem) -> str:
        """What to say of a problem that gets no entry."""
        reasons = [record.reason for record in self.records if record.problem == problem.name]
        first = f"the first: {reasons[0]}" if reasons else "the run ended before that"
        return f"{problem.name} gets no entry: none of its {len(reasons)} configs that were compiled works; {first}"

    def _entry(self, problem: Problem, length: TunedLength, tier: Tier | None, best: _Survivor) -> Entry:
        gpu = self.request.gpu
        prediction = predict(best.variant.config, problem, tuned_shape(length), gpu, best.measured)
        record = self.records[self._record_index(best)]
        return structs.replace(predicted_entry(best.variant, best.built, length, prediction, gpu, record), tier=tier)

    def _winners(self, problem: Problem, length: TunedLength) -> dict[Tier | None, _Survivor]:
        """By tier: one for everyone where the best is fine, or where no fine one was found."""
        best = next((survivor for survivor, _ in self._passing(problem, length)), None)
        if best is None:
            return {}
        if is_fine(self.records[self._record_index(best)].figures, problem.precision):
            return {None: best}
        tried = itertools.islice(self._passing(problem, length), 1 + _FINE_TRIES)
        fine = next((s for s, figures in tried if figures and is_fine(figures, problem.precision)), None)
        return {"coarse": best, "fine": fine} if fine else {None: best}

    def _passing(
        self, problem: Problem, length: TunedLength
    ) -> Iterator[tuple[_Survivor, Mapping[str, Mapping[str, float]]]]:
        """The survivors that pass the gate, best first, with its figures, none where it did not judge.

        Those that fail are no survivors from then on, for every length.
        """
        for survivor in sorted(self.survivors[problem], key=lambda s: self._call_us(s, length)):
            verdict = self.keeper.judge(problem, survivor.variant.config)
            if verdict is None:
                yield survivor, {}
                continue
            index = self._record_index(survivor)
            figures = {kind: dict(values) for kind, values in verdict.figures.items()}
            if verdict.outcome == "ok":
                self.records[index] = replace(self.records[index], figures=figures)
                yield survivor, figures
                continue
            self.survivors[problem].remove(survivor)
            self._counts["ok"] -= 1
            failed = replace(self.records[index], outcome="accuracy", reason=verdict.reason, figures=figures)
            self.records[index] = failed
            self._tell(failed, problem)

    def _record_index(self, survivor: _Survivor) -> int:
        names = (survivor.variant.problem.name, survivor.variant.config.name)
        return next(i for i, record in enumerate(self.records) if (record.problem, record.config) == names)

    def _choose(self) -> Mapping[Problem, list[Variant]]:
        """Variants to compile: the default, then the model's favourites, each text once."""
        shapes = [tuned_shape(length) for length in self.request.lengths]
        trials = self.request.trials or DEFAULT_TRIALS
        chosen, total = {}, 0
        for problem in self.request.problems:
            self.listen(Preparing(self.request.gpu.name, problem.name))
            target = make_target(self.request, problem, self.toolkit)
            configs = all_searched_configs(target)
            total += len(configs)
            wanted = [self.defaults[problem], *promising_configs(configs, target, shapes, trials)]
            by_text = {(v := self.renderer.variant(problem, c)).blank_sha256: v for c in reversed(wanted)}
            chosen[problem] = list(reversed(by_text.values()))[:trials]
        names = tuple(problem.name for problem in self.request.problems)
        self.listen(Started(self.request.gpu.name, names, total, 0, offline=True))
        return chosen

    def _enter(self, variant: Variant, result: Built | BuildFailure) -> None:
        outcome, reason = self._judge(variant, result)
        built = result if isinstance(result, Built) else None
        record = Record(
            problem=variant.problem.name,
            config=variant.config.name,
            phase="build",
            outcome=outcome,
            gpu=self.request.gpu.name,
            protocol=PROTOCOL,
            text_sha256=variant.source.sha256,
            reason=reason,
            nvcc=self.toolkit.build,
            cubin_sha256=built.cubin_sha256 if built else "",
            code_sha256=built.code_sha256 if built else "",
            resources={role: asdict(used) for role, used in built.resources.items()} if built else {},
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            seconds=built.seconds if built else 0.0,
        )
        self.records.append(record)
        self._tell(record, variant.problem)

    def _tell(self, record: Record, problem: Problem) -> None:
        self._counts[record.outcome] += 1
        best, speed = self._best_so_far(problem)
        progress = len(self.records) / max(1, self._total)
        self.listen(Attempted(record, best, speed, dict(+self._counts), progress, self._left_s()))

    def _judge(self, variant: Variant, result: Built | BuildFailure) -> tuple[Outcome, str]:
        """The outcome of a build; variants worth ranking join the survivors."""
        if isinstance(result, BuildFailure):
            return result.outcome, result.reason
        used = result.resources["attention"]
        spilled = used.spill_store_bytes + used.spill_load_bytes
        smem = used.smem_bytes + make_layout(variant.config, variant.problem).smem_bytes
        is_default = variant.config == self.defaults[variant.problem]
        if smem > self.request.gpu.smem_per_block:
            return "constraint", f"takes {smem} bytes of shared memory, {self.request.gpu.name} has less"
        if spilled and not is_default:
            return "constraint", f"spills {spilled} bytes per thread"
        counts = count_tile(result.cubin, self.disassembler) if self.disassembler else None
        self.survivors[variant.problem].append(_Survivor(variant, result, Measured(used.registers, spilled, counts)))
        return "ok", ""

    def _best_so_far(self, problem: Problem) -> tuple[str | None, PredictedRatio | None]:
        """The best by the predicted full calls of all lengths together, and its speed over the default."""
        survivors = self.survivors[problem]
        if not survivors:
            return None, None
        cost = {id(s): sum(self._call_us(s, length) for length in self.request.lengths) for s in survivors}
        best = min(survivors, key=lambda s: cost[id(s)])
        default = next((s for s in survivors if s.variant.config == self.defaults[problem]), None)
        return best.variant.config.name, PredictedRatio(cost[id(default)] / cost[id(best)]) if default else None

    def _call_us(self, survivor: _Survivor, length: TunedLength) -> float:
        variant, gpu = survivor.variant, self.request.gpu
        return predict(variant.config, variant.problem, tuned_shape(length), gpu, survivor.measured).call_us

    def _left_s(self) -> float | None:
        if self.request.budget_s is None:
            return None
        return max(0.0, self.start + self.request.budget_s - time.monotonic())

    def _compiling_left_s(self) -> float | None:
        """Seconds until compiling must end, so that the gate has its share of the budget."""
        left = self._left_s()
        if left is None or self.request.budget_s is None or not self.keeper.is_open:
            return left
        return max(0.0, left - _GATE_SHARE * self.request.budget_s)
