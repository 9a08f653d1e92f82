"""Environment variables, and the cache folder's stand-ins (case E7)."""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sagegen import env as env_module
from sagegen.env import VARIABLES, is_writable, read_env
from sagegen.errors import ArgumentError


class Recorder(Mapping[str, str]):
    """An empty environment that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh home folder without XDG variables, and no warning given yet."""
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(env_module.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(env_module.tempfile, "tempdir", str(tmp_path))
    env_module._stand_in_dir.cache_clear()
    return tmp_path / "home"


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A path that not even root can make a folder at: it lies below a file."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cache"


def test_the_table_lists_exactly_the_variables_that_are_read(home: Path) -> None:
    recorder = Recorder()
    read_env(recorder)
    assert recorder.asked == {variable.name for variable in VARIABLES}


def test_the_readme_has_the_same_table() -> None:
    lines = (Path(__file__).parents[2] / "README.md").read_text().splitlines()
    rows = [f"| `{variable.name}` | {variable.meaning} | {variable.default} |" for variable in VARIABLES]
    assert [line for line in lines if line.startswith("| `SAGEGEN_")] == rows


def test_without_variables_folders_are_the_users(home: Path) -> None:
    env = read_env({})
    assert env.cache_dir == home / ".cache" / "sagegen"
    assert env.tuned_dir == home / ".local" / "share" / "sagegen" / "tuned"
    assert (env.strict, env.log, env.nvcc, env.backend) == (False, "warning", None, None)
    assert (env.disabled, env.pin) == (False, None)


def test_variables_win(home: Path, tmp_path: Path) -> None:
    env = read_env(
        {
            "SAGEGEN_CACHE_DIR": "~/mine",
            "SAGEGEN_TUNED_DIR": str(tmp_path / "tuned"),
            "SAGEGEN_STRICT": "1",
            "SAGEGEN_LOG": "DEBUG",
            "SAGEGEN_NVCC": "/opt/nvcc",
            "SAGEGEN_BACKEND": "sdpa",
            "SAGEGEN_DISABLE": "on",
            "SAGEGEN_PIN": " mma_x ",
        }
    )
    assert env.cache_dir == home / "mine"
    assert env.tuned_dir == tmp_path / "tuned"
    assert (env.strict, env.log, env.nvcc, env.backend) == (True, "debug", "/opt/nvcc", "sdpa")
    assert (env.disabled, env.pin) == (True, "mma_x")


def test_empty_variables_count_as_unset(home: Path) -> None:
    assert read_env({variable.name: "" for variable in VARIABLES}) == read_env({})


@pytest.mark.parametrize(("text", "strict"), [("1", True), ("Yes", True), ("on", True), ("0", False), ("FALSE", False)])
def test_flags_are_on_or_off(home: Path, text: str, strict: bool) -> None:
    assert read_env({"SAGEGEN_STRICT": text}).strict is strict


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SAGEGEN_STRICT", "maybe"),
        ("SAGEGEN_SELF_TEST", "2"),
        ("SAGEGEN_DISABLE", "maybe"),
        ("SAGEGEN_LOG", "loud"),
        *(("SAGEGEN_WORKSPACE_MIB", text) for text in ("0", "-1", "1.5", "2GB")),
    ],
)
def test_a_wrong_value_names_its_variable(home: Path, name: str, value: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}='{value}'"):
        read_env({name: value})


@pytest.mark.parametrize(("text", "limit"), [("", 1 << 30), ("1", 1 << 20), (" 2048 ", 1 << 31)])
def test_the_limit_of_scratch_is_in_mib(home: Path, text: str, limit: int) -> None:
    assert read_env({"SAGEGEN_WORKSPACE_MIB": text}).workspace_limit == limit


def test_reading_makes_no_folder(home: Path) -> None:
    read_env({})
    assert not home.exists()


def test_an_unwritable_home_is_overridden_by_the_variable(
    home: Path, blocked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E7, first part."""
    monkeypatch.setenv("HOME", str(blocked))
    assert read_env({"SAGEGEN_CACHE_DIR": str(tmp_path / "mine")}).cache_dir == tmp_path / "mine"
    assert not caplog.records


def test_both_unwritable_give_a_private_temporary_folder_and_one_warning(
    home: Path, blocked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E7, second part."""
    monkeypatch.setenv("HOME", str(blocked))
    first = read_env({"SAGEGEN_CACHE_DIR": str(blocked)}).cache_dir
    second = read_env({"SAGEGEN_CACHE_DIR": str(blocked)}).cache_dir
    assert first == second
    assert first.parent == tmp_path
    assert is_writable(first)
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(blocked) in caplog.text
    assert "SAGEGEN_CACHE_DIR" in caplog.text


def test_an_unwritable_variable_falls_back_to_the_home_with_a_warning(
    home: Path, blocked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_env({"SAGEGEN_CACHE_DIR": str(blocked)}).cache_dir == home / ".cache" / "sagegen"
    assert str(blocked) in caplog.text


def test_a_temporary_folder_of_another_user_is_not_used(
    home: Path, blocked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Private by its mode, but its owner could put cubins into it."""
    monkeypatch.setenv("HOME", str(blocked))
    monkeypatch.setattr(env_module.os, "getuid", lambda: 4711)
    (tmp_path / "sagegen-4711").mkdir(mode=0o700)
    chosen = read_env({}).cache_dir
    assert chosen != tmp_path / "sagegen-4711"
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o700


def test_named_registries_are_paths_in_order(home: Path) -> None:
    assert read_env({}).registries == ()
    assert read_env({"SAGEGEN_REGISTRY": "~/a::/b:rel:/b"}).registries == (home / "a", Path("/b"), Path("rel"))


@pytest.mark.parametrize("kind", ["open to all", "a link"])
def test_a_temporary_folder_that_others_may_have_made_is_not_used(
    home: Path, blocked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("HOME", str(blocked))
    shared = tmp_path / f"sagegen-{env_module.os.getuid()}"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        shared.symlink_to(tmp_path / "elsewhere")
    else:
        shared.mkdir()
        shared.chmod(0o777)
    assert read_env({}).cache_dir != shared


def test_writable_means_a_folder_or_one_that_can_be_made(tmp_path: Path, blocked: Path) -> None:
    assert is_writable(tmp_path)
    assert is_writable(tmp_path / "a" / "b")
    assert not is_writable(blocked)
    assert not is_writable(blocked.parent)
