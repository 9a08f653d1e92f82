"""`sagegen unpack`: an archive of `sagegen pack` as a folder, checked."""

from __future__ import annotations

import shlex
from pathlib import Path

import click


@click.command("unpack")
@click.argument("archive", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FOLDER",
    help="A new folder. [the archive's name without .tar.zst]",
)  # fmt: skip
@click.option("--check", "check_only", is_flag=True, help="Check the archive or wheel alone; write nothing.")
def command(archive: Path, output: Path | None, check_only: bool) -> None:
    """Check an archive and unpack it into a folder for SAGEGEN_REGISTRY.

    Nothing is written unless everything in the archive is as its manifest says. That proves that it is what was packed,
    not that whoever packed it is to be trusted: a cubin is code, so unpack archives only of people whose code you run.

    \b
    Example:
      sagegen unpack h200.tar.zst -o /srv/sagegen/h200
      sagegen unpack --check h200.tar.zst
    """
    from sagegen.registry_places import ARCHIVE_SUFFIX
    from sagegen.shipping.archive import read_archive
    from sagegen.shipping.bundle import write_folder
    from sagegen.shipping.wheel import read_wheel

    if archive.suffix == ".whl":
        if not check_only:
            raise click.UsageError(f"a wheel is for pip: pip install {shlex.quote(str(archive))}; or add --check")
        bundle = read_wheel(archive)
    else:
        bundle = read_archive(archive)
    gpus = ", ".join(bundle.manifest.gpus)
    if check_only:
        click.echo(f"{archive} is whole: {len(bundle.files)} files for {gpus}, launch ABI {bundle.manifest.launch_abi}")
        return
    folder = output or Path(str(archive).removesuffix(ARCHIVE_SUFFIX))
    if folder == archive:
        raise click.UsageError(f"{archive} does not end in {ARCHIVE_SUFFIX}; name a folder with -o")
    write_folder(bundle, folder)
    click.echo(f"{len(bundle.files)} files for {gpus} in {folder}")
    click.echo(f"To use it: export SAGEGEN_REGISTRY={shlex.quote(str(folder.absolute()))}")
