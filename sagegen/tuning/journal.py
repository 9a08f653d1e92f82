"""The tuner's only memory: one JSON line per attempt, failures included, appended and never rewritten.

A run that was killed resumes from its journal without repeating an attempt, and a recorded journal answers a search
without a GPU (`replay`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec

from sagegen.errors import ArgumentError, JournalError, UnknownNameError
from sagegen.measuring.telemetry import Conditions
from sagegen.problem import Problem
from sagegen.space import Config
from sagegen.tuning.packed import unpack

#: Bumped when a record's fields change meaning; records of another number are not read.
JOURNAL_SCHEMA = 1

Outcome = Literal["ok", "constraint", "compile", "timeout", "launch", "crash", "accuracy"]
Phase = Literal["build", "screen", "final", "confirm"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Samples:
    """Raw times at one shape, in microseconds, in the order measured.

    Attributes:
        tokens: query and key length.
        batch, heads_q, heads_kv: counts of the shape.
        times_us: one entry per timed launch of the attention kernel.
        call_us: one entry per timed full call, quantizers included.
        warm_us: one entry per launch of the attention kernel right behind another, L2 warm; all others are cold.
        conditions: clock, power, temperature and slowdowns meanwhile; None where nobody looked.
    """

    tokens: int
    batch: int
    heads_q: int
    heads_kv: int
    times_us: tuple[float, ...]
    call_us: tuple[float, ...] = ()
    warm_us: tuple[float, ...] = ()
    conditions: Conditions | None = None

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us)

    @property
    def calls(self) -> tuple[float, ...]:
        """What a tuning run makes shorter: times of full calls, or of the kernel where no calls were timed."""
        return self.call_us or self.times_us

    @property
    def median_call_us(self) -> float:
        """Of full calls."""
        return statistics.median(self.calls)


@dataclass(frozen=True, slots=True)
class Record:
    """One attempt at one config of one problem, measured at every tuned length.

    Attributes:
        problem, config: their names.
        phase: how far the attempt was meant to go; `build` never ran on a GPU.
        outcome: `ok`, or what went wrong.
        reason: one line that explains an outcome other than `ok`.
        gpu, product, driver, nvcc: where it was built and measured.
        protocol: number of the measuring protocol; times of different numbers are not compared.
        text_sha256: digest of the rendered source.
        cubin_sha256, code_sha256: digests of the cubin and of its kernels' machine code; empty if not built.
        samples: one per tuned length; empty unless the outcome is `ok`.
        figures: accuracy of each input kind, figure name to value.
        resources: of each kernel role, as ptxas reports them.
        shared_from: name of the config whose equal text or code was measured instead; empty if measured itself.
        date: UTC, ISO 8601.
        seconds: wall time of the attempt on the GPU.
        first_failure: how it failed in a process that others had used before, when alone in a fresh one it did not.
    """

    problem: str
    config: str
    phase: Phase
    outcome: Outcome
    gpu: str
    protocol: int
    text_sha256: str
    reason: str = ""
    product: str = ""
    driver: str = ""
    nvcc: str = ""
    cubin_sha256: str = ""
    code_sha256: str = ""
    samples: tuple[Samples, ...] = ()
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    resources: dict[str, dict[str, int]] = field(default_factory=dict)
    shared_from: str = ""
    date: str = ""
    seconds: float = 0.0
    schema: int = JOURNAL_SCHEMA
    first_failure: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for times of a `build`: what never ran on a GPU has none."""
        if self.phase == "build" and self.samples and not self.shared_from:
            raise ValueError("a record of phase `build` has times, and nothing ran")

    def median_us(self, tokens: int) -> float | None:
        """Median kernel time at that length in microseconds; None if it was not measured there."""
        return next((s.median_us for s in self.samples if s.tokens == tokens), None)

    def median_call_us(self, tokens: int) -> float | None:
        """Median time of full calls at that length in microseconds; None if it was not measured there."""
        return next((s.median_call_us for s in self.samples if s.tokens == tokens), None)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


