"""A packed wheel on the card: no nvcc, a cold cache, several processes at once, a damaged file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sagegen.env import read_env
from sagegen.gpu import Gpu
from sagegen.registry import load_registry
from sagegen.shipping.bundle import make_bundle
from sagegen.shipping.wheel import pack_wheel

pytestmark = pytest.mark.gpu

_PROCESSES = 8
_START_S = 120
_CHILD = """
import sys, time
from pathlib import Path
import torch
import sagegen
from sagegen import registry
from sagegen.env import read_env
from sagegen.errors import ToolchainError
from sagegen.toolkit import find_toolkit

registry.shipped_dir = lambda: Path("/nowhere")  # so that what answers is from the wheel
ready, go = map(Path, sys.argv[1:])
try:
    raise SystemExit(f"there is {find_toolkit(read_env())}")
except ToolchainError:
    pass
q, k, v = (torch.randn(1, 8, 4096, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(i)).bfloat16()
           for i in range(3))
torch.cuda.synchronize()
ready.touch()
while not go.exists():
    time.sleep(0.001)
out = sagegen.attention(q, k, v)
last = sagegen.last_dispatch()
exact = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
cosine = torch.nn.functional.cosine_similarity(out.float().flatten(), exact.flatten(), dim=0)
print(last.answer, last.kernel, last.found.layer.label, last.found.entry.cubin_sha256, f"{cosine:.5f}", sep="|")
assert last.found.layer.label in str(sagegen.explain(q, k, v))
"""


@dataclass(frozen=True)
class Site:
    """A folder that pip put the wheel into, and the variables of a process that has it and no nvcc."""

    folder: Path
    variables: dict[str, str]

    def start(self, ready: Path, go: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(ready), str(go)],
            env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


@pytest.fixture
def site(gpu: Gpu, tmp_path: Path) -> Iterator[Site]:
    shipped = [layer for layer in load_registry(gpu.name).layers if layer.shipped]
    if not shipped:
        pytest.skip(f"no registry of {gpu.name} ships")
    name, data = pack_wheel(make_bundle([gpu.name], read_env()))
    (tmp_path / name).write_bytes(data)
    folder, path = tmp_path / "site", tmp_path / "path"
    path.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, str(tmp_path / name)], check=True)
    for file in folder.rglob("*"):
        file.chmod(0o555 if file.is_dir() else 0o444)
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("SAGEGEN_", "CUDA_HOME", "CUDA_PATH"))
    }
    yield Site(folder, {
        **kept,
        "PATH": str(path),
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SAGEGEN_NVCC": str(path / "nvcc"),  # where there is none: the pip wheel's does not count either
        "SAGEGEN_CACHE_DIR": str(tmp_path / "cache"),
        "SAGEGEN_TUNED_DIR": str(tmp_path / "tuned"),
        "SAGEGEN_STRICT": "1",
    })  # fmt: skip
    for file in (folder, *folder.rglob("*")):
        file.chmod(0o755)


def run_all(site: Site, tmp_path: Path, count: int) -> list[tuple[int, str, str]]:
    """Exit codes, outputs and errors of so many processes whose first call is at the same time."""
    go = tmp_path / "go"
    ready = [tmp_path / f"ready{i}" for i in range(count)]
    children = [site.start(own, go) for own in ready]
    deadline = time.monotonic() + _START_S
    while not all(own.exists() or child.poll() is not None for own, child in zip(ready, children, strict=True)):
        assert time.monotonic() < deadline, "the processes did not start"
        time.sleep(0.01)
    go.touch()
    said = [child.communicate(timeout=_START_S) for child in children]
    go.unlink()
    for own in ready:
        own.unlink(missing_ok=True)
    return [(child.returncode, *words) for child, words in zip(children, said, strict=True)]


@pytest.mark.parametrize("count", [1, _PROCESSES])
def test_a_wheel_serves_without_nvcc_and_writes_nothing(site: Site, gpu: Gpu, tmp_path: Path, count: int) -> None:
    answers = set()
    for code, said, error in run_all(site, tmp_path, count):
        assert code == 0, error
        answers.add(said)
    (answer,) = answers
    kind, kernel, label, digest, cosine = answer.strip().split("|")
    assert kind == "kernel"
    assert label.startswith(f"sagegen-kernels-{gpu.name} ")
    assert kernel.startswith("d128_bf16_full_int8_")
    assert list(site.folder.glob(f"*/{gpu.name}/{digest[:16]}.cubin.gz"))
    assert float(cosine) >= 0.998
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "tuned").exists()


def test_a_flipped_byte_of_the_wheels_cubin_is_refused_by_its_name(site: Site, gpu: Gpu, tmp_path: Path) -> None:
    ((code, said, error),) = run_all(site, tmp_path, 1)
    assert code == 0, error
    (file,) = site.folder.glob(f"*/{gpu.name}/{said.split('|')[3][:16]}.cubin.gz")
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(whole)
    ((code, said, error),) = run_all(site, tmp_path, 1)
    assert code == 1
    assert "RegistryError" in error
    assert f"{file}: the file is not the cubin whose digest its registry names" in error
