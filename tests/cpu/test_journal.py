"""The journal survives whatever kills its writer, and answers only what is still true."""

from __future__ import annotations

import gzip
import hashlib
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagegen.errors import ArgumentError, UnknownNameError
from sagegen.problem import Problem
from sagegen.space import MMA_SPACE, Config
from sagegen.tuning.journal import (
    Journal,
    Record,
    Samples,
    attempts,
    comparable_records,
    read_journal,
    replay,
    set_aside,
)

PROBLEM = Problem(128, "bf16", False)
CONFIGS: list[Config] = [config for config, _ in zip(MMA_SPACE, range(4), strict=False)]


def make_record(config: Config = CONFIGS[0], **changes: object) -> Record:
    values: dict[str, object] = {
        "problem": PROBLEM.name,
        "config": config.name,
        "phase": "screen",
        "outcome": "ok",
        "gpu": "l20",
        "protocol": 1,
        "text_sha256": "aa",
        "samples": (Samples(1024, 16, 32, 32, (3.0, 1.0, 2.0), (5.0,)),),
        "figures": {"normal": {"cosine": 0.9993}},
        "resources": {"attention": {"registers": 168}},
    }
    return Record(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journals" / "l20.jsonl"


def test_records_come_back_as_they_were_written(path: Path) -> None:
    failed = make_record(CONFIGS[1], outcome="crash", reason="worker killed by SIGSEGV", samples=())
    with Journal(path) as journal:
        journal.append(make_record())
        journal.append(failed)
    assert read_journal(path) == [make_record(), failed]


def test_a_torn_last_line_is_cut_off_before_the_next_record(path: Path) -> None:
    with Journal(path) as journal:
        journal.append(make_record())
    with path.open("ab") as file:
        file.write(b'{"problem":"d128_bf')
    with Journal(path) as journal:
        assert journal.records == [make_record()]
        journal.append(make_record(CONFIGS[1]))
    assert [r.config for r in read_journal(path)] == [CONFIGS[0].name, CONFIGS[1].name]
    assert path.read_bytes().count(b"\n") == 2


@given(cut=st.integers(min_value=0, max_value=2000))
def test_a_journal_cut_anywhere_keeps_its_whole_lines(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j.jsonl"
        with Journal(path) as journal:
            for config in CONFIGS:
                journal.append(make_record(config))
        data = path.read_bytes()[:cut]
        path.write_bytes(data)
        with Journal(path) as journal:
            assert len(journal.records) == data.count(b"\n")
            journal.append(make_record())
        assert len(read_journal(path)) == data.count(b"\n") + 1


def packed_journal(path: Path) -> list[Record]:
    """Writes a journal that differs enough to be packed into some kilobytes, and packs it; its records."""
    records = [make_record(text_sha256=hashlib.sha256(bytes([n])).hexdigest()) for n in range(100)]
    with Journal(path) as journal:
        for record in records:
            journal.append(record)
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    return records


@pytest.mark.parametrize("keep", [20, 1000, 3000])
def test_of_a_packed_journal_that_is_cut_short_the_whole_lines_are_read(path: Path, keep: int, caplog: Any) -> None:
    records = packed_journal(path)
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(packed.read_bytes()[:keep])
    read = read_journal(packed)
    assert read == records[: len(read)]
    assert (len(read) > 10) == (keep >= 1000)
    assert f"journal {packed} is cut short or damaged: read the {len(read)} lines before that" in caplog.text


def test_of_a_packed_journal_that_is_damaged_what_is_before_is_read(path: Path, caplog: Any) -> None:
    records = packed_journal(path)
    packed = path.with_name(path.name + ".gz")
    data = packed.read_bytes()
    packed.write_bytes(data[:2500] + b"\xff" * 200 + data[2700:])
    read = read_journal(packed)
    assert read == records[: len(read)]
    assert "cut short or damaged" in caplog.text


def test_packed_journals_in_a_row_are_one(path: Path, caplog: Any) -> None:
    records = packed_journal(path)
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(packed.read_bytes() * 2 + b"\0" * 700)
    assert read_journal(packed) == records * 2
    assert caplog.text == ""


def test_a_journal_that_only_has_the_name_of_a_packed_one_is_told(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl.gz"
    file.write_bytes(b'{"problem":')
    with pytest.raises(ArgumentError, match=r"j\.jsonl\.gz is not packed by gzip; .*mv .*j\.jsonl\.gz .*j\.jsonl$"):
        read_journal(file)


def test_a_writer_that_is_killed_loses_nothing_that_it_appended(path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys\n"
        "from sagegen.tuning.journal import Journal, Record\n"
        "journal = Journal(pathlib.Path(sys.argv[1]))\n"
        "for n in range(3):\n"
        "    journal.append(Record('p', str(n), 'screen', 'ok', 'l20', 1, 'aa'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with Journal(path) as journal:  # and the dead writer's lock is gone
        assert [r.config for r in journal.records] == ["0", "1", "2"]


def test_a_damaged_line_costs_itself_only_and_is_reported(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Journal(path) as journal:
        journal.append(make_record())
    with path.open("ab") as file:
        file.write(b"\x00\x00 not a record\n")
    with Journal(path) as journal:
        journal.append(make_record(CONFIGS[1]))
    assert len(read_journal(path)) == 2
    assert "skipped 1 lines" in caplog.text


def test_records_of_another_schema_are_not_read(path: Path) -> None:
    with Journal(path) as journal:
        journal.append(make_record(schema=99))
    assert read_journal(path) == []


def test_two_writers_at_once_are_refused(path: Path) -> None:
    with Journal(path), pytest.raises(ArgumentError, match="in use"):
        Journal(path)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"file/l20\.jsonl"):
        Journal(tmp_path / "file" / "l20.jsonl")


@pytest.mark.parametrize(
    "change", [{"gpu": "h200"}, {"protocol": 2}, {"text_sha256": "bb"}], ids=["gpu", "protocol", "text"]
)
def test_records_of_another_gpu_protocol_or_text_do_not_count(change: dict[str, object]) -> None:
    records = [make_record(), make_record(CONFIGS[1], **change)]
    assert comparable_records(records, "l20", 1, lambda problem, config: "aa") == records[:1]


def test_a_config_that_no_longer_renders_does_not_count() -> None:
    assert comparable_records([make_record()], "l20", 1, lambda problem, config: None) == []


def test_the_median_is_of_the_kernel_at_that_length() -> None:
    assert make_record().median_us(1024) == 2.0
    assert make_record().median_us(4096) is None


def test_finals_do_not_replace_the_attempt() -> None:
    final = make_record(phase="final", samples=())
    assert attempts([make_record(), final])[PROBLEM.name, CONFIGS[0].name] == make_record()


def test_replay_answers_from_the_journal_and_nothing_else() -> None:
    run = replay([make_record(outcome="crash"), make_record()])
    assert run(PROBLEM, CONFIGS[0]).outcome == "ok"  # the later attempt
    with pytest.raises(UnknownNameError, match="not in the journal"):
        run(PROBLEM, CONFIGS[1])


def test_a_journal_set_aside_is_kept(path: Path) -> None:
    assert set_aside(path, "20261129") is None
    with Journal(path) as journal:
        journal.append(make_record())
    kept = set_aside(path, "20261129")
    assert kept is not None
    assert read_journal(kept) == [make_record()]
    assert read_journal(path) == []


def test_f5_a_line_of_an_earlier_release_is_read_and_lacks_what_came_later(path: Path) -> None:
    line = (
        b'{"problem":"d64_bf16_causal_int8","config":"c","phase":"screen","outcome":"ok","gpu":"h200","protocol":1,'
        b'"text_sha256":"bc","reason":"","product":"NVIDIA H200","driver":"580","nvcc":"V13","cubin_sha256":"b7",'
        b'"code_sha256":"a4","samples":[{"tokens":1024,"batch":16,"heads_q":32,"heads_kv":32,"times_us":[2.0],'
        b'"call_us":[3.0]}],"figures":{},"resources":{},"shared_from":"","date":"2026-11-29T21:03:13+00:00",'
        b'"seconds":0.0,"schema":1}\n'
    )
    path.parent.mkdir()
    path.write_bytes(line)
    (record,) = read_journal(path)
    (samples,) = record.samples
    assert (samples.warm_us, samples.conditions, record.first_failure) == ((), None, "")
    assert (samples.median_us, samples.median_call_us) == (2.0, 3.0)
