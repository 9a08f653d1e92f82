"""`sagegen gc`: what goes from the stores, and what must not."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from sagegen import registry
from sagegen.cli.main import main
from sagegen.emulator.compiler import open_libraries
from sagegen.entry import Entry, Provenance, Range
from sagegen.env import Env
from sagegen.problem import Problem
from sagegen.shipping.sweep import DAY_S, find_strays, remove_stray
from sagegen.store import Store, make_key, mark_used, open_store

PROBLEM = Problem(128, "bf16", True)
CONFIG = "mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qoreg_mb1"
MONTH_S = 30 * DAY_S


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Env:
    monkeypatch.setattr(registry, "shipped_dir", lambda: tmp_path / "shipped")
    return Env(tmp_path / "cache", tmp_path / "user", False, "warning", None)


@pytest.fixture
def store(env: Env) -> Store:
    return open_store(env)


def age(path: Path, days: float) -> None:
    at = time.time() - days * DAY_S
    for file in (*path.iterdir(), path) if path.is_dir() else (path,):
        os.utime(file, (at, at))


def publish(store: Store, name: str, days: float, **record: str) -> Path:
    """An entry that was last used so many days ago."""
    key = make_key(name, name, "sm_89", "V13.0", ())
    folder = store.publish(key, name, name.encode(), record)
    age(folder, days)
    return folder


def register(env: Env, cubin: bytes, text: str | None = None) -> None:
    """An entry of the user's registry that names a cubin and a text."""
    provenance = Provenance(
        kind="measured", gpu="l20", sms=92, launch_abi=1, protocol=1, date="2025-11-29", shape="b1", text_sha256=text
    )
    entry = Entry(
        problem=PROBLEM.name,
        bucket=Range(kv_min=1, kv_max=None),
        answer="kernel",
        config=CONFIG,
        kernel=f"{PROBLEM.name}_{CONFIG}",
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
        provenance=provenance,
    )
    registry.save_entries(env.tuned_dir / "l20.yaml", "l20", [entry], {})


def found(env: Env) -> set[tuple[str, str]]:
    return {(stray.kind, stray.path.name.split(".")[0]) for stray in find_strays(env, MONTH_S)}


def test_old_kernels_go_that_no_registry_names(env: Env, store: Store) -> None:
    publish(store, "old", 31)
    publish(store, "young", 29)
    publish(store, "named", 99)
    publish(store, "of_a_named_text", 99, text_sha256="a" * 64)
    assert found(env) == {("kernel", "old"), ("kernel", "named"), ("kernel", "of_a_named_text")}
    register(env, b"named", "a" * 64)
    assert found(env) == {("kernel", "old")}


def test_a_kernel_that_is_loaded_counts_as_young(env: Env, store: Store) -> None:
    folder = publish(store, "old", 99)
    (stray,) = find_strays(env, MONTH_S)
    mark_used(folder)
    assert not remove_stray(stray)  # loaded since it was found
    assert find_strays(env, MONTH_S) == []
    assert folder.exists()


def test_damaged_entries_and_what_killed_processes_left_go_after_a_day(env: Env, store: Store) -> None:
    for days, name in ((0.9, "fresh"), (1.1, "stale")):
        folder = publish(store, name, days)
        (folder / "build.json").write_text("")
        age(folder, days)
        (store.root / ".staging").mkdir(exist_ok=True)
        (store.root / ".staging" / name).mkdir()
        (store.root / ".locks").mkdir(exist_ok=True)
        (store.root / ".locks" / f"{name}.lock").write_text("")
        age(store.root / ".staging" / name, days)
        age(store.root / ".locks" / f"{name}.lock", days)
    assert found(env) == {(kind, "stale") for kind in ("damaged", "staging", "lock")}
    assert all(remove_stray(stray) for stray in find_strays(env, MONTH_S))
    left = {
        path.name.split(".")[0] for folder in (".", ".staging", ".locks") for path in (store.root / folder).iterdir()
    }
    assert left - {""} == {"fresh"}


def test_the_emulators_libraries_are_swept_too(env: Env) -> None:
    publish(open_libraries(env), "library", 31)
    assert found(env) == {("kernel", "library")}


def test_what_is_being_built_stays(env: Env, store: Store) -> None:
    key = make_key("old", "old", "sm_89", "V13.0", ())
    folder = publish(store, "old", 99)
    (stray,) = find_strays(env, MONTH_S)
    with store.lock(key):
        assert not remove_stray(stray)
        age(store.root / ".locks" / f"{key.folder}.lock", 99)
        assert not any(remove_stray(other) for other in find_strays(env, MONTH_S))
    assert folder.exists()
    assert remove_stray(stray)
    assert not folder.exists()


def test_a_malformed_registry_stops_it(env: Env, store: Store, run: Callable[..., str]) -> None:
    """Nobody knows what that names."""
    folder = publish(store, "old", 99)
    env.tuned_dir.mkdir()
    (env.tuned_dir / "h200.yaml").write_text("schema: 1\n")
    assert "h200.yaml:2: the file is cut short" in run("gc", code=2)
    assert folder.exists()


def test_what_stands_in_for_a_named_folder_is_not_swept(
    env: Env, run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    theirs = publish(open_store(replace(env, cache_dir=tmp_path / "home" / "sagegen")), "old", 99)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAGEGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))  # no folder can be made there
    assert "file/cache cannot be written, so nothing can be removed from it" in run("gc", "--days", "1", code=2)
    assert theirs.exists()


@pytest.fixture
def run(env: Env, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setenv("SAGEGEN_TUNED_DIR", str(env.tuned_dir))
    monkeypatch.setenv("SAGEGEN_CACHE_DIR", str(env.cache_dir))

    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, list(arguments))
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_the_command_says_what_goes_and_a_dry_run_keeps_it(env: Env, store: Store, run: Callable[..., str]) -> None:
    old, young = publish(store, "old", 12), publish(store, "young", 5)
    (env.cache_dir / "journals").mkdir()
    (env.cache_dir / "journals" / "l20.jsonl").write_text("")
    before = sorted(env.cache_dir.rglob("*"))
    assert run("gc") == "0.00 MB freed\n"
    output = run("gc", "--days", "7", "--dry-run")
    assert output.startswith("would be removed: kernel ")
    assert f"12 days  {old}" in output
    assert sorted(env.cache_dir.rglob("*")) == before
    facts = json.loads(run("gc", "--days", "7", "--json"))
    (stray,) = facts["strays"]
    assert (stray["path"], stray["kind"], stray["fate"]) == (str(old), "kernel", "removed")
    assert facts["freed_bytes"] == stray["bytes"] > 6  # two files of three bytes, and the record
    assert not old.exists()
    assert young.exists()
    assert (env.cache_dir / "journals" / "l20.jsonl").exists()
