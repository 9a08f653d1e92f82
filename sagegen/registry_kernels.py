"""The cubin that an entry names: beside its registry, in the kernel store, or beside another layer's registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sagegen.abi import LAUNCH_ABI
from sagegen.env import Env
from sagegen.errors import RegistryError
from sagegen.registry import Found, load_layers, read_cubin
from sagegen.store import mark_used, open_store
from sagegen.store import read_cubin as read_stored_cubin


def find_cubin(found: Found | None, env: Env, on_registry_error: Callable[[RegistryError], None]) -> bytes | None:
    """The cubin that a registry entry names; None when it is nowhere. Wherever it lies, its digest is the entry's.

    Args:
        found: the entry; None has no cubin, nor has an entry of another launch ABI.
        on_registry_error: gets the error when the cubin beside the registry is not the one that it names.
    """
    if found is None or found.entry.provenance.launch_abi != LAUNCH_ABI:
        return None
    try:
        cubin = read_cubin(found)
    except RegistryError as error:
        on_registry_error(error)
        cubin = None
    if cubin is not None:
        return cubin
    folder = open_store(env).find_cubin(str(found.entry.kernel), str(found.entry.cubin_sha256))
    if folder is None:
        return _find_in_layers(found, env)
    mark_used(folder)
    return read_stored_cubin(folder)


def _find_in_layers(found: Found, env: Env) -> bytes | None:
    """From the bundles below the user's store, and whatever else has a registry of that GPU."""
    for layer in load_layers(found.gpu_name, env, _pass_over):
        if layer.folder == found.layer.folder:
            continue
        try:
            cubin = read_cubin(replace(found, layer=layer))
        except RegistryError:  # its own entry will say so when it is asked
            continue
        if cubin is not None:
            return cubin
    return None


def _pass_over(error: RegistryError) -> None:
    """Whoever looked the entry up was told."""
