"""A worker that gates in the emulator: started by test_plants.py. A candidate's `cubin` is its text for the host."""

import sys
from pathlib import Path

from sagegen.emulator.program import load_source
from sagegen.env import read_env
from sagegen.errors import EmulatorError
from sagegen.measuring.emulated import small_cases
from sagegen.measuring.gate import run_gate
from sagegen.measuring.jobs import Gate, Job, Reply, Tell
from sagegen.measuring.worker_main import claim_stdout, die_with_parent, serve
from sagegen.problem import parse_problem
from sagegen.render import Source
from sagegen.space import parse_config


def do(job: Job, tell: Tell) -> Reply:
    if not isinstance(job, Gate):
        return Reply("ok")
    candidate = job.candidate
    tell(candidate.name)
    problem, config = parse_problem(candidate.problem), parse_config(candidate.config)
    source = Source(candidate.name, problem, config, Path(candidate.cubin).read_text())
    try:
        result = run_gate(load_source(source, 89, read_env()), problem, config, small_cases(), kinds=job.kinds)
    except EmulatorError as error:  # as a CUDA error, it spoils the process
        return Reply("crash", str(error).partition("\n")[0])
    return Reply("ok" if result.passed else "accuracy", result.reason)


die_with_parent()
pipe = claim_stdout()
serve(sys.stdin.buffer, pipe, do)
