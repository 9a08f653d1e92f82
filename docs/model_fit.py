"""Fits the coefficients of mma_cost.py and wgmma_cost.py that say `Fitted`: python docs/model_fit.py (docs/model.md).

Least squares of relative errors of kernel times, with no negative coefficient. A case of the model is linear in them:
so many tiles, so many blocks, times what each term counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sagegen.gpu import find_gpu
from sagegen.layout import ceil_div, make_layout
from sagegen.problem import Problem, Shape, parse_problem
from sagegen.space import parse_config
from sagegen.tuning import mma_cost, wgmma_cost
from sagegen.tuning.journal import attempts, read_journal
from sagegen.tuning.model import Measured, estimate_occupancy, predict
from sagegen.tuning.tile_cost import Tile

RUNS = Path(__file__).parent / "gpu-runs"
GPU = find_gpu("h200")
MMA = ("2026-11-29-h200-bf16",)
WGMMA = ("2026-11-30-h200-bf16", "2026-11-30b-h200-bf16", "2026-11-30c-h200-fp16")
MMA_TERMS = ("matrix", "issue", "mufu", "half_rate", "shared", "local", "output", "mask", "block")
WGMMA_TERMS = ("exact", "packed", "row sum", "update", "tile", "block", "causal", "output", "mask")


def read(names: Sequence[str], family: str) -> Iterator[tuple[Problem, Any, Shape, Measured, float]]:
    """Every measured config of a family at each of its lengths, with its kernel time in microseconds."""
    for name in names:
        for record in attempts(read_journal(RUNS / f"{name}-journal.jsonl.gz")).values():
            if record.outcome != "ok" or record.shared_from or not record.config.startswith(f"{family}_"):
                continue
            used = record.resources["attention"]
            measured = Measured(used["registers"], used["spill_store_bytes"] + used["spill_load_bytes"])
            for s in record.samples:
                shape = Shape(s.batch, s.heads_q, s.heads_kv, s.tokens, s.tokens)
                yield parse_problem(record.problem), parse_config(record.config), shape, measured, s.median_us


def lay_out(problem: Problem, config: Any, shape: Shape, measured: Measured) -> tuple[Tile, float, float]:
    """The mean tile, microseconds per clock of a block, and the warps that share a scheduler."""
    occupancy = estimate_occupancy(config, problem, GPU, measured).blocks_per_sm
    blocks = shape.batch * shape.heads_q * ceil_div(shape.q_len, config.block_q)
    per_clock = blocks / GPU.sms / GPU.boost_mhz
    if not problem.is_causal:  # half of what the last wave leaves empty, as the model has it
        waves, rest = divmod(blocks, GPU.sms * occupancy)
        in_step = (waves * occupancy + ceil_div(rest, GPU.sms)) * GPU.sms / blocks
        per_clock *= (1 + in_step) / 2
    tiles = mean_tiles(problem, config.block_q, config.block_k, shape.q_len)
    tile = Tile(config, problem, make_layout(config, problem), GPU, tiles, measured.spill_bytes)
    return tile, per_clock, occupancy * config.warps / 4


def mean_tiles(problem: Problem, block_q: int, block_k: int, tokens: int) -> float:
    """Key tiles that a query tile visits."""
    if not problem.is_causal:
        return ceil_div(tokens, block_k)
    rows = range(0, tokens, block_q)
    return sum(ceil_div(min(row + block_q, tokens), block_k) for row in rows) / len(rows)


def mma_terms(tile: Tile, warps: float) -> list[float]:
    units = mma_cost._unit_clocks(tile)
    lone = max(mma_cost._MOST_GAIN, 1 + mma_cost._LONE_WARP * (1 / warps - 0.5))
    return [
        *(tile.tiles * lone * units[n] for n in MMA_TERMS[:6]), float(tile.outputs), float(tile.masked_scores), 1.0,
    ]  # fmt: skip


def wgmma_terms(tile: Tile, warps: float) -> list[float]:
    config = tile.config
    scores, exact = config.block_q * config.block_k, wgmma_cost._exact_share(config)
    gap = tile.tiles * wgmma_cost._GAPS[config.consumers, config.schedule]
    of_warps = config.warps * (1 + wgmma_cost._SPAN_SHARE * (tile.layout.k_spans - 1))
    return [
        gap * scores * exact, gap * scores * (1 - exact), gap * scores * (config.row_sum == "fadd"),
        gap * wgmma_cost._updates(config) * tile.outputs, gap * of_warps, 1.0, float(tile.problem.is_causal),
        float(tile.outputs), float(tile.masked_scores),
    ]  # fmt: skip


def wgmma_fixed(tile: Tile) -> float:
    queries = wgmma_cost._QUERY_CLOCKS * tile.outputs if tile.config.q_quantizer == "prologue" else 0.0
    return tile.tiles * wgmma_cost.wgmma_tile_cost(tile).units["matrix"] + queries


def fit(
    names: Sequence[str],
    family: str,
    labels: Sequence[str],
    terms: Callable[[Tile, float], list[float]],
    fixed: Callable[[Tile], float] = lambda tile: 0.0,
) -> None:
    """Print the coefficients, the spread of the relative errors, and that of the model as it is."""
    rows, rest, as_is = [], [], []
    for problem, config, shape, measured, us in read(names, family):
        tile, per_clock, warps = lay_out(problem, config, shape, measured)
        rows.append(np.array(terms(tile, warps)) * per_clock / us)
        rest.append(1 - fixed(tile) * per_clock / us)
        as_is.append(predict(config, problem, shape, GPU, measured).kernel_us / us - 1)
    matrix, wanted = np.array(rows), np.array(rest)
    kept = list(range(len(labels)))
    while True:  # a coefficient that would be negative is none
        found = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int(np.argmin(found)))
    errors = matrix[:, kept] @ found - wanted
    values = dict.fromkeys(labels, 0.0) | {labels[k]: float(v) for k, v in zip(kept, found, strict=True)}
    print(f"{family}, {len(rows)} times of {', '.join(names)}")
    print("  " + ", ".join(f"{label} {value:.4g}" for label, value in values.items()))
    print(f"  standard deviation of relative errors {np.std(errors):.4f}, of the model as it is {np.std(as_is):.4f}")


if __name__ == "__main__":
    fit(MMA, "mma", MMA_TERMS, mma_terms)
    fit(WGMMA, "wgmma", WGMMA_TERMS, wgmma_terms, wgmma_fixed)
