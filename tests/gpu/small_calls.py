"""A few small calls of many kernels, for a checker to watch; no test. See sanitize.py, which runs the checkers.

    python tests/gpu/small_calls.py [--kinds wgmma-exact mma] [--problems d128_bf16_causal_int8] [--registry]

One call leaves tails in every tile, shares heads (GQA), and one key holds a NaN. The other has more works than the GPU
has SMs, so that persistent blocks fetch several. Of sequences of their own lengths some have nothing on one side.
`--registry` adds what is tuned for this GPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kernel_kinds import KINDS, PROBLEMS, RELATIVES
from ragged_calls import draw_ragged, run_ragged
from sagegen.build import Built, build_batch
from sagegen.env import read_env
from sagegen.gpu import Gpu, match_gpu
from sagegen.launch import Program, load_program
from sagegen.measuring.call import call_program
from sagegen.measuring.inputs import DTYPES as TORCH_DTYPES
from sagegen.problem import Shape, parse_problem
from sagegen.registry import load_registry
from sagegen.render import Source, render
from sagegen.rules import Target
from sagegen.space import parse_config
from sagegen.store import open_store
from sagegen.toolkit import find_toolkit

TAILS = Shape(1, 4, 2, 200, 333)
MANY_WORKS = Shape(4, 40, 8, 64, 130)
WINDOW = (60, 20)
#: Heads, queries and keys of sequences; the same again.
RAGGED = (((4, 2), (200, 0, 77, 1), (333, 20, 0, 5)), ((40, 8), (64, 1, 130, 64), (130, 3, 64, 200)))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which kernels: names of kinds and problems, and whether the registry's too."""

    kinds: tuple[str, ...]
    problems: tuple[str, ...]
    registry: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds, problems = [kind.name for kind in KINDS], [problem.name for problem in (*PROBLEMS, *RELATIVES)]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--problems", nargs="+", choices=problems, default=problems)
    parser.add_argument("--registry", action="store_true", help="the kernels that are tuned for this GPU too")


def read_arguments(arguments: argparse.Namespace) -> Wanted:
    return Wanted(tuple(arguments.kinds), tuple(arguments.problems), arguments.registry)


def find_gpu() -> Gpu:
    properties = torch.cuda.get_device_properties(0)
    gpu = match_gpu(properties.name, properties.multi_processor_count)
    if gpu is None:
        raise SystemExit(f"{properties.name} is no GPU of sagegen's table")
    return gpu


def render_wanted(gpu: Gpu, wanted: Wanted) -> list[Source]:
    """The sources, each once; kinds that the GPU has not are left out."""
    found = {source.name: source for source in _render_kinds(gpu, wanted)}
    for layer in load_registry(gpu.name).layers if wanted.registry else ():
        for entry in layer.entries:
            if entry.config and entry.problem in wanted.problems:
                source = render(parse_problem(entry.problem), parse_config(entry.config))
                found[source.name] = source
    return list(found.values())


def _render_kinds(gpu: Gpu, wanted: Wanted) -> Iterator[Source]:
    for kind in KINDS:
        for problem in (*PROBLEMS, *RELATIVES):
            if kind.name in wanted.kinds and problem.name in wanted.problems:
                config = kind.find_config(Target(gpu, problem))
                if config is not None:
                    yield render(problem, config)


def build(gpu: Gpu, sources: Iterable[Source]) -> dict[str, Path]:
    """Cubins by the sources' names."""
    cubins = {}
    for name, result in build_batch(list(sources), gpu.arch, open_store(read_env()), find_toolkit(read_env())).items():
        if not isinstance(result, Built):
            raise SystemExit(f"{name}: {result.reason}")
        cubins[name] = result.cubin
    return cubins


def run_calls(source: Source, cubin: Path) -> None:
    program = load_program(cubin.read_bytes(), source.name, source.problem, source.config, 0)
    run = run_sequences if source.problem.is_ragged else run_shapes
    run(source, program)
    program.unload()


def run_shapes(source: Source, program: Program) -> None:
    problem, window = source.problem, WINDOW if source.problem.is_windowed else None
    for shape in (TAILS, MANY_WORKS):
        dim, dtype = problem.head_dim, TORCH_DTYPES[problem.dtype]
        q = torch.randn(shape.batch, shape.heads_q, shape.q_len, dim, device="cuda", dtype=dtype)
        k, v = (
            torch.randn(shape.batch, shape.heads_kv, shape.kv_len, dim, device="cuda", dtype=dtype) for _ in range(2)
        )
        k[0, 0, 5, 3] = math.nan
        call_program(program, problem, source.config, q, k, v, want_lse=True, window=window)
        torch.cuda.synchronize()


def run_sequences(source: Source, program: Program) -> None:
    window = WINDOW if source.problem.is_windowed else None
    for heads, q_lengths, kv_lengths in RAGGED:
        for is_packed in (True, False):
            call = draw_ragged(
                source.problem, q_lengths, kv_lengths, heads, window=window, is_packed=is_packed, device="cuda"
            )
            call.k[call.keys[0]][5, 0, 3] = math.nan
            run_ragged(program, source.problem, call)
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    wanted = read_arguments(parser.parse_args())
    gpu = find_gpu()
    sources = render_wanted(gpu, wanted)
    for name, cubin in build(gpu, sources).items():
        run_calls(next(source for source in sources if source.name == name), cubin)
    print(f"{len(sources)} kernels on {gpu.name}")


if __name__ == "__main__":
    main()
