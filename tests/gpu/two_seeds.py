"""Two tunes with different seeds, then their winners and the best ever seen raced in the same rounds; no test.

    python tests/gpu/two_seeds.py --out $OUT --budget 110s
    python tests/gpu/two_seeds.py --out $OUT --budget 110s --resume-from earlier
    python tests/gpu/two_seeds.py --out $OUT --race-only --resume-from earlier

Problems: head dim 128, not causal, at 16K tokens; head dim 64, causal, at 4K. Each tune begins from the default config,
with a journal of its own: what won before is left out (`--incumbent default`). --out gets the journals, packed after
each tune, race.json and race.md; --resume-from names a folder that was an earlier --out, and its tunes go on. A sitting
takes problems x seeds x --budget, and about a minute for the races.

A race has the winners of every seed, of both tiers, what ships in the registry, and the winners of the journals in
--best. All pass the accuracy gate first. Figures are of full calls, paired by round, with 95 % intervals. Exits with 1
where the seeds' fastest configs are more than 2 % apart, or one is more than 3 % behind the fastest of all.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sagegen.entry import is_fine
from sagegen.env import read_env
from sagegen.gpu import find_gpu
from sagegen.measuring.jobs import Candidate, Finals, Gate
from sagegen.measuring.subjects import build_pairs, require_gpu
from sagegen.measuring.verdict import compare
from sagegen.measuring.worker import Worker
from sagegen.problem import TUNED_LENGTHS, Problem, TunedLength, parse_problem
from sagegen.registry import load_registry
from sagegen.rules import Target, broken_rules
from sagegen.space import Config, parse_config
from sagegen.toolkit import find_toolkit
from sagegen.tuning.distances import find_distances
from sagegen.tuning.examine import tuned_shape
from sagegen.tuning.journal import read_journal

CASES = (("d128_bf16_full_int8", 16384), ("d64_bf16_causal_int8", 4096))
SEEDS_AGREE = 1.02
NEAR_THE_BEST = 1.03
ROUNDS = 60
PROCESSES = 2  # each races everyone; their rounds are put together
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Race:
    """Times of full calls, in microseconds, by config, paired by round.

    Attributes:
        origins: who named each config: seeds, the registry, journals.
        fine: whether callers that ask for fine results may get it.
    """

    name: str
    calls: Mapping[Config, Sequence[float]]
    origins: Mapping[Config, Sequence[str]]
    fine: Mapping[Config, bool]

    @property
    def ranked(self) -> list[Config]:
        return sorted(self.calls, key=lambda config: statistics.median(self.calls[config]))

    def best_of(self, seed: int) -> Config | None:
        """The fastest of what a seed's tune found."""
        found = (config for config in self.ranked if f"seed {seed}" in self.origins[config])
        return next(found, None)

    def against(self, config: Config, other: Config) -> tuple[float, float, float]:
        """How many times slower `config` is than `other`, and the interval."""
        verdict = compare(self.calls[config], self.calls[other])
        return verdict.ratio, verdict.low, verdict.high


def main() -> None:
    asked = read_arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.work.mkdir(parents=True, exist_ok=True)
    cases = [(parse_problem(CASES[n][0]), length_of(CASES[n][1])) for n in asked.cases]
    for (problem, _), seed in itertools.product(cases, asked.seeds):
        packed = f"{journal_name(asked.gpu, problem, seed)}.gz"
        if asked.resume_from and (asked.resume_from / packed).exists():
            data = gzip.decompress((asked.resume_from / packed).read_bytes())
            (asked.work / journal_name(asked.gpu, problem, seed)).write_bytes(data)
    for (problem, length), seed in itertools.product(cases, asked.seeds) if not asked.race_only else ():
        tune(asked.gpu, problem, length, seed, asked.budget, asked.work)
        name = journal_name(asked.gpu, problem, seed)
        (asked.out / f"{name}.gz").write_bytes(gzip.compress((asked.work / name).read_bytes(), mtime=0))
    races = [race(asked.gpu, *case, asked.seeds, asked.work, asked.best) for case in cases]
    (asked.out / "race.json").write_text(json.dumps([as_values(own) for own in races]) + "\n")
    reports = [report(own, asked.seeds) for own in races]
    text = "\n".join(text for text, _ in reports)
    (asked.out / "race.md").write_text(text)
    print(text)
    if not all(holds for _, holds in reports):
        raise SystemExit(1)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--out", type=Path, required=True, help="folder for packed journals and the race")
    parser.add_argument("--work", type=Path, default=Path("/tmp/two-seeds"), help="folder of journals and registries")
    parser.add_argument("--budget", default="110s", help="of each tune, finals included; as `sagegen tune --budget`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", type=int, nargs="+", default=[0, 1], help="which of the two problems")
    parser.add_argument("--resume-from", type=Path, help="folder that an earlier --out was")
    parser.add_argument("--best", type=Path, default=Path("docs/gpu-runs"), help="folder of packed journals")
    parser.add_argument("--race-only", action="store_true")
    return parser.parse_args()


def length_of(tokens: int) -> TunedLength:
    return next(length for length in TUNED_LENGTHS if length.tokens == tokens)


def journal_name(gpu: str, problem: Problem, seed: int) -> str:
    return f"{gpu}-{problem.name}-seed{seed}.jsonl"


