"""Environment variables: the one place that reads them."""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from sagegen.errors import ArgumentError

_LOGGER = logging.getLogger(__name__)

LOG_LEVELS = ("debug", "info", "warning", "error")
#: The benchmarked calls need less: 790 MiB is the most, of 4 x 32 heads of 16K tokens with an lse.
DEFAULT_WORKSPACE_MIB = 1024
_MIB = 1 << 20
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: what it is for and what holds without it."""

    name: str
    meaning: str
    default: str


VARIABLES = (
    Variable("SAGEGEN_CACHE_DIR", "folder of compiled kernels and tuning journals", "the user's cache folder"),
    Variable(
        "SAGEGEN_TUNED_DIR",
        "folder of your registries; asked before the shipped ones, but measured entries before predicted",
        "the user's data folder",
    ),
    Variable(
        "SAGEGEN_REGISTRY",
        "folders of registries, as unpacked bundles, parted by `:`; asked after yours, before installed ones",
        "none",
    ),
    Variable("SAGEGEN_STRICT", "1: raise where a call would fall back to torch SDPA", "0"),
    Variable("SAGEGEN_LOG", f"how much is logged: {', '.join(LOG_LEVELS)}", "warning"),
    Variable("SAGEGEN_NVCC", "the nvcc to compile with", "searched: pip wheel, CUDA_HOME, PATH"),
    Variable(
        "SAGEGEN_WORKSPACE_MIB",
        "MiB of scratch of a call; one that needs more runs in parts, over batch items, then over KV heads",
        str(DEFAULT_WORKSPACE_MIB),
    ),
    Variable("SAGEGEN_SELF_TEST", "0: use kernels without trying each on a tiny problem when it is loaded", "1"),
    Variable("SAGEGEN_BACKEND", "answer every call with this backend, as `backend=` does", "chosen per call"),
    Variable("SAGEGEN_DISABLE", "1: answer every call with torch SDPA; `backend=` that names a kernel raises", "0"),
    Variable(
        "SAGEGEN_PIN",
        "run every kernel on a GPU in this config, by its name or `default`, whatever is tuned and `min_cosine` asks",
        "the registry's",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Env:
    """What the environment variables say.

    Attributes:
        cache_dir: writable folder of compiled kernels and journals; may not exist yet.
        tuned_dir: folder of the user's own registries; may not exist.
        strict: raise instead of falling back to torch SDPA.
        log: one of LOG_LEVELS.
        nvcc: the nvcc that was asked for, as it was written; None when none was.
        backend: the backend that was asked for, as it was written; None when none was.
        workspace_limit: bytes of scratch above which a call is split.
        self_test: try a kernel on a tiny problem when it is loaded.
        disabled: torch SDPA answers every call.
        pin: name of the config that every kernel is to have, as it was written; None when none was.
        registries: folders of registries that the user named, the first to be asked first; may not exist.
        named_cache_dir: the folder that SAGEGEN_CACHE_DIR names, which `cache_dir` is not where that cannot be written;
            None when it names none.
    """

    cache_dir: Path
    tuned_dir: Path
    strict: bool
    log: str
    nvcc: str | None
    backend: str | None = None
    workspace_limit: int = DEFAULT_WORKSPACE_MIB * _MIB
    self_test: bool = True
    disabled: bool = False
    pin: str | None = None
    registries: tuple[Path, ...] = ()
    named_cache_dir: Path | None = None


def read_env(environ: Mapping[str, str] = os.environ) -> Env:
    """The settings in `environ`; an empty variable counts as unset.

    Where SAGEGEN_CACHE_DIR cannot be written the user's cache folder stands in, and where that cannot be either, one
    below the system's temporary folder; one warning says so.

    Raises:
        ArgumentError: a variable has a value outside its list.
    """
    log = environ.get("SAGEGEN_LOG", "").lower() or "warning"
    if log not in LOG_LEVELS:
        raise ArgumentError(f"SAGEGEN_LOG={log!r} is no log level", f"set it to one of {', '.join(LOG_LEVELS)}")
    named_cache_dir = _read_path(environ.get("SAGEGEN_CACHE_DIR", ""))
    return Env(
        cache_dir=_cache_dir(named_cache_dir),
        tuned_dir=_tuned_dir(_read_path(environ.get("SAGEGEN_TUNED_DIR", ""))),
        strict=_read_flag("SAGEGEN_STRICT", environ.get("SAGEGEN_STRICT", "")),
        log=log,
        nvcc=environ.get("SAGEGEN_NVCC") or None,
        backend=environ.get("SAGEGEN_BACKEND") or None,
        workspace_limit=_read_mib("SAGEGEN_WORKSPACE_MIB", environ.get("SAGEGEN_WORKSPACE_MIB", "")),
        self_test=_read_flag("SAGEGEN_SELF_TEST", environ.get("SAGEGEN_SELF_TEST") or "1"),
        disabled=_read_flag("SAGEGEN_DISABLE", environ.get("SAGEGEN_DISABLE", "")),
        pin=environ.get("SAGEGEN_PIN", "").strip() or None,
        registries=_read_paths(environ.get("SAGEGEN_REGISTRY", "")),
        named_cache_dir=named_cache_dir,
    )


def is_writable(path: Path) -> bool:
    """Whether files can be made in `path`, or in the folders that would have to be made for it. Touches nothing."""
    path = path.absolute()
    nearest = next((p for p in (path, *path.parents) if os.path.lexists(p)), path)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _read_flag(name: str, text: str) -> bool:
    lowered = text.strip().lower()
    if lowered not in _TRUE + _FALSE:
        raise ArgumentError(f"{name}={text!r} is neither on nor off", "set it to 1 or 0")
    return lowered in _TRUE


def _read_mib(name: str, text: str) -> int:
    """Bytes of so many MiB."""
    if not text.strip():
        return DEFAULT_WORKSPACE_MIB * _MIB
    if not text.strip().isdecimal() or int(text) == 0:
        raise ArgumentError(f"{name}={text!r} is no number of MiB", "set it to a whole number from 1 on")
    return int(text) * _MIB


def _read_path(text: str) -> Path | None:
    return Path(text).expanduser() if text else None


def _read_paths(text: str) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(Path(part).expanduser() for part in text.split(os.pathsep) if part))


def _tuned_dir(named: Path | None) -> Path:
    return named if named is not None else platformdirs.user_data_path("sagegen") / "tuned"


def _cache_dir(named: Path | None) -> Path:
    wanted = [platformdirs.user_cache_path("sagegen")]
    if named is not None:
        wanted.insert(0, named)
    writable = next((path for path in wanted if is_writable(path)), None)
    if writable == wanted[0]:
        return writable
    return _stand_in_dir(wanted[0], writable)


@functools.cache
def _stand_in_dir(unwritable: Path, other: Path | None) -> Path:
    """The cache folder to use instead of `unwritable`: `other`, else a temporary one. Cached, so it warns once."""
    stand_in = other or _temporary_dir()
    _LOGGER.warning(
        "cache folder %s cannot be written; using %s; set SAGEGEN_CACHE_DIR to a writable folder", unwritable, stand_in
    )
    return stand_in


def _temporary_dir() -> Path:
    """A private folder below the system's temporary one, the same in every process of this user where that is safe."""
    shared = Path(tempfile.gettempdir()) / f"sagegen-{os.getuid()}"
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        status = shared.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="sagegen-"))
    # cubins are loaded from here: a folder that someone else made or can write must not be trusted
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return shared if private else Path(tempfile.mkdtemp(prefix="sagegen-"))