class Journal:
    """An open journal file: what it held, and where new records go.

    Args:
        path: the JSONL file; made if missing. A torn last line, left by a killed run, is cut off.

    Raises:
        ArgumentError: another process has the journal open, or the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        from filelock import FileLock, Timeout

        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(path.with_name(path.name + ".lock"))
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ArgumentError(
                f"journal {path} is in use by another tuning run", "wait for it, or name another file with --journal"
            ) from None
        except OSError as error:
            raise ArgumentError(
                f"journal {path} cannot be written ({error.strerror})", "name another with --journal"
            ) from error
        try:
            self._file, self._size = _open_after_last_newline(path)
            self.records = read_journal(path)
        except BaseException:
            self._lock.release()
            raise

    def append(self, record: Record) -> None:
        """Write `record` through to the operating system, so that only a power cut can lose it.

        Raises:
            JournalError: it could not be written, as on a full disk; the journal ends with the record before.
        """
        line = _encoder.encode(record) + b"\n"
        try:
            left = memoryview(line)
            while left:  # a disk that fills up takes a part first
                left = left[os.write(self._file, left) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # the next start cuts it off too
                os.ftruncate(self._file, self._size)
            raise JournalError(
                f"journal {self.path} cannot be written ({error.strerror}); all records before are in it",
                "free its disk, then the same command goes on from there",
            ) from error
        self._size += len(line)
        self.records.append(record)

    def close(self) -> None:
        os.close(self._file)
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_after_last_newline(path: Path) -> tuple[int, int]:
    """A descriptor that appends to `path`, once what follows its last newline is cut off, and the bytes before."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    size = path.read_bytes().rfind(b"\n") + 1
    os.ftruncate(file, size)
    return file, size


def read_journal(path: Path) -> list[Record]:
    """Every readable record of `path`, in order; [] if there is no file. A name that ends in `.gz` is unpacked.

    Lines of another schema, and lines that are no records, are skipped with one warning: a journal is evidence, and
    one damaged line must not cost the rest. Likewise of a packed one that was cut short or damaged, the part before.

    Raises:
        ArgumentError: a name ends in `.gz` and what it names was never packed.
    """
    if not path.exists():
        return []
    records, skipped = [], 0
    data = path.read_bytes()
    for line in (unpack(path, data) if path.suffix == ".gz" else data).split(b"\n"):
        if not line:
            continue
        try:
            record = _decoder.decode(line)
        except msgspec.DecodeError:
            skipped += 1
            continue
        if record.schema == JOURNAL_SCHEMA:
            records.append(record)
        else:
            skipped += 1
    if skipped:
        _log.warning("journal %s: skipped %d lines that are not records of schema %d", path, skipped, JOURNAL_SCHEMA)
    return records


def set_aside(path: Path, stamp: str) -> Path | None:
    """Rename the journal out of the way, keeping it under a name with `stamp`; None if there was none."""
    if not path.exists():
        return None
    kept = path.with_name(f"{path.stem}.{stamp}{path.suffix}")
    path.rename(kept)
    return kept


def comparable_records(
    records: Iterable[Record], gpu: str, protocol: int, text_of: Callable[[str, str], str | None]
) -> list[Record]:
    """The records that count today: same GPU, same protocol, and the config still renders to the same text.

    Args:
        text_of: (problem name, config name) to the sha256 of the text rendered now, or None if it cannot be rendered.
    """
    return [
        record
        for record in records
        if record.gpu == gpu
        and record.protocol == protocol
        and record.text_sha256 == text_of(record.problem, record.config)
    ]


def attempts(records: Iterable[Record]) -> dict[tuple[str, str], Record]:
    """The last build or screen record of every (problem, config); finals are not among them.

    Samples at lengths that it lacks come from earlier ones of the same text: sittings may measure at lengths of their
    own.
    """
    latest: dict[tuple[str, str], Record] = {}
    for record in records:
        if record.phase in ("build", "screen"):
            key = (record.problem, record.config)
            latest[key] = _with_samples_of(record, latest.get(key))
    return latest


def _with_samples_of(record: Record, earlier: Record | None) -> Record:
    is_same = earlier is not None and (earlier.outcome, earlier.text_sha256) == ("ok", record.text_sha256)
    if earlier is None or not is_same or record.outcome != "ok":
        return record
    by_tokens = {samples.tokens: samples for samples in (*earlier.samples, *record.samples)}
    return replace(record, samples=tuple(by_tokens[tokens] for tokens in sorted(by_tokens)))


def replay(records: Iterable[Record]) -> Callable[[Problem, Config], Record]:
    """A runner that answers from a journal: it lets search strategies be compared without a GPU.

    The runner raises UnknownNameError for a config that was never attempted, so offer it only recorded ones.
    """
    known: Mapping[tuple[str, str], Record] = attempts(records)

    def run(problem: Problem, config: Config) -> Record:
        record = known.get((problem.name, config.name))
        if record is None:
            raise UnknownNameError(
                f"config {config.name} of {problem.name} is not in the journal", "search only recorded configs"
            )
        return record

    return run
