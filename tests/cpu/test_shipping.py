"""Bundles: packed reproducibly, read with suspicion, found as registries (cases E1, E2)."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from click.testing import CliRunner
from msgspec import structs

from sagegen import registry, registry_places
from sagegen.abi import LAUNCH_ABI
from sagegen.cli.main import main
from sagegen.entry import Entry, Provenance, Range
from sagegen.env import Env
from sagegen.errors import RegistryError
from sagegen.gpu import GPUS
from sagegen.problem import Problem
from sagegen.registry_kernels import find_cubin
from sagegen.registry_manifest import parse_manifest
from sagegen.shipping.archive import pack_archive, read_archive
from sagegen.shipping.bundle import Bundle, make_bundle, read_folder, write_folder
from sagegen.shipping.wheel import pack_wheel, read_wheel
from sagegen.store import Store, make_key

PROBLEM = Problem(128, "bf16", True)
CONFIG = "mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qoreg_mb1"
#: Two cubins, and sha256 of them from coreutils' sha256sum.
ONE, TWO = b"one", b"two"
ONE_SHA256 = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
TWO_SHA256 = "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3"
CUBIN = f"h200/{ONE_SHA256[:16]}.cubin.gz"


def make_entry(kv=(1, None), digest=ONE_SHA256, kind="measured", date="2025-11-29", config=CONFIG, **rest) -> Entry:
    rest.setdefault("answer", "kernel")
    return Entry(
        problem=PROBLEM.name,
        bucket=Range(kv_min=kv[0], kv_max=kv[1]),
        config=config,
        kernel=f"{PROBLEM.name}_{config}",
        cubin_sha256=digest,
        provenance=Provenance(
            kind=kind, gpu="h200", sms=132, launch_abi=LAUNCH_ABI, protocol=3, date=date,
            shape="b1 h32/32 q4096 kv4096", driver="580.1" if kind == "measured" else None, nvcc="V13.0.88",
        ),
        **rest,
    )  # fmt: skip


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Env:
    """A user's layer, and nothing shipped or installed."""
    monkeypatch.setattr(registry, "shipped_dir", lambda: tmp_path / "shipped")
    return Env(tmp_path / "cache", tmp_path / "user", False, "warning", None)


def tune(env: Env, *entries: Entry, cubins: tuple[bytes, ...] = (ONE, TWO)) -> None:
    named = {hashlib.sha256(cubin).hexdigest(): cubin for cubin in cubins}
    registry.save_entries(env.tuned_dir / "h200.yaml", "h200", entries, named)


@pytest.fixture
def bundle(env: Env) -> Bundle:
    """Of a measured entry for short calls and a predicted one for long ones."""
    tune(env, make_entry((1, 99)), make_entry((100, None), TWO_SHA256, "predicted", "2025-12-24"))
    return make_bundle(["h200"], env)


def lookup(env: Env, kv_len: int = 1) -> registry.Found:
    found = registry.lookup(GPUS["h200"], PROBLEM, kv_len, env)
    assert found is not None
    return found


def fail(error: RegistryError) -> None:
    raise error


# --- what is packed


def test_a_bundle_has_registry_cubins_digests_and_provenance(env: Env, bundle: Bundle) -> None:
    assert sorted(bundle.files) == ["h200.yaml", f"h200/{TWO_SHA256[:16]}.cubin.gz", CUBIN]
    assert gzip.decompress(bundle.files[CUBIN]) == ONE
    assert bundle.files["h200.yaml"] == (env.tuned_dir / "h200.yaml").read_bytes()
    manifest = json.loads(bundle.all_files["manifest.json"])
    assert manifest["launch_abi"] == LAUNCH_ABI
    assert manifest["gpus"]["h200"] == {
        "entries": 2, "measured": 1, "predicted": 1, "cubins": 2, "dates": ["2025-11-29", "2025-12-24"],
        "drivers": ["580.1"], "nvccs": ["V13.0.88"], "protocols": [3],
    }  # fmt: skip
    for name, facts in manifest["files"].items():
        assert facts == {
            "sha256": hashlib.sha256(bundle.files[name]).hexdigest(),
            "bytes": len(bundle.files[name]),
        }


