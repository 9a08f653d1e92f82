"""Batches between compiler and GPU: order, laggards, and where they end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sagegen.build import BuildFailure, Built
from sagegen.gpu import find_gpu
from sagegen.problem import Problem
from sagegen.render import Source, render
from sagegen.rules import Target, default_config
from sagegen.store import Store
from sagegen.tuning.pipeline import Pipeline
from sagegen.tuning.variants import Batch, BuildAhead, Variant

PROBLEM = Problem(64, "fp16", False)
HONEST = render(PROBLEM, default_config(Target(find_gpu("l20"), PROBLEM)))


def make_variant(name: str) -> Variant:
    return Variant(replace(HONEST, name=name))


@dataclass
class Builder:
    """Compiles at once what is not in `slow`; keeps the order in which batches come."""

    slow: dict[str, Future[Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def submit(self, variants: Any) -> Batch:
        futures = []
        for variant in variants:
            self.asked.append(variant.name)
            future: Future[Any] = self.slow.get(variant.name, Future())
            if variant.name not in self.slow:
                future.set_result(f"built {variant.name}")
            futures.append(future)
        return Batch(tuple(variants), tuple(futures))


def run(builder: Builder, *batches: str, left_s: float | None = 60.0, patience_s: float = 0.01) -> Iterator[list[str]]:
    """Names of what is handed out, batch after batch; a batch is a word, a variant a letter."""
    pipeline = Pipeline(builder, patience_s)  # type: ignore[arg-type]
    end = None if left_s is None else time.monotonic() + left_s
    for built in pipeline.run(iter([[make_variant(name) for name in batch] for batch in batches]), lambda: end):
        assert all(result == f"built {variant.name}" for variant, result in built)
        yield [variant.name for variant, _ in built]


def test_one_batch_is_compiled_while_another_is_handed_out() -> None:
    builder = Builder()
    taken = run(builder, "a", "bc", "d")
    assert next(taken) == ["a"]
    assert builder.asked == ["a", "b", "c"]
    assert list(taken) == [["b", "c"], ["d"]]


def test_a_laggard_joins_a_later_batch_and_delays_nobody() -> None:
    late: Future[Any] = Future()
    taken = run(Builder({"x": late}), "a", "bxc", "d", "e")
    assert [next(taken) for _ in range(2)] == [["a"], ["b", "c"]]
    assert next(taken) == ["d"]
    late.set_result("built x")
    assert next(taken) == ["x", "e"]
    assert list(taken) == []


def test_laggards_are_waited_for_at_the_end_and_given_up_when_time_is_over() -> None:
    late: Future[Any] = Future()
    taken = run(Builder({"x": late}), "a", "xb", left_s=None)
    assert [next(taken) for _ in range(2)] == [["a"], ["b"]]
    late.set_result("built x")
    assert list(taken) == [["x"]]
    start = time.monotonic()
    assert list(run(Builder({"x": Future()}), "a", "xb", left_s=0.2)) == [["a"], ["b"]]
    assert 0.1 < time.monotonic() - start < 10


def test_a_batch_of_laggards_alone_is_waited_for() -> None:
    late: Future[Any] = Future()
    builder = Builder({"x": late})
    taken = run(builder, "a", "x", "b")
    assert next(taken) == ["a"]
    late.set_result("built x")
    assert next(taken) == ["x"]
    assert list(taken) == [["b"]]


def test_the_whole_first_batch_is_waited_for_and_nothing_is_an_end_too() -> None:
    late: Future[Any] = Future()
    late.set_result("built x")
    assert list(run(Builder({"x": late}), "ax", "b", patience_s=0.0)) == [["a", "x"], ["b"]]
    assert list(run(Builder())) == []


def test_f1_a_compile_that_hangs_does_not_hold_up_its_batch(tmp_path: Path, nvcc: Any) -> None:
    def source(name: str, body: str = "") -> Source:
        kernels = "".join(
            f'extern "C" __global__ void {role}_{name}() {{}}\n' for role in ("stats", "quantize", "attention")
        )
        return replace(HONEST, name=name, text=f"// {body}\n{kernels}")

    builder = BuildAhead("sm_89", Store(tmp_path / "kernels"), nvcc.toolkit, jobs=3, timeout_s=4)
    batches = [
        [Variant(source("a"))],
        [Variant(source("hangs", "SLEEP")), Variant(source("b"))],
        [Variant(source("c"))],
    ]
    start = time.monotonic()
    seen: list[tuple[str, float]] = []
    results: dict[str, Built | BuildFailure] = {}
    for built in Pipeline(builder, patience_s=0.5).run(iter(batches), lambda: None):
        seen += [(variant.name, time.monotonic() - start) for variant, _ in built]
        results.update({variant.name: result for variant, result in built})
    builder.close()
    assert [name for name, _ in seen] == ["a", "b", "c", "hangs"]
    assert results["hangs"] == BuildFailure("hangs", "timeout", "nvcc took more than 4 s", results["hangs"].log)  # type: ignore[union-attr]
    assert dict(seen)["c"] < 4 <= dict(seen)["hangs"]
