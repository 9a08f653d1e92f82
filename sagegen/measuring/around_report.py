"""The table of a config's variations as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from sagegen.measuring.around import Around, Row
from sagegen.measuring.race import Pace, Standing
from sagegen.measuring.race_report import TEXT_WIDTH, facts_text, markdown_table, rate_text, sampling_text, speed_text

AROUND_HEADINGS = (
    "parameter",
    "value",
    "instead of",
    "TOPS",
    "burst TOPS",
    "/ winner",
    "cosine",
    "L1",
    "registers",
    "spill bytes",
    "SM MHz",
    "config",
)


def around_rows(around: Around) -> Iterator[tuple[str, ...]]:
    """Cells below AROUND_HEADINGS: the winner, then by parameter what every other value gives."""
    for row in around.rows():
        yield _cells(around.standing, row)


def _cells(standing: Standing, row: Row) -> tuple[str, ...]:
    variation, rival, used = row.variation, row.rival, row.resources
    figures = row.contender.figures.get("normal", {}) if row.contender else {}
    clock = standing.clock(rival) if rival else None
    name = row.config.name if row.config else "-"
    return (
        variation.param if variation else "(winner)",
        f"{variation.value}{variation.with_text}" if variation else "-",
        str(variation.base) if variation else "-",
        rate_text(standing, rival, "sustained") if rival else "-",
        rate_text(standing, rival, "burst") if rival else "-",
        speed_text(row.speed),
        f"{figures['cosine']:.5f}" if "cosine" in figures else "-",
        f"{figures['relative_l1']:.4f}" if "relative_l1" in figures else "-",
        str(used.registers) if used else "-",
        str(used.spill_store_bytes + used.spill_load_bytes) if used else "-",
        f"{clock:.0f}" if clock is not None else "-",
        f"{name}: {row.note}" if row.note else name,
    )


def around_markdown(done: Sequence[Around], machine: Mapping[str, object], pace: Pace, command: str) -> str:
    """A table per race with all that is needed to read it: command, machine, protocol."""
    standings = [around.standing for around in done]
    facts = f"`{command}` on {facts_text(standings, machine)}."
    lines = [
        textwrap.fill(facts, TEXT_WIDTH, break_on_hyphens=False),
        "",
        textwrap.fill(_protocol(pace), TEXT_WIDTH, break_on_hyphens=False),
    ]
    for around in done:
        title = f"{around.standing.leg.work}, kernel alone, around {around.field.winner.name}:"
        lines += ["", title, "", *markdown_table(AROUND_HEADINGS, around_rows(around))]
        if around.standing.failure:
            lines += ["", f"- {around.standing.failure}"]
    return "\n".join(lines) + "\n"


def _protocol(pace: Pace) -> str:
    return (
        f"All configs of a table in one run, {sampling_text(pace)} of the attention kernel "
        "alone, by the median; ± half of the 20..80 % range of times. "
        "`/ winner` is the sustained speed over the winner's, paired by round, with a 95 % interval. `with` names what "
        "else had to change to keep the rules. Cosine and relative L1 are of normal inputs at 2K tokens against FP64; "
        "registers and spill bytes (stores + loads, per thread) are ptxas' of the attention kernel, before warpgroups "
        "trade registers. The SM clock is NVML's, read during the sustained samples."
    )
