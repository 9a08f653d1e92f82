"""`sagegen report`: a journal or a registry as one page that works offline."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from sagegen.cli.options import json_option


@click.command("report")
@click.argument(
    "paths", nargs=-1, required=True, metavar="FILE...", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("report.html"),
    show_default=True,
    metavar="FILE",
    help="Page to write.",
)
@click.option(
    "--probe",
    "probe_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="What `sagegen probe -o FILE` measured on that GPU: limits of the roofline, rates of the model.",
)
@json_option
def command(paths: tuple[Path, ...], output: Path, probe_file: Path | None, as_json: bool) -> None:
    """Write what journals and registries say as one HTML page.

    FILE is a tuning journal (.jsonl, .jsonl.gz), a registry (.yaml), or races of `sagegen bench --peers` (.json).
    Beside a journal, a registry of the same GPU adds torch SDPA's times and the registered configs; alone, it is shown
    as it is. Races add cuDNN's FP8 attention and other peers to either. The page holds its styles and charts, runs no
    script and loads nothing. What the model predicts has a ~ and is drawn hollow or hatched.

    \b
    Example:
      sagegen report ~/.cache/sagegen/journals/h200.jsonl
      sagegen report h200.jsonl.gz tuned/h200.yaml --probe probe.yaml -o h200.html
      sagegen report h200.jsonl.gz race.json -o h200.html
      sagegen report tuned/l20.yaml -o l20.html
    """
    from sagegen.errors import ArgumentError
    from sagegen.registry_disk import replace_file
    from sagegen.report.contents import make_page
    from sagegen.report.page import render_page
    from sagegen.report.sources import read_inputs

    if output.resolve() in {path.resolve() for path in (*paths, *filter(None, [probe_file]))}:
        raise ArgumentError(f"-o {output} would be written over what it is made from", "name another file with -o")
    inputs = read_inputs(paths)
    page = make_page(inputs, probe_file, _spell_command(paths, output, probe_file))
    data = render_page(page).encode("utf-8")
    replace_file(output, data)
    facts = {
        "page": str(output),
        "bytes": len(data),
        "origin": page.origin,
        "gpus": list(inputs.gpus),
        "problems": [part.facts.problem.name for part in page.problems],
        "left_out": sum(inputs.left_out.values()),
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"Wrote {output} ({len(data) / 1024:.0f} KiB): {len(page.problems)} problems, {page.origin}")
    if inputs.left_out:
        click.echo(f"Left out {facts['left_out']} records; the page says why")


def _spell_command(paths: tuple[Path, ...], output: Path, probe_file: Path | None) -> str:
    """What to type to make the page again."""
    probe = ["--probe", str(probe_file)] if probe_file else []
    return shlex.join(["sagegen", "report", *map(str, paths), *probe, "-o", str(output)])
