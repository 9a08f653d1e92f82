"""How much sooner a tuning run ends with more workers: the run itself, its workers answering from a recorded journal.

A worker's answer to a config is its recorded sample, after its recorded duration times --scale. Compiling is scripted
and takes no time. For example:

    python tests/gpu/replay_scaling.py docs/gpu-runs/2026-11-30c-h200-fp16-journal.jsonl.gz --workers 1,2,4
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sagegen.build import Built
from sagegen.cubin import Resources
from sagegen.gpu import DetectedGpu
from sagegen.measuring.jobs import Finals, Gate, Job, Ping, Reply
from sagegen.measuring.telemetry import GpuState
from sagegen.plan import ROLES
from sagegen.problem import TUNED_LENGTHS
from sagegen.render import Source
from sagegen.space import parse_config
from sagegen.store import CUBIN_FILE, Store, make_key
from sagegen.toolkit import Toolkit
from sagegen.tuning.journal import Journal, Record, Samples
from sagegen.tuning.replay import Landscape, read_landscapes
from sagegen.tuning.request import Request, Tools
from sagegen.tuning.strategy import Strategy
from sagegen.tuning.tune import tune


@dataclass
class ReplayWorker:
    """Answers from a landscape; each step takes its share of the recorded seconds."""

    landscape: Landscape
    scale: float
    gpu_index: int = 0
    pid: int | None = None
    busy_s: float = 0.0
    gated: list[str] = field(default_factory=list)

    def run(self, job: Job, timeout_s: float) -> Reply:
        self.pid = 1_000_000 + self.gpu_index
        gpu = self.landscape.target.gpu
        if isinstance(job, Ping):
            return Reply(
                "ok", data={"product": gpu.products[0], "compute_capability": gpu.compute_capability, "sms": gpu.sms}
            )
        if isinstance(job, Finals):
            return Reply("ok", data=self._finals(job))
        config = parse_config(job.candidate.config)
        record = self.landscape.records[config]
        self._take(record.seconds / (1 + len(self.landscape.tokens)))
        if isinstance(job, Gate):
            self.gated.append(config.name)
            return Reply(record.outcome, record.reason, {"figures": record.figures, "seconds": 0.1})
        samples = _samples_at(record, job.shape.kv_len)
        return Reply("ok", data={"kernel_us": list(samples.times_us), "call_us": list(samples.calls)})

    def close(self) -> None:
        self.pid = None

    def _take(self, seconds: float) -> None:
        self.busy_s += seconds * self.scale
        time.sleep(seconds * self.scale)

    def _finals(self, job: Finals) -> Mapping[str, Any]:
        records = [self.landscape.records[parse_config(c.config)] for c in job.candidates]
        own = [_samples_at(record, job.shape.kv_len) for record in records]
        return {
            "kernel_us": [[s.median_us] * job.rounds for s in own],
            "call_us": [[s.median_call_us] * job.rounds for s in own],
            "peers": {},
            "absent": {},
        }


def _samples_at(record: Record, tokens: int) -> Samples:
    return next(samples for samples in record.samples if samples.tokens == tokens)


def build_batch(
    sources: Sequence[Source], arch: str, store: Store, toolkit: Toolkit, **options: object
) -> dict[str, Built]:
    """A compiler that takes no time; the text stands in for the cubin."""
    built = {}
    for source in sources:
        cubin = source.text.encode()
        folder = store.publish(make_key(source.name, source.text, arch, toolkit.build, ()), source.text, cubin, {})
        digest = hashlib.sha256(cubin).hexdigest()
        resources = {role: Resources(168, 0, 0, 0, 0) for role in ROLES}
        built[source.name] = Built(
            source.name, arch, folder / CUBIN_FILE, digest, source.sha256, digest, resources, 0.0, toolkit.build, False
        )
    return built


def time_run(landscape: Landscape, count: int, scale: float, folder: Path) -> tuple[float, list[ReplayWorker]]:
    """Wall time of a run over all recorded configs by `count` workers, without the start of the first one's thread."""
    gpu, configs = landscape.target.gpu, list(landscape.successes)
    workers = [ReplayWorker(landscape, scale, index) for index in range(count)]
    device = DetectedGpu(0, gpu.products[0], gpu.sms, "580.1", gpu.arch, gpu)
    toolkit = Toolkit(Path("/nvcc"), (13, 0), "V13.0.88")
    lengths = tuple(length for length in TUNED_LENGTHS if length.tokens in landscape.tokens)
    request = Request(
        gpu, (landscape.problem,), budget_s=None, trials=len(configs), strategy=Strategy("random"), lengths=lengths
    )
    with pytest.MonkeyPatch.context() as patch, Journal(folder / "journal.jsonl") as journal:
        patch.setattr("sagegen.tuning.variants.build_batch", build_batch)
        patch.setattr("sagegen.tuning.request.all_searched_configs", lambda target: configs)
        patch.setattr("sagegen.tuning.request.default_config", lambda target: landscape.reference)
        patch.setattr("sagegen.tuning.tune.default_config", lambda target: landscape.reference)
        patch.setattr("sagegen.tuning.occupancy.find_others", lambda index: None)
        patch.setattr("sagegen.tuning.judge.read_state", lambda index: GpuState())
        tools = Tools(workers, [device] * count, journal, Store(folder / "kernels"), toolkit, jobs=8)
        start = time.monotonic()
        tune(request, tools)
    return time.monotonic() - start, workers


def _all_rendered(landscape: Landscape) -> None:
    """Render everything once, so that no run pays for the first one's caches."""
    from sagegen.render import render

    for config in landscape.records:
        render(landscape.problem, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal", type=Path)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--scale", type=float, default=1.0, help="of the recorded durations")
    asked = parser.parse_args()
    for landscape in read_landscapes(asked.journal):
        _all_rendered(landscape)
        alone = None
        for count in map(int, asked.workers.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                wall_s, workers = time_run(landscape, count, asked.scale, Path(folder))
            alone = alone or wall_s
            busy = sum(worker.busy_s for worker in workers) / count / wall_s
            print(
                f"{landscape.problem.name}: {len(landscape.successes)} configs, {count} workers: {wall_s:.2f} s, "
                f"{wall_s / alone:.2f} of one worker, each busy {busy:.0%}"
            )


if __name__ == "__main__":
    main()
