"""The registry entry by which tests on a card hold the public API to one kernel."""

from __future__ import annotations

from datetime import date

from sagegen.abi import LAUNCH_ABI
from sagegen.entry import Entry, Provenance, Range
from sagegen.gpu import Gpu
from sagegen.measuring.verdict import PROTOCOL
from sagegen.problem import Problem
from sagegen.space import Config


def make_entry(problem: Problem, config: Config, cubin_sha256: str, gpu: Gpu) -> Entry:
    """One for all lengths that goes before every shipped one: the user's, and measured as far as it says."""
    return Entry(
        problem=problem.name,
        bucket=Range(kv_min=1, kv_max=None),
        answer="kernel",
        config=config.name,
        kernel=f"{problem.name}_{config.name}",
        cubin_sha256=cubin_sha256,
        provenance=Provenance(
            kind="measured",
            gpu=gpu.name,
            sms=gpu.sms,
            launch_abi=LAUNCH_ABI,
            protocol=PROTOCOL,
            date=date.today().isoformat(),
            shape="",
        ),
    )
