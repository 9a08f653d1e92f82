"""Writing what a tuning run found, whatever signal comes meanwhile."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sagegen.interrupts import deferred_interrupts

if TYPE_CHECKING:
    from sagegen.registry import Saved
    from sagegen.tuning.request import Result


def keep_result(path: Path, gpu_name: str, result: Result, *, has_journal: bool = True) -> tuple[Result, Saved]:
    """Write a run's entries and cubins to the registry at `path`; a signal meanwhile makes it an interrupted run.

    Raises:
        RegistryError: the disk is full, or the file cannot be written; it is as it was. The journal has all that was
            measured.
    """
    from sagegen.errors import RegistryError
    from sagegen.registry import Saved, save_entries
    from sagegen.registry_stale import is_stale

    saved = Saved((), ())
    try:
        with deferred_interrupts():
            cubins = {digest: file.read_bytes() for digest, file in result.cubins.items()}
            if result.entries:
                saved = save_entries(path, gpu_name, result.entries, cubins, is_stale)
    except KeyboardInterrupt as error:
        result = replace(result, cause=result.cause or error)
    except OSError as error:
        kept = "the journal has what was measured" if has_journal else "kernels stay compiled"
        mend = "free its disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "name another file with -o"
        saves = "measuring" if has_journal else "compiling"
        raise RegistryError(
            f"registry {path} cannot be written ({error.strerror}) and is as it was; {kept}",
            f"{mend}, then the same command writes it without {saves} that again",
        ) from error
    return result, saved
