"""Where registries lie, in the order in which they are asked: the user's folder, named ones, installed ones, shipped.

Installed bundles are packages that declare the entry point group `sagegen.registries`. They are located by their
metadata alone; nothing of them is imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sagegen.env import Env
from sagegen.errors import RegistryError
from sagegen.registry_manifest import MANIFEST_FILE

#: Each entry point is `<any name> = <folder of the bundle in site-packages>`.
ENTRY_POINT_GROUP = "sagegen.registries"
ARCHIVE_SUFFIX = ".tar.zst"

Origin = Literal["user", "named", "installed", "shipped"]


@dataclass(frozen=True, slots=True)
class Place:
    """A folder of registries.

    Attributes:
        origin: `user` is SAGEGEN_TUNED_DIR, `named` a path in SAGEGEN_REGISTRY, `installed` a package with a bundle.
        package: name and version of that package.
    """

    folder: Path
    origin: Origin
    package: str = ""

    @property
    def is_bundle(self) -> bool:
        """Whether its files are held to a manifest; of the user's own folder, tuning changes them."""
        return self.origin == "installed" or (self.origin == "named" and (self.folder / MANIFEST_FILE).exists())


def find_places(env: Env, shipped: Path, on_error: Callable[[RegistryError], None]) -> Iterator[Place]:
    """All places, the first to be asked first; `on_error` gets the error of each that cannot be used."""
    yield Place(env.tuned_dir, "user")
    for path in env.registries:
        try:
            yield _named_place(path)
        except RegistryError as error:
            on_error(error)
    installed, errors = _installed_places(tuple(sys.path))
    yield from installed
    for broken in errors:
        on_error(broken)
    yield Place(shipped, "shipped")


def _named_place(path: Path) -> Place:
    if path.is_dir():
        return Place(path, "named")
    if not path.exists():
        raise RegistryError(f"SAGEGEN_REGISTRY names {path}, which does not exist", "mend or unset it")
    file = shlex.quote(str(path))
    if path.name.endswith(ARCHIVE_SUFFIX):
        folder = shlex.quote(str(path).removesuffix(ARCHIVE_SUFFIX))
        remedy = f"run: sagegen unpack {file} -o {folder} && export SAGEGEN_REGISTRY={folder}"
        raise RegistryError(f"SAGEGEN_REGISTRY names {path}, an archive, and kernels are loaded from folders", remedy)
    remedy = (
        f"run: pip install {file}"
        if path.suffix == ".whl"
        else "name a folder that `sagegen pack -o` or `tune -o` made"
    )
    raise RegistryError(f"SAGEGEN_REGISTRY names {path}, which is no folder", remedy)


@functools.lru_cache(maxsize=4)
def _installed_places(search_path: tuple[str, ...]) -> tuple[tuple[Place, ...], tuple[RegistryError, ...]]:
    """Bundles that packages on `search_path`, which is sys.path, declare, and what is wrong with others.

    Read once, since reading the metadata of all packages takes milliseconds.
    """
    places, errors = [], []
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        owner = point.dist
        if owner is None:
            continue
        name = str(owner.metadata["Name"])
        package = f"{name} {owner.version}"
        folder = Path(str(owner.locate_file(point.value)))
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", point.value) and (folder / MANIFEST_FILE).is_file():
            places.append(Place(folder, "installed", package))
        else:
            message = (
                f"the installed package {package} says that it has a bundle in {point.value!r}, and has none there"
            )
            errors.append(RegistryError(message, f"pip uninstall {shlex.quote(name)}"))
    return tuple(sorted(places, key=lambda place: place.package)), tuple(errors)
