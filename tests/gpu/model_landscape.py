"""Samplers on a whole space, with the model's predicted times in place of measured ones; no test, and no GPU.

    python tests/gpu/model_landscape.py d64_bf16_causal_int8 d128_bf16_full_int8 --seeds 8

A replay knows only configs that were measured, a hundred of tens of thousands. Here every config of the space has a
time: what the model predicts, with 0.3 % of noise. None is a measurement: they say how samplers do on a landscape of
that size and shape, nothing of any kernel. Searches begin with the default config alone. Prints, by sampler, how far
the best config found is behind the best of the space, at the length where it is farthest: mean and worst over seeds.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Mapping

from sagegen.gpu import find_gpu
from sagegen.problem import TUNED_LENGTHS, parse_problem
from sagegen.rules import Target, all_searched_configs, default_config
from sagegen.space import Config
from sagegen.tuning.examine import tuned_shape
from sagegen.tuning.journal import Record, Samples
from sagegen.tuning.model import predict
from sagegen.tuning.search import Searcher
from sagegen.tuning.strategy import Sampler, Strategy

LENGTHS = TUNED_LENGTHS[::2]
BATCH = 8  # asked at once, as a run with one GPU and many cores does
NOISE = 0.003
SAMPLERS: tuple[Sampler, ...] = ("tpe", "neighbour", "random")

Times = Mapping[Config, Mapping[int, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="+")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--trials", type=int, default=120)
    asked = parser.parse_args()
    for name in asked.problems:
        target = Target(find_gpu(asked.gpu), parse_problem(name))
        times: Times = {
            config: {t.tokens: predict(config, target.problem, tuned_shape(t), target.gpu).call_us for t in LENGTHS}
            for config in all_searched_configs(target)
        }
        print(f"{name} on {asked.gpu}: {len(times)} configs, {asked.trials} trials, {asked.seeds} seeds", flush=True)
        for sampler in SAMPLERS:
            gaps = [search(target, times, sampler, seed, asked.trials) for seed in range(asked.seeds)]
            print(f"  {sampler}: {statistics.mean(gaps):.1%} behind on average, at worst {max(gaps):.1%}", flush=True)


def search(target: Target, times: Times, sampler: Sampler, seed: int, trials: int) -> float:
    """How far the best found is behind, at the length where that is farthest."""
    noise = random.Random(seed)
    strategy = Strategy(sampler, starts=0)
    searcher = Searcher(target, list(times), first=[default_config(target)], strategy=strategy, seed=seed)
    found = dict.fromkeys((length.tokens for length in LENGTHS), math.inf)
    for told in range(0, trials, BATCH):
        for config in searcher.ask(BATCH, told / trials):
            own = times[config]
            samples = tuple(Samples(tokens, 1, 32, 32, (us * noise.gauss(1, NOISE),)) for tokens, us in own.items())
            record = Record(target.problem.name, config.name, "screen", "ok", target.gpu.name, 0, "", samples=samples)
            searcher.tell(config, record)
            found = {tokens: min(us, own[tokens]) for tokens, us in found.items()}
    return max(us / min(own[tokens] for own in times.values()) - 1 for tokens, us in found.items())


if __name__ == "__main__":
    main()
