"""One tuned entry: what answers a problem in a range of key lengths, how good it is, where that comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from sagegen.problem import Bucket, Precision, parse_problem

#: Callers that an entry is for where a bucket has two: those that ask for more accuracy, and those that want speed.
Tier = Literal["fine", "coarse"]
#: By precision: cosines against FP64 by input kind, and the relative L1 of normal inputs, that make a config fine.
#: INT4's are what scales per thread reach and coarser ones miss (docs/numerics.md).
FINE_COSINES: Mapping[Precision, Mapping[str, float]] = {
    "int8": {"normal": 0.9993, "channel_offsets": 0.9989},
    "int4": {"normal": 0.978, "channel_offsets": 0.978},
}
FINE_RELATIVE_L1: Mapping[Precision, float] = {"int8": 0.038, "int4": 0.21}
#: By precision, of an entry whose accuracy is not known; INT4's is that of its coarsest scales.
ASSUMED_COSINES: Mapping[Precision, float] = {"int8": 0.999, "int4": 0.97}

Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
#: Of keys; kernels count them in 32 bits.
Length = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
#: Beyond 1 by what rounding in FP64 adds.
Cosine = Annotated[float, msgspec.Meta(ge=-1, le=1 + 1e-9)]
Error = Annotated[float, msgspec.Meta(ge=0)]
#: Of what takes time; rates are rounded, so that a slow one may be 0.
Above0 = Annotated[float, msgspec.Meta(gt=0)]
Rate = Annotated[float, msgspec.Meta(ge=0)]
Date = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}\Z")]
#: Free text. It is printed, so it must not hold what steers a terminal.
Text = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z", max_length=200)]

#: Input kinds of the accuracy gate, on a GPU and in the emulator; listed here since reading a registry loads no torch.
ACCURACY_KINDS = (
    "normal", "k_offset", "channel_offsets", "outliers", "v_constant", "v_offset_long", "v_one_long", "v_one_4k",
    "v_zero_channel", "large_logits", "off_edge", "few_keys", "gqa", "non_finite",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """Microseconds that a GPU took. Formats as the number."""

    us: float

    def __format__(self, spec: str) -> str:
        return format(self.us, spec)


@dataclass(frozen=True, slots=True)
class PredictedTime:
    """Microseconds that the model expects. However it is formatted, `~` goes before the number."""

    us: float

    def __format__(self, spec: str) -> str:
        return f"~{self.us:{spec}}"


@dataclass(frozen=True, slots=True)
class PredictedRatio:
    """How many times faster the model expects something to be. `~` goes before it, as before a `PredictedTime`."""

    ratio: float

    def __format__(self, spec: str) -> str:
        return f"~{self.ratio:{spec}}"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything in the file: immutable, and a misspelled key is an error."""


class Range(Record, frozen=True, kw_only=True):
    """Key lengths that an entry answers, both ends included; `kv_max` null is open."""

    kv_min: Length
    kv_max: Length | None


