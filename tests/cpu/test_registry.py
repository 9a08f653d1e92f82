"""Registry files: what they may hold, what is said when they hold something else, which entry a call gets."""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sagegen import registry
from sagegen.entry import ACCURACY_KINDS, is_fine
from sagegen.env import Env
from sagegen.errors import RegistryError
from sagegen.gpu import GPUS
from sagegen.measuring.inputs import EMULATED_KINDS, INPUT_KINDS
from sagegen.problem import DTYPES, HEAD_DIMS, TUNED_LENGTHS, Problem, parse_problem
from sagegen.registry import Accuracy, Entry, KernelResources, Provenance, Range, Timing
from sagegen.registry_file import dump_entries, parse_entries
from sagegen.render import render
from sagegen.space import MMA_PARAMS, MmaConfig, make_config, parse_config
from sagegen.store import make_key

CAUSAL = Problem(128, "bf16", True)
FULL = Problem(128, "bf16", False)
CONFIG = "mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qoreg_mb1"
PER_WARP = CONFIG.replace("grthread", "grwarp")


def make_entry(
    problem=CAUSAL, kv=(1, None), config=CONFIG, kind="measured", cubin=b"cubin", gpu="h200", **rest
) -> Entry:
    return Entry(
        problem=problem.name,
        bucket=Range(kv_min=kv[0], kv_max=kv[1]),
        answer=rest.pop("answer", "kernel"),
        config=config,
        kernel=f"{problem.name}_{config}",
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
        provenance=Provenance(
            kind=kind, gpu=gpu, sms=132, launch_abi=1, protocol=1, date="2025-11-29", shape="b1 h32/32 q4096 kv4096"
        ),
        **rest,
    )


@pytest.fixture
def env(tmp_path, monkeypatch) -> Env:
    """A user's layer in one folder, and an empty folder in place of the package's registries."""
    monkeypatch.setattr(registry, "shipped_dir", lambda: tmp_path / "shipped")
    return Env(cache_dir=tmp_path / "cache", tuned_dir=tmp_path / "user", strict=False, log="warning", nvcc=None)


def save(folder: Path, gpu: str, *entries: Entry) -> None:
    registry.save_entries(folder / f"{gpu}.yaml", gpu, entries, {})


def filled(record, values):
    """Any instance of a record whose fields all take `values`."""
    return st.builds(record, **dict.fromkeys(record.__struct_fields__, values))


FIGURE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
COSINE = st.floats(-1, 1)
ACCURACIES = st.builds(
    Accuracy, cosine=COSINE, relative_l1=FIGURE, relative_l2=FIGURE, max_error=FIGURE, scale_ratio=FIGURE
)


def entries_of(kind, figures):
    """Entries of any content; a predicted one has no figures that only a GPU gives."""
    return st.builds(
        make_entry,
        problem=st.builds(Problem, st.sampled_from(HEAD_DIMS), st.sampled_from(DTYPES), st.booleans()),
        kv=st.integers(1, 10**6).flatmap(lambda low: st.tuples(st.just(low), st.none() | st.integers(low, 10**7))),
        config=st.fixed_dictionaries({p.name: st.sampled_from(p.values) for p in MMA_PARAMS}).map(
            lambda values: make_config(MmaConfig, values).name
        ),
        kind=st.just(kind),
        cubin=st.binary(max_size=8),
        gpu=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20),
        answer=st.sampled_from(["kernel", "sdpa"]),
        min_cosine=st.none() | COSINE,
        tier=st.sampled_from([None, "fine", "coarse"]),
        figures=figures,
        accuracy=st.dictionaries(st.sampled_from(ACCURACY_KINDS), ACCURACIES),
        resources=st.none() | filled(KernelResources, st.integers(0, 10**6)),
    )


OPTIONAL = st.none() | FIGURE
ENTRIES = entries_of(
    "measured", st.builds(Timing, kernel_us=OPTIONAL, tops=OPTIONAL, speed_vs_sdpa=OPTIONAL)
) | entries_of("predicted", st.builds(Timing, predicted_us=OPTIONAL, predicted_full_us=OPTIONAL))


@given(entries=st.lists(ENTRIES, max_size=4))
def test_what_is_written_is_read_back(entries):
    distinct: list[Entry] = []
    for entry in entries:
        if not any(entry.overlaps(other) for other in distinct):
            distinct.append(entry)
    text = dump_entries("h200", distinct)
    read = parse_entries(text, "h200.yaml", "h200")
    assert sorted(read, key=repr) == sorted(distinct, key=repr)
    assert dump_entries("h200", reversed(read)) == text


