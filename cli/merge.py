"""`sagegen merge`: several registries of one GPU as one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sagegen.cli.options import json_option
from sagegen.cli.values import RegistryFile


@click.command("merge")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="FILE...")
@click.option("-o", "--output", type=RegistryFile(), required=True, metavar="FILE", help="Registry file to write.")
@click.option("--gpu", "gpu_name", metavar="NAME", help="Which GPU's, of files that have several. [-o's name]")
@json_option
def command(files: tuple[Path, ...], output: Path, gpu_name: str | None, as_json: bool) -> None:
    """Merge registries of one GPU, with their cubins, into one.

    Of entries for the same lengths a measured one goes before a predicted one, then the newer before the older, then
    that of the file named first. Whoever goes before another is told. FILE is a registry, a folder of registries, or a
    bundle as `sagegen pack` writes it.

    \b
    Example:
      sagegen merge alice/h200.yaml bob/h200.yaml -o tuned/h200.yaml
    """
    from sagegen.errors import RegistryError
    from sagegen.gpu import GPUS
    from sagegen.registry_save import write_entries
    from sagegen.shipping.merging import merge_sources
    from sagegen.shipping.sources import read_sources

    if output.exists() and output.resolve() not in [file.resolve() for file in files]:
        raise RegistryError(
            f"{output} is there already, and is none of the files to merge", "name it too, or another -o"
        )
    named = output.stem if output.stem in GPUS else None
    if gpu_name and named and gpu_name != named:
        raise RegistryError(f"-o {output} names {named}, --gpu {gpu_name}", f"write it to a file {gpu_name}.yaml")
    wanted = gpu_name or named
    sources = []
    for file in files:
        found = read_sources(file)
        own = [source for source in found if source.gpu == wanted or (wanted is None and len(found) == 1)]
        if not own:
            has = ", ".join(source.gpu for source in found) or "none"
            remedy = "name the GPU with --gpu, and with it the file of -o"
            raise RegistryError(f"{file} has no registry of {wanted or output.stem}; it has: {has}", remedy)
        sources += own
    merged = merge_sources(sources)
    write_entries(output, merged.gpu, merged.entries, merged.cubins)
    if as_json:
        conflicts = [str(conflict) for conflict in merged.conflicts]
        values = {"path": str(output), "gpu": merged.gpu, "entries": len(merged.entries), "cubins": len(merged.cubins)}
        click.echo(json.dumps({**values, "conflicts": conflicts}))
        return
    for conflict in merged.conflicts:
        click.echo(str(conflict))
    click.echo(f"{len(merged.entries)} entries and {len(merged.cubins)} cubins written to {output}")
