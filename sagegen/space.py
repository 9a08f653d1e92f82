"""The search space: parameters, and the config that is one point of it.

A config's name spells every parameter, so a kernel's name in a profiler says how it was built.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from sagegen.errors import ConfigError, UnknownNameError

#: Of a parameter.
Value = int | float | str


@dataclass(frozen=True, slots=True)
class Param:
    """One dimension of a space.

    Attributes:
        name: field name in the config.
        label: prefix of its value in a config's name.
        values: what may be tried, in order: neighbours of a value are its neighbours here.
        doc: what it does, for `sagegen show --space` and the docs.
        neutral: a value that renders what was rendered before the parameter came, and that names leave out. A
            parameter that is added with one changes no older config's name or text, and so makes no entry stale.
    """

    name: str
    label: str
    values: tuple[Value, ...]
    doc: str
    neutral: Value | None = None

    def spell(self, value: Value) -> str:
        """The field of a config's name for `value`; a decimal point is a `p`, since names are C++ identifiers."""
        return f"{self.label}{value}".replace(".", "p")


_DELTA = Param("delta", "ds", ("f32", "f16"), "type of delta S in memory; f16 has a scale per row", "f32")
_ROTATE = Param("rotate", "ro", ("no", "yes"), "Q and K less their means are rotated by a Hadamard matrix", "no")
_BALANCE = Param(
    "balance", "bl", ("no", "yes"), "channels of Q and K less their means are scaled to one size, before rotation", "no"
)
_QK_DOC = "operands of Q·K^T: INT8, which carry INT4 values too, {}FP8"


def _mean_span(*spans: int) -> Param:
    doc = "query rows whose mean is subtracted, and comes back as delta S; 0: Q is not smoothed"
    return Param("mean_span", "ms", (0, *spans), doc, 0)


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
    Param("q_span", "qs", (16, 32), "query rows that a set of thread or warp scales covers"),
    Param("k_span", "ks", (64, 128), "keys that a set of thread or warp scales covers"),
    Param("rescale", "rs", ("always", "skip"), "rescale O every tile, or only when a row maximum of the warp grew"),
    Param("q_operand", "qo", ("reg", "smem"), "where the Q operand lives: registers, or reloaded from shared memory"),
    Param("min_blocks", "mb", (1, 2, 3), "resident blocks per SM that registers are limited for"),
    Param("p_max", "pm", (56, 112, 224, 448), "what P is at a row's maximum in e4m3", 448),
    Param("v_max", "vm", (2.25, 4.5, 9, 18, 448), "largest |V| of a channel in e4m3", 448),
    Param("smooth_v", "sv", ("no", "yes"), "V's channel means are subtracted from it and added to the output", "no"),
    _mean_span(64, 128),
    _DELTA,
    _ROTATE,
    _BALANCE,
    Param("qk", "qk", ("s8", "s4", "e4m3"), _QK_DOC.format("two INT4 in a byte, or "), "s8"),
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
    _mean_span(64, 128, 192),
    _DELTA,
    _ROTATE,
    _BALANCE,
    Param("qk", "qk", ("s8", "e4m3"), _QK_DOC.format("or "), "s8"),
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


Config = MmaConfig | WgmmaConfig


@dataclass(frozen=True, slots=True)
class Space:
    """All configs of one family, valid or not; `rules.searched_configs` prunes it."""

    config_type: type[Config]

    @property
    def params(self) -> tuple[Param, ...]:
        return self.config_type.params

    def __iter__(self) -> Iterator[Config]:
        for values in itertools.product(*(p.values for p in self.params)):
            yield make_config(self.config_type, dict(zip((p.name for p in self.params), values, strict=True)))

    def __len__(self) -> int:
        size = 1
        for param in self.params:
            size *= len(param.values)
        return size


MMA_SPACE = Space(MmaConfig)
WGMMA_SPACE = Space(WgmmaConfig)
FAMILIES = {"mma": MMA_SPACE, "wgmma": WGMMA_SPACE}


def make_config(config_type: type[Config], values: dict[str, Any]) -> Config:
    """A config from a mapping of every parameter to a value of its list.

    Raises:
        ConfigError: a parameter is missing, unknown, or has a value that is not in its list.
    """
    known = {p.name: p for p in config_type.params}
    if wrong := sorted(set(values) ^ set(known)):
        raise ConfigError(f"config parameters missing or unknown: {', '.join(wrong)}", f"give {', '.join(known)}")
    for name, value in values.items():
        # bool is an int to Python; YAML's `true` must not pass for 1
        if isinstance(value, bool) or value not in known[name].values:
            raise ConfigError(
                f"config parameter {name}={value!r} is not in the space",
                f"use one of {', '.join(map(str, known[name].values))}",
            )
    # the list's own 9, not an equal 9.0, which names would spell otherwise
    listed: dict[str, Any] = {name: known[name].values[known[name].values.index(values[name])] for name in values}
    return config_type(**listed)


def config_values(config: Config) -> dict[str, Value]:
    """The inverse of `make_config`: parameter name to value, in the space's order."""
    return {f.name: getattr(config, f.name) for f in fields(config)}


def parse_config(name: str) -> Config:
    """The config that `name` spells.

    Raises:
        UnknownNameError: the family is unknown, or a field is missing, misspelled or has a value outside its list.
    """
    family, *parts = name.split("_")
    if family not in FAMILIES:
        raise UnknownNameError(
            f"config {name!r} names no kernel family", f"start it with one of {', '.join(FAMILIES)}, or say `default`"
        )
    space = FAMILIES[family]
    return make_config(space.config_type, parse_fields(space.params, parts))


def spell_name(family: str, params: tuple[Param, ...], values: dict[str, Value]) -> str:
    """Family and fields joined by underscores; neutral values are left out."""
    return "_".join([family, *(p.spell(values[p.name]) for p in params if values[p.name] != p.neutral)])


def parse_fields(params: tuple[Param, ...], parts: list[str]) -> dict[str, Value]:
    """Values by parameter of a name's fields, which stand in the parameters' order.

    Raises:
        UnknownNameError: a field is missing, misspelled, out of place, or one too many.
    """
    values: dict[str, Value] = {}
    left = list(parts)
    for param in params:
        by_text = {param.spell(value): value for value in param.values}
        if left and left[0] in by_text:
            values[param.name] = by_text[left.pop(0)]
        elif param.neutral is not None:
            values[param.name] = param.neutral
        else:
            found = f"field {left[0]!r} does not name" if left else "name ends before"
            raise UnknownNameError(f"config {found} a {param.name}", f"use one of {', '.join(by_text)}")
    if left:
        raise UnknownNameError(f"config field {left[0]!r} is one too many", f"end the name after {params[-1].name}")
    return values


def neighbours(config: Config) -> list[Config]:
    """Configs one step away along one parameter; steps of unordered parameters reach every value."""
    own = config_values(config)
    found = []
    for param in config.params:
        index = param.values.index(getattr(config, param.name))
        if isinstance(param.values[0], int | float):
            reach = [i for i in (index - 1, index + 1) if 0 <= i < len(param.values)]
        else:
            reach = [i for i in range(len(param.values)) if i != index]
        found += [make_config(type(config), {**own, param.name: param.values[i]}) for i in reach]
    return found
