"""Two registries compared (`show --diff`), several merged (`merge`)."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs

from sagegen.cli.main import main
from sagegen.entry import Entry, Provenance, Range, Timing
from sagegen.env import Env
from sagegen.problem import Problem
from sagegen.registry import read_entries, save_entries
from sagegen.shipping.archive import pack_archive
from sagegen.shipping.bundle import make_bundle

PROBLEM = Problem(128, "bf16", True)
CONFIG = "mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qoreg_mb1"
OTHER = CONFIG.replace("grthread", "grwarp")


def make_entry(
    kv=(1, None), config=CONFIG, kind="measured", date="2025-11-29", cubin=b"cubin", model=None, **rest
) -> Entry:
    return Entry(
        problem=PROBLEM.name,
        bucket=Range(kv_min=kv[0], kv_max=kv[1]),
        answer=rest.pop("answer", "kernel"),
        config=config,
        kernel=f"{PROBLEM.name}_{config}",
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
        provenance=Provenance(
            kind=kind, gpu="l20", sms=92, launch_abi=1, protocol=rest.pop("protocol", 1), date=date, model=model,
            shape=rest.pop("shape", "b1"),
        ),
        **rest,
    )  # fmt: skip


def measured(full_us: float, kv=(1, None), **rest) -> Entry:
    """2e12 operations, so that rates follow from times."""
    sdpa = rest.pop("speed_vs_sdpa", None)
    return make_entry(kv, figures=Timing(full_us=full_us, full_tops=2e6 / full_us, speed_vs_sdpa=sdpa), **rest)


def predicted(full_us: float, kv=(1, None), model="1", **rest) -> Entry:
    figures = Timing(predicted_full_us=float(full_us))
    return make_entry(kv, kind="predicted", model=model, figures=figures, **rest)


def save(path: Path, *entries: Entry, cubins: tuple[bytes, ...] = ()) -> Path:
    save_entries(path, "l20", entries, {hashlib.sha256(cubin).hexdigest(): cubin for cubin in cubins})
    return path


@pytest.fixture
def run() -> Callable[..., str]:
    def run(*arguments: object, code: int = 0) -> str:
        result = CliRunner().invoke(main, list(map(str, arguments)))
        assert result.exit_code == code, result.output
        return result.output

    return run


@pytest.fixture
def changes(run: Callable[..., str], tmp_path: Path) -> Callable[..., list[dict]]:
    """What `show --diff --json` says of registries of some entries."""

    def changes(old: list[Entry], new: list[Entry]) -> list[dict]:
        files = [save(tmp_path / name / "l20.yaml", *side) for name, side in (("old", old), ("new", new))]
        answer = json.loads(run("show", "--diff", *files, "--json"))
        for file in files:
            file.unlink()
        return answer["changes"]

    return changes


# --- differences


@pytest.mark.parametrize(
    ("old", "new", "words", "speed"),
    [
        (measured(100), measured(100), [], 1.0),
        (measured(100), measured(80), ["faster"], 1.25),
        (measured(80), measured(100), ["slower"], 0.8),
        (measured(100), measured(99.5), [], 100 / 99.5),
        (measured(100), measured(80, shape="b2"), [], None),
        (measured(100), measured(80, protocol=2), [], None),
        (measured(100), make_entry(), [], None),
        (predicted(100), predicted(80, config=OTHER), ["faster", "another config"], 1.25),
        (predicted(100), predicted(80, model="2"), [], None),
        (predicted(100), measured(80), ["measured, was predicted"], None),
        (measured(100), predicted(10), ["predicted, was measured"], None),
        # 100 us of ours, half as fast as torch's 50
        (measured(50), measured(100, answer="sdpa", speed_vs_sdpa=0.5), ["answers sdpa, was kernel"], 1.0),
        (measured(100), measured(100, cubin=b"other"), ["rebuilt"], 1.0),
        (make_entry(min_cosine=0.9995), make_entry(min_cosine=0.9993), ["less accurate"], None),
        (make_entry(min_cosine=0.9993), make_entry(min_cosine=0.9995), ["more accurate"], None),
        (make_entry(min_cosine=0.99951), make_entry(min_cosine=0.99949), [], None),
        (make_entry(), make_entry(min_cosine=0.9993), ["accuracy known"], None),
        (make_entry(min_cosine=0.9993), make_entry(), ["accuracy no longer known"], None),
    ],
)
def test_each_kind_of_change_is_named(changes, old, new, words, speed) -> None:
    (change,) = changes([old], [new])
    assert change["changes"] == words
    assert change["speed"] == (None if speed is None else pytest.approx(speed))
    kind = None if speed is None else old.provenance.kind
    assert change["speed_is"] == kind


def test_ranges_are_cut_where_either_side_changes(changes) -> None:
    rows = changes(
        [make_entry((1, 99)), make_entry((100, 199), OTHER)], [make_entry((1, 149)), make_entry((300, None))]
    )
    assert [(row["kv_min"], row["kv_max"], row["changes"]) for row in rows] == [
        (1, 99, []),
        (100, 149, ["another config"]),
        (150, 199, ["removed"]),
        (300, None, ["added"]),
    ]


def test_callers_of_two_tiers_are_compared_by_themselves(changes) -> None:
    rows = changes(
        [measured(100, min_cosine=0.9995)],
        [measured(80, tier="coarse", min_cosine=0.9991), measured(100, tier="fine", min_cosine=0.9995, config=OTHER)],
    )
    assert [(row["tier"], row["changes"]) for row in rows] == [
        ("coarse", ["faster", "less accurate"]),
        ("fine", ["another config"]),
    ]


def test_the_table_marks_predictions_and_leaves_out_what_is_the_same(run, tmp_path) -> None:
    old = save(tmp_path / "old" / "l20.yaml", predicted(100, (1, 9)), measured(100, (10, 19)), make_entry((20, 29)))
    new = save(tmp_path / "new" / "l20.yaml", predicted(80, (1, 9)), measured(80, (10, 19)), make_entry((20, 29)))
    output = run("show", "--diff", old, new)
    rows = {line.split()[2]: line.split() for line in output.splitlines()[1:-1]}
    assert rows.keys() == {"kv1-9", "kv10-19"}
    assert "~1.250x" in rows["kv1-9"]
    assert "1.250x" in rows["kv10-19"]
    assert output.splitlines()[-1] == "2 of 3 ranges of lengths changed"


def test_bundles_folders_and_copies_of_any_name_are_compared(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sagegen.registry.shipped_dir", lambda: tmp_path / "none")
    save(tmp_path / "folder" / "l20.yaml", measured(100), cubins=(b"cubin",))
    env = Env(tmp_path / "cache", tmp_path / "folder", False, "warning", None)
    (tmp_path / "new.tar.zst").write_bytes(pack_archive(make_bundle(["l20"], env)))
    copy = tmp_path / "before.yaml"
    copy.write_bytes((tmp_path / "folder" / "l20.yaml").read_bytes())
    for source in (copy, tmp_path / "folder", tmp_path / "folder" / "l20.yaml"):
        assert run("show", "--diff", source, tmp_path / "new.tar.zst") == "0 of 1 ranges of lengths changed\n"
    damaged = bytearray((tmp_path / "new.tar.zst").read_bytes())
    damaged[-20] ^= 1
    (tmp_path / "new.tar.zst").write_bytes(damaged)
    assert "new.tar.zst: damaged" in run("show", "--diff", copy, tmp_path / "new.tar.zst", code=2)


# --- merging


def test_measured_goes_before_predicted_and_newer_before_older(run, tmp_path) -> None:
    one = save(
        tmp_path / "one" / "l20.yaml",
        make_entry((1, 9), date="2025-01-01"),
        make_entry((10, 19), date="2025-01-02", cubin=b"new"),
        make_entry((20, None), date="2025-01-01", cubin=b"first"),
        cubins=(b"cubin", b"new", b"first"),
    )
    two = save(
        tmp_path / "two" / "l20.yaml",
        make_entry((1, 9), OTHER, "predicted", date="2025-12-31"),
        make_entry((10, 29), OTHER, date="2025-01-01"),
        cubins=(b"cubin",),
    )
    output = run("merge", one, two, "-o", tmp_path / "out" / "l20.yaml")
    entries = read_entries(tmp_path / "out" / "l20.yaml", "l20")
    assert [(entry.lengths.name, entry.config == OTHER) for entry in entries] == [
        ("kv1-9", False),
        ("kv10-19", False),
        ("kv20-", False),
    ]
    cubins = {gzip.decompress(file.read_bytes()) for file in (tmp_path / "out" / "l20").iterdir()}
    assert cubins == {b"cubin", b"new", b"first"}
    assert f"kv1-9 of {one} (measured 2025-01-01) goes before kv1-9 of {two} (predicted 2025-12-31)" in output
    assert f"kv10-19 of {one} (measured 2025-01-02) goes before kv10-19 of {two} (measured 2025-01-01)" in output
    assert f"kv20- of {one} (measured 2025-01-01) goes before kv10-29 of {two} (measured 2025-01-01)" in output
    assert output.endswith(f"3 entries and 3 cubins written to {tmp_path}/out/l20.yaml\n")


def test_the_tiers_of_a_bucket_stay_together(run, tmp_path) -> None:
    """The coarse one alone is newer than the other file's entry, which must not take the fine one's place."""
    one = save(
        tmp_path / "one" / "l20.yaml",
        make_entry(tier="coarse", date="2025-01-03"),
        make_entry(tier="fine", config=OTHER, date="2025-01-01"),
    )
    two = save(tmp_path / "two" / "l20.yaml", make_entry(date="2025-01-02"))
    for files in ((one, two), (two, one)):
        run("merge", *files, "-o", tmp_path / "out" / "l20.yaml")
        entries = read_entries(tmp_path / "out" / "l20.yaml", "l20")
        assert [entry.tier for entry in entries] == ["coarse", "fine"]
        (tmp_path / "out" / "l20.yaml").unlink()


def test_equal_entries_are_no_conflict_and_a_file_may_be_merged_into_itself(run, tmp_path) -> None:
    one = save(tmp_path / "one" / "l20.yaml", make_entry(), cubins=(b"cubin",))
    before = one.read_bytes()
    facts = json.loads(run("merge", one, one, "-o", one, "--json"))
    assert (facts["entries"], facts["cubins"], facts["conflicts"]) == (1, 1, [])
    assert one.read_bytes() == before
    assert gzip.decompress(next((tmp_path / "one" / "l20").iterdir()).read_bytes()) == b"cubin"
    other = save(tmp_path / "two" / "l20.yaml", make_entry())
    assert "is none of the files to merge" in run("merge", one, "-o", other, code=2)


def test_registries_of_two_gpus_do_not_merge(run, tmp_path) -> None:
    one = save(tmp_path / "l20.yaml", make_entry())
    (tmp_path / "l40.yaml").write_text(one.read_text().replace("gpu: l20\nentries", "gpu: l40\nentries"))
    output = run("merge", one, tmp_path / "l40.yaml", "-o", tmp_path / "out.yaml", code=2)
    assert "l20.yaml is of l20" in output
    assert "l40.yaml is of l40" in output
    assert "has no registry of h200; it has: l20, l40" in run("merge", tmp_path, "-o", tmp_path / "h200.yaml", code=2)


def test_a_registry_of_one_gpu_is_not_written_as_anothers(run, tmp_path) -> None:
    one = save(tmp_path / "l20.yaml", make_entry())
    for arguments in (("-o", tmp_path / "out" / "l40.yaml"), ("-o", tmp_path / "out" / "new.yaml", "--gpu", "l40")):
        assert "has no registry of l40; it has: l20" in run("merge", one, *arguments, code=2)
    output = run("merge", one, "-o", tmp_path / "out" / "l40.yaml", "--gpu", "l20", code=2)
    assert "l40.yaml names l40, --gpu l20" in output
    assert "write it to a file l20.yaml" in output
    assert not (tmp_path / "out").exists()
    run("merge", one, "-o", tmp_path / "out" / "new.yaml")
    assert len(read_entries(tmp_path / "out" / "new.yaml", "l20")) == 1


# --- predictions that stay


GATED = predicted(80, (1, 99), min_cosine=0.9994, config=OTHER)
SAME = (1, 99)


@pytest.mark.parametrize(
    ("newer", "stays"),
    [
        (predicted(100, SAME), True),  # the default of a run that was ended early: slower, and not gated
        (predicted(70, SAME), True),  # faster, but nobody knows how accurate
        (predicted(100, SAME, min_cosine=0.9995), True),
        (predicted(100, (20, 30)), True),
        (predicted(70, SAME, min_cosine=0.9991), False),
        (predicted(100, SAME, min_cosine=0.9995, model="2"), False),  # what another model says is not compared
        (predicted(100, SAME, min_cosine=0.9995, model=None), False),
        (predicted(100, SAME, min_cosine=0.9995, shape="b2"), False),
        (predicted(100, (1, None)), False),  # lengths that nothing else answers
        (measured(100, SAME), False),
    ],
)
def test_a_better_prediction_stays(tmp_path, newer, stays) -> None:
    path = save(tmp_path / "l20.yaml", GATED)
    before = path.read_bytes()
    saved = save_entries(path, "l20", [newer], {})
    assert (saved.outdone, saved.written) == (((newer,), ()) if stays else ((), (newer,)))
    assert (path.read_bytes() == before) == stays


def test_a_stale_prediction_gives_way(tmp_path) -> None:
    path = save(tmp_path / "l20.yaml", GATED)
    saved = save_entries(path, "l20", [predicted(100, SAME)], {}, lambda entry: entry.config == OTHER)
    assert len(saved.written) == 1


def test_both_tiers_stay_or_go_together(tmp_path) -> None:
    coarse, fine = predicted(80, tier="coarse", min_cosine=0.9991), predicted(90, tier="fine", min_cosine=0.9995)
    path = save(tmp_path / "l20.yaml", coarse, fine)
    # one for everyone that nobody gated: for each caller there is a better one
    assert save_entries(path, "l20", [predicted(85)], {}).outdone
    # gated, and better for those who ask for accuracy
    assert save_entries(path, "l20", [predicted(85, min_cosine=0.9995)], {}).outdone == ()
    # now one stands for everyone, and half of a new pair is slower: a hole for its callers would be worse
    pair = (
        predicted(80, tier="coarse", min_cosine=0.9991, config=OTHER),
        predicted(95, tier="fine", min_cosine=0.9996, config=OTHER),
    )
    assert save_entries(path, "l20", pair, {}).outdone == ()
    assert [entry.tier for entry in read_entries(path, "l20")] == ["coarse", "fine"]


def test_a_refreshed_text_of_the_same_config_replaces_it(tmp_path) -> None:
    def of_text(entry: Entry, digit: str) -> Entry:
        return structs.replace(entry, provenance=structs.replace(entry.provenance, text_sha256=digit * 64))

    path = save(tmp_path / "l20.yaml", of_text(GATED, "a"))
    newer = structs.replace(GATED, figures=Timing(predicted_full_us=100.0), min_cosine=None)
    assert save_entries(path, "l20", [of_text(newer, "a")], {}).outdone
    assert save_entries(path, "l20", [of_text(newer, "b")], {}).outdone == ()
