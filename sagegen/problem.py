"""What the caller asks: the problem a kernel is rendered for, the shape it runs on, the bucket an entry answers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from sagegen.errors import UnknownNameError

Dtype = Literal["fp16", "bf16"]
Precision = Literal["int8", "int4"]
Mask = Literal["full", "causal", "window"]

HEAD_DIMS = (64, 128, 256)
#: Those that tuning and benches take unless others are asked for.
TUNED_HEAD_DIMS = (64, 128)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

_NAME = re.compile(r"d(\d+)_(fp16|bf16)_(causal|full|window)_(int8|int4)(_ragged)?")


@dataclass(frozen=True, slots=True)
class Problem:
    """What a kernel is rendered for: everything of a call but its lengths and strides.

    Attributes:
        head_dim: channels per head, one of HEAD_DIMS.
        dtype: type of q, k, v and the output.
        is_causal: query i sees key j when j <= i + kv_len - q_len (bottom-right alignment).
        precision: of Q and K. `int8` is SageAttention2-8b; `int4`, with values from -7 to 7, SageAttention2-4b.
        is_windowed: query i sees keys from i + kv_len - q_len - left to i + kv_len - q_len + right, which the call
            gives; instead of is_causal.
        is_ragged: batch items are sequences of their own lengths, which a table in device memory gives.
    """

    head_dim: int
    dtype: Dtype
    is_causal: bool
    precision: Precision = "int8"
    is_windowed: bool = False
    is_ragged: bool = False

    def __post_init__(self) -> None:
        for field, value, allowed in (
            ("head_dim", self.head_dim, HEAD_DIMS),
            ("dtype", self.dtype, DTYPES),
            ("precision", self.precision, PRECISIONS),
        ):
            if value not in allowed:
                raise UnknownNameError(
                    f"problem {field}={value!r} has no kernel", f"use one of {', '.join(map(str, allowed))}"
                )
        if self.is_causal and self.is_windowed:
            raise UnknownNameError("problem is_causal=True and is_windowed=True", "give a window whose right side is 0")

    @property
    def mask(self) -> Mask:
        """What a query sees."""
        return "window" if self.is_windowed else "causal" if self.is_causal else "full"

    @property
    def name(self) -> str:
        """Identity in file names and kernel names, e.g. `d128_bf16_causal_int8`."""
        ragged = "_ragged" if self.is_ragged else ""
        return f"d{self.head_dim}_{self.dtype}_{self.mask}_{self.precision}{ragged}"

    @property
    def tuned(self) -> Problem:
        """The problem that is tuned for this one: windows and ragged batches take the configs of dense ones."""
        return replace(self, is_windowed=False, is_ragged=False)


def parse_problem(name: str) -> Problem:
    """The problem that `name` spells; raises UnknownNameError."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise UnknownNameError(f"problem {name!r} does not exist", "write it like d128_bf16_causal_int8")
    head_dim, dtype, mask, precision, ragged = match.groups()
    is_ragged = ragged is not None
    return Problem(int(head_dim), dtype, mask == "causal", precision, mask == "window", is_ragged)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths and counts of one call. `heads_q` is a multiple of `heads_kv` (GQA)."""

    batch: int
    heads_q: int
    heads_kv: int
    q_len: int
    kv_len: int

    def flops(self, problem: Problem) -> float:
        """Operations of both matrix products: 4 B H Lq Lk d, half of it for causal (the papers' convention)."""
        full = 4.0 * self.batch * self.heads_q * self.q_len * self.kv_len * problem.head_dim
        return full / 2 if problem.is_causal else full


@dataclass(frozen=True, slots=True)
class Bucket:
    """The range of key lengths that one registry entry answers, both ends included; `kv_max` None is open."""

    kv_min: int
    kv_max: int | None

    def holds(self, kv_len: int) -> bool:
        return self.kv_min <= kv_len and (self.kv_max is None or kv_len <= self.kv_max)

    @property
    def name(self) -> str:
        return f"kv{self.kv_min}-{'' if self.kv_max is None else self.kv_max}"


@dataclass(frozen=True, slots=True)
class TunedLength:
    """A bucket and the length it is tuned at."""

    bucket: Bucket
    tokens: int


def make_lengths(tokens: Sequence[int]) -> tuple[TunedLength, ...]:
    """The lengths to tune at, which rise, each with its bucket.

    Edges lie at the geometric middle of neighbours, so that an entry answers the lengths that are nearest to it.
    """
    edges = [math.isqrt(a * b) for a, b in itertools.pairwise(tokens)]
    buckets = map(Bucket, [1, *(edge + 1 for edge in edges)], [*edges, None])
    return tuple(map(TunedLength, buckets, tokens))


#: What is tuned: up to 1K keys, 2K, 4K, 8K, 16K and more.
TUNED_LENGTHS = make_lengths((1024, 2048, 4096, 8192, 16384))
