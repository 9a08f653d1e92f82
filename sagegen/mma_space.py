"""The parameters of the `mma` family, and the config that is one point of its space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sagegen.param import BALANCE, DELTA, QK_DOC, ROTATE, Param, mean_span, spell_name

MMA_PARAMS = (
    Param("block_q", "bq", (64, 128), "query rows of a thread block's tile"),
    Param("block_k", "bk", (64, 128), "keys of a tile"),
    Param("warps", "w", (2, 4, 8), "warps of a thread block; they split the query rows"),
    Param("stages", "st", (2, 3, 4), "K/V tiles in flight through shared memory"),
    Param("pv", "pv", ("e4m3f32", "e4m3f16", "f16f32", "bf16f32"), "type of P and V, then of the P·V accumulator"),
    Param(
        "accum_depth", "ad", (0, 32, 64, 128), "keys summed before the FP8 accumulator is promoted to FP32; 0: never"
    ),
    Param(
        "conversion", "cv", ("i2f", "magic"), "INT32 to FP32 score: conversion instruction, or magic-bias start value"
    ),
    Param("granularity", "gr", ("thread", "warp", "block"), "rows of Q and K that share a scale"),
    Param(
        "q_span", "qs", (8, 16, 32), "query rows that a set of thread or warp scales covers; per thread 8: each its own"
    ),
    Param("k_span", "ks", (64, 128), "keys that a set of thread or warp scales covers"),
    Param("rescale", "rs", ("always", "skip"), "rescale O every tile, or only when a row maximum of the warp grew"),
    Param("q_operand", "qo", ("reg", "smem"), "where the Q operand lives: registers, or reloaded from shared memory"),
    Param("min_blocks", "mb", (1, 2, 3), "resident blocks per SM that registers are limited for"),
    Param("p_max", "pm", (56, 112, 224, 448), "what P is at a row's maximum in e4m3", 448),
    Param("v_max", "vm", (2.25, 4.5, 9, 18, 448), "largest |V| of a channel in e4m3", 448),
    Param("smooth_v", "sv", ("no", "yes"), "V's channel means are subtracted from it and added to the output", "no"),
    mean_span(64, 128),
    DELTA,
    ROTATE,
    BALANCE,
    Param("qk", "qk", ("s8", "s4", "e4m3"), QK_DOC.format("two INT4 in a byte, or "), "s8"),
)


@dataclass(frozen=True, slots=True)
class MmaConfig:
    """A point of the `mma` family's space (mma.sync + cp.async, sm_80 and later). Fields are MMA_PARAMS, in order."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    pv: str
    accum_depth: int
    conversion: str
    granularity: str
    q_span: int
    k_span: int
    rescale: str
    q_operand: str
    min_blocks: int
    # these came later and start neutral
    p_max: int = 448
    v_max: float = 448
    smooth_v: str = "no"
    mean_span: int = 0
    delta: str = "f32"
    rotate: str = "no"
    balance: str = "no"
    qk: str = "s8"

    family: ClassVar[str] = "mma"
    arch_suffix: ClassVar[str] = ""
    params: ClassVar[tuple[Param, ...]] = MMA_PARAMS
    bounds_steps: ClassVar[bool] = False
    measured_tensors: ClassVar[int] = 1
    folds_delta: ClassVar[bool] = False  # into the integer sums, as `WgmmaConfig` has it
    is_persistent: ClassVar[bool] = False
    row_sum: ClassVar[str] = "fadd"
    launch: ClassVar[str] = "serial"
    lse_changes_output: ClassVar[bool] = False
    q_quantizer: ClassVar[str] = "kernel"

    @property
    def name(self) -> str:
        """`mma_bq128_bk64_...`: letters, digits and underscores only, so it is safe in paths and C++ identifiers."""
        return spell_name(self.family, self.params, {p.name: getattr(self, p.name) for p in self.params})

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def rows_per_warp(self) -> int:
        return self.block_q // self.warps

    @property
    def quantize_rows(self) -> int:
        """Query rows that one block of the quantizer takes."""
        return self.block_q

    @property
    def statistics(self) -> int:
        """Numbers that a block of the statistics leaves of each channel of K: its sum, and what bounds delta S."""
        return 2 if self.delta == "f16" else 1

    @property
    def smooths_q(self) -> bool:
        """The means of Q's rows are subtracted before it is quantized, and scores get them back."""
        return self.mean_span > 0

    @property
    def rotates(self) -> bool:
        """Q and K are rotated before they are quantized."""
        return self.rotate == "yes"

    @property
    def balances(self) -> bool:
        """Each channel of Q and of K is scaled before they are rotated and quantized, by factors whose product is 1."""
        return self.balance == "yes"

    @property
    def has_float_scores(self) -> bool:
        """Q and K are FP8 (e4m3), whose products the tensor core sums as floats; of INT8 and INT4 they are integers."""
        return self.qk == "e4m3"

    @property
    def quantizes_v(self) -> bool:
        """V goes through the quantizer (e4m3); else the attention kernel reads the caller's V."""
        return self.pv.startswith("e4m3")

    @property
    def smooths_v(self) -> bool:
        """V's channel means are subtracted before it is quantized and added to the output."""
        return self.smooth_v == "yes"

    @property
    def head_rows(self) -> int:
        """Rows of head_dim floats that the quantizer leaves for each KV head: scales of V, and its means."""
        return 2 if self.smooths_v else 1

    @property
    def v_statistics(self) -> int:
        """Numbers that a block of the statistics leaves of each channel of V: its peak, or its sum and both ends."""
        return 3 if self.smooths_v else 1

    @property
    def sums_in_fp16(self) -> bool:
        """The tensor core sums P·V in FP16, so P and V must leave room for the sum (SageAttention2++)."""
        return self.pv == "e4m3f16"