def test_file_is_readable_text_in_a_fixed_order():
    short, long = make_entry(kv=(1, 2047)), make_entry(kv=(2048, None))
    text = dump_entries("h200", [long, make_entry(FULL), short])
    assert text.startswith(
        "schema: 1\ngpu: h200\nentries:\n- problem: d128_bf16_causal_int8\n  bucket:\n    kv_min: 1\n"
    )
    assert text.index("kv_max: 2047") < text.index("kv_min: 2048") < text.index("d128_bf16_full_int8")
    assert text.endswith("\n...\n")


# --- E11: each message names file, line and key


FULL_OF_FIGURES = make_entry(
    kv=(1, 2047),
    min_cosine=0.9,
    figures=Timing(kernel_us=765.4),
    accuracy={"normal": Accuracy(cosine=0.9, relative_l1=0.1, relative_l2=0.1, max_error=0.1, scale_ratio=1.0)},
    resources=KernelResources(registers=168, spill_bytes=0, smem_bytes=33280),
)
GOOD = dump_entries("h200", [FULL_OF_FIGURES, make_entry(kv=(2048, None))])


def line_of(text: str, part: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.parametrize(
    ("edit", "at", "says"),
    [
        (("  kernel: d128", "  kernal: d128"), "kernal", ["key `kernal` is not known", "did you mean `kernel`?"]),
        (("    kv_max: 2047", "    kv_mx: 2047"), "kv_mx", ["`kv_mx`", "`kv_max`"]),
        (("schema: 1", "schema: 2"), "schema", ["key `schema`", "version 2", "upgrade sagegen"]),
        (("gpu: h200", "gpu: l20"), "gpu: l20", ["key `gpu`", "'l20' is not 'h200'"]),
        (("kv_min: 1\n", "kv_min: 0\n"), "kv_min: 0", ["entries[0].bucket.kv_min"]),
        (("kv_max: 2047", "kv_max: 'many'"), "many", ["entries[0].bucket.kv_max", "str"]),
        (("sms: 132", "sms: .nan"), ".nan", ["not finite"]),
        (("answer: kernel", "answer: cudnn"), "cudnn", ["entries[0].answer", "cudnn"]),
        (("_grthread_", "_grrow_"), "_grrow_", ["key `config`", "'grrow'", "granularity"]),
        (("problem: d128", "problem: d129"), "d129", ["key `problem`", "head_dim=129"]),
        (("date: '2025-11-29'", "date: !!python/object/apply:os.abort []"), "os.abort", ["python", "not allowed"]),
        (("date: '2025-11-29'", "date: !sh 'x'"), "!sh", ["tag !sh is not allowed"]),
        (("date: '2025-11-29'", "date: &a [*a]"), "&a", ["aliases"]),
        (("  answer: kernel\n", "  answer: kernel\n  answer: sdpa\n"), "answer: sdpa", ["`answer` occurs twice"]),
        (("- problem", "- - problem"), "- - problem", ["not YAML"]),
        (("kv_min: 1\n", f"kv_min: {10**22}\n"), str(10**22), ["entries[0].bucket.kv_min"]),
        (("min_cosine: 0.9", "min_cosine: 2.0"), "2.0", ["entries[0].min_cosine", "1.0"]),
        (("min_cosine: 0.9", "min_cosine: -3"), "-3", ["entries[0].min_cosine", "-1"]),
        (("kernel_us: 765.4", "kernel_us: -765.4"), "-765.4", ["entries[0].figures.kernel_us", "> 0"]),
        (("kernel_us: 765.4", "kernel_us: 0"), "kernel_us: 0", ["entries[0].figures.kernel_us", "> 0"]),
        (("kernel_us: 765.4", "kernel_us: 1.0e+999"), "e+999", ["not finite"]),
        (("    normal:", "    normals:"), "normals", ["key `accuracy`", "'normals'", "did you mean `normal`"]),
        (("relative_l1: 0.1", "relative_l1: -0.1"), "-0.1", ["relative_l1", ">= 0"]),
        (("registers: 168", "registers: -168"), "-168", ["resources.registers", ">= 0"]),
        (("sms: 132", "sms: 0"), "sms: 0", ["provenance.sms", ">= 1"]),
        (("date: '2025-11-29'", "date: 'yesterday'"), "yesterday", ["provenance.date"]),
        (("  answer: kernel\n", ""), "- problem", ["key `entries[0].answer` is missing", "add it"]),
        (("schema: 1\n", ""), "gpu: h200", ["key `schema` is missing", "add it"]),
        (("gpu: h200\n", ""), "schema: 1", ["key `gpu` is missing", "add it"]),
        (("entries:", "others:"), "others:", ["key `others` is not known"]),
        (("sms: 132", "sms: \0\0"), "sms: ", ["'\\x00' is no text"]),
        (("shape: b1 h32/32", r'shape: "\e]0;mine\a' + '"  # '), "shape", ["provenance.shape"]),
        (("gpu: h200\n    sms", 'gpu: "h\\n200"\n    sms'), 'gpu: "h', ["provenance.gpu"]),
        (("shape: b1", f"shape: {'b' * 300}"), "bbb", ["provenance.shape"]),
    ],
)  # fmt: skip
def test_a_malformed_file_is_named_with_line_and_key(edit, at, says):
    text = GOOD.replace(*edit, 1)
    assert text != GOOD
    with pytest.raises(RegistryError) as caught:
        parse_entries(text, "tuned/h200.yaml", "h200")
    # a YAML syntax error is seen at the next line at the earliest
    slack = 2 if "not YAML" in str(caught.value) else 0
    lines = [f"tuned/h200.yaml:{line_of(text, at) + i}: " for i in range(slack + 1)]
    assert any(str(caught.value).startswith(line) for line in lines), str(caught.value)
    for part in says:
        assert part in str(caught.value)


def test_the_kinds_of_accuracy_are_those_of_the_gate():
    assert set(ACCURACY_KINDS) == {*INPUT_KINDS, *EMULATED_KINDS}


@pytest.mark.parametrize("name", sorted(GPUS))
def test_what_ships_keeps_the_bounds(name):
    """Cosines beyond 1 by a rounding among it."""
    nothing = Env(cache_dir=Path("none"), tuned_dir=Path("none"), strict=False, log="warning", nvcc=None)
    errors: list[RegistryError] = []
    for layer in registry.load_layers(name, nothing, errors.append):
        assert layer.entries
    assert errors == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:200],
        lambda text: text.replace("schema: 1", "schema: 2"),
        lambda text: "...\n",
        lambda text: "- a list\n...\n",
        lambda text: text.replace("min_cosine: 0.9", "min_cosine: .nan"),
        lambda text: text.replace("  kernel: d128", "  kernel: d64", 1),
        lambda text: text.replace("schema: 1", "schema: \0"),
    ],
    ids=["cut short", "another schema", "empty", "no mapping", "not finite", "another's kernel", "NUL"],
)
def test_the_remedy_of_a_lost_file_works(tmp_path, damage):
    """A tuning run reads the file first, so that tuning again alone ends in the same error."""
    path = tmp_path / "a folder" / "h200.yaml"
    path.parent.mkdir()
    path.write_text(damage(GOOD))
    with pytest.raises(RegistryError) as caught:
        registry.read_entries(path, "h200")
    move, _, tune = caught.value.remedy.partition("move it away and tune again: ")[2].partition(" && ")
    assert tune == "sagegen tune --gpu h200"
    subprocess.run(move, shell=True, check=True)
    assert registry.read_entries(path, "h200") == []
    assert path.with_name("h200.yaml.bad").exists()


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path):
    path = tmp_path / "h200.yaml"
    path.write_bytes(b"schema: 1\ngpu: \xff\n...\n")
    with pytest.raises(RegistryError, match=r"h200\.yaml:2: .*mv .*\.bad"):
        registry.read_entries(path, "h200")