def test_layers_are_packed_as_one_registry(env: Env, tmp_path: Path) -> None:
    """Measured before predicted, then the user's before the shipped; what is left of a bucket stays."""
    tune(env, make_entry((1, 9), kind="predicted"), make_entry((10, 19), TWO_SHA256))
    own = Env(env.cache_dir, tmp_path / "shipped", False, "warning", None)
    tune(own, make_entry((1, 14), TWO_SHA256), make_entry((15, None), kind="predicted"))
    text = make_bundle(["h200"], env).files["h200.yaml"].decode()
    assert re.findall(r"kv_min: (\d+)\n    kv_max: (\w+)", text) == [("1", "9"), ("10", "19"), ("20", "null")]
    assert re.findall(r"kind: (\w+)", text) == ["measured", "measured", "predicted"]


def test_a_cubin_of_the_store_is_packed_too(env: Env) -> None:
    tune(env, make_entry(), cubins=())
    key = make_key(f"{PROBLEM.name}_{CONFIG}", "text", "sm_90", "V13.0", ())
    Store(env.cache_dir / "kernels").publish(key, "text", ONE, {})
    assert gzip.decompress(make_bundle(["h200"], env).files[CUBIN]) == ONE


def test_what_cannot_serve_is_not_packed(env: Env) -> None:
    with pytest.raises(RegistryError, match="nothing is tuned for h200; run: sagegen tune --gpu h200"):
        make_bundle(["h200"], env)
    tune(env, make_entry(), cubins=())
    with pytest.raises(RegistryError, match="neither beside its registry nor stored"):
        make_bundle(["h200"], env)
    tune(env, make_entry(answer="sdpa"), cubins=())
    assert list(make_bundle(["h200"], env).files) == ["h200.yaml"]
    other = make_entry()
    tune(env, structs.replace(other, provenance=structs.replace(other.provenance, launch_abi=LAUNCH_ABI + 1)))
    with pytest.raises(RegistryError, match=f"has launch ABI {LAUNCH_ABI + 1}, not {LAUNCH_ABI}"):
        make_bundle(["h200"], env)


def test_the_same_inputs_give_the_same_bytes(env: Env, bundle: Bundle, tmp_path: Path) -> None:
    """Of all three forms, in another process, folder, order of saving and time of day."""
    elsewhere = Env(env.cache_dir, tmp_path / "a b" / "other", False, "warning", None)
    tune(elsewhere, make_entry((100, None), TWO_SHA256, "predicted", "2025-12-24"))
    tune(elsewhere, make_entry((1, 99)))
    os.utime(elsewhere.tuned_dir / "h200.yaml", (1, 1))
    for name in ("h200.tar.zst", "folder", "wheels"):
        form = ["--wheel", "-o", str(tmp_path / name)] if name == "wheels" else ["-o", str(tmp_path / name)]
        variables = {"SAGEGEN_TUNED_DIR": str(elsewhere.tuned_dir), "SAGEGEN_CACHE_DIR": str(tmp_path / "cache")}
        script = "import pathlib, sys; from sagegen import registry; from sagegen.cli.main import main;"
        script += "registry.shipped_dir = lambda: pathlib.Path('none'); main(sys.argv[1:])"
        command = [sys.executable, "-c", script, "pack", "--gpu", "h200", *form]
        subprocess.run(command, env={**os.environ, **variables, "TZ": "Asia/Tokyo"}, check=True, capture_output=True)
    assert (tmp_path / "h200.tar.zst").read_bytes() == pack_archive(bundle)
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert (wheel.name, wheel.read_bytes()) == pack_wheel(bundle)
    assert {str(f.relative_to(tmp_path / "folder")): f.read_bytes() for f in (tmp_path / "folder").rglob("*.*")} == (
        bundle.all_files
    )


def test_other_inputs_are_another_version_of_the_wheel(env: Env, bundle: Bundle) -> None:
    name, _ = pack_wheel(bundle)
    assert re.fullmatch(rf"sagegen_kernels_h200-{LAUNCH_ABI}\.20251224\+c[0-9a-f]{{8}}-py3-none-any\.whl", name)
    tune(env, make_entry((1, 50)))
    assert pack_wheel(make_bundle(["h200"], env))[0] != name