def tune(gpu: str, problem: Problem, length: TunedLength, seed: int, budget: str, work: Path) -> None:
    """One sitting; it goes on from its journal.

    Raises:
        CalledProcessError: the tune failed.
    """
    journal = work / journal_name(gpu, problem, seed)
    mask = "--causal" if problem.is_causal else "--full"
    print(f"## {problem.name} at {length.tokens}, seed {seed}", flush=True)
    command = [
        *(sys.executable, "-c", "from sagegen.cli.main import main; main()", "tune", "--gpu", gpu),
        *("--head-dim", str(problem.head_dim), "--dtype", problem.dtype, mask, "--tokens", str(length.tokens)),
        *("--seed", str(seed), "--budget", budget, "--incumbent", "default", "--devices", "1"),
        *("--journal", str(journal), "-o", str(journal.with_suffix(".yaml"))),
    ]
    subprocess.run(command, check=True)


def contestants(
    gpu: str, problem: Problem, length: TunedLength, seeds: Iterable[int], work: Path, best: Path
) -> Iterator[tuple[str, str]]:
    """Who races: (config name, who named it)."""
    journals = {f"seed {seed}": work / journal_name(gpu, problem, seed) for seed in seeds}
    journals |= {path.name.removesuffix("-journal.jsonl.gz"): path for path in sorted(best.glob("*journal.jsonl.gz"))}
    for origin, path in journals.items():
        own = (r for r in read_journal(path) if (r.gpu, r.problem) == (gpu, problem.name))
        for case in find_distances(own):
            if case.tokens == length.tokens:
                yield case.distances[0].config, origin
    for layer in load_registry(gpu, read_env()).layers:
        for entry in layer.entries:
            if entry.problem == problem.name and entry.lengths.holds(length.tokens) and entry.config:
                yield entry.config, f"{entry.provenance.kind} entry"


def race(gpu_name: str, problem: Problem, length: TunedLength, seeds: Iterable[int], work: Path, best: Path) -> Race:
    """Everyone that is valid today and passes the gate."""
    gpu, env = find_gpu(gpu_name), read_env()
    device = require_gpu(gpu, "the race is run")
    target = Target(gpu, problem, find_toolkit(env).version)
    origins: dict[Config, list[str]] = {}
    for name, origin in contestants(gpu_name, problem, length, seeds, work, best):
        config = parse_config(name)
        if not broken_rules(config, target) and origin not in origins.setdefault(config, []):
            origins[config].append(origin)
    cubins = build_pairs(gpu, [(problem, config) for config, named in origins.items() if named], env)
    candidates = {config: Candidate(str(path), problem.name, config.name) for (_, config), path in cubins.items()}
    calls: dict[Config, list[float]] = {}
    fine: dict[Config, bool] = {}
    for process in range(PROCESSES):
        with Worker(device.index) as worker:
            if process == 0:
                fine = gate(worker, candidates, problem)
                candidates = {config: candidates[config] for config in fine}
            job = Finals(tuple(candidates.values()), tuned_shape(length), rounds=ROUNDS, seed=process)
            reply = worker.run(job, TIMEOUT_S)
            if reply.outcome != "ok":
                raise SystemExit(f"the race of {problem.name} ended with {reply.outcome}: {reply.reason}")
            for config, times in zip(candidates, reply.data["call_us"], strict=True):
                calls.setdefault(config, []).extend(times)
    return Race(f"{problem.name} at {length.tokens} tokens", calls, origins, fine)


def gate(worker: Worker, candidates: Mapping[Config, Candidate], problem: Problem) -> dict[Config, bool]:
    """Those that pass the accuracy gate, and whether they are fine."""
    passed = {}
    for config, candidate in candidates.items():
        reply = worker.run(Gate(candidate), TIMEOUT_S)
        if reply.outcome == "ok":
            passed[config] = is_fine(reply.data["figures"], problem.precision)
        else:
            print(f"left out: {config.name}: {reply.outcome}: {reply.reason}", flush=True)
    return passed


def as_values(race: Race) -> dict[str, object]:
    rows = [
        {
            "config": config.name,
            "origins": race.origins[config],
            "fine": race.fine[config],
            "call_us": race.calls[config],
        }
        for config in race.ranked
    ]
    return {"race": race.name, "rows": rows}


def report(race: Race, seeds: Sequence[int]) -> tuple[str, bool]:
    """A race as Markdown, and whether seeds and best are as near to each other as they must be."""
    ranked = race.ranked
    lines = [f"## {race.name}", "", "| config | named by | tier | full call us | slower than the fastest |"]
    lines.append("|---|---|---|---|---|")
    for config in ranked:
        tier = "fine" if race.fine[config] else "coarse"
        median = statistics.median(race.calls[config])
        behind = ratio_text(race.against(config, ranked[0]))
        lines.append(f"| `{config.name}` | {', '.join(race.origins[config])} | {tier} | {median:.1f} | {behind} |")
    lines.append("")
    holds = True
    winners = {seed: race.best_of(seed) for seed in seeds}
    for seed, config in winners.items():
        if config is None:
            lines.append(f"- seed {seed} found nothing that passes")
            holds = False
            continue
        behind = race.against(config, ranked[0])
        holds &= behind[0] <= NEAR_THE_BEST
        lines.append(
            f"- seed {seed} is {ratio_text(behind)} times the fastest of all; at most {NEAR_THE_BEST} is asked"
        )
    for (one, first), (two, second) in itertools.combinations(winners.items(), 2):
        if first is not None and second is not None:
            apart = race.against(first, second)
            holds &= 1 / SEEDS_AGREE <= apart[0] <= SEEDS_AGREE
            lines.append(f"- seed {one} takes {ratio_text(apart)} times seed {two}; within {SEEDS_AGREE} is asked")
    return "\n".join([*lines, ""]), holds


def ratio_text(ratio: tuple[float, float, float]) -> str:
    return f"{ratio[0]:.4f} ({ratio[1]:.4f} to {ratio[2]:.4f})"


if __name__ == "__main__":
    main()