@pytest.mark.parametrize("nested", ["- " * 10**5 + "x", "[" * 10**5, "{a: " * 10**5, "? " * 10**5])
def test_deep_nesting_ends_in_an_error_not_in_the_process(nested):
    with pytest.raises(RegistryError, match=r"h200\.yaml:\d+: not YAML"):
        parse_entries(f"{nested}\n...\n", "h200.yaml", "h200")


@pytest.mark.parametrize("digest", ["0" * 64 + "\n", "../" * 21 + "x", "0" * 63, "A" * 64])
def test_a_digest_that_is_none_never_names_a_file(digest):
    text = dump_entries("h200", [structs.replace(make_entry(), cubin_sha256=digest)])
    with pytest.raises(RegistryError, match="cubin_sha256"):
        parse_entries(text, "h200.yaml", "h200")


def test_what_is_no_plain_file_is_not_waited_for(env):
    """A named pipe, which nobody writes to, in the place of a registry and of a cubin."""
    save(env.tuned_dir, "h200", make_entry())
    found = registry.lookup(GPUS["h200"], CAUSAL, 1, env)
    (env.tuned_dir / "h200").mkdir()
    pipe = env.tuned_dir / "h200" / f"{found.entry.cubin_sha256[:16]}.cubin.gz"
    os.mkfifo(pipe)
    with pytest.raises(RegistryError, match=pipe.name):
        registry.read_cubin(found)
    (env.tuned_dir / "l20.yaml").symlink_to("/dev/zero")
    with pytest.raises(RegistryError, match=r"l20\.yaml: is no plain file"):
        registry.read_entries(env.tuned_dir / "l20.yaml", "l20")


def test_a_python_tag_is_not_executed(tmp_path):
    proof = tmp_path / "executed"
    text = GOOD.replace("date: '2025-11-29'", f"date: !!python/object/apply:pathlib.Path.touch [{proof}]", 1)
    with pytest.raises(RegistryError):
        parse_entries(text, "h200.yaml", "h200")
    assert not proof.exists()


