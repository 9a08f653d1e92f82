"""`sagegen build`: compile one config and tell what it takes."""

from __future__ import annotations

import json
import sys

import click

from sagegen.cli.options import config_option, gpu_option, json_option, make_config, make_problem, problem_options


@click.command("build")
@gpu_option
@config_option
@problem_options
@json_option
def command(
    gpu_name: str,
    config_name: str,
    head_dim: str,
    dtype: str,
    is_causal: bool,
    precision: str,
    as_json: bool,
) -> None:
    """Compile a config and print what it takes: registers, and the instructions that a warp issues for one key tile.

    The latter are read off the machine code, where nvdisasm is beside nvcc or on PATH. Needs nvcc but no GPU. What was
    compiled before comes from the kernel store. A kernel that does not compile is
    exit code 1.

    \b
    Example:
      sagegen build --gpu l20 --config default --head-dim 64
    """
    from sagegen.build import BuildFailure, build_batch
    from sagegen.env import read_env
    from sagegen.gpu import find_gpu
    from sagegen.render import render
    from sagegen.rules import Target
    from sagegen.store import open_store
    from sagegen.toolkit import find_toolkit
    from sagegen.tuning.disassembly import count_tile, find_disassembler

    gpu = find_gpu(gpu_name)
    problem = make_problem(head_dim, dtype, is_causal, precision)
    make_config(config_name, Target(gpu, problem))  # a wrong name is told before nvcc is looked for
    env = read_env()
    toolkit = find_toolkit(env)
    source = render(problem, make_config(config_name, Target(gpu, problem, toolkit.version)))
    built = build_batch([source], gpu.arch, open_store(env), toolkit)[source.name]
    if isinstance(built, BuildFailure):
        click.echo(built.log, err=True, nl=False)
        click.echo(f"Error: {source.name} did not compile ({built.outcome}): {built.reason}", err=True)
        sys.exit(1)
    disassembler = find_disassembler(toolkit)
    tile = count_tile(built.cubin, disassembler) if disassembler else None
    if as_json:
        from dataclasses import asdict

        click.echo(json.dumps({**asdict(built), "tile": asdict(tile) if tile else None}, default=str))
        return
    click.echo(f"{built.name} for {built.arch}, {built.nvcc}")
    for role, used in built.resources.items():
        spills = f"{used.spill_store_bytes} + {used.spill_load_bytes}"
        click.echo(
            f"  {role:9} {used.registers:3} registers, {spills} bytes spilled (stores + loads), "
            f"{used.stack_bytes} bytes stack, {used.smem_bytes} bytes static shared memory"
        )
    if tile is not None:
        kinds = f"{tile.matrix} matrix, {tile.mufu} MUFU, {tile.fp32} FP32, {tile.alu} ALU, {tile.memory} memory"
        click.echo(f"  a key tile takes a warp {tile.issued} instructions: {kinds}, {tile.other} other")
    click.echo(f"  compiled in {built.seconds:.1f} s{' (earlier; from the kernel store)' if built.cached else ''}")
    click.echo(f"  {built.cubin}")
