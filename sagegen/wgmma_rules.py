"""The `wgmma` family's rules and its default config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sagegen.e4m3_rules import E4M3_OPERANDS, E4M3_SCORES, e4m3_operands_margin, e4m3_scores_margin
from sagegen.layout import make_layout
from sagegen.problem import Precision, Problem
from sagegen.rule import Rule, Target, limit_rule
from sagegen.smoothing_rules import (
    BALANCE,
    RAGGED,
    SEARCHED,
    SEARCHED_BALANCE,
    SMOOTH_Q,
    balance_margin,
    ragged_margin,
    searched_balance_margin,
    searched_margin,
    smooth_q_margin,
)
from sagegen.space import WgmmaConfig

#: Registers per thread that the loop needs beside its tiles, at least. nvcc 13.0 on the 216 configs of two stages that
#: keep the other rules (templates of 22b6959): with 24 or more spare none spills, with 4 to 16 ten of them do, up to 60
#: bytes; with -20 or fewer ptxas spills hundreds and serializes the products (C7512).
OTHER_REGISTERS = 4


def tile_registers(config: WgmmaConfig, problem: Problem) -> int:
    """Registers per thread that a config's tiles must hold at once: O, the scores, P, and a tile's own P V.

    With `overlap` the tensor core still reads one tile's P while the next tile's is made.
    """
    output = problem.head_dim // 2 + (4 if config.row_sum == "ones" else 0)
    scores = config.block_k // 2
    p_operand = config.block_k // 8
    return (
        output * (2 if config.accumulation == "two" else 1)
        + scores
        + p_operand * (2 if config.schedule == "overlap" else 1)
    )


def _registers(config: WgmmaConfig, target: Target) -> tuple[int, int]:
    """Per thread: what a config needs, and what a consumer has."""
    return tile_registers(config, target.problem) + OTHER_REGISTERS, config.consumer_registers


def _smem(config: WgmmaConfig, target: Target) -> tuple[int, int]:
    """Bytes of a block, and the GPU's limit."""
    return make_layout(config, target.problem).smem_bytes, target.gpu.smem_per_block


def _two_level(config: WgmmaConfig, _: Target) -> float:
    if config.accumulation == "one":
        return 0
    return config.consumers - 2 + max(0, config.block_k - 128)


def _overlap(config: WgmmaConfig, _: Target) -> float:
    if config.schedule == "plain":
        return 0
    kept = (config.accumulation == "one", config.row_sum == "ones", config.rescale == "skip", config.consumers == 2)
    return kept.count(False)


def _packed(config: WgmmaConfig, _: Target) -> float:
    return 1 if config.bounds_steps and config.row_sum != "ones" else 0


def _exponent(config: WgmmaConfig, target: Target) -> float:
    return 1 if config.bounds_steps and target.problem.precision == "int4" else 0


def _spans(config: WgmmaConfig, _: Target) -> float:
    """A packed exponent takes one step for all of a row's scores."""
    if config.bounds_steps:
        return abs(config.block_k - config.k_span)
    return config.block_k % config.k_span


def _plain_scores(config: WgmmaConfig, _: Target) -> float:
    prepared = config.smooths_q or config.rotates
    return (prepared and config.bounds_steps) + (prepared and config.q_quantizer == "prologue")


#: Of rules that no parameter decides: judged with the first one that is chosen.
_ANY = ("consumers",)