@given(cut=st.integers(0, len(GOOD) - 2))
def test_every_half_of_a_file_is_refused(cut):
    with pytest.raises(RegistryError, match=r"h200\.yaml:\d+: the file is cut short"):
        parse_entries(GOOD[:cut], "h200.yaml", "h200")


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (make_entry(kv=(1, 2047)), make_entry(kv=(1, 2047)), "the same bucket"),
        (make_entry(kv=(1, 2047)), make_entry(kv=(1, 2047), config=PER_WARP), "the same bucket"),
        (make_entry(kv=(1, 2047)), make_entry(kv=(2047, None)), "a bucket that overlaps"),
        (make_entry(kv=(1, None)), make_entry(kv=(5, 6)), "a bucket that overlaps"),
    ],
)
def test_two_entries_for_one_length_are_refused(first, second, says):
    text = dump_entries("h200", [first, second])
    with pytest.raises(RegistryError, match=says) as caught:
        parse_entries(text, "h200.yaml", "h200")
    starts = [i for i, line in enumerate(text.splitlines(), 1) if line.startswith("- problem")]
    assert f"h200.yaml:{starts[1]}: key `bucket`" in str(caught.value)
    assert f"line {starts[0]}" in str(caught.value)


def test_a_kernel_entry_without_its_cubin_digest_is_refused():
    text = "".join(line for line in GOOD.splitlines(True) if "cubin_sha256" not in line)
    with pytest.raises(RegistryError, match="key `cubin_sha256` is missing"):
        parse_entries(text, "h200.yaml", "h200")


def test_other_registries_load_beside_a_broken_one(env):
    save(env.tuned_dir, "h200", make_entry())
    (env.tuned_dir / "l20.yaml").write_text(GOOD.replace("schema: 1", "schema: 9"))
    assert registry.load_registry("h200", env).find(CAUSAL, 100) is not None
    with pytest.raises(RegistryError, match=r"l20\.yaml:1"):
        registry.load_registry("l20", env)


def test_a_broken_user_layer_leaves_the_shipped_one(env):
    save(registry.shipped_dir(), "h200", make_entry())
    env.tuned_dir.mkdir()
    (env.tuned_dir / "h200.yaml").write_text("schema: 1\n")
    errors: list[RegistryError] = []
    found = registry.lookup(GPUS["h200"], CAUSAL, 100, env, on_error=errors.append)
    assert found is not None
    assert found.layer.shipped
    assert "cut short" in str(errors[0])


# --- saving


def test_a_predicted_entry_never_replaces_a_measured_one(env):
    path = env.tuned_dir / "h200.yaml"
    measured = make_entry(kv=(1, 2047))
    registry.save_entries(path, "h200", [measured], {})
    newer = make_entry(kv=(1, 2047), config=PER_WARP, kind="predicted")
    elsewhere = make_entry(kv=(2048, None), kind="predicted")
    saved = registry.save_entries(path, "h200", [newer, elsewhere], {})
    assert saved.refused == (newer,)
    assert saved.written == (elsewhere,)
    assert registry.load_registry("h200", env).layers[0].entries == (measured, elsewhere)


def test_a_measured_entry_replaces_what_it_overlaps_and_leaves_the_rest(env):
    path = env.tuned_dir / "h200.yaml"
    old = [make_entry(kv=(1, 100), kind="predicted"), make_entry(kv=(101, 200)), make_entry(kv=(201, None))]
    registry.save_entries(path, "h200", old, {})
    newer = make_entry(kv=(50, 150), config=PER_WARP)
    registry.save_entries(path, "h200", [newer], {})
    below, above = (make_entry(kv=(1, 49), kind="predicted"), make_entry(kv=(151, 200)))
    assert registry.load_registry("h200", env).layers[0].entries == (below, newer, above, old[2])


def test_saving_keeps_cubins_that_are_named_and_drops_the_rest(env):
    path = env.tuned_dir / "h200.yaml"
    old, new = b"old cubin", b"new cubin"
    digests = {data: hashlib.sha256(data).hexdigest() for data in (old, new)}
    registry.save_entries(path, "h200", [make_entry(cubin=old)], {digests[old]: old})
    found = registry.lookup(GPUS["h200"], CAUSAL, 1, env)
    assert registry.read_cubin(found) == old
    registry.save_entries(path, "h200", [make_entry(cubin=new)], {digests[new]: new})
    found = registry.lookup(GPUS["h200"], CAUSAL, 1, env)
    assert registry.read_cubin(found) == new
    files = {p.relative_to(env.tuned_dir).as_posix() for p in env.tuned_dir.rglob("*") if p.is_file()}
    assert files == {"h200.yaml", f"h200/{digests[new][:16]}.cubin.gz"}


