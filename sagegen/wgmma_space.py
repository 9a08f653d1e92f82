"""The parameters of the `wgmma` family, and the config that is one point of its space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sagegen.param import BALANCE, DELTA, QK_DOC, ROTATE, Param, mean_span, spell_name

WGMMA_PARAMS = (
    Param("consumers", "c", (2, 3), "consumer warpgroups of a block; each takes 64 query rows"),
    Param("block_k", "bk", (64, 128, 192, 256), "keys of a tile"),
    Param("stages", "st", (2, 3, 4), "K/V tiles in flight through shared memory"),
    Param("schedule", "sc", ("plain", "overlap"), "wait for each product, or softmax of a tile beside P V of the last"),
    Param("accumulation", "ac", ("two", "one"), "FP8 sums are promoted to FP32 every tile, or never and V is smoothed"),
    Param("k_span", "ks", (64, 128, 192, 256), "keys that a set of scales covers, one per thread of a quad"),
    Param("rescale", "rs", ("always", "skip"), "rescale O every tile, or only when a row maximum of the warp grew"),
    Param("row_sum", "su", ("fadd", "ones"), "sum of P: added up before it is rounded, or a column of ones beside V"),
    Param(
        "exponent",
        "ex",
        ("mufu", "mixed2", "mixed3", "mixed4", "packed"),
        "2^x by the special function unit, in packed 16-bit steps, or by the unit for 16 keys of every 32, 48 or 64",
    ),
    Param(
        "launch", "la", ("serial", "early"), "a kernel starts when the one before it has ended, or is ending", "serial"
    ),
    Param(
        "q_quantizer",
        "qq",
        ("kernel", "prologue"),
        "Q is quantized by a kernel before, or by warps of the attention kernel one work ahead of its consumers",
        "kernel",
    ),
    mean_span(64, 128, 192),
    DELTA,
    ROTATE,
    BALANCE,
    Param("qk", "qk", ("s8", "e4m3"), QK_DOC.format("or "), "s8"),
)


@dataclass(frozen=True, slots=True)
class WgmmaConfig:
    """A point of the `wgmma` family's space (wgmma + bulk copies, sm_90a). Fields are WGMMA_PARAMS, in order."""

    consumers: int
    block_k: int
    stages: int
    schedule: str
    accumulation: str
    k_span: int
    rescale: str
    row_sum: str
    exponent: str
    launch: str
    q_quantizer: str
    mean_span: int = 0
    delta: str = "f32"
    rotate: str = "no"
    balance: str = "no"
    qk: str = "s8"

    family: ClassVar[str] = "wgmma"
    arch_suffix: ClassVar[str] = "a"  # wgmma is not forward compatible: sm_90a, not sm_90
    params: ClassVar[tuple[Param, ...]] = WGMMA_PARAMS
    pv: ClassVar[str] = "e4m3f32"
    p_max: ClassVar[int] = 448
    v_max: ClassVar[float] = 448
    quantizes_v: ClassVar[bool] = True
    sums_in_fp16: ClassVar[bool] = False
    q_operand: ClassVar[str] = "smem"
    min_blocks: ClassVar[int] = 1
    rows_per_warp: ClassVar[int] = 16
    quantize_rows: ClassVar[int] = 128
    granularity: ClassVar[str] = "thread"
    q_span: ClassVar[int] = 8
    statistics: ClassVar[int] = 4  # of K: sum, largest, smallest and bad values of every channel
    v_statistics: ClassVar[int] = 4
    is_persistent: ClassVar[bool] = True
    measured_tensors: ClassVar[int] = 2  # K and V, each by blocks of its own

    @property
    def name(self) -> str:
        """`wgmma_c3_bk128_...`, as `MmaConfig.name`."""
        return spell_name(self.family, self.params, {p.name: getattr(self, p.name) for p in self.params})

    @property
    def block_q(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Those of the consumers and of one more warpgroup, the producer."""
        return 128 * (self.consumers + 1)

    @property
    def warps(self) -> int:
        """Of the consumers."""
        return 4 * self.consumers

    @property
    def producer_registers(self) -> int:
        """Of a thread of the producer's warpgroup; more where it quantizes Q."""
        if self.consumers == 3:
            return 32
        return 40 if self.q_quantizer == "prologue" else 24

    @property
    def consumer_registers(self) -> int:
        """Of a thread: what the producer leaves of the 168 or 128 that all threads start with."""
        return {24: 240, 40: 232, 32: 160}[self.producer_registers]

    @property
    def v_panel(self) -> int:
        """Tokens of a row of V in shared memory: a tile is one or more panels side by side."""
        return 128 if self.block_k % 128 == 0 else 64

    @property
    def bounds_steps(self) -> bool:
        """Scales of Q and K have lower limits, so that the packed exponent spans its range."""
        return self.exponent != "mufu"

    @property
    def exact_every(self) -> int:
        """Every how many groups of 16 keys have the exact exponent among packed ones; 0: none."""
        return {"mixed2": 2, "mixed3": 3, "mixed4": 4}.get(self.exponent, 0)

    @property
    def lse_changes_output(self) -> bool:
        """With an lse all P are by the exact exponent: the packed one has none to add up before it is rounded."""
        return self.bounds_steps

    @property
    def smooths_q(self) -> bool:
        """As `MmaConfig.smooths_q`."""
        return self.mean_span > 0

    @property
    def rotates(self) -> bool:
        """As `MmaConfig.rotates`."""
        return self.rotate == "yes"

    @property
    def balances(self) -> bool:
        """As `MmaConfig.balances`."""
        return self.balance == "yes"

    @property
    def has_float_scores(self) -> bool:
        """As `MmaConfig.has_float_scores`."""
        return self.qk == "e4m3"

    @property
    def folds_delta(self) -> bool:
        """Integer sums of Q K^T start at delta S in whole numbers where it fits; float ones get it afterwards."""
        return self.smooths_q and not self.has_float_scores

    @property
    def smooths_v(self) -> bool:
        """V's channel means are subtracted before it is quantized and added to the output."""
        return self.accumulation == "one"

    @property
    def head_rows(self) -> int:
        """Rows of head_dim floats that the quantizer leaves for each KV head."""
        return 2 + 2 * self.smooths_v + (self.q_quantizer == "prologue")

    @property
    def accum_depth(self) -> int:
        """Keys summed before a promotion; 0: never promoted."""
        return self.block_k if self.accumulation == "two" else 0
