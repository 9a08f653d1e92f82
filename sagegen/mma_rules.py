"""The `mma` family's rules and its default config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sagegen.e4m3_rules import E4M3_OPERANDS, E4M3_SCORES, e4m3_operands_margin, e4m3_scores_margin
from sagegen.layout import make_layout
from sagegen.problem import Problem
from sagegen.rule import Rule, Target, Version, limit_rule
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
from sagegen.space import MmaConfig

#: Registers per thread that the loop needs beside its tiles: addresses, row maxima, sums, scales, loop state.
OTHER_REGISTERS = 40
_MAX_REGISTERS = 255
#: Shared memory that the driver keeps for itself in every resident block (CUDA programming guide, sm_80 and later).
_RESERVED_SMEM = 1024
#: Largest finite FP16 number.
FP16_MAX = 65504
#: p_max and v_max that tuning takes for FP16 sums of so many keys: SageAttention2++'s for two instructions, and for one
#: and four what fills the range as well. Others that fill it are as fast and as accurate (docs/numerics.md).
FP16_PEAKS = {32: (448, 4.5), 64: (224, 4.5), 128: (224, 2.25)}


def accumulator_registers(config: MmaConfig, problem: Problem) -> int:
    """Registers per thread that a config's tiles must hold at once: O, the scores, and what else lives in registers."""
    m_tiles = max(1, config.rows_per_warp // 16)
    output = m_tiles * problem.head_dim // 2
    scores = m_tiles * config.block_k // 2
    steps = problem.head_dim // (64 if config.qk == "s4" else 32)
    query = 4 * m_tiles * (steps if config.q_operand == "reg" else 1)
    return output + scores + query


def _registers(config: MmaConfig, target: Target) -> tuple[int, int]:
    """Per thread: what a config needs, and what there is."""
    limit = min(_MAX_REGISTERS, 65536 // (config.threads * config.min_blocks))
    return accumulator_registers(config, target.problem) + OTHER_REGISTERS, limit


def _smem(config: MmaConfig, target: Target) -> tuple[int, int]:
    """Bytes of a block, and the GPU's limit."""
    return make_layout(config, target.problem).smem_bytes, target.gpu.smem_per_block


def _residency(config: MmaConfig, target: Target) -> tuple[int, int]:
    """Bytes of the blocks that are to be resident, and what an SM has."""
    used = config.min_blocks * (make_layout(config, target.problem).smem_bytes + _RESERVED_SMEM)
    return used, target.gpu.smem_per_sm


def _threads(config: MmaConfig, target: Target) -> tuple[int, int]:
    return config.min_blocks * config.threads, target.gpu.threads_per_sm


def _rows(config: MmaConfig, _: Target) -> tuple[int, int]:
    return config.rows_per_warp, 32


def _pv_dtype(config: MmaConfig, target: Target) -> float:
    wanted = {"fp16": "f16f32", "bf16": "bf16f32"}[target.problem.dtype]
    return 0 if config.quantizes_v or config.pv == wanted else 1


def _pv_arch(config: MmaConfig, target: Target) -> float:
    return 89 - target.gpu.compute_capability if config.quantizes_v else 0


def _toolkit(config: MmaConfig, target: Target) -> float:
    has_fp8 = config.quantizes_v or config.has_float_scores
    is_new = target.gpu.compute_capability >= 100 or config.sums_in_fp16
    needed: Version = (12, 8) if is_new else (12, 4) if has_fp8 else (12, 0)
    return 0 if target.toolkit >= needed else 1


def _fp16_sum(config: MmaConfig, _: Target) -> float:
    return max(0, largest_sum(config) - FP16_MAX) if config.sums_in_fp16 else 0


def largest_sum(config: MmaConfig) -> float:
    """Of the products of P and V between two promotions, if all are as large as they can be.

    No P exceeds p_max, nor a V v_max, after they were rounded: see `softmax_tile` of templates/attention_mma.cu.j2.
    """
    return config.p_max * config.v_max * config.accum_depth


def _explain_sum(config: MmaConfig, _: Target) -> str:
    return f"{config.p_max} * {config.v_max} * {config.accum_depth} keys = {largest_sum(config):.9g}"


def _peaks(config: MmaConfig, _: Target) -> float:
    return 0 if config.sums_in_fp16 else abs(448 - config.p_max) + abs(448 - config.v_max)


def _fp16_peaks(config: MmaConfig, _: Target) -> float:
    if not config.sums_in_fp16 or (config.p_max, config.v_max) == FP16_PEAKS.get(config.accum_depth):
        return 0
    return 1


def _accum_depth(config: MmaConfig, _: Target) -> float:
    if not config.quantizes_v:
        return config.accum_depth
    if config.accum_depth == 0:
        return 0 if config.smooths_v and not config.sums_in_fp16 else 1
    return config.accum_depth - config.block_k


def _int4_units(config: MmaConfig, target: Target) -> float:
    return 1 if config.qk == "s4" and "s4" not in target.gpu.peaks else 0


def _e4m3_arch(config: MmaConfig, target: Target) -> float:
    return 89 - target.gpu.compute_capability if config.has_float_scores else 0


def _spans(config: MmaConfig, _: Target) -> float:
    if config.granularity == "block":  # spans are not used: one spelling only
        return abs(config.q_span - 32) + abs(config.k_span - 64)
    return max(config.k_span - config.block_k, config.q_span - config.block_q)


#: Parameters that the sizes of tiles in shared memory follow from.
_TILES = ("block_q", "block_k", "stages", "pv", "granularity", "k_span", "q_operand", "mean_span", "delta", "qk")

MMA_RULES: tuple[Rule[MmaConfig], ...] = (
    Rule("pv_arch", "e4m3 matrix products need sm_89 or later", _pv_arch, reads=("pv",)),
    Rule("pv_dtype", "P·V in 16 bits takes V as it is, so its type is the problem's dtype", _pv_dtype, reads=("pv",)),
    Rule("int4_operands", "two values in a byte are INT4's; INT8 has none to halve",
         lambda c, t: 1 if c.qk == "s4" and t.problem.precision != "int4" else 0, reads=("qk",)),
    Rule("int4_magic", "the bias costs P up to 1.5 steps of a score, which for INT4 are worth 330 of INT8's: rows of 0",
         lambda c, t: 1 if c.conversion == "magic" and t.problem.precision == "int4" else 0, reads=("conversion",)),
    Rule("int4_units", "sm_80, 86 and 89 have INT4 units; later ones have a routine of 190 instructions", _int4_units,
         reads=("qk",)),
    Rule("e4m3_arch", "e4m3 matrix products need sm_89 or later", _e4m3_arch, reads=("qk",)),
    Rule("e4m3_operands", E4M3_OPERANDS, e4m3_operands_margin, reads=("qk",)),
    Rule("e4m3_conversion", "sums of e4m3 products are floats already: one spelling, i2f",
         lambda c, _: 1 if c.has_float_scores and c.conversion != "i2f" else 0, reads=("conversion", "qk")),
    Rule("toolkit", "nvcc 12.4 brought e4m3 mma.sync, 12.8 its FP16 sums and sm_120", _toolkit, reads=("pv", "qk")),
    Rule("rows_low", "a warp owns at least one 16-row MMA tile",
         lambda c, _: 16 - c.rows_per_warp, reads=("block_q", "warps")),
    limit_rule("rows_high", "more than 32 query rows per warp do not fit its registers", _rows, "rows",
               reads=("block_q", "warps")),
    Rule("accum_depth", "FP8 sums are promoted within the tile, or in FP32 never (0) where V is smoothed; 16 bits: 0",
         _accum_depth, reads=("block_k", "pv", "accum_depth", "smooth_v")),
    Rule("spans", "a scale span lies inside its tile; `block` scales have no span", _spans,
         reads=("block_q", "block_k", "granularity", "q_span", "k_span")),
    Rule("smooth_q", SMOOTH_Q, smooth_q_margin, reads=("block_q", "mean_span", "delta")),
    Rule("ragged", RAGGED, ragged_margin, reads=("mean_span",)),
    Rule("balance", BALANCE, balance_margin, reads=("mean_span", "balance")),
    limit_rule("smem", "shared memory of one block fits the GPU's opt-in limit", _smem, "bytes", reads=_TILES),
    limit_rule("residency", "min_blocks blocks fit one SM's shared memory", _residency, "bytes",
               reads=(*_TILES, "min_blocks")),
    limit_rule("threads", "min_blocks blocks fit one SM's threads", _threads, "threads",
               reads=("warps", "min_blocks")),
    limit_rule("registers", "the tiles fit the registers that min_blocks leaves a thread", _registers, "registers",
               reads=("block_q", "block_k", "warps", "q_operand", "min_blocks", "qk")),
    Rule("smooth_v", "V in 16 bits is taken as it is", lambda c, _: c.smooths_v and not c.quantizes_v,
         reads=("pv", "smooth_v")),
    Rule("peaks", "P and V fill e4m3's range, up to 448, unless their sums are in FP16", _peaks,
         reads=("pv", "p_max", "v_max")),
    Rule("fp16_sum", f"p_max * v_max * keys between promotions fit FP16, {FP16_MAX}", _fp16_sum,
         reads=("pv", "accum_depth", "p_max", "v_max"), numbers=_explain_sum),
)  # fmt: skip

MMA_SEARCH_RULES: tuple[Rule[MmaConfig], ...] = (
    Rule("searched", SEARCHED, searched_margin, reads=("block_q", "mean_span", "rotate")),
    Rule("searched_balance", SEARCHED_BALANCE, searched_balance_margin, reads=("balance",)),
    Rule("e4m3_scores", E4M3_SCORES, e4m3_scores_margin, reads=("qk",)),
    Rule("fp16_peaks", "p_max and v_max change what FP16 sums are worth, not their speed", _fp16_peaks,
         reads=("pv", "accum_depth", "p_max", "v_max")),
)  # fmt: skip


def default_mma_config(target: Target) -> MmaConfig:
    """Conservative, and valid on every known GPU."""
    dtype_pv = "f16f32" if target.problem.dtype == "fp16" else "bf16f32"
    native_fp8 = target.gpu.compute_capability in (89, 120)
    is_int4 = target.problem.precision == "int4"  # what 15 values need: smoothed Q, and rotation
    config = MmaConfig(
        block_q=128,
        block_k=64,
        warps=8,
        stages=2,
        pv="e4m3f32" if native_fp8 else dtype_pv,
        accum_depth=64 if native_fp8 else 0,
        conversion="i2f",
        granularity="thread",
        q_span=32,
        k_span=64,
        rescale="always",
        # 16 registers less than in registers: no spills, emulated FP8 on sm_90 included
        q_operand="smem" if native_fp8 else "reg",
        min_blocks=1,
        qk="s4" if is_int4 and "s4" in target.gpu.peaks else "s8",
        mean_span=128 if is_int4 else 0,
        delta="f16" if is_int4 else "f32",
        rotate="yes" if is_int4 else "no",
    )
    return _without_spills(config, target) if target.problem.head_dim > 128 else config


def _without_spills(config: MmaConfig, target: Target) -> MmaConfig:
    """A default config, changed for 256 channels, whose O alone takes 128 registers.

    Found by compiling with nvcc 13.0: none spills but INT4's causal kernel on sm_120, 4 bytes.
    """
    if target.gpu.compute_capability == 120:
        return config
    config = replace(
        config,
        accum_depth=32 if config.quantizes_v else 0,
        rescale="skip" if config.quantizes_v or target.problem.is_causal else "always",
    )
    in_smem = replace(config, q_operand="smem")
    taken, limit = _smem(in_smem, target)
    return in_smem if taken <= limit else config


def mma_with_steps(config: MmaConfig, wanted: Mapping[str, bool]) -> MmaConfig:
    """A default config with these steps of the quantizer; `wanted` says of each whether it is taken."""
    smooths_q = wanted["smooths_q"]
    return replace(
        config,
        smooth_v="yes" if wanted["smooths_v"] else "no",
        mean_span=config.block_q if smooths_q else 0,
        delta=config.delta if smooths_q else "f32",
        rotate="yes" if wanted["rotates"] else "no",
    )
