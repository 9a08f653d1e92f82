"""precision="auto": which precision's answer a call gets, and why not the other's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from sagegen.entry import Entry
from sagegen.registry import Found
from sagegen.runtime.explanation import Explanation

#: What puts an entry behind one without it, however fast: the gravest first.
_FLAWS: Mapping[str, Callable[[Found], bool]] = {
    "no bucket of its entries holds this length": lambda found: found.out_of_range,
    "its entry is borrowed from another GPU": lambda found: found.borrowed,
    "its entry is predicted, not measured": lambda found: not found.entry.measured,
}


def prefer(int8: Explanation, int4: Explanation) -> Explanation:
    """Of the answers to one call in both precisions the one to give; it says why the other is passed over.

    INT4 answers with a tuned kernel that is accurate enough for the caller, where INT8 has none or where it is known to
    be faster than what answers in INT8, which may be torch SDPA.
    """
    refusal = _refusal(int4, int8) if int4.answer == "kernel" else int4.reason
    if refusal is not None:
        return replace(int8, passed_over=(f"int4: {refusal}",))
    return replace(int4, passed_over=(f"int8: {_refusal(int8, int4)}",))


def _refusal(own: Explanation, other: Explanation) -> str | None:
    """Why `own` does not answer before `other`; None when it does."""
    if own.is_fallback:
        return own.reason
    if own.found is None:
        return "nothing is tuned for it at this length"
    if other.found is None or other.is_fallback:
        return None
    for flaw, has in _FLAWS.items():
        if has(own.found) != has(other.found):
            return flaw if has(own.found) else None
    mine, others = own.found.entry, other.found.entry
    if mine.is_faster_than(others):
        return None
    return f"not known to be faster: {_describe_speed(mine)}, the other {_describe_speed(others)}"


def _describe_speed(entry: Entry) -> str:
    if entry.answer_tops is not None:
        return f"{entry.answer_tops:.0f} TOPS with quantizers"
    time = entry.call_time
    return "unknown speed" if time is None else f"{time:.0f} us"