def test_a_folder_that_holds_something_is_not_written_to(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    (tmp_path / "empty").mkdir()
    for name in ("full", "link", "full/mine"):
        with pytest.raises(RegistryError, match="is there already"):
            write_folder(bundle, tmp_path / name)
    write_folder(bundle, tmp_path / "empty")
    assert read_folder(tmp_path / "empty") == bundle
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o755
    assert sorted(os.listdir(tmp_path / "full")) == ["mine"]


# --- archives that nobody should trust


def archive_of(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for member, data in members:
            member.size = member.size or len(data)
            archive.addfile(member, io.BytesIO(data))
    path.write_bytes(zstandard.compress(tar.getvalue()))
    return path


def member_of(name: str, kind: bytes = tarfile.REGTYPE, to: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, to
    return member


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (member_of("/etc/cron.d/evil"), "'/etc/cron.d/evil' is an absolute path"),
        (member_of("../evil"), "'../evil' leads out of its folder"),
        (member_of("h200/../../evil"), "'h200/../../evil' leads out of its folder"),
        (member_of("h200", tarfile.SYMTYPE, "/etc"), "'h200' is a link to '/etc'"),
        (member_of("h200/x.cubin.gz", tarfile.LNKTYPE, "h200.yaml"), "is a link to 'h200.yaml'"),
        (member_of("null", tarfile.CHRTYPE), "'null' is no plain file"),
        (member_of("pipe", tarfile.FIFOTYPE), "'pipe' is no plain file"),
        (member_of("folder", tarfile.DIRTYPE), "'folder' is no plain file"),
        (member_of("h200.yaml"), "'h200.yaml' is there twice"),
        (member_of("h200.py"), "h200.py: manifest.json of its bundle does not list it"),
    ],
)
def test_a_member_that_no_bundle_has_is_refused_by_name(bundle: Bundle, tmp_path: Path, member, says: str) -> None:
    good = [(member_of(name), data) for name, data in bundle.all_files.items()]
    assert read_archive(archive_of(tmp_path / "good.tar.zst", *good)) == bundle
    archive = archive_of(tmp_path / "bad.tar.zst", *good, (member, b""))
    with pytest.raises(RegistryError, match=re.escape(says)) as caught:
        read_archive(archive)
    assert str(archive) in str(caught.value)
    result = CliRunner().invoke(main, ["unpack", str(archive), "-o", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tar.zst", "good.tar.zst", "user"]


def test_a_manifest_cannot_name_a_path_that_leads_elsewhere(bundle: Bundle, tmp_path: Path) -> None:
    for name in (
        "../h200.yaml",
        "/h200.yaml",
        "h200/h200.yaml",
        "h200/x.cubin.gz",
        "l20.yaml",
        "h200.yaml/",
        "h200.py",
    ):
        text = bundle.all_files["manifest.json"].replace(b'"h200.yaml"', json.dumps(name).encode())
        with pytest.raises(RegistryError, match=r"m\.json: lists"):
            parse_manifest(text, "m.json")
    for text in (b"", b"[]", b"{}", b'{"schema": 1}', b'{"schema": 2}', b"\xff", b" " * (1 << 23)):
        with pytest.raises(RegistryError, match=r"^m\.json: "):
            parse_manifest(text, "m.json")


def test_a_size_bomb_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    bomb, unsized = tmp_path / "bomb.tar.zst", tmp_path / "unsized.tar.zst"
    packer = zstandard.ZstdCompressor().compressobj(size=1 << 34)
    bomb.write_bytes(packer.compress(bytes(1 << 20)) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    unsized.write_bytes(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20)))
    with pytest.raises(RegistryError, match=r"bomb\.tar\.zst: unpacks to 16384 MiB, more than"):
        read_archive(bomb)
    with pytest.raises(RegistryError, match=r"unsized\.tar\.zst: unpacks to an unknown size"):
        read_archive(unsized)
    sparse = member_of("big")
    sparse.pax_headers = {"GNU.sparse.size": str(1 << 40), "GNU.sparse.map": "0,0", "GNU.sparse.major": "0"}
    with pytest.raises(RegistryError, match=r"sparse\.tar\.zst: "):
        read_archive(archive_of(tmp_path / "sparse.tar.zst", (sparse, b"x")))


def test_headers_that_make_no_sense_are_damage(bundle: Bundle, tmp_path: Path) -> None:
    """Long names for long names, which readers take recursively; a member that says it is larger than the archive."""
    nested = member_of("././@LongLink", tarfile.GNUTYPE_LONGNAME).tobuf(tarfile.GNU_FORMAT) * 20_000
    large = member_of("h200.yaml")
    large.size = 1 << 33
    for name, tar in (("nested", nested), ("large", large.tobuf(tarfile.GNU_FORMAT) + bytes(1024)), ("text", b"text")):
        archive = tmp_path / f"{name}.tar.zst"
        archive.write_bytes(zstandard.compress(tar))
        with pytest.raises(RegistryError, match=rf"{name}\.tar\.zst: "):
            read_archive(archive)
    (tmp_path / "x.whl").write_bytes(b"text")
    with pytest.raises(RegistryError, match=r"x\.whl: damaged"):
        read_wheel(tmp_path / "x.whl")


def test_every_flipped_byte_of_an_archive_is_refused_by_the_archives_name(bundle: Bundle, tmp_path: Path) -> None:
    whole = pack_archive(bundle)
    archive = tmp_path / "h200.tar.zst"
    for at in (*range(64), *range(64, len(whole), 5)):
        archive.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(RegistryError, match=r"h200\.tar\.zst: "):
            read_archive(archive)
    for damaged in (whole[:-1], whole + b"x", b""):
        archive.write_bytes(damaged)
        with pytest.raises(RegistryError, match=r"h200\.tar\.zst: "):
            read_archive(archive)


def test_a_flipped_byte_of_a_folder_or_a_wheel_is_refused_by_the_files_name(bundle: Bundle, tmp_path: Path) -> None:
    write_folder(bundle, tmp_path / "bundle")
    for name in bundle.files:
        file = tmp_path / "bundle" / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(RegistryError, match=name):
            read_folder(tmp_path / "bundle")
        file.write_bytes(whole)
    _, wheel = pack_wheel(bundle)
    at = wheel.index(bundle.files[CUBIN])
    (tmp_path / "x.whl").write_bytes(wheel[:at] + b"\0" + wheel[at + 1 :])
    with pytest.raises(RegistryError, match=f"x.whl: damaged: .*{CUBIN}"):
        read_wheel(tmp_path / "x.whl")
    (tmp_path / "x.whl").write_bytes(wheel)
    assert read_wheel(tmp_path / "x.whl") == bundle


# --- bundles as registries


@pytest.fixture
def installed(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Site-packages with the wheel unpacked, as pip does; a Python file in it would leave a trace if it were run."""
    name, data = pack_wheel(bundle)
    (tmp_path / name).write_bytes(data)
    site = tmp_path / "site"
    zipfile.ZipFile(tmp_path / name).extractall(site)
    trap = f"open({str(tmp_path / 'imported')!r}, 'w')"
    (site / "sagegen_kernels_h200" / "__init__.py").write_text(trap)
    monkeypatch.syspath_prepend(str(site))
    return site


def test_an_installed_wheel_answers_and_nothing_of_it_is_imported(env: Env, installed: Path, tmp_path: Path) -> None:
    shutil.rmtree(env.tuned_dir)
    found = lookup(env)
    assert registry.read_cubin(found) == ONE
    assert found.layer.label == f"sagegen-kernels-h200 {importlib.metadata.version('sagegen-kernels-h200')}"
    assert found.layer.label.startswith(f"sagegen-kernels-h200 {LAUNCH_ABI}.20251224+c")
    assert not (tmp_path / "imported").exists()
    summary = importlib.metadata.metadata("sagegen-kernels-h200")["Summary"]
    assert summary == f"Tuned attention kernels for h200; launch ABI {LAUNCH_ABI} of sagegen"


def test_pip_installs_the_wheel_and_it_holds_no_python(bundle: Bundle, tmp_path: Path) -> None:
    name, data = pack_wheel(bundle)
    (tmp_path / name).write_bytes(data)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path / "site")]
    subprocess.run([*pip, "--no-deps", "--no-index", str(tmp_path / name)], check=True, capture_output=True)
    assert read_folder(tmp_path / "site" / "sagegen_kernels_h200") == bundle
    (owner,) = importlib.metadata.distributions(path=[str(tmp_path / "site")])
    assert [(point.group, point.value) for point in owner.entry_points] == [
        ("sagegen.registries", "sagegen_kernels_h200")
    ]
    assert not any(str(file).endswith(".py") for file in owner.files or ())


def test_layers_answer_in_order(env: Env, installed: Path, tmp_path: Path) -> None:
    """The user's, those that were named in their order, installed ones, shipped ones; measured before predicted."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        shutil.copy(env.tuned_dir / "h200.yaml", tmp_path / name)
    shutil.copytree(tmp_path / "first", tmp_path / "shipped")
    env = replace(env, registries=(tmp_path / "first", tmp_path / "second"))
    labels = [layer.label for layer in registry.load_registry("h200", env).layers]
    package = f"sagegen-kernels-h200 {importlib.metadata.version('sagegen-kernels-h200')}"
    assert labels == ["user", str(tmp_path / "first"), str(tmp_path / "second"), package, "shipped"]
    assert lookup(env).layer.label == "user"
    tune(env, make_entry(kind="predicted"))  # refused: measured ones stay
    (env.tuned_dir / "h200.yaml").unlink()
    tune(env, make_entry(kind="predicted"))
    assert lookup(env).layer.label == str(tmp_path / "first")


def test_a_bundle_of_another_launch_abi_hides_nothing(env: Env, bundle: Bundle, tmp_path: Path) -> None:
    """One that was installed before sagegen was upgraded; it still answers where nothing else does."""
    old = make_entry()
    old = structs.replace(old, provenance=structs.replace(old.provenance, launch_abi=LAUNCH_ABI + 1))
    shutil.rmtree(env.tuned_dir)
    tune(env, old)
    assert lookup(env).layer.label == "user"
    tune(replace(env, tuned_dir=tmp_path / "shipped"), make_entry((1, 99), kind="predicted"))
    assert (lookup(env, 1).layer.label, lookup(env, 100).layer.label) == ("shipped", "user")


def test_a_flipped_byte_of_an_installed_or_named_bundle_is_refused_by_its_name(
    env: Env, installed: Path, bundle: Bundle, tmp_path: Path
) -> None:
    shutil.rmtree(env.tuned_dir)
    package = installed / "sagegen_kernels_h200"
    write_folder(bundle, tmp_path / "named")
    for folder, own in ((package, env), (tmp_path / "named", replace(env, registries=(tmp_path / "named",)))):
        whole = (folder / CUBIN).read_bytes()
        (folder / CUBIN).write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        with pytest.raises(RegistryError, match=f"{folder}/{CUBIN}: the file is not the cubin"):
            find_cubin(lookup(own), own, fail)
        text = (folder / "h200.yaml").read_bytes()
        (folder / "h200.yaml").write_bytes(text.replace(b"protocol: 3", b"protocol: 2", 1))
        with pytest.raises(RegistryError, match=f"{folder}/h200.yaml: the file is not the one"):
            lookup(own)
        (folder / "h200.yaml").write_bytes(text)
    (package / "manifest.json").write_text("{}")
    with pytest.raises(RegistryError, match=f"{package}/manifest.json"):
        lookup(env)


def test_the_users_own_folder_may_be_a_bundle_that_is_tuned_on(env: Env, bundle: Bundle, tmp_path: Path) -> None:
    write_folder(bundle, tmp_path / "mine")
    env = replace(env, tuned_dir=tmp_path / "mine")
    tune(env, make_entry((1, 50)))
    assert lookup(env).layer.label == "user"


def test_a_path_that_is_no_folder_of_registries_is_told_with_what_helps(env: Env, tmp_path: Path) -> None:
    for name, says in (
        ("h200.tar.zst", f"run: sagegen unpack {tmp_path}/h200.tar.zst -o {tmp_path}/h200 && export SAGEGEN_REGISTRY="),
        ("x.whl", "run: pip install"),
        ("x.yaml", "is no folder"),
        ("gone", "does not exist"),
    ):
        if name != "gone":
            (tmp_path / name).write_text("")
        errors: list[RegistryError] = []
        list(registry.load_layers("h200", replace(env, registries=(tmp_path / name,)), errors.append))
        assert [says in str(error) for error in errors] == [True]


@pytest.mark.parametrize("value", ["../outside", "os.path", "sagegen_kernels_h200", "/etc"])
def test_a_package_that_names_no_bundle_of_its_own_is_told_and_not_followed(
    env: Env, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    write_folder(bundle, tmp_path / "outside")
    info = tmp_path / "site" / "evil-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sagegen.registries]\nx = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    errors: list[RegistryError] = []
    layers = list(registry.load_layers("h200", env, errors.append))
    assert [layer.label for layer in layers] == ["user"]
    assert f"package evil 1 says that it has a bundle in {value!r}" in str(errors[0])
    assert registry_places.ENTRY_POINT_GROUP == "sagegen.registries"


def test_a_cubin_that_only_a_bundle_has_serves_an_entry_of_another_layer(
    env: Env, bundle: Bundle, tmp_path: Path
) -> None:
    """The user's entry, whose cubin was in a store that is gone; bundles lie below the user's store."""
    write_folder(bundle, tmp_path / "named")
    shutil.rmtree(env.tuned_dir / "h200")
    assert find_cubin(lookup(env), env, fail) is None
    env = replace(env, registries=(tmp_path / "named",))
    assert lookup(env).layer.label == "user"
    assert find_cubin(lookup(env), env, fail) == ONE


_STARTER = """
import sys, time
from pathlib import Path
from sagegen import registry, toolkit
from sagegen.env import read_env
from sagegen.errors import ToolchainError
from sagegen.gpu import GPUS
from sagegen.problem import Problem
from sagegen.registry_kernels import find_cubin
def fail(error):
    raise error
registry.shipped_dir = lambda: Path("none")
toolkit.importlib.util.find_spec = lambda name: None  # nvcc's wheel
while time.time() < float(sys.argv[1]):  # all at once
    pass
env = read_env()
found = registry.lookup(GPUS["h200"], Problem(128, "bf16", True), 1, env)
try:
    toolkit.find_toolkit(env)
except ToolchainError:
    print(find_cubin(found, env, fail).decode(), found.layer.label)
"""


@pytest.mark.parametrize("form", ["installed", "named"])
def test_eight_processes_start_on_a_read_only_bundle_without_nvcc(
    env: Env, installed: Path, bundle: Bundle, tmp_path: Path, form: str
) -> None:
    """E2 for bundles: a cold cache, nothing on PATH; all load the shipped cubin, and none writes anything."""
    shutil.rmtree(env.tuned_dir)
    write_folder(bundle, tmp_path / "named")
    folder = installed if form == "installed" else tmp_path / "named"
    for path in folder.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(tmp_path.rglob("*"))
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("SAGEGEN", "CUDA", "PYTHON"))}
    variables = {
        "PATH": str(tmp_path / "nothing"),
        "SAGEGEN_CACHE_DIR": str(tmp_path / "cold"),
        "SAGEGEN_TUNED_DIR": str(tmp_path / "none"),
        "SAGEGEN_NVCC": "",
        "TMPDIR": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
        **({"PYTHONPATH": str(installed)} if form == "installed" else {"SAGEGEN_REGISTRY": str(folder)}),
    }
    command = [sys.executable, "-c", _STARTER, str(time.time() + 2)]
    children = [
        subprocess.Popen(command, env={**keep, **variables}, stdout=subprocess.PIPE, text=True) for _ in range(8)
    ]
    label = "sagegen-kernels-h200 " if form == "installed" else str(folder)
    for child in children:
        said, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        assert said.startswith(f"one {label}")
    assert sorted(tmp_path.rglob("*")) == before
    for path in (folder, *folder.rglob("*")):  # so that pytest can remove them
        path.chmod(0o755)


# --- the commands


@pytest.fixture
def run(env: Env, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setenv("SAGEGEN_TUNED_DIR", str(env.tuned_dir))
    monkeypatch.setenv("SAGEGEN_CACHE_DIR", str(env.cache_dir))

    def run(*arguments: object, code: int = 0) -> str:
        result = CliRunner().invoke(main, list(map(str, arguments)))
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_pack_unpack_and_show_go_round(run: Callable[..., str], bundle: Bundle, tmp_path: Path, monkeypatch) -> None:
    archive = tmp_path / "h200.tar.zst"
    assert "1 measured, 1 predicted" in run("pack", "--gpu", "h200", "-o", archive)
    assert "is whole: 3 files for h200" in run("unpack", "--check", archive)
    said = run("unpack", archive)
    assert read_folder(tmp_path / "h200") == bundle
    assert f"export SAGEGEN_REGISTRY={tmp_path}/h200" in said
    monkeypatch.setenv("SAGEGEN_REGISTRY", str(tmp_path / "h200"))
    layers = [row["layer"] for row in json.loads(run("show", "--gpu", "h200", "--json"))["entries"]]
    assert layers == ["user", "user", str(tmp_path / "h200"), str(tmp_path / "h200")]
    assert "is there already" in run("unpack", archive, code=2)
    facts = json.loads(run("pack", "--all", "--wheel", "-o", tmp_path, "--json"))
    assert run("unpack", "--check", facts["path"]).startswith(facts["path"])
    assert "pip install" in run("unpack", facts["path"], code=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "h200"], "say where to"),
        (["-o", "x"], "name GPUs"),
        (["--gpu", "h200", "--all", "-o", "x"], "name GPUs"),
        (["--gpu", "h201", "-o", "x"], "did you mean h20"),
        (["--gpu", "l20", "-o", "x"], "nothing is tuned for l20"),
    ],
)
def test_pack_says_what_is_missing(run: Callable[..., str], arguments: list[str], says: str) -> None:
    assert says in run("pack", *arguments, code=2)
