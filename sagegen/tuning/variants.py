"""Variants: rendered configs on their way to the compiler, and the thread that compiles ahead of the measuring."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from sagegen.build import BuildFailure, Built, build_batch
from sagegen.errors import SagegenError
from sagegen.problem import Problem, parse_problem
from sagegen.render import Source, render
from sagegen.space import Config, parse_config
from sagegen.store import Store
from sagegen.toolkit import Toolkit

Builds = Mapping[str, Built | BuildFailure]


@dataclass(frozen=True, slots=True)
class Variant:
    """A config of a problem with its rendered source.

    Attributes:
        planted: how the source was sabotaged to test the tuner; empty for an honest one.
    """

    source: Source
    planted: str = ""

    @property
    def problem(self) -> Problem:
        return self.source.problem

    @property
    def config(self) -> Config:
        return self.source.config

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def blank_sha256(self) -> str:
        """Digest of the text without the kernel's own name: equal for configs that say the same in other words."""
        return hashlib.sha256(self.source.text.replace(self.source.name, "").encode()).hexdigest()


@dataclass(slots=True)
class Renderer:
    """Renders each config once."""

    _variants: dict[tuple[str, str], Variant] = field(default_factory=dict)

    def variant(self, problem: Problem, config: Config) -> Variant:
        key = (problem.name, config.name)
        if key not in self._variants:
            self._variants[key] = Variant(render(problem, config))
        return self._variants[key]

    def text_sha256(self, problem_name: str, config_name: str) -> str | None:
        """Digest of the text that the named config renders to now; None when the names say nothing any more."""
        try:
            variant = self.variant(parse_problem(problem_name), parse_config(config_name))
        except SagegenError:
            return None
        return variant.source.sha256


@dataclass(frozen=True, slots=True)
class Batch:
    """Variants on their way through the compiler, each with its own future: one that takes minutes delays no other."""

    variants: tuple[Variant, ...]
    futures: tuple[Future[Built | BuildFailure], ...]

    def result(self) -> Builds:
        """All results by source name, once all are there.

        Raises:
            BuildError, StoreError, ToolchainError: as `build.build_batch`.
        """
        return {v.name: future.result() for v, future in zip(self.variants, self.futures, strict=True)}


class BuildAhead:
    """Compiles in the background while something else is measured.

    Args:
        jobs: compilers at a time; None: one per core.
        timeout_s: for each compiler.
    """

    def __init__(
        self, arch: str, store: Store, toolkit: Toolkit, *, jobs: int | None = None, timeout_s: float = 120
    ) -> None:
        self._arch = arch
        self._store = store
        self._toolkit = toolkit
        self._timeout_s = timeout_s
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0)), thread_name_prefix="sagegen-build")

    def submit(self, variants: Sequence[Variant]) -> Batch:
        """Start building; sources are taken in the order they come."""
        futures = tuple(self._threads.submit(self._build, variant.source) for variant in variants)
        return Batch(tuple(variants), futures)

    def close(self) -> None:
        """End the running compilers and wait for them to be gone."""
        self._stop.set()
        self._threads.shutdown(cancel_futures=True)

    def _build(self, source: Source) -> Built | BuildFailure:
        built = build_batch(
            [source], self._arch, self._store, self._toolkit, jobs=1, timeout_s=self._timeout_s, stop=self._stop
        )
        return built[source.name]
