"""Which of the papers' techniques and number types an emulated attention takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sagegen.errors import ArgumentError
from sagegen.quantizing import MMA_KEYS

QkType = Literal["exact", "int8", "int4", "e4m3"]
PvType = Literal["exact", "fp16", "e4m3", "e5m2", "int8"]
Granularity = Literal["token", "thread", "warp", "block", "tensor"]
Balance = Literal["none", "rms", "max"]
Width = Literal["fp32", "fp22", "fp16"]

#: Largest number of each type that quantization maps to: INT4 and INT8 are symmetric.
QK_MAX: dict[QkType, float] = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0}
PV_MAX: dict[PvType, float] = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The numerics of one emulated attention; the defaults are SageAttention2-8b with smoothed Q.

    Attributes:
        qk: type of Q and K in the first product; `int4` is [-7, 7].
        granularity: which tokens of Q, and which of K, share a scale, see `sagegen.ablation.grouping`.
        smooth_q: subtract Q's mean over each block of `block_q` rows and add what it contributes to the scores, dS,
            from the K that is not quantized (SageAttention2, section 3.1).
        smooth_k: subtract K's mean over all tokens.
        balance: per-channel scale of Q against K after smoothing, one per KV head. `max` without smoothing is
            SmoothQuant's migration with alpha 0.5 (arXiv 2211.10438, equation 4); `rms` has the root mean square in
            the maximum's place.
        rotate: Hadamard rotation of Q and K along head_dim, after smoothing and balance; without smoothing it is the
            rotation of QuaRot (arXiv 2404.00456).
        pv: type of P and V in the second product; all but `exact` and `fp16` scale V per channel.
        smooth_v: subtract V's mean per channel and add it to the output.
        accumulator: of P·V; `fp22` cuts each sum to 13 mantissa bits, `fp16` rounds it (SageAttention2++).
        two_level: add the accumulator to an FP32 output every `accum_depth` keys; else one sum over all keys.
        accum_depth: keys, a multiple of 32 that divides `block_k`.
        p_max, v_max: what P's 1 and each channel's largest |V| are scaled to; None is the type's largest number.
        block_q, block_k: rows and keys of a tile; the paper's 128 and 64.
    """

    qk: QkType = "int8"
    granularity: Granularity = "thread"
    smooth_q: bool = True
    smooth_k: bool = True
    balance: Balance = "none"
    rotate: bool = False
    pv: PvType = "e4m3"
    smooth_v: bool = False
    accumulator: Width = "fp32"
    two_level: bool = True
    accum_depth: int = 64
    p_max: float | None = None
    v_max: float | None = None
    block_q: int = 128
    block_k: int = 64

    def __post_init__(self) -> None:
        for name, value, kind in (
            ("qk", self.qk, QkType), ("granularity", self.granularity, Granularity), ("pv", self.pv, PvType),
            ("balance", self.balance, Balance), ("accumulator", self.accumulator, Width),
        ):  # fmt: skip
            if value not in get_args(kind):
                raise ArgumentError(f"{name} {value!r} does not exist", f"use one of {', '.join(get_args(kind))}")
        if self.block_q < 1 or self.block_k < 1:
            raise ArgumentError(f"blocks of {self.block_q} rows and {self.block_k} keys", "use 1 or more")
        if self.accumulator != "fp32" and self.pv != "e4m3":
            raise ArgumentError(f"the {self.accumulator} accumulator adds e4m3 products, not {self.pv}", "use pv=e4m3")
        if self.adds_in_chains and (
            self.accum_depth < 1 or self.accum_depth % MMA_KEYS or self.block_k % self.accum_depth
        ):
            raise ArgumentError(
                f"accum_depth {self.accum_depth} is no multiple of {MMA_KEYS} that divides block_k {self.block_k}",
                "use 32 or 64, or a larger block_k",
            )
        self._check_peak("p_max", self.p_max)
        self._check_peak("v_max", self.v_max)

    def _check_peak(self, name: str, peak: float | None) -> None:
        if peak is None:
            return
        if self.pv not in PV_MAX:
            raise ArgumentError(f"{name} scales P and V of pv e4m3, e5m2 or int8, not {self.pv}", f"leave out {name}")
        if not 0 < peak <= PV_MAX[self.pv]:
            raise ArgumentError(f"{name} {peak} is not in (0, {PV_MAX[self.pv]:g}]", f"use at most {PV_MAX[self.pv]:g}")

    @property
    def adds_in_chains(self) -> bool:
        """Whether the order of P·V's additions decides the result: the accumulator loses something."""
        return self.accumulator != "fp32"

    @property
    def p_peak(self) -> float:
        """What a weight of 1 is scaled to."""
        return self.p_max or PV_MAX.get(self.pv, 1.0)

    @property
    def v_peak(self) -> float:
        """What a channel's largest |V| is scaled to; 0 where V is not scaled."""
        return self.v_max or PV_MAX.get(self.pv, 0.0)