def test_cubins_that_are_not_packed_serve_and_stay_while_they_are_named(env):
    path, data = env.tuned_dir / "h200.yaml", b"cubin"
    digest = hashlib.sha256(data).hexdigest()
    registry.save_entries(path, "h200", [make_entry(kv=(1, 99), cubin=data)], {})
    plain = env.tuned_dir / "h200" / f"{digest[:16]}.cubin"
    plain.parent.mkdir()
    plain.write_bytes(data)
    (plain.parent / "0123456789abcdef.cubin").write_bytes(b"nobody's")
    registry.save_entries(path, "h200", [make_entry(kv=(100, 200))], {})
    assert [file.name for file in plain.parent.iterdir()] == [plain.name]
    assert registry.read_cubin(registry.lookup(GPUS["h200"], CAUSAL, 1, env)) == data
    plain.write_bytes(b"another")
    assert registry.read_cubin(registry.lookup(GPUS["h200"], CAUSAL, 1, env)) is None


def test_saving_over_a_broken_file_leaves_it_alone(env):
    path = env.tuned_dir / "h200.yaml"
    path.parent.mkdir()
    path.write_text("schema: 1\n")
    with pytest.raises(RegistryError, match="cut short"):
        registry.save_entries(path, "h200", [make_entry()], {})
    assert [p.name for p in path.parent.iterdir()] == ["h200.yaml"]
    assert path.read_text() == "schema: 1\n"


def test_a_cubin_under_a_false_digest_is_not_saved(env):
    with pytest.raises(RegistryError, match="digest"):
        registry.save_entries(env.tuned_dir / "h200.yaml", "h200", [make_entry()], {"0" * 64: b"cubin"})
    assert not env.tuned_dir.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: b"another",
        lambda packed: gzip.compress(b"another"),
        lambda packed: packed[:-9],
        lambda packed: gzip.compress(bytes(1 << 27)),
    ],
    ids=["not packed", "another", "cut short", "a bomb"],
)
def test_a_changed_cubin_is_refused(env, damage):
    data = b"cubin"
    digest = hashlib.sha256(data).hexdigest()
    registry.save_entries(env.tuned_dir / "h200.yaml", "h200", [make_entry(cubin=data)], {digest: data})
    (env.tuned_dir / "h200" / f"{digest[:16]}.cubin.gz").write_bytes(damage(gzip.compress(data)))
    with pytest.raises(RegistryError, match=f"{digest[:16]}.cubin"):
        registry.read_cubin(registry.lookup(GPUS["h200"], CAUSAL, 1, env))


def test_an_absent_cubin_is_none(env):
    save(env.tuned_dir, "h200", make_entry())
    assert registry.read_cubin(registry.lookup(GPUS["h200"], CAUSAL, 1, env)) is None


# --- looking up


@pytest.mark.parametrize(
    ("kv_len", "bucket"), [(1, 1), (2047, 1), (2048, 2048), (8191, 2048), (8192, 8192), (10**6, 8192)]
)
def test_the_bucket_that_holds_the_length_answers(env, kv_len, bucket):
    save(env.tuned_dir, "h200", *(make_entry(kv=kv) for kv in ((1, 2047), (2048, 8191), (8192, None))))
    found = registry.lookup(GPUS["h200"], CAUSAL, kv_len, env)
    assert found.entry.bucket.kv_min == bucket
    assert (found.borrowed, found.out_of_range) == (False, False)


def test_entries_that_differ_in_mask_only_do_not_collide(env):
    """E10."""
    save(env.tuned_dir, "h200", make_entry(CAUSAL), make_entry(FULL, config=PER_WARP))
    assert registry.lookup(GPUS["h200"], CAUSAL, 64, env).entry.config == CONFIG
    assert registry.lookup(GPUS["h200"], FULL, 64, env).entry.config == PER_WARP
    assert registry.lookup(GPUS["h200"], replace(FULL, dtype="fp16"), 64, env) is None


def test_a_length_above_every_bucket_has_no_answer(env):
    save(env.tuned_dir, "h200", make_entry(kv=(64, 2047)))
    assert registry.lookup(GPUS["h200"], CAUSAL, 2048, env) is None


def test_a_length_below_every_bucket_gets_the_next_longer(env):
    save(env.tuned_dir, "h200", make_entry(kv=(64, 127)), make_entry(kv=(128, None)))
    found = registry.lookup(GPUS["h200"], CAUSAL, 63, env)
    assert found.entry.bucket.kv_min == 64
    assert found.out_of_range


def test_the_users_layer_goes_before_the_shipped(env):
    save(env.tuned_dir, "h200", make_entry(config=PER_WARP))
    save(registry.shipped_dir(), "h200", make_entry())
    found = registry.lookup(GPUS["h200"], CAUSAL, 1, env)
    assert found.entry.config == PER_WARP
    assert not found.layer.shipped


def test_a_measured_shipped_entry_goes_before_the_users_prediction(env):
    save(env.tuned_dir, "h200", make_entry(config=PER_WARP, kind="predicted"))
    save(registry.shipped_dir(), "h200", make_entry())
    assert registry.lookup(GPUS["h200"], CAUSAL, 1, env).layer.shipped


