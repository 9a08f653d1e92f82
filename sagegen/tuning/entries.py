"""From results to registry entries: what was measured, against what, where and when."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Literal

import numpy as np

from sagegen.abi import LAUNCH_ABI
from sagegen.build import Built
from sagegen.entry import Accuracy, Entry, KernelResources, Provenance, Range, Timing
from sagegen.gpu import Gpu, Rates
from sagegen.layout import make_layout
from sagegen.measuring.telemetry import GpuState
from sagegen.measuring.verdict import PROTOCOL
from sagegen.problem import Shape, TunedLength
from sagegen.tuning.examine import tuned_shape
from sagegen.tuning.finals import Decision
from sagegen.tuning.journal import Record
from sagegen.tuning.model import MODEL, MODEL_CHECKED_ON, MODEL_ERROR, Prediction
from sagegen.tuning.variants import Variant

_RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Place:
    """Where and when a result is from; `state` is empty for one that was predicted."""

    gpu: Gpu
    driver: str | None = None
    state: GpuState = field(default_factory=GpuState)


def predicted_entry(
    variant: Variant, built: Built, length: TunedLength, prediction: Prediction, gpu: Gpu, record: Record | None = None
) -> Entry:
    """An entry of a config that was compiled for `gpu` but never run there.

    Args:
        record: has the accuracy figures of the emulator, if any.
    """
    shape = tuned_shape(length)
    figures = Timing(predicted_us=round(prediction.kernel_us, 1), predicted_full_us=round(prediction.call_us, 1))
    return _entry("predicted", variant, built, length, shape, Place(gpu), figures, record)


def screened_entry(
    variant: Variant, built: Built, length: TunedLength, record: Record, default: Record | None, place: Place
) -> Entry:
    """An entry of a run that was ended before its finals: figures of the screen, against the default's screen."""
    shape = tuned_shape(length)
    samples = next(s for s in record.samples if s.tokens == length.tokens)
    default_us = default.median_us(length.tokens) if default else None
    figures = _timing(
        variant, shape, samples.times_us, samples.call_us, vs_default=default_us and default_us / samples.median_us
    )
    return _entry("measured", variant, built, length, shape, place, figures, record)


def decided_entry(decision: Decision, variant: Variant, built: Built, record: Record, place: Place) -> Entry:
    """An entry of a bucket that finals decided."""
    bout = decision.bout
    against_default, against_sdpa = decision.against_default, decision.against_sdpa
    figures = _timing(
        variant,
        bout.match.shape,
        tuple(bout.kernel_us[variant.config]),
        tuple(bout.call_us[variant.config]),
        vs_default=against_default.ratio if against_default else None,
        vs_sdpa=against_sdpa.ratio if against_sdpa else None,
    )
    return _entry(
        "measured", variant, built, bout.match.length, bout.match.shape, place, figures, record, decision.answer
    )


def _timing(
    variant: Variant,
    shape: Shape,
    kernel_us: tuple[float, ...],
    call_us: tuple[float, ...],
    *,
    vs_default: float | None = None,
    vs_sdpa: float | None = None,
) -> Timing:
    median, low, high = _median_interval(kernel_us)
    full_us = statistics.median(call_us) if call_us else None
    flops = shape.flops(variant.problem)
    return Timing(
        kernel_us=round(median, 2),
        kernel_us_low=round(low, 2),
        kernel_us_high=round(high, 2),
        full_us=full_us and round(full_us, 2),
        tops=round(flops / median / 1e6, 1),
        full_tops=full_us and round(flops / full_us / 1e6, 1),
        speed_vs_default=vs_default and round(vs_default, 4),
        speed_vs_sdpa=vs_sdpa and round(vs_sdpa, 4),
    )


def _median_interval(times: tuple[float, ...]) -> tuple[float, float, float]:
    """Median and the ends of its 95 % interval, by a percentile bootstrap."""
    values = np.asarray(times, dtype=np.float64)
    picks = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), (2.5, 97.5)).tolist()
    return float(np.median(values)), low, high


def _entry(
    kind: Literal["measured", "predicted"],
    variant: Variant,
    built: Built,
    length: TunedLength,
    shape: Shape,
    place: Place,
    figures: Timing,
    record: Record | None = None,
    answer: Literal["kernel", "sdpa"] = "kernel",
) -> Entry:
    accuracy = {name: Accuracy(**values) for name, values in record.figures.items()} if record else {}
    used = built.resources["attention"]
    return Entry(
        problem=variant.problem.name,
        bucket=Range(kv_min=length.bucket.kv_min, kv_max=length.bucket.kv_max),
        answer=answer,
        config=variant.config.name,
        kernel=variant.name,
        cubin_sha256=built.cubin_sha256,
        min_cosine=accuracy["normal"].cosine if "normal" in accuracy else None,
        figures=figures,
        accuracy=accuracy,
        resources=KernelResources(
            registers=used.registers,
            spill_bytes=used.spill_store_bytes + used.spill_load_bytes,
            smem_bytes=used.smem_bytes + make_layout(variant.config, variant.problem).smem_bytes,
        ),
        provenance=Provenance(
            kind=kind,
            gpu=place.gpu.name,
            sms=place.gpu.sms,
            launch_abi=LAUNCH_ABI,
            protocol=PROTOCOL,
            date=datetime.now(timezone.utc).date().isoformat(),
            shape=f"b{shape.batch} h{shape.heads_q}/{shape.heads_kv} q{shape.q_len} kv{shape.kv_len}",
            driver=place.driver,
            nvcc=built.nvcc,
            text_sha256=variant.source.sha256,
            clock_mhz=place.state.clock_mhz,
            power_limit_w=place.state.power_limit_w,
            accuracy_from="emulator" if accuracy and kind == "predicted" else None,
            model=_name_model(place.gpu) if kind == "predicted" else None,
            model_error=MODEL_ERROR[variant.config.family] if kind == "predicted" else None,
            model_checked_on=MODEL_CHECKED_ON if kind == "predicted" else None,
        ),
    )


def _name_model(gpu: Gpu) -> str:
    """The model that predicted; with a probe's rates it is another one than with those of the table of GPUs."""
    return MODEL if gpu.measured == Rates() else f"{MODEL}, probed"
