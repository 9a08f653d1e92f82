"""`sagegen render`: one config's CUDA source."""

from __future__ import annotations

from pathlib import Path

import click

from sagegen.cli.options import config_option, gpu_option, make_config, make_problem, problem_options


@click.command("render")
@gpu_option
@config_option
@problem_options
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write; else stdout.")
def command(
    gpu_name: str,
    config_name: str,
    head_dim: str,
    dtype: str,
    is_causal: bool,
    precision: str,
    output: Path | None,
) -> None:
    """Print the CUDA source of a config.

    The source is one self-contained .cu that plain nvcc compiles.

    \b
    Example:
      sagegen render --gpu l20 --config default --causal -o attention.cu
    """
    from sagegen.gpu import find_gpu
    from sagegen.render import render
    from sagegen.rules import Target

    problem = make_problem(head_dim, dtype, is_causal, precision)
    text = render(problem, make_config(config_name, Target(find_gpu(gpu_name), problem))).text
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise click.BadParameter(f"{output} cannot be written: {error.strerror}", param_hint="-o") from error
