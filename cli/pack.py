"""`sagegen pack`: registries with their cubins as a folder, an archive or a wheel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sagegen.cli.options import json_option

if TYPE_CHECKING:
    from sagegen.shipping.bundle import Bundle


@click.command("pack")
@click.option("--gpu", "gpu_names", metavar="NAME", multiple=True, help="Pack this GPU's registry; may be repeated.")
@click.option("--all", "pack_all", is_flag=True, help="Pack the registries of all GPUs that have one.")
@click.option("--wheel", "as_wheel", is_flag=True, help="Write a wheel, which pip installs; -o is its folder.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="PATH",
    help="A new folder, or a file that ends in .tar.zst; with --wheel a folder. [with --wheel: this one]",
)  # fmt: skip
@json_option
def command(gpu_names: tuple[str, ...], pack_all: bool, as_wheel: bool, output: Path | None, as_json: bool) -> None:
    """Pack tuned registries with their cubins, for machines that tune and compile nothing.

    Packed is what answers calls here: all layers of a GPU as one registry, measured entries before predicted ones. A
    manifest has the digest of every file. The same registry and cubins give the same bytes.

    \b
    Example:
      sagegen pack --gpu h200 -o h200.tar.zst
      sagegen pack --gpu h200 --wheel
      sagegen pack --all -o /srv/sagegen
    """
    from sagegen.env import read_env
    from sagegen.gpu import GPUS, find_gpu
    from sagegen.registry import load_registry
    from sagegen.shipping.bundle import make_bundle

    if bool(gpu_names) == pack_all:
        raise click.UsageError("name GPUs with --gpu, or all that are tuned with --all")
    if output is None and not as_wheel:
        raise click.UsageError("say where to with -o, or add --wheel")
    env = read_env()
    names = [find_gpu(name).name for name in gpu_names] or [n for n in GPUS if load_registry(n, env).layers]
    bundle = make_bundle(list(dict.fromkeys(names)), env)
    path = _write(bundle, output, as_wheel)
    if as_json:
        click.echo(json.dumps({"path": str(path), **_to_values(bundle)}))
        return
    for gpu, facts in bundle.manifest.gpus.items():
        kinds = f"{facts.measured} measured, {facts.predicted} predicted"
        click.echo(f"{gpu}: {facts.entries} entries ({kinds}), {facts.cubins} cubins")
    click.echo(f"Written to {path}")
    if path.is_file():
        remedy = f"pip install {path}" if as_wheel else f"sagegen unpack {path} -o FOLDER"
        click.echo(f"To use it: {remedy}")


def _write(bundle: Bundle, output: Path | None, as_wheel: bool) -> Path:
    from sagegen.registry_disk import replace_file
    from sagegen.registry_places import ARCHIVE_SUFFIX
    from sagegen.shipping.bundle import write_folder

    if as_wheel:
        from sagegen.shipping.wheel import pack_wheel

        name, data = pack_wheel(bundle)
        path = (output or Path()) / name
    elif output is not None and output.name.endswith(ARCHIVE_SUFFIX):
        from sagegen.shipping.archive import pack_archive

        path, data = output, pack_archive(bundle)
    else:
        path = output or Path()
        write_folder(bundle, path)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)
    return path


def _to_values(bundle: Bundle) -> dict[str, object]:
    import msgspec

    values: dict[str, object] = msgspec.to_builtins(bundle.manifest)
    return values