class Timing(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Times in microseconds, rates in TOPS (1e12 operations a second, `Shape.flops`).

    `kernel_us` is the attention kernel alone, median, with the interval's ends; `full_us` has its quantizers too.
    `speed_vs_sdpa` compares full calls; `speed_vs_default` the kernel with that of the default config, in the same run.
    `predicted_us` and `predicted_full_us` are the model's; all others come from a GPU.
    """

    kernel_us: Above0 | None = None
    kernel_us_low: Above0 | None = None
    kernel_us_high: Above0 | None = None
    full_us: Above0 | None = None
    tops: Rate | None = None
    full_tops: Rate | None = None
    speed_vs_sdpa: Above0 | None = None
    speed_vs_default: Above0 | None = None
    predicted_us: Above0 | None = None
    predicted_full_us: Above0 | None = None


class Accuracy(Record, frozen=True, kw_only=True):
    """Figures of one input kind against FP64."""

    cosine: Cosine
    relative_l1: Error
    relative_l2: Error
    max_error: Error
    scale_ratio: float


class KernelResources(Record, frozen=True, kw_only=True):
    """What ptxas gave the attention kernel."""

    registers: Natural
    spill_bytes: Natural
    smem_bytes: Natural


class Provenance(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Where the figures come from. `shape` and `date` are text: `b1 h32/32 q4096 kv4096`, `2025-11-29`.

    `accuracy_from` is absent when accuracy figures are from the GPU itself; `emulator` means small inputs on the CPU.
    `model` says which model predicted the times; predictions of different ones are not compared.
    `model_error` is what a predicted entry's full call may be off by, relative to its time: nine of ten configs that
    the model was held to were nearer, on the GPU `model_checked_on`. On any other nobody has measured it.
    """

    kind: Literal["measured", "predicted"]
    gpu: Text
    sms: Positive
    launch_abi: Positive
    protocol: Positive
    date: Date
    shape: Text
    driver: Text | None = None
    nvcc: Text | None = None
    model: Text | None = None
    text_sha256: Sha256 | None = None
    clock_mhz: Rate | None = None
    power_limit_w: Rate | None = None
    accuracy_from: Literal["emulator"] | None = None
    model_error: Error | None = None
    model_checked_on: str | None = None


#: Figures that only a GPU gives.
_MEASURED_FIGURES = tuple(name for name in Timing.__struct_fields__ if not name.startswith("predicted"))


class Entry(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What answers one problem in one range of key lengths, and how that is known.

    Attributes:
        problem: a `Problem.name`.
        answer: `kernel`, or `sdpa` where torch is faster with quantization counted in.
        config: a config's name; with `kernel` and `cubin_sha256` needed for answer `kernel`.
        kernel: name of the rendered source, and so of its kernels.
        tier: `coarse` where another entry of the bucket, `fine`, is slower and more accurate; absent: the only one.
        min_cosine: cosine against FP64 on normal inputs; absent when it is not known.
        accuracy: figures by input kind.
    """

    problem: str
    bucket: Range
    answer: Literal["kernel", "sdpa"]
    provenance: Provenance
    config: str | None = None
    kernel: str | None = None
    cubin_sha256: Sha256 | None = None
    tier: Tier | None = None
    min_cosine: Cosine | None = None
    figures: Timing = Timing()
    accuracy: dict[str, Accuracy] = {}
    resources: KernelResources | None = None

    def __post_init__(self) -> None:
        """Raise ValueError where a predicted entry has figures that only a GPU gives: there can be no such entry."""
        if self.provenance.kind == "predicted":
            for name in _MEASURED_FIGURES:
                if getattr(self.figures, name) is not None:
                    raise ValueError(f"figure `{name}` is measured, and the entry is predicted")

    @property
    def lengths(self) -> Bucket:
        return Bucket(self.bucket.kv_min, self.bucket.kv_max)

    @property
    def precision(self) -> Precision:
        return parse_problem(self.problem).precision

    @property
    def measured(self) -> bool:
        return self.provenance.kind == "measured"

    @property
    def kernel_time(self) -> MeasuredTime | PredictedTime | None:
        """Of the attention kernel alone; None when it is not known."""
        return self._time(self.figures.kernel_us, self.figures.predicted_us)

    @property
    def call_time(self) -> MeasuredTime | PredictedTime | None:
        """Of the full call, quantizers included; None when it is not known."""
        return self._time(self.figures.full_us, self.figures.predicted_full_us)

    def _time(self, measured: float | None, predicted: float | None) -> MeasuredTime | PredictedTime | None:
        if self.measured:
            return None if measured is None else MeasuredTime(measured)
        return None if predicted is None else PredictedTime(predicted)

    @property
    def answer_tops(self) -> float | None:
        """Measured rate of what answers in TOPS, quantizers included; None when it is not known."""
        tops, ratio = self.figures.full_tops, self.figures.speed_vs_sdpa
        if self.answer == "kernel" or tops is None:
            return tops
        return tops / ratio if ratio else None

    def is_faster_than(self, other: Entry) -> bool:
        """Whether its answer is known to take less time than `other`'s: measured, or predicted for the same shape."""
        if self.answer_tops is not None and other.answer_tops is not None:
            return self.answer_tops > other.answer_tops
        own, others = self.figures.predicted_full_us, other.figures.predicted_full_us
        if own is None or others is None or self.provenance.shape != other.provenance.shape:
            return False
        return own < others

    def serves(self, min_cosine: float) -> bool:
        """Whether it is accurate enough for a caller; torch is for all."""
        return self.answer == "sdpa" or self.is_accurate_for(min_cosine)

    def is_accurate_for(self, min_cosine: float) -> bool:
        """Whether its kernel is accurate enough for a caller.

        Who asks for the cosine of the fine tier does not get a coarse kernel, whatever made that coarse.
        """
        is_below_tier = self.tier == "coarse" and min_cosine >= FINE_COSINES[self.precision]["normal"]
        return not is_below_tier and reaches(self.known_cosine, min_cosine)

    @property
    def known_cosine(self) -> float:
        """On normal inputs; what is assumed where that was not measured."""
        return ASSUMED_COSINES[self.precision] if self.min_cosine is None else self.min_cosine

    @property
    def known_figures(self) -> dict[str, dict[str, float]]:
        """Accuracy by input kind, at least the cosine on normal inputs."""
        measured = {kind: msgspec.structs.asdict(values) for kind, values in self.accuracy.items()}
        return measured or {"normal": {"cosine": self.known_cosine}}

    def overlaps(self, other: Entry) -> bool:
        """Whether both claim some length of the same problem for the same callers."""
        return (
            self.problem == other.problem
            and (self.lengths.holds(other.bucket.kv_min) or other.lengths.holds(self.bucket.kv_min))
            and (self.tier is None or other.tier is None or self.tier == other.tier)
        )


def reaches(cosine: float, floor: float) -> bool:
    """Whether a measured cosine is as good as was asked: four decimals are what such a figure means."""
    return max(cosine, round(cosine, 4)) >= floor


def is_fine(figures: Mapping[str, Mapping[str, float]], precision: Precision = "int8") -> bool:
    """Whether accuracy figures by input kind are those of the fine tier; what was not measured counts as reached."""
    floors = FINE_COSINES[precision]
    cosines = all(reaches(figures[kind]["cosine"], floor) for kind, floor in floors.items() if kind in figures)
    return cosines and figures.get("normal", {}).get("relative_l1", 0.0) <= FINE_RELATIVE_L1[precision]