def test_siblings_lend_before_others_of_the_architecture(env):
    # l40s' declared siblings are l40, then l20; rtx4090 has its architecture, h200 has not
    save(env.tuned_dir, "h200", make_entry())
    assert registry.lookup(GPUS["l40s"], CAUSAL, 1, env) is None
    for lender in ("rtx4090", "l20", "l40"):
        save(env.tuned_dir, lender, make_entry())
        found = registry.lookup(GPUS["l40s"], CAUSAL, 1, env)
        assert (found.gpu_name, found.borrowed) == (lender, True)
    save(env.tuned_dir, "l40s", make_entry())
    assert registry.lookup(GPUS["l40s"], CAUSAL, 1, env).borrowed is False


def test_a_bucket_of_a_sibling_goes_before_ones_own_longer_bucket(env):
    save(env.tuned_dir, "h200", make_entry(kv=(2048, None)))
    save(env.tuned_dir, "h100", make_entry(kv=(1, 2047)))
    found = registry.lookup(GPUS["h200"], CAUSAL, 100, env)
    assert (found.gpu_name, found.out_of_range) == ("h100", False)


def test_a_gpu_without_a_row_borrows_from_its_architecture(env):
    save(env.tuned_dir, "rtx4090", make_entry())
    assert registry.lookup(None, CAUSAL, 1, env, arch="sm_90") is None
    found = registry.lookup(None, CAUSAL, 1, env, arch="sm_89")
    assert (found.gpu_name, found.borrowed) == ("rtx4090", True)


def test_a_file_changed_by_a_tuner_is_seen(env):
    path = env.tuned_dir / "h200.yaml"
    save(env.tuned_dir, "h200", make_entry())
    assert registry.lookup(GPUS["h200"], CAUSAL, 1, env).entry.config == CONFIG
    save(env.tuned_dir, "h200", make_entry(config=PER_WARP))
    assert registry.lookup(GPUS["h200"], CAUSAL, 1, env).entry.config == PER_WARP
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_shipped_registries_are_valid_and_their_cubins_match(gpu):
    """Holds for whatever ships: every named cubin is there with its digest."""
    file = registry.shipped_dir() / f"{gpu}.yaml"
    if not file.exists():
        return
    for entry in parse_entries(file.read_text(), str(file), gpu):
        layer = registry.Layer(file.parent, gpu, (entry,), "shipped")
        if entry.answer == "kernel":
            assert registry.read_cubin(registry.Found(entry, gpu, False, False, layer)) is not None


def test_entries_are_immutable():
    with pytest.raises(AttributeError):
        make_entry().answer = "sdpa"
    assert msgspec.structs.replace(make_entry(), answer="sdpa").answer == "sdpa"


def test_two_files_of_one_gpu_in_one_folder_keep_their_cubins(tmp_path):
    for name in ("l20.yaml", "trial.yaml"):
        registry.save_entries(
            tmp_path / name, "l20", [make_entry(cubin=b"one")], {hashlib.sha256(b"one").hexdigest(): b"one"}
        )
    other = {hashlib.sha256(b"two").hexdigest(): b"two"}
    registry.save_entries(tmp_path / "trial.yaml", "l20", [make_entry(cubin=b"two")], other)
    assert [gzip.decompress(path.read_bytes()) for path in (tmp_path / "l20").iterdir()] == [b"one"]
    assert [gzip.decompress(path.read_bytes()) for path in (tmp_path / "trial").iterdir()] == [b"two"]


def test_a_kernel_of_another_config_is_refused_with_its_line():
    text = dump_entries("h200", [make_entry()])
    edited = text.replace("  config: mma_bq128_bk64_w8", "  config: mma_bq64_bk64_w4", 1)
    assert edited != text
    line = next(i for i, row in enumerate(edited.splitlines(), 1) if row.startswith("  kernel:"))
    with pytest.raises(RegistryError, match=rf":{line}: key `kernel`"):
        parse_entries(edited, "h200.yaml", "h200")


@pytest.mark.parametrize(
    ("old", "new"),
    [("relative_l1:", "relativ_l1:"), ("date: '2025-11-29'", "date: 2025-13-29"), ("sms: 132", "sms: !!int abc")],
    ids=["key of an input kind", "no date", "no integer"],
)
def test_what_yaml_or_the_schema_cannot_build_is_a_registry_error(old, new):
    figures = Accuracy(cosine=1.0, relative_l1=0.0, relative_l2=0.0, max_error=0.0, scale_ratio=1.0)
    text = dump_entries("h200", [make_entry(accuracy={"normal": figures})])
    assert old in text
    with pytest.raises(RegistryError, match=r"h200\.yaml:"):
        parse_entries(text.replace(old, new, 1), "h200.yaml", "h200")


