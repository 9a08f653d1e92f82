"""A kernel beside torch SDPA at one shape: what `sagegen bench` prints, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sagegen.measuring.jobs import Reply
from sagegen.measuring.verdict import PROTOCOL, Summary, Verdict, compare, summarize
from sagegen.problem import Problem, Shape

#: What a kernel's own times are called beside the peers'.
KERNEL, CALL = "kernel", "call"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One shape's times.

    Attributes:
        config, origin: of the kernel, and where it is from, e.g. `tuned for kv1-2047`.
        times: median and spread by name: `kernel` (attention alone), `call` (with the quantizers), peers.
        absent: peers that cannot run here, and why.
        speed: of the whole call over the fastest peer; None without peers.
        kernel_speed: of the attention kernel alone over the same peer.
        failure: why there are no times; empty otherwise.
    """

    problem: Problem
    shape: Shape
    config: str
    origin: str
    times: Mapping[str, Summary]
    absent: Mapping[str, str]
    speed: Verdict | None = None
    kernel_speed: Verdict | None = None
    failure: str = ""

    def tops(self, name: str) -> float:
        """1e12 operations per second by the median time."""
        return self.shape.flops(self.problem) / self.times[name].median_us / 1e6

    def as_values(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rates = {name: {**asdict(time), "tops": self.tops(name)} for name, time in self.times.items()}
        return {
            "problem": self.problem.name,
            "shape": asdict(self.shape),
            "config": self.config,
            "origin": self.origin,
            "times": rates,
            "absent": dict(self.absent),
            "speed": asdict(self.speed) if self.speed else None,
            "kernel_speed": asdict(self.kernel_speed) if self.kernel_speed else None,
            "failure": self.failure,
        }


def make_comparison(problem: Problem, shape: Shape, config: str, origin: str, reply: Reply) -> Comparison:
    """What a `Finals` job of one candidate with peers says."""
    if reply.outcome != "ok":
        return Comparison(problem, shape, config, origin, {}, {}, failure=f"{reply.outcome}: {reply.reason}")
    (kernel,), (call,), peers = reply.data["kernel_us"], reply.data["call_us"], reply.data["peers"]
    times = {KERNEL: summarize(kernel), CALL: summarize(call)}
    times.update({name: summarize(samples) for name, samples in peers.items()})
    absent = reply.data["absent"]
    if not peers:
        return Comparison(problem, shape, config, origin, times, absent)
    rival = peers[min(peers, key=lambda name: times[name].median_us)]
    return Comparison(
        problem, shape, config, origin, times, absent, speed=compare(rival, call), kernel_speed=compare(rival, kernel)
    )


HEADINGS = ("problem", "tokens", "kernel TOPS", "call TOPS", "flash TOPS", "cuDNN TOPS", "call / best", "kernel / best")


def make_cells(comparison: Comparison) -> tuple[str, ...]:
    """A table's row below HEADINGS: rates with the spread of their times, ratios with their intervals."""
    shape = comparison.shape
    tokens = f"{shape.kv_len}" if shape.q_len == shape.kv_len else f"{shape.q_len}/{shape.kv_len}"
    if comparison.failure:
        return (comparison.problem.name, tokens, comparison.failure, *[""] * (len(HEADINGS) - 3))
    rates = [_rate_text(comparison, name) for name in (KERNEL, CALL, "sdpa-flash", "sdpa-cudnn")]
    ratios = [_ratio_text(verdict) for verdict in (comparison.speed, comparison.kernel_speed)]
    return (comparison.problem.name, tokens, *rates, *ratios)


def _rate_text(comparison: Comparison, name: str) -> str:
    """`812 ±1.2%`: half of the distance between the 20th and the 80th percentile of the times, of their median."""
    if name not in comparison.times:
        return "-"
    time = comparison.times[name]
    return f"{comparison.tops(name):.0f} ±{(time.p80_us - time.p20_us) / 2 / time.median_us:.1%}"


def _ratio_text(verdict: Verdict | None) -> str:
    return "-" if verdict is None else f"{verdict.ratio:.3f} ({verdict.low:.3f}..{verdict.high:.3f})"


def host_text(reply: Reply) -> str:
    """One line of what a `Host` job says."""
    if reply.outcome != "ok":
        return f"host time of a warm call: not measured, {reply.reason}"
    ours, theirs = (summarize(reply.data[name]) for name in ("attention_us", "sdpa_us"))
    return (
        f"host time of a warm call: sagegen.attention {ours.median_us:.1f} us ({ours.p20_us:.1f}..{ours.p80_us:.1f}), "
        f"torch SDPA {theirs.median_us:.1f} us ({theirs.p20_us:.1f}..{theirs.p80_us:.1f})"
    )


def to_markdown(
    comparisons: Sequence[Comparison], machine: Mapping[str, object], rounds: int, sustained_s: float, host: str = ""
) -> str:
    """A table with all that is needed to read it: machine, protocol, shapes, and which peers are missing."""
    mode = f"means of {sustained_s:g} s back to back" if sustained_s else "single launches with cold L2"
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)
    lines = [
        f"Measured on {facts}; protocol {PROTOCOL}, {rounds} interleaved rounds, {mode}.",
        "",
        "TOPS = 4 B H Lq Lk d / time (half of it for causal), by the median; ± half of the 20..80 % range. `kernel` is",
        "the attention kernel alone, `call` has the quantizers too; ratios are speeds over the faster torch SDPA",
        "backend of the same rounds, with 95 % intervals.",
        "",
        f"| {' | '.join((*HEADINGS, 'batch x heads (KV)', 'config'))} |",
        "|" + "---|" * (len(HEADINGS) + 2),
    ]
    for comparison in comparisons:
        shape = comparison.shape
        counts = f"{shape.batch} x {shape.heads_q} ({shape.heads_kv})"
        config = f"`{comparison.config}` ({comparison.origin})"
        lines.append(f"| {' | '.join((*make_cells(comparison), counts, config))} |")
    absent = {name: why for comparison in comparisons for name, why in comparison.absent.items()}
    lines += ["", *(f"{name} could not run: {why}" for name, why in absent.items())] if absent else []
    lines += ["", f"{host[:1].upper()}{host[1:]}."] if host else []
    return "\n".join(lines) + "\n"
