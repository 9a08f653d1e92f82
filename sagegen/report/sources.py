"""What a report is made from: journals and registries, read strictly and cut down to what can be trusted.

Both are untrusted input. A record that no tuning run can have written is left out and counted with a reason, so that
the rest of the journal can still be shown.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sagegen.entry import Entry
from sagegen.errors import ArgumentError, SagegenError
from sagegen.gpu import find_gpu
from sagegen.problem import parse_problem
from sagegen.registry_file import parse_entries
from sagegen.report.figure import is_time
from sagegen.report.races import Race, read_races
from sagegen.report.text import cut_text
from sagegen.space import parse_config
from sagegen.tuning.journal import Record, Samples, read_journal

#: Longer than any length that a run can have measured: the model walks over the tiles of a call.
MOST_TOKENS = 1 << 24
_MOST_HEADS = 1 << 20
_REGISTRY_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was read.

    Attributes:
        name: its name without folders.
        sha256: of its bytes.
        kind: what it is.
        count: records or entries in it.
    """

    name: str
    sha256: str
    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that a report is made from.

    Attributes:
        records: of all journals, in the order of the files.
        entries: of all registries, by GPU.
        races: against peers.
        left_out: why records were left out, and how many.
    """

    sources: tuple[Source, ...]
    records: tuple[Record, ...]
    entries: Mapping[str, tuple[Entry, ...]]
    races: tuple[Race, ...]
    left_out: Mapping[str, int]

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of the GPUs, in the order in which they were met."""
        return tuple(dict.fromkeys((*(record.gpu for record in self.records), *self.entries)))


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Read journals (`.jsonl`, `.jsonl.gz`), registries (`.yaml`) and races (`.json`).

    Raises:
        ArgumentError: a name ends otherwise, a race's file holds none, or no journal or registry has anything to show.
        RegistryError: a registry is malformed; names file, line and key.
        OSError: a file cannot be read.
    """
    sources, records, races, left_out = [], [], [], Counter[str]()
    entries: dict[str, tuple[Entry, ...]] = {}
    for path in dict.fromkeys(paths):
        data = path.read_bytes()
        if path.suffix in _REGISTRY_SUFFIXES:
            gpu, found = _read_registry(path, data)
            entries[gpu] = (*entries.get(gpu, ()), *found)
            sources.append(Source(path.name, _digest(data), "registry", len(found)))
        elif path.suffix == ".json":
            races += (raced := read_races(path, data))
            sources.append(Source(path.name, _digest(data), "races", len(raced)))
        elif ".jsonl" in path.suffixes[-2:]:
            read = read_journal(path)
            kept = list(keep_sound(read, left_out))
            records += kept
            sources.append(Source(path.name, _digest(data), "journal", len(read)))
        else:
            raise ArgumentError(
                f"{path} is no journal, registry or race by its name",
                "name files that end in .jsonl, .jsonl.gz, .yaml or .json",
            )
    if not records and not any(entries.values()):
        why = f": {'; '.join(left_out)}" if left_out else ""
        remedy = "name a journal or a registry beside the races" if races else "tune first"
        raise ArgumentError(f"there is nothing to report in {', '.join(map(str, paths))}{why}", remedy)
    return Inputs(tuple(sources), _of_one_protocol(records, left_out), entries, tuple(races), dict(left_out))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_registry(path: Path, data: bytes) -> tuple[str, list[Entry]]:
    text = data.decode(errors="replace")
    named = re.search(r"^gpu: *([a-z0-9]+) *$", text, re.MULTILINE)
    gpu = named[1] if named else path.stem
    return gpu, parse_entries(text, str(path), gpu)


def keep_sound(records: Iterable[Record], left_out: Counter[str]) -> Iterator[Record]:
    """The records that a tuning run can have written; others are counted by reason in `left_out`."""
    for record in records:
        try:
            problem, config = parse_problem(record.problem), parse_config(record.config)
            find_gpu(record.gpu)
        except SagegenError as error:
            left_out[cut_text(error.message)] += 1
            continue
        if problem.name != record.problem or config.name != record.config:
            left_out["a name is not spelled as sagegen spells it"] += 1
        elif not all(map(_is_sound, record.samples)):
            left_out["times are absent, not positive, or of a shape that no run has"] += 1
        elif not _has_figures(record):
            left_out["accuracy figures are not finite, or have no cosine that is one"] += 1
        elif record.outcome == "ok" and record.phase != "build" and not record.samples:
            left_out["the outcome is ok and there are no times"] += 1
        else:
            yield replace(
                record,
                samples=record.samples if record.outcome == "ok" else (),
                reason=cut_text(record.reason),
                product=cut_text(record.product),
                driver=cut_text(record.driver),
                nvcc=cut_text(record.nvcc),
            )


def _is_sound(samples: Samples) -> bool:
    times = (*samples.times_us, *samples.call_us)
    counts = (samples.batch, samples.heads_q, samples.heads_kv)
    return (
        len(samples.times_us) > 0
        and len(samples.call_us) in (0, len(samples.times_us))  # finals are compared round by round
        and all(map(is_time, times))
        and 0 < samples.tokens <= MOST_TOKENS
        and all(0 < count <= _MOST_HEADS for count in counts)
        and samples.heads_q % samples.heads_kv == 0
    )


def _has_figures(record: Record) -> bool:
    kinds = record.figures.values()
    return all(
        abs(figures.get("cosine", 2.0)) < 1.001 and all(map(math.isfinite, figures.values())) for figures in kinds
    )


def _of_one_protocol(records: Sequence[Record], left_out: Counter[str]) -> tuple[Record, ...]:
    """Of each GPU and problem the records of the protocol that came last: times of others are not compared."""
    last = {(record.gpu, record.problem): record.protocol for record in records}
    kept = tuple(record for record in records if record.protocol == last[record.gpu, record.problem])
    if len(kept) < len(records):
        left_out["measured by an older protocol"] += len(records) - len(kept)
    return kept