# --- registries of three buckets, as they were tuned before there were five


THREE = ((1, 2047), (2048, 8191), (8192, None))


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_what_ships_answers_every_length(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("SAGEGEN_TUNED_DIR", str(tmp_path))
    problems = {entry.problem for layer in registry.load_registry(gpu).layers for entry in layer.entries}
    assert problems
    for name in problems:
        for kv_len in (1, 1448, 1449, 2047, 2048, 2897, 5793, 8191, 8192, 11586, 10**6):
            found = registry.lookup(GPUS[gpu], parse_problem(name), kv_len)
            assert not found.out_of_range
            assert found.entry.lengths.holds(kv_len)


def test_five_buckets_take_over_from_three(env):
    path = env.tuned_dir / "h200.yaml"
    registry.save_entries(path, "h200", [make_entry(kv=kv) for kv in THREE], {})
    five = [make_entry(kv=(t.bucket.kv_min, t.bucket.kv_max), config=PER_WARP) for t in TUNED_LENGTHS]
    registry.save_entries(path, "h200", five, {})
    assert registry.read_entries(path, "h200") == five
    for tuned in TUNED_LENGTHS:
        assert registry.lookup(GPUS["h200"], CAUSAL, tuned.tokens, env).entry.lengths == tuned.bucket


def test_one_of_five_buckets_leaves_the_three_what_it_does_not_answer(env):
    path = env.tuned_dir / "h200.yaml"
    registry.save_entries(path, "h200", [make_entry(kv=kv) for kv in THREE], {})
    middle = TUNED_LENGTHS[2].bucket  # 2897 to 5792
    registry.save_entries(path, "h200", [make_entry(kv=(middle.kv_min, middle.kv_max), config=PER_WARP)], {})
    own = {kv: registry.lookup(GPUS["h200"], CAUSAL, kv, env) for kv in (1, 2047, 2048, 2896, 2897, 5792, 5793, 8191)}
    assert [kv for kv, found in own.items() if found.entry.config == PER_WARP] == [2897, 5792]
    assert not any(found.out_of_range for found in own.values())
    assert [e.lengths.name for e in registry.read_entries(path, "h200")] == [
        "kv1-2047", "kv2048-2896", "kv2897-5792", "kv5793-8191", "kv8192-"
    ]  # fmt: skip


def test_a_users_three_buckets_and_five_that_ship_answer_side_by_side(env, tmp_path):
    save(env.tuned_dir, "h200", *(make_entry(kv=kv) for kv in THREE[:1]))
    save(
        registry.shipped_dir(), "h200",
        *(make_entry(kv=(t.bucket.kv_min, t.bucket.kv_max), config=PER_WARP) for t in TUNED_LENGTHS),
    )  # fmt: skip
    found = {kv: registry.lookup(GPUS["h200"], CAUSAL, kv, env).entry.lengths.name for kv in (1024, 2047, 2048, 9000)}
    assert found == {1024: "kv1-2047", 2047: "kv1-2047", 2048: "kv1449-2896", 9000: "kv5793-11585"}


# --- two entries of a bucket


FINE = make_entry(config=CONFIG.replace("_st2_", "_st3_"), tier="fine", min_cosine=0.99934)
COARSE = make_entry(tier="coarse", min_cosine=0.99917)


@pytest.mark.parametrize(("asked", "tier"), [(0.0, "coarse"), (0.999, "coarse"), (0.9992, "coarse"), (0.9993, "fine")])
@pytest.mark.parametrize("order", [(FINE, COARSE), (COARSE, FINE)])
def test_the_fast_entry_answers_whom_it_is_accurate_enough_for(env, asked, tier, order):
    save(env.tuned_dir, "h200", *order)
    assert registry.lookup(GPUS["h200"], CAUSAL, 100, env, min_cosine=asked).entry.tier == tier


def test_entries_that_differ_in_granularity_only_do_not_collide(env):
    """E10. Of one problem and bucket: each has its own cubin and its own place in the kernel store."""
    per_thread, per_block = CONFIG, CONFIG.replace("grthread", "grblock")
    fine = make_entry(config=per_thread, cubin=b"fine", tier="fine", min_cosine=0.9995)
    coarse = make_entry(config=per_block, cubin=b"coarse", tier="coarse", min_cosine=0.9991)
    cubins = {hashlib.sha256(data).hexdigest(): data for data in (b"fine", b"coarse")}
    registry.save_entries(env.tuned_dir / "h200.yaml", "h200", [fine, coarse], cubins)
    for asked, config, cubin in ((0.9993, per_thread, b"fine"), (0.999, per_block, b"coarse")):
        found = registry.lookup(GPUS["h200"], CAUSAL, 100, env, min_cosine=asked)
        assert (found.entry.config, registry.read_cubin(found)) == (config, cubin)
    sources = [render(CAUSAL, parse_config(name)) for name in (per_thread, per_block)]
    keys = {make_key(source.name, source.text, "sm_90", "V13", ()).folder for source in sources}
    assert len(keys) == 2


def test_a_bucket_whose_entries_are_all_too_coarse_still_says_which_it_has(env):
    save(env.tuned_dir, "h200", COARSE, FINE)
    assert registry.lookup(GPUS["h200"], CAUSAL, 100, env, min_cosine=0.9999).entry == COARSE


def test_where_torch_is_the_fast_answer_it_is_for_everyone(env):
    save(env.tuned_dir, "h200", structs.replace(COARSE, answer="sdpa"), FINE)
    assert registry.lookup(GPUS["h200"], CAUSAL, 100, env, min_cosine=0.9993).entry.answer == "sdpa"


def test_another_layer_may_have_what_is_accurate_enough(env, tmp_path):
    save(env.tuned_dir, "h200", structs.replace(COARSE, tier=None))
    save(tmp_path / "shipped", "h200", FINE)
    assert registry.lookup(GPUS["h200"], CAUSAL, 100, env, min_cosine=0.999).entry.tier is None
    assert registry.lookup(GPUS["h200"], CAUSAL, 100, env, min_cosine=0.9993).entry.tier == "fine"


def test_tiers_replace_their_own_and_an_entry_for_everyone_replaces_both(env):
    file = env.tuned_dir / "h200.yaml"
    single = make_entry(min_cosine=0.9995)
    for saved, left in (((single,), [single]), ((COARSE, FINE), [COARSE, FINE]), ((FINE,), [COARSE, FINE]),
                        ((single,), [single])):  # fmt: skip
        save(env.tuned_dir, "h200", *saved)
        assert registry.read_entries(file, "h200") == left


def test_four_decimals_decide_what_is_fine():
    assert is_fine({})
    assert is_fine({"normal": {"cosine": 0.99926}, "channel_offsets": {"cosine": 0.99886}})
    assert not is_fine({"normal": {"cosine": 0.99924}})
    assert not is_fine({"normal": {"cosine": 0.9995}, "channel_offsets": {"cosine": 0.9988}})


@pytest.mark.parametrize(("l1", "fine"), [(0.038, True), (0.0382, False)])
def test_the_relative_l1_of_normal_inputs_decides_too(l1, fine):
    assert is_fine({"normal": {"cosine": 0.9995, "relative_l1": l1}}) == fine
    assert is_fine({"normal": {"cosine": 0.9995}, "channel_offsets": {"cosine": 0.9995, "relative_l1": 0.1}})


@pytest.mark.parametrize(
    ("cosine", "asked", "served"),
    [
        (0.99926, 0.9993, True),  # as is_fine has it
        (0.99924, 0.9993, False),
        (0.99926, 0.99926, True),
        (0.99926, 0.99935, False),
        (0.99895, 0.999, True),
        (0.99894, 0.999, False),
        (None, 0.999, True),
        (None, 0.9991, False),
    ],
)
def test_one_rule_says_whether_a_cosine_is_reached(cosine, asked, served):
    entry = make_entry(min_cosine=cosine)
    assert entry.serves(asked) == entry.is_accurate_for(asked) == served
    if cosine is not None and asked == 0.9993:
        assert is_fine({"normal": {"cosine": cosine}}) == served


def test_a_coarse_kernel_is_not_for_who_asks_for_the_fine_tier():
    # coarse by its relative L1: its cosine alone would do
    coarse = make_entry(tier="coarse", min_cosine=0.99927)
    assert coarse.serves(0.9992)
    assert not coarse.serves(0.9993)
    assert make_entry(min_cosine=0.99927).serves(0.9993)  # the only one of its bucket


def test_int4_has_a_fine_tier_of_its_own():
    figures = {"normal": {"cosine": 0.979, "relative_l1": 0.207}, "channel_offsets": {"cosine": 0.9812}}
    assert is_fine(figures, "int4")
    assert not is_fine({**figures, "channel_offsets": {"cosine": 0.8785}}, "int4")  # K smoothed alone
    assert not is_fine(figures)
    assert not is_fine({"normal": {"cosine": 0.9726, "relative_l1": 0.233}}, "int4")
    problem = Problem(128, "bf16", False, "int4")
    assert make_entry(problem=problem, min_cosine=None).known_cosine == 0.97
    assert not make_entry(problem=problem, min_cosine=None).serves(0.999)  # what callers ask for who say nothing
    coarse = make_entry(problem=problem, tier="coarse", min_cosine=0.9785)
    assert coarse.serves(0.97)
    assert not coarse.serves(0.978)


def test_torch_is_for_everyone_and_its_kernel_is_not():
    entry = make_entry(answer="sdpa", min_cosine=0.9991)
    assert entry.serves(0.9999)
    assert not entry.is_accurate_for(0.9999)
