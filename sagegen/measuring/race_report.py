"""The standings of races as text: rows against the goals, and everyone's times."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from sagegen.measuring.jobs import BURST_LAUNCHES, CUDNN_FP8, SDPA_CUDNN, SDPA_FLASH, SETTLE_S
from sagegen.measuring.race import Mode, Pace, Score, Standing
from sagegen.measuring.verdict import Verdict

LABELS = {CUDNN_FP8: "cuDNN FP8", SDPA_CUDNN: "cuDNN bf16", SDPA_FLASH: "flash bf16"}
TEXT_WIDTH = 140
SCORE_HEADINGS = (
    "work",
    "tier",
    "TOPS",
    "target",
    "reached",
    "floor",
    "held",
    *(f"/ {label}" for label in LABELS.values()),
    "cosine, L1",
    "config",
)
RIVAL_HEADINGS = (
    "work",
    "who",
    "sustained TOPS",
    "burst TOPS",
    "burst / sustained",
    "sustained us",
    "SM MHz",
    "agrees",
)


def score_rows(standings: Sequence[Standing]) -> Iterator[tuple[str, ...]]:
    """Cells below SCORE_HEADINGS: our fastest kernel of each tier beside what is asked of it, all sustained."""
    for standing in standings:
        for score in standing.scores():
            yield _score_cells(standing, score)


def _score_cells(standing: Standing, score: Score) -> tuple[str, ...]:
    work = f"{score.leg.work} {score.part}"
    goal, rival = score.goal, score.rival
    contender = standing.contender(rival) if rival else None
    floor = f"{goal.floor:g} x {LABELS[goal.peer]}" if goal else "-"
    if rival is None or contender is None:
        why = standing.failure or "no kernel is accurate enough"
        target = _target_text(standing, score)
        return (work, score.tier, "-", target, "-", floor, *["-"] * (len(SCORE_HEADINGS) - 7), why)
    figures = contender.figures["normal"]
    accuracy = f"{figures['cosine']:.5f}"
    if "relative_l1" in figures:
        accuracy += f", {figures['relative_l1']:.4f}"
    return (
        work,
        score.tier,
        rate_text(standing, rival, "sustained"),
        _target_text(standing, score),
        f"{score.tops / goal.tops:.1%}" if goal else "-",
        floor,
        {True: "yes", False: "no", None: "-"}[score.meets_floor],
        *(speed_text(score.speeds.get(peer)) for peer in LABELS),
        accuracy,
        contender.subject.config.name,
    )


def _target_text(standing: Standing, score: Score) -> str:
    """`1080 (1.154 x cuDNN FP8)`: the target, and what it is in the speed of its peer in this run."""
    if score.goal is None:
        return "-"
    rate = standing.tops(score.goal.peer)
    ratio = f" ({score.goal.tops / rate:.3f} x {LABELS[score.goal.peer]})" if rate else ""
    return f"{score.goal.tops:g}{ratio}"


def rival_rows(standings: Sequence[Standing]) -> Iterator[tuple[str, ...]]:
    """Cells below RIVAL_HEADINGS: everyone's times, sustained and in bursts."""
    for standing in standings:
        for rival in standing.sustained_us:
            sustained, burst = standing.tops(rival), standing.tops(rival, "burst")
            time, clock = standing.time(rival), standing.clock(rival)
            yield (
                standing.leg.work,
                _who(standing, rival),
                rate_text(standing, rival, "sustained"),
                rate_text(standing, rival, "burst"),
                f"{burst / sustained:.3f}" if sustained and burst else "-",
                f"{time.median_us:.1f}" if time else "-",
                f"{clock:.0f}" if clock is not None else "-",
                f"{standing.agreement[rival]:.5f}" if rival in standing.agreement else "-",
            )


def _who(standing: Standing, rival: str) -> str:
    contender = standing.contender(rival)
    if contender is None:
        return LABELS.get(rival, rival)
    return f"{rival.partition(' ')[0]} {contender.subject.config.name}"


def rate_text(standing: Standing, rival: str, mode: Mode) -> str:
    """`1091 ±0.4%`: half of the distance between the 20th and the 80th percentile of the times, of their median."""
    rate, time = standing.tops(rival, mode), standing.time(rival, mode)
    if rate is None or time is None:
        return "-"
    return f"{rate:.0f} ±{(time.p80_us - time.p20_us) / 2 / time.median_us:.1%}"


def speed_text(verdict: Verdict | None) -> str:
    return "-" if verdict is None else f"{verdict.ratio:.3f} ({verdict.low:.3f}..{verdict.high:.3f})"


def remarks(standings: Sequence[Standing]) -> list[str]:
    """Who could not run and why, and what else to know of a kernel; each once."""
    found = []
    for standing in standings:
        work = standing.leg.work
        found += [f"{work}: {LABELS.get(name, name)} could not run: {why}" for name, why in standing.absent.items()]
        found += [f"{work}: {c.subject.config.name}: {c.note}" for c in standing.contenders if c.note]
        if standing.failure:
            found.append(f"{work}: {standing.failure}")
    return list(dict.fromkeys(found))


def to_markdown(standings: Sequence[Standing], machine: Mapping[str, object], pace: Pace, command: str) -> str:
    """Both tables with all that is needed to read them: command, machine, protocol, and who is missing."""
    lines = [
        textwrap.fill(f"`{command}` on {facts_text(standings, machine)}.", TEXT_WIDTH, break_on_hyphens=False),
        "",
        textwrap.fill(_protocol(pace), TEXT_WIDTH, break_on_hyphens=False),
        "",
        "Sustained, our fastest kernel of each tier against what is asked:",
        "",
        *markdown_table(SCORE_HEADINGS, score_rows(standings)),
        "",
        "Everyone, sustained and in bursts:",
        "",
        *markdown_table(RIVAL_HEADINGS, rival_rows(standings)),
    ]
    if notes := remarks(standings):
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def facts_text(standings: Sequence[Standing], machine: Mapping[str, object]) -> str:
    versions = {name: version for standing in standings for name, version in standing.versions.items()}
    facts = ", ".join(f"{name} {value}" for name, value in {**machine, **versions}.items() if value is not None)
    counts = {(s.leg.shape.batch, s.leg.shape.heads_q, s.leg.shape.heads_kv) for s in standings}
    return "; ".join([facts, *(f"batch {b}, {q} heads, {kv} KV heads" for b, q, kv in sorted(counts))])


def sampling_text(pace: Pace) -> str:
    """How a race's samples are taken, as its reports say it."""
    bursts = f", then {pace.burst_rounds} rounds of bursts: {BURST_LAUNCHES} launches after {pace.idle_s:g} s of rest"
    return (
        f"in the same rounds, in an order of their own each time: {pace.rounds} rounds of sustained samples, each of "
        f"at least {pace.sustained_s:g} s back to back after {SETTLE_S:g} s that do not count"
        f"{bursts if pace.burst_rounds else ''}. TOPS = 4 B H Lq Lk d / time (half of it for causal)"
    )


def _protocol(pace: Pace) -> str:
    return (
        f"One run, everyone {sampling_text(pace)}, by the median; ± half of the 20..80 % range of times. "
        "`kernel` is our attention kernel alone, `call` has the quantizers too; cuDNN FP8 is its attention alone, from "
        "q, k and v that are FP8 already, to FP8. Columns with `/` are sustained speeds over a peer, paired by round, "
        "with 95 % intervals; a target's ratio is to its peer's speed in this run. `agrees` is the cosine of an output "
        "with torch's 16-bit one at that shape. The SM clock is NVML's, read during the sustained samples."
    )


def markdown_table(headings: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
