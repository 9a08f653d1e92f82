"""Running tables: every row's recipe against exact attention, on seeds of synthetic inputs or on captured layers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch

from sagegen.ablation.deviation import Deviation, find_deviation
from sagegen.ablation.emulation import emulate
from sagegen.ablation.recipe import Recipe
from sagegen.ablation.synthetic import draw_kind
from sagegen.ablation.tables import HEAD_DIM, Row, Table
from sagegen.ablation.weighting import prepare_values
from sagegen.errors import ArgumentError
from sagegen.measuring.inputs import Inputs
from sagegen.reference import attention


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of one seed or layer, and exact attention of them in FP64."""

    name: str
    inputs: Inputs
    truth: torch.Tensor


@dataclass(frozen=True, slots=True)
class Result:
    """One row on all cases.

    Attributes:
        inputs: the kind of synthetic inputs, or `captured`.
        deviations: by the name of the case.
        flushed_share: of V's numbers, that are zero as the product reads them, over all cases.
    """

    label: str
    inputs: str
    recipe: Recipe
    deviations: Mapping[str, Deviation]
    flushed_share: float

    def mean(self, figure: str) -> float:
        return statistics.fmean(getattr(deviation, figure) for deviation in self.deviations.values())

    def spread(self, figure: str) -> float:
        """Standard deviation over the cases; 0 for one."""
        values = [getattr(deviation, figure) for deviation in self.deviations.values()]
        if len(values) < 2:
            return 0.0
        return math.nan if any(map(math.isnan, values)) else statistics.stdev(values)

    @property
    def worst_case(self) -> float:
        return _least([deviation.cosine for deviation in self.deviations.values()])

    @property
    def worst_head(self) -> float:
        return _least([deviation.worst_head for deviation in self.deviations.values()])

    def as_values(self) -> dict[str, object]:
        """For JSON: a figure that is not finite, after an overflow, is None."""
        cases = {
            name: {figure: _finite(value) for figure, value in asdict(deviation).items()}
            for name, deviation in self.deviations.items()
        }
        return {
            "label": self.label,
            "inputs": self.inputs,
            "recipe": asdict(self.recipe),
            **{figure: _finite(self.mean(figure)) for figure in ("cosine", "relative_l1", "rmse")},
            "cosine_std": _finite(self.spread("cosine")),
            "relative_l1_std": _finite(self.spread("relative_l1")),
            "worst_case": _finite(self.worst_case),
            "worst_head": _finite(self.worst_head),
            "v_flushed_share": self.flushed_share,
            "cases": cases,
        }


def _least(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A table with its results, in the order of its rows.

    Attributes:
        broken: pairs of rows that stand in another order than the papers', as text.
    """

    table: Table
    results: tuple[Result, ...]
    broken: tuple[str, ...]


class Study:
    """Runs tables on `seeds` draws of their kinds, or on captured layers where these are given and the table can."""

    def __init__(
        self, seeds: int, *, captured: Mapping[str, Inputs] | None = None, is_causal: bool = False, device: str = "cpu"
    ) -> None:
        self._seeds = seeds
        self._captured = captured
        self._is_causal = is_causal
        self._device = device
        self._cases: dict[object, list[Case]] = {}

    def run(self, table: Table, on_row: Callable[[Result], None] = lambda result: None) -> Outcome:
        """Every row of a table; `on_row` is told each as it is done."""
        results = []
        for row in self._rows(table):
            results.append(self._measure(table, row))
            on_row(results[-1])
        broken = dict.fromkeys(find_broken(table, results))  # two of a table's orders may share a pair
        return Outcome(table, tuple(results), tuple(broken))

    def _rows(self, table: Table) -> list[Row]:
        """On captured inputs each recipe once, whatever kinds it would meet."""
        if not self._takes_captured(table):
            return list(table.rows)
        return list({row.recipe: row for row in reversed(table.rows)}.values())[::-1]

    def _takes_captured(self, table: Table) -> bool:
        return self._captured is not None and table.takes_tensors

    def _measure(self, table: Table, row: Row) -> Result:
        is_captured = self._takes_captured(table)
        cases = self._find_cases(row, is_captured)
        deviations = {}
        for case in cases:
            out = emulate(case.inputs, row.recipe, is_causal=self._is_causal)
            deviations[case.name] = find_deviation(out, case.truth)
        shares = [prepare_values(case.inputs.v.float(), row.recipe).flushed_share for case in cases]
        inputs = "captured" if is_captured else row.kind
        return Result(row.label, inputs, row.recipe, deviations, statistics.fmean(shares))

    def _find_cases(self, row: Row, is_captured: bool) -> list[Case]:
        key = None if is_captured else (row.kind, row.shape)
        if key not in self._cases:
            self._cases[key] = list(self._draw(row) if key else self._read())
        return self._cases[key]

    def _draw(self, row: Row) -> Iterator[Case]:
        for seed in range(self._seeds):
            yield self._make_case(f"seed {seed}", draw_kind(row.kind, row.shape, HEAD_DIM, seed))

    def _read(self) -> Iterator[Case]:
        for name, inputs in (self._captured or {}).items():
            yield self._make_case(name, inputs)

    def _make_case(self, name: str, inputs: Inputs) -> Case:
        inputs = inputs.map(lambda x: x.to(self._device))
        truth = attention(inputs.q, inputs.k, inputs.v, is_causal=self._is_causal, out_dtype=torch.float64)
        return Case(name, inputs, truth)


def find_broken(table: Table, results: Sequence[Result]) -> Iterator[str]:
    """Neighbours of the table's orders of which the first is not better than the second."""
    found = {(result.label, result.inputs): result for result in results}
    sign = 1 if table.ranked_by == "cosine" else -1
    for order in table.orders:
        for better, worse in pairwise(order):
            if better not in found or worse not in found:
                continue
            if not sign * found[better].mean(table.ranked_by) > sign * found[worse].mean(table.ranked_by):
                yield f"{better[0]} is not better than {worse[0]} ({better[1]})"


def cut_tokens(captured: Mapping[str, Inputs], tokens: int) -> dict[str, Inputs]:
    """The first tokens of every layer's q, k and v.

    Raises:
        ArgumentError: q and k of a layer differ in length, so that a cut would change which keys a row sees.
    """
    for name, inputs in captured.items():
        if inputs.q.shape[2] != inputs.k.shape[2]:
            raise ArgumentError(
                f"{name} has {inputs.q.shape[2]} queries and {inputs.k.shape[2]} keys and cannot be cut",
                "store as many of both",
            )
    return {name: inputs.map(lambda x: x[:, :, :tokens]) for name, inputs in captured.items()}
