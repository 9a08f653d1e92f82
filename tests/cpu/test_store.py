"""The kernel store: identity, races, damage."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagegen.env import read_env
from sagegen.errors import StoreError
from sagegen.store import Key, Store, make_key, open_store, read_cubin, read_record

KEY = make_key("kernel", "text", "sm_89", "V13.0.88", ["-O3"])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "kernels")


def entries(store: Store) -> list[str]:
    return sorted(path.name for path in store.root.iterdir() if not path.name.startswith("."))


def leftovers(store: Store) -> list[Path]:
    return list((store.root / ".staging").iterdir())


@pytest.mark.parametrize(
    "other",
    [
        ("kernel", "text2", "sm_89", "V13.0.88", ["-O3"]),
        ("kernel", "text", "sm_90", "V13.0.88", ["-O3"]),
        ("kernel", "text", "sm_89", "V13.1.80", ["-O3"]),
        ("kernel", "text", "sm_89", "V13.0.88", ["-O2"]),
    ],
)
def test_whatever_decides_the_binary_changes_the_key(other: tuple[str, str, str, str, list[str]]) -> None:
    assert make_key(*other).digest != KEY.digest


@given(
    st.tuples(st.text(), st.text(), st.text(), st.lists(st.text())),
    st.tuples(st.text(), st.text(), st.text(), st.lists(st.text())),
)
def test_no_two_inputs_share_a_key(one: tuple[str, str, str, list[str]], two: tuple[str, str, str, list[str]]) -> None:
    assert (make_key("k", *one) == make_key("k", *two)) == (one == two)


def test_an_empty_store_has_nothing_and_makes_no_folder(store: Store) -> None:
    assert store.find(KEY) is None
    assert store.find_cubin("kernel", "0" * 64) is None
    assert not store.root.exists()


def test_a_published_entry_is_found_with_all_its_files(store: Store) -> None:
    folder = store.publish(KEY, "text", b"cubin", {"arch": "sm_89"})
    assert store.find(KEY) == folder == store.root / f"kernel.{KEY.digest[:12]}"
    assert (folder / "kernel.cu").read_text() == "text"
    assert read_cubin(folder) == b"cubin"
    assert read_record(folder)["arch"] == "sm_89"
    assert leftovers(store) == []


def test_an_entry_is_found_by_its_cubin_whatever_built_it(store: Store) -> None:
    # sha256 of b"one", from coreutils' sha256sum
    digest = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    folder = store.publish(KEY, "text", b"one", {})
    store.publish(Key("kernel", "f" * 64), "text", b"two", {})
    store.publish(Key("kernel_b", "e" * 64), "text", b"one", {})
    assert store.find_cubin("kernel", digest) == folder
    assert store.find_cubin("kernel", "0" * 64) is None


def test_an_entry_is_found_by_its_text_and_architecture_whatever_built_it(store: Store) -> None:
    store.publish(Key("kernel", "a" * 64), "text", b"one", {"text_sha256": "t1", "arch": "sm_90"})
    wanted = store.publish(KEY, "text", b"two", {"text_sha256": "t1", "arch": "sm_89"})
    assert store.find_text("kernel", "t1", "sm_89") == wanted
    assert store.find_text("kernel", "t2", "sm_89") is None
    (wanted / "kernel.cubin").write_bytes(b"damaged")
    assert store.find_text("kernel", "t1", "sm_89") is None


def test_the_first_to_publish_wins_quietly(store: Store) -> None:
    first = store.publish(KEY, "text", b"first", {})
    assert store.publish(KEY, "text", b"second", {}) == first
    assert read_cubin(first) == b"first"
    assert leftovers(store) == []


def test_many_publishers_leave_one_complete_entry(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda i: store.publish(KEY, "text", b"%d" % i, {}), range(32)))
    assert entries(store) == [KEY.folder]
    assert folders == {store.find(KEY)}
    assert leftovers(store) == []


@pytest.mark.parametrize("damage", ["cubin changed", "cubin gone", "record cut short", "record gone", "record a list"])
def test_a_damaged_entry_is_missed_and_healed_by_publishing(store: Store, damage: str) -> None:
    folder = store.publish(KEY, "text", b"cubin", {})
    record = folder / "build.json"
    match damage:
        case "cubin changed":
            (folder / "kernel.cubin").write_bytes(b"cubim")
        case "cubin gone":
            (folder / "kernel.cubin").unlink()
        case "record cut short":
            record.write_text(record.read_text()[:20])
        case "record gone":
            record.unlink()
        case "record a list":
            record.write_text("[]")
    with pytest.raises(StoreError, match=r"kernel\.cubin|build\.json"):
        read_cubin(folder)
    assert store.find(KEY) is None
    store.publish(KEY, "text", b"healed", {})
    assert store.find(KEY) == folder
    assert read_cubin(folder) == b"healed"
    assert leftovers(store) == []


def test_an_entry_of_a_key_that_shares_the_first_digits_is_no_hit(store: Store) -> None:
    folder = store.publish(KEY, "text", b"cubin", {})
    record = json.loads((folder / "build.json").read_text())
    (folder / "build.json").write_text(json.dumps({**record, "key": KEY.digest[:12] + "0" * 52}))
    assert store.find(KEY) is None


def test_a_moved_store_still_hits(store: Store, tmp_path: Path) -> None:
    store.publish(KEY, "text", b"cubin", {})
    store.root.rename(tmp_path / "elsewhere")
    assert Store(tmp_path / "elsewhere").find(KEY) is not None


def test_a_store_that_cannot_be_written_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="SAGEGEN_CACHE_DIR"):
        Store(tmp_path / "file" / "kernels").publish(KEY, "text", b"cubin", {})


def test_staging_folders_of_killed_processes_are_removed_after_a_day(store: Store) -> None:
    with store.staging() as folder:
        abandoned = folder.parent / "1-old"
        recent = folder.parent / "1-new"
        abandoned.mkdir()
        recent.mkdir()
        day_ago = time.time() - 25 * 3600
        os.utime(abandoned, (day_ago, day_ago))
    with store.staging():
        pass
    assert leftovers(store) == [recent]


def test_the_environments_store_lies_in_its_cache_folder(tmp_path: Path) -> None:
    assert open_store(read_env({"SAGEGEN_CACHE_DIR": str(tmp_path)})).root == tmp_path / "kernels"
