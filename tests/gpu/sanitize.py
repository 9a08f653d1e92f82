"""Runs compute-sanitizer's tools on small calls of kernels of both families, and says what they found; no test.

    python tests/gpu/sanitize.py [--tools memcheck racecheck] [--kinds ...] [--problems ...] [--registry]

Errors of memcheck, synccheck and initcheck fail, and so do hazards of racecheck that explained_hazards.py does not
explain; these are grouped by the pair of lines. With OUT set, each tool's whole output goes to $OUT/<tool>.log.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from explained_hazards import explain
from kernel_kinds import RELATIVES
from sagegen.problem import Problem
from sanitizer_report import TOOLS, Report, group_hazards, parse_report
from small_calls import add_arguments, build, find_gpu, read_arguments, render_wanted

DEFAULT_PROBLEMS = (
    Problem(128, "bf16", True).name,
    Problem(64, "fp16", False).name,
    *(problem.name for problem in RELATIVES),
)
OPTIONS: Mapping[str, tuple[str, ...]] = {
    # sagegen asks the driver for what may be missing
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),
}
#: Without torch's own cache each tensor is an allocation, whose ends and first writes the tools then know.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
MOST_SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each tool")
    add_arguments(parser)
    parser.set_defaults(problems=DEFAULT_PROBLEMS)
    arguments = parser.parse_args()
    checker = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(checker).exists():
        raise SystemExit("needs compute-sanitizer of the CUDA toolkit on PATH")
    wanted, gpu = read_arguments(arguments), find_gpu()
    sources = render_wanted(gpu, wanted)
    build(gpu, sources)  # the store has them then: no tool watches a compiler
    texts = {source.name: source.text.splitlines() for source in sources}
    names = ["--kinds", *wanted.kinds, "--problems", *wanted.problems, *(["--registry"] if wanted.registry else [])]
    passed = [run_tool(checker, tool, names, texts, arguments.timeout) for tool in arguments.tools]
    return 0 if all(passed) else 1


def run_tool(
    checker: str, tool: str, names: Sequence[str], texts: Mapping[str, Sequence[str]], timeout_s: float
) -> bool:
    """Run one tool and print what it found; whether nothing is wrong."""
    script = str(Path(__file__).with_name("small_calls.py"))
    command = [
        checker,
        "--tool",
        tool,
        "--print-limit",
        "10000",
        *OPTIONS.get(tool, ()),
        sys.executable,
        script,
        *names,
    ]
    start = time.monotonic()
    code, output = run_command(command, timeout_s)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], f"{tool}.log").write_text(output)
    report = parse_report(tool, output)
    last = next((line for line in output.splitlines() if " kernels on " in line), "")
    print(f"{tool}: {last or 'the calls did not end'}, {time.monotonic() - start:.0f} s, counted: {report.counted}")
    if not last or report.counted is None:
        print(f"  exit status {code}; the end of its output:\n{output[-2000:]}")
        return False
    return print_report(report, texts)


def run_command(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Exit status and output; everything that the command started ends with it."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nended after {timeout_s:g} s\n"
    return process.returncode, output


def print_report(report: Report, texts: Mapping[str, Sequence[str]]) -> bool:
    """Faults and hazards with their source lines; whether nothing is wrong."""
    for fault in report.faults[:MOST_SHOWN]:
        print(f"  {fault.message}\n    {fault.place.kernel} {fault.place.name}: {fault.place.quote(texts)}")
    unexplained = 0
    for group in group_hazards(report.hazards, texts):
        barrier = explain(group)
        unexplained += not barrier
        sides = (group.example.first, group.example.second)
        print(f"  {group.example.severity}, {group.count} hazards in {len(group.kernels)} kernels: {barrier or '?'}")
        for line, side in zip(
            group.lines, sorted(sides, key=lambda s: f"{s.verb}: {s.place.quote(texts)}"), strict=True
        ):
            print(f"    {line}\n      {side.place.name}")
    if report.tool == "racecheck":
        return not unexplained and (not report.counted or bool(report.hazards))
    return not report.counted


if __name__ == "__main__":
    sys.exit(main())
