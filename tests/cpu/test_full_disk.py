"""F5's kin: a disk that is full costs what could not be written, and nothing that was."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sagegen.cli.keeping import keep_result
from sagegen.errors import JournalError, RegistryError, StoreError
from sagegen.store import Store, make_key
from sagegen.tuning.journal import Journal, Record, read_journal
from sagegen.tuning.request import Result

KEY = make_key("kernel", "text", "sm_89", "V13.0.88", ["-O3"])


def make_record(n: int, reason: str = "") -> Record:
    return Record("d64_fp16_full_int8", f"config{n}", "screen", "ok", "l20", 1, "aa", reason)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_journal_on_a_full_disk_ends_with_a_whole_record_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    path = small_disk / "l20.jsonl"
    ballast = small_disk / "ballast"
    with Journal(path) as journal:
        journal.append(make_record(0))
        ballast.write_bytes(b"x" * (48 << 10))
        with pytest.raises(JournalError, match=r"l20\.jsonl cannot be written \(No space left.*free its disk"):
            journal.append(make_record(1, "y" * (64 << 10)))
        assert path.read_bytes().endswith(b"\n")
        assert [record.config for record in read_journal(path)] == ["config0"]
        ballast.unlink()
        journal.append(make_record(2))
    assert [record.config for record in read_journal(path)] == ["config0", "config2"]


def test_a_record_of_which_a_part_was_written_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "l20.jsonl"
    real = os.write
    lengths = iter([30, None, 10, 10, 10_000])

    def write(file: int, data: bytes) -> int:
        length = next(lengths)
        if length is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, bytes(data)[:length])

    with Journal(path) as journal:
        journal.append(make_record(0))
        monkeypatch.setattr("sagegen.tuning.journal.os.write", write)
        with pytest.raises(JournalError):
            journal.append(make_record(1))
        journal.append(make_record(2))  # in three parts, as a pipe or a slow disk may take it
    assert [record.config for record in read_journal(path)] == ["config0", "config2"]


#: Appends records until the limit on the file's size, which the kernel keeps as it keeps a full disk: by halves.
_LIMITED = """
import pathlib, resource, sys
from sagegen.errors import JournalError
from sagegen.tuning.journal import Journal, Record
journal = Journal(pathlib.Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    for n in range(100):
        journal.append(Record("p", str(n), "screen", "ok", "l20", 1, "aa"))
except JournalError:
    print(len(journal.records))
"""


def test_what_the_kernel_writes_by_half_is_cut_off_again(tmp_path: Path) -> None:
    path = tmp_path / "l20.jsonl"
    done = subprocess.run([sys.executable, "-c", _LIMITED, str(path)], capture_output=True, text=True, check=True)
    written = int(done.stdout)
    assert 1 <= written < 10
    data = path.read_bytes()
    assert data.endswith(b"\n")
    assert len(data) <= 1000
    assert [record.config for record in read_journal(path)] == [str(n) for n in range(written)]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000  # the limit was the child's alone


def test_a_kernel_that_does_not_fit_is_not_in_the_store(small_disk: Path) -> None:
    store = Store(small_disk / "kernels")
    store.publish(KEY, "text", b"a cubin", {})
    other = make_key("other", "text", "sm_89", "V13.0.88", [])
    with pytest.raises(StoreError, match=r"cannot be written.*No space left"):
        store.publish(other, "text", b"x" * (128 << 10), {})
    assert store.find(other) is None
    assert store.find(KEY) is not None
    assert list((store.root / ".staging").iterdir()) == []
    store.publish(other, "text", b"a small one", {})
    assert store.find(other) is not None


def test_a_registry_that_does_not_fit_is_as_it_was(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_disk / "l20.yaml"
    path.write_text("what was there\n")
    entry = object()

    def save(path: Path, *_: object) -> None:
        from sagegen.registry_disk import replace_file

        replace_file(path, b"x" * (128 << 10))

    monkeypatch.setattr("sagegen.registry.save_entries", save)
    with pytest.raises(
        RegistryError, match=r"l20\.yaml cannot be written \(No space left.*journal has what was measured"
    ):
        keep_result(path, "l20", Result((entry,), {}))  # type: ignore[arg-type]
    assert path.read_text() == "what was there\n"
    assert [file.name for file in small_disk.iterdir()] == ["l20.yaml"]


@pytest.mark.parametrize(
    ("code", "has_journal", "said"),
    [
        (errno.ENOSPC, True, "journal has what was measured.*free its disk.*without measuring"),
        (errno.EACCES, True, "journal has what was measured.*name another file with -o.*without measuring"),
        (errno.ENOENT, False, "kernels stay compiled.*name another file with -o.*without compiling"),
    ],
)
def test_a_registry_that_cannot_be_written_says_what_is_kept_and_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, has_journal: bool, said: str
) -> None:
    def save(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("sagegen.registry.save_entries", save)
    with pytest.raises(RegistryError) as raised:
        keep_result(tmp_path / "l20.yaml", "l20", Result((object(),), {}), has_journal=has_journal)  # type: ignore[arg-type]
    assert re.search(said, f"{raised.value} {raised.value.remedy}", re.DOTALL)
