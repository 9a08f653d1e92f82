"""Whether an entry's kernel is of the text that its config renders to today."""

from __future__ import annotations

from sagegen.entry import Entry
from sagegen.problem import parse_problem
from sagegen.render import render
from sagegen.space import parse_config


def find_staleness(entry: Entry) -> bool | None:
    """Whether the entry's figures are of an older text; None where no text was recorded."""
    if entry.config is None or entry.provenance.text_sha256 is None:
        return None
    return render(parse_problem(entry.problem), parse_config(entry.config)).sha256 != entry.provenance.text_sha256


def is_stale(entry: Entry) -> bool:
    """Whether the entry's figures are known to be of an older text."""
    return bool(find_staleness(entry))
