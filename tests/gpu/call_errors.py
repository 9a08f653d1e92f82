"""How far a random call's answer is from exact attention, measured without waiting, and how far it may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from random_calls import RandomCall


@dataclass(frozen=True, slots=True)
class Limit:
    """Upper limits of one kind of inputs.

    Attributes:
        l2: relative L2 of a call with FEW_ROWS rows or more.
        few_rows_l2: of a call with fewer, which has no average: one row may lie between two keys.
        row_error, lse_error: of each row.
        mean_cosine: lower limit, over all calls of one kind of kernels.
    """

    l2: float
    few_rows_l2: float
    row_error: float
    lse_error: float
    mean_cosine: float


FEW_ROWS = 64
#: One and a half times the worst of 6,000 calls of the same draws whose numerics were run step by step in FP32
#: (`quantized_attention`, all kinds of kernels), so these are what INT8 scores and FP8 weights cost; garbage gives 1.4.
#: Wide scores (the last three) have long tails, so they get twice.
LIMITS: Mapping[str, Limit] = {
    "normal": Limit(0.065, 0.065, 0.11, 0.07, 0.999),
    "k_offset": Limit(0.065, 0.065, 0.1, 0.075, 0.999),
    "q_x0.25": Limit(0.075, 0.075, 0.1, 0.06, 0.999),
    "v_offset": Limit(0.033, 0.033, 0.06, 0.065, 0.9997),
    "q_x4": Limit(0.065, 0.065, 0.24, 0.3, 0.999),
    "outliers_x8": Limit(0.075, 0.1, 0.46, 0.95, 0.999),
    "outliers_x16": Limit(0.09, 0.22, 1.3, 3.3, 0.998),
    "q_x16": Limit(0.09, 0.26, 0.9, 1.6, 0.998),
}


@dataclass(frozen=True, slots=True)
class Errors:
    """Of one call.

    Attributes:
        not_finite: outputs, and lse of rows that see a key, that are NaN or Inf.
        blind_wrong: outputs other than 0, and lse other than -inf, of rows that see no key.
        dot, out2, ref2, error2: sums of o r, o^2, r^2 and (o - r)^2 over the rows that see a key.
        row_error: largest |o - r| / |r| of such a row.
        lse_error: largest error of the lse of such a row; 0 without lse.
    """

    not_finite: float
    blind_wrong: float
    dot: float
    out2: float
    ref2: float
    error2: float
    row_error: float
    lse_error: float

    @property
    def relative_l2(self) -> float:
        return math.sqrt(self.error2 / self.ref2) if self.ref2 else math.sqrt(self.error2)


def measure(out: torch.Tensor, lse: torch.Tensor | None, ref: torch.Tensor, ref_lse: torch.Tensor) -> torch.Tensor:
    """The fields of Errors in a float64 tensor; nothing here waits for the device.

    Args:
        out, lse: the kernel's.
        ref, ref_lse: exact attention's, float64 and float32.
    """
    sees = ref_lse > -math.inf
    o = out.double()
    not_finite = (~out.isfinite()).sum()
    blind_wrong = ((o != 0).any(-1) & ~sees).sum()
    o = torch.where(sees[..., None], o, 0)
    error2, ref2 = (o - ref).square().sum(-1), ref.square().sum(-1)
    lse_error = ref2.new_zeros(())
    if lse is not None:
        not_finite = not_finite + (~lse.isfinite() & sees).sum()
        blind_wrong = blind_wrong + ((lse != -math.inf) & ~sees).sum()
        lse_error = torch.where(sees, (lse - ref_lse).abs(), 0).max().double()
    row_error = torch.where(sees, error2 / ref2, 0).max().sqrt()
    values = (
        not_finite,
        blind_wrong,
        (o * ref).sum(),
        o.square().sum(),
        ref2.sum(),
        error2.sum(),
        row_error,
        lse_error,
    )
    return torch.stack([value.double() for value in values])


def find_fault(call: RandomCall, errors: Errors) -> str:
    """What is wrong with a call's answer, or an empty string."""
    shape, limit = call.shape, LIMITS[call.inputs]
    is_small = shape.batch * shape.heads_q * shape.q_len < FEW_ROWS
    checks = (
        ("outputs or lse are NaN or Inf", errors.not_finite, 0),
        ("rows that see no key are not 0 and -inf", errors.blind_wrong, 0),
        ("relative L2", errors.relative_l2, limit.few_rows_l2 if is_small else limit.l2),
        ("error of a row", errors.row_error, limit.row_error),
        ("error of the lse", errors.lse_error, limit.lse_error),
    )
    # a NaN is above nothing and below nothing
    return "; ".join(f"{name}: {value:.4g} of {most:g}" for name, value, most in checks if not value <= most)


@dataclass(frozen=True, slots=True)
class Row:
    """All calls of one kind of kernels and inputs."""

    kind: str
    inputs: str
    calls: int
    cosine: float
    worst_l2: float
    worst_row_error: float
    worst_lse_error: float


@dataclass(slots=True)
class Totals:
    """Errors of all calls so far, by kinds of kernels and inputs."""

    _errors: dict[tuple[str, str], list[Errors]] = field(default_factory=dict)

    def add(self, kind: str, inputs: str, errors: Errors) -> None:
        self._errors.setdefault((kind, inputs), []).append(errors)

    def rows(self) -> list[Row]:
        return [self._row(*key, own) for key, own in sorted(self._errors.items())]

    def _row(self, kind: str, inputs: str, own: list[Errors]) -> Row:
        dot, out2, ref2 = (sum(getattr(errors, name) for errors in own) for name in ("dot", "out2", "ref2"))
        return Row(
            kind=kind,
            inputs=inputs,
            calls=len(own),
            cosine=dot / math.sqrt(out2 * ref2) if out2 and ref2 else 1.0,
            worst_l2=max(errors.relative_l2 for errors in own),
            worst_row_error=max(errors.row_error for errors in own),
            worst_lse_error=max(errors.lse_error for errors in own),
        )
