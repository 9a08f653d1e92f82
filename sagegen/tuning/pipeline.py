"""Batches between compiler and GPU: what is examined next, and what is not waited for.

One batch is always being compiled while another is examined. A compiler that takes much longer than the others of its
batch is left behind: its variant joins a later batch, and the GPU goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from sagegen.build import BuildFailure, Built
from sagegen.tuning.variants import Batch, BuildAhead, Variant

#: How long an idle GPU waits for the rest of a batch of which some are built.
_PATIENCE_S = 5.0
#: So many compilers may lag; with more the run waits for one of them.
_MOST_LAGGING = 8

Result = Built | BuildFailure
_Pending = tuple[Variant, Future[Result]]


class Pipeline:
    """Compiles batches ahead of whoever examines them.

    Args:
        patience_s: for tests.
    """

    def __init__(self, builder: BuildAhead, patience_s: float = _PATIENCE_S) -> None:
        self._builder = builder
        self._patience_s = patience_s
        self._lagging: list[_Pending] = []

    def run(
        self, batches: Iterator[Sequence[Variant]], deadline: Callable[[], float | None]
    ) -> Iterator[list[tuple[Variant, Result]]]:
        """What is built, batch after batch; the next batch is asked for, and compiled, before one is handed out.

        The whole first batch is waited for: nothing counts without the default configs.

        Args:
            deadline: on the monotonic clock, asked when nothing but laggards is left; those are given up then.
        """
        ahead: Batch | None = None
        is_first = True
        for batch in batches:
            following = self._builder.submit(batch)
            if ahead is not None:
                yield self._take(ahead, None if is_first else self._patience_s)
                is_first = False
            ahead = following
        if ahead is not None:
            yield self._take(ahead, None if is_first else self._patience_s)
        while self._lagging:
            end = deadline()
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return
            if built := self._take_first(left):
                yield built

    def _take(self, batch: Batch, patience_s: float | None) -> list[tuple[Variant, Result]]:
        """Of a batch and the laggards those that are built, at least one."""
        own = list(zip(batch.variants, batch.futures, strict=True))
        wait([future for _, future in own], timeout=patience_s)
        self._lagging += own
        if len(self._lagging) > _MOST_LAGGING or not any(future.done() for _, future in self._lagging):
            return self._take_first(None)
        return self._take_done()

    def _take_first(self, timeout_s: float | None) -> list[tuple[Variant, Result]]:
        wait([future for _, future in self._lagging], timeout=timeout_s, return_when=FIRST_COMPLETED)
        return self._take_done()

    def _take_done(self) -> list[tuple[Variant, Result]]:
        done = [pair for pair in self._lagging if pair[1].done()]
        self._lagging = [pair for pair in self._lagging if pair not in done]
        return [(variant, future.result()) for variant, future in done]
