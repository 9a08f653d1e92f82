"""What a measuring worker can be asked, and what it answers: the messages between tuner and worker.

One JSON object per line in each direction. A job's `job` member names its type; unknown members are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

import msgspec

from sagegen.problem import Shape

#: What a kernel is compared with: torch SDPA's backends on the same inputs, and cuDNN's FP8 attention.
SDPA_FLASH, SDPA_CUDNN, CUDNN_FP8 = "sdpa-flash", "sdpa-cudnn", "cudnn-fp8"
PEERS = (SDPA_FLASH, SDPA_CUDNN, CUDNN_FP8)
#: Of a race: seconds of launches before a sustained sample that do not count, since the clock is still that of the
#: rival before; launches of a burst.
SETTLE_S = 0.1
BURST_LAUNCHES = 3
#: What of a call is timed: the attention kernel alone, or all of it, quantizers included.
Part = Literal["kernel", "call"]

#: How an attempt ended, as far as a worker can tell; a subset of the journal's outcomes.
WorkerOutcome = Literal["ok", "launch", "crash", "accuracy", "timeout"]


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel to run: path of its cubin, names of its problem and its config."""

    cubin: str
    problem: str
    config: str

    @property
    def name(self) -> str:
        """Name of the rendered source, which its kernels carry."""
        return f"{self.problem}_{self.config}"


class Ping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="job", tag="ping"):
    """Starts CUDA. Answers `{product, compute_capability, sms, torch}`."""


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="job", tag="gate"):
    """The accuracy gate of one candidate.

    Answers `{figures: {kind: {cosine, relative_l1, relative_l2, max_error, scale_ratio}}, seconds}`; outcome `accuracy`
    with a reason when a floor is missed.

    Attributes:
        kinds: names of input kinds; empty means all.
        captured: path of a safetensors file with a model's own q, k and v, run as further kinds.
    """

    candidate: Candidate
    kinds: tuple[str, ...] = ()
    captured: str = ""


class Screen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="job", tag="screen"):
    """Times one candidate at one shape, L2 flushed before each launch.

    Answers `{kernel_us: [...], call_us: [...], warm_us: [...], sustained_us: float | null, conditions: {...}}`: the
    attention kernel alone, all kernels of the call, the attention kernel right behind another launch of it, the mean of
    back-to-back calls of it, and `telemetry.Conditions`. Throttled launches are repeated, see `bench.take_rounds`.

    Attributes:
        launches: timed launches of each, after warm-up.
        sustained_s: seconds of the back-to-back run; 0 leaves it out.
    """

    candidate: Candidate
    shape: Shape
    launches: int = 30
    sustained_s: float = 0.0


class Finals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="job", tag="finals"):
    """Times candidates against each other at one shape, interleaved in random order.

    Answers `{kernel_us: [[per round] per candidate], call_us: likewise, peers: {name: [per round]},
    absent: {peer: reason}, conditions: {...}}`, candidates in the order given; the times of a round are pairs, whatever
    they are of. Throttled rounds are repeated, see `bench.take_rounds`; `conditions` is `telemetry.Conditions`.
    When it fails, `{running}` names the candidate or the peer that ran last.

    Attributes:
        rounds: each round times every candidate once, in an order of its own.
        seed: of the orders.
        sustained_s: a sample is the mean of back-to-back launches for that long instead of one launch with cold L2.
        peers: whether torch SDPA's flash and cuDNN backends run in the same rounds.
    """

    candidates: tuple[Candidate, ...]
    shape: Shape
    rounds: int = 60
    seed: int = 0
    sustained_s: float = 0.0
    peers: bool = False


class Race(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="job", tag="race"):
    """Times candidates and peers at one shape, interleaved in random order: sustained in some rounds, bursts in others.

    Answers `{sustained_us: {rival: [per round]}, burst_us: likewise, clock_mhz: {rival: [per sustained round]},
    agreement: {rival: cosine of its output with torch's}, absent: {peer: reason}, versions: {library: version}}`;
    rivals are called `kernel 0`, `call 0`, ... in the order of the candidates, and as the peers are.
    When it fails, `{running}` names the candidate or the peer at fault.

    Attributes:
        problem: its name; of all candidates, of which there may be none.
        gpu_index: NVML's index of the worker's GPU.
        rounds: of sustained samples; each has every rival once, in an order of its own.
        sustained_s: least seconds of a sample.
        burst_rounds: likewise of bursts; 0 leaves them out.
        idle_s: rest before a burst.
        seed: of the orders.
    """

    candidates: tuple[Candidate, ...]
    problem: str
    shape: Shape
    gpu_index: int
    parts: tuple[Part, ...] = ("kernel", "call")
    peers: tuple[str, ...] = PEERS
    rounds: int = 3
    sustained_s: float = 0.3
    burst_rounds: int = 2
    idle_s: float = 0.5
    seed: int = 0


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="job", tag="host"):
    """Times a warm `sagegen.attention` on the host, and torch SDPA on the same small inputs.

    Answers `{attention_us: [per batch], sdpa_us: likewise}`: the mean of a batch of calls, before they are waited for.

    Attributes:
        problem: name of the problem whose kernel is called.
    """

    problem: str


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="job", tag="probe"):
    """Runs the kernel of one of `sagegen probe`'s probes.

    Answers `{figures: probing.timing.Figures, nvml_mhz, power_w, power_limit_w}`, or of an accumulator probe
    `{alone: [...], with_products: [...]}`: D of a product of zeros and of products that sum to 1.

    Attributes:
        probe: its name.
        cubin: path.
        gpu_index: NVML's index of the worker's GPU.
    """

    probe: str
    cubin: str
    gpu_index: int


#: Says which candidate is about to run, by its source name, or which peer.
Tell = Callable[[str], None]
Job = Union[Ping, Gate, Screen, Finals, Race, Host, Probe]  # noqa: UP007 - msgspec resolves it at run time on 3.10


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a job.

    Attributes:
        outcome: `ok`, or how it failed.
        reason: one line that explains an outcome other than `ok`.
        data: as the job's type documents; after a failure at least `{running}`, the candidate's source name, if known.
    """

    outcome: WorkerOutcome
    reason: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="message", tag="running"):
    """Sent before a candidate's first launch, so that the parent knows whom a hang or a death belongs to."""

    name: str


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="message", tag="ready"):
    """Sent once, when the worker can take jobs."""


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="message", tag="done"):
    """The end of a job."""

    reply: Reply


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="message", tag="fault"):
    """The worker's own code failed, not the candidate: `trace` is the traceback."""

    trace: str


Message = Union[Ready, Progress, Done, Fault]  # noqa: UP007 - as above


def read_job(job: Job | Mapping[str, Any]) -> Job:
    """A job from itself or from its JSON form; raises msgspec.ValidationError, which names the wrong member."""
    if isinstance(job, Mapping):
        return msgspec.convert(dict(job), Job)  # type: ignore[no-any-return]
    return job