WGMMA_RULES: tuple[Rule[WgmmaConfig], ...] = (
    Rule("arch", "wgmma is an instruction of sm_90a alone", lambda _, t: abs(t.gpu.compute_capability - 90),
         reads=_ANY),
    Rule("head_dim", "O of 256 channels is half of a thread's registers, and with sums of rows wider than one wgmma",
         lambda _, t: max(0, t.problem.head_dim - 128), reads=_ANY),
    Rule("toolkit", "bulk copies into a block's own shared memory came with PTX 8.6, nvcc 12.8",
         lambda _, t: 0 if t.toolkit >= (12, 8) else 1, reads=_ANY),
    Rule("spans", "scale spans divide a tile; the packed exponent has one step, hence one span, for a tile", _spans,
         reads=("block_k", "k_span", "exponent")),
    Rule("two_level", "a tile's own P V leaves room for two consumers and tiles of 128 keys at most", _two_level,
         reads=("consumers", "block_k", "accumulation")),
    Rule("overlap", "two products at once: two consumers, and O is rescaled and summed in place", _overlap,
         reads=("consumers", "schedule", "accumulation", "rescale", "row_sum")),
    Rule("packed", "a packed P is never a float, so the tensor core sums it", _packed, reads=("row_sum", "exponent")),
    Rule("smooth_q", SMOOTH_Q, smooth_q_margin, reads=("consumers", "mean_span", "delta")),
    Rule("ragged", RAGGED, ragged_margin, reads=("mean_span",)),
    Rule("ragged_queries", "the prologue fetches query tiles of one length for all batch items",
         lambda c, t: int(t.problem.is_ragged and c.q_quantizer == "prologue"), reads=("q_quantizer",)),
    Rule("balance", BALANCE, balance_margin, reads=("mean_span", "balance")),
    Rule("plain_scores", "the packed exponent works on whole scores and bounds K by its range, and the prologue "
         "quantizes Q as it comes: neither knows delta S or rotation", _plain_scores,
         reads=("exponent", "q_quantizer", "mean_span", "rotate")),
    Rule("e4m3_operands", E4M3_OPERANDS, e4m3_operands_margin, reads=("qk",)),
    Rule("e4m3_exponent", "a packed exponent reads the upper half of an integer score's bits; sums of e4m3 are floats",
         lambda c, _: 1 if c.has_float_scores and c.bounds_steps else 0, reads=("exponent", "qk")),
    Rule("exponent", "a packed exponent reads the upper half of a score's bits, INT4's is in the lower", _exponent,
         reads=("exponent",)),
    limit_rule("smem", "shared memory of one block fits the GPU's opt-in limit", _smem, "bytes",
         reads=("consumers", "block_k", "stages", "accumulation", "k_span", "row_sum", "q_quantizer", "mean_span",
                "delta")),
    limit_rule("registers", "the tiles fit a consumer's registers: 240 or 232 a thread of two, 160 of three",
         _registers, "registers", reads=("consumers", "block_k", "schedule", "accumulation", "row_sum", "q_quantizer")),
)  # fmt: skip


WGMMA_SEARCH_RULES: tuple[Rule[WgmmaConfig], ...] = (
    Rule("searched", SEARCHED, searched_margin, reads=("consumers", "mean_span", "rotate")),
    Rule("searched_balance", SEARCHED_BALANCE, searched_balance_margin, reads=("balance",)),
    Rule("e4m3_scores", E4M3_SCORES, e4m3_scores_margin, reads=("qk",)),
)


def default_wgmma_config(precision: Precision = "int8") -> WgmmaConfig:
    """The exact exponent on three consumers: fastest on an H200 of those that need no run-time fallback."""
    is_int4 = precision == "int4"  # what 15 values need: smoothed Q, and rotation
    return WgmmaConfig(
        consumers=3,
        block_k=128,
        stages=3,
        schedule="plain",
        accumulation="one",
        k_span=64,
        rescale="skip",
        row_sum="ones",
        exponent="mufu",
        launch="early",
        q_quantizer="kernel",
        mean_span=192 if is_int4 else 0,
        delta="f16" if is_int4 else "f32",
        rotate="yes" if is_int4 else "no",
    )


def wgmma_with_steps(config: WgmmaConfig, wanted: Mapping[str, bool]) -> WgmmaConfig:
    """A default config with these steps of the quantizer; `wanted` says of each whether it is taken."""
    if not wanted["smooths_v"]:
        config = replace(config, consumers=2, accumulation="two")
    config = replace(config, rotate="yes" if wanted["rotates"] else "no")
    if not wanted["smooths_q"]:
        return replace(config, mean_span=0, delta="f32")
    if config.smooths_q:
        return replace(config, mean_span=config.block_q)
    # one span of scales: delta S then costs 3 % of the kernel, with two spans 6 % (docs/gpu-runs/2026-11-30e-h200.md)
    return replace(config, mean_span=config.block_q, k_span=config.block_k)
