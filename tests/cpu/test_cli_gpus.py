"""`sagegen gpus`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from sagegen.cli.main import main
from sagegen.gpu import GPUS, DetectedGpu


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    present = [
        DetectedGpu(0, "NVIDIA H200", 132, "580.65", "sm_90", GPUS["h200"], "GPU-a"),
        DetectedGpu(1, "NVIDIA A30", 56, "580.65", "sm_80", None, "GPU-b"),
    ]
    monkeypatch.setattr("sagegen.cli.gpus.detect_gpus", lambda: present)


@pytest.mark.usefixtures("two_gpus")
def test_the_table_and_the_machine_are_listed() -> None:
    output = CliRunner().invoke(main, ["gpus"]).output
    row = next(line for line in output.splitlines() if line.split()[:1] == ["rtx4090"])
    peaks = ["660.6", "330.3", "660.6", "165.2", "165.2"]
    assert row.split() == ["rtx4090", "sm_89", "128", "99", "72", "1008", "2520", *peaks]
    assert "GPU 0: NVIDIA H200, sm_90, 132 SMs, driver 580.65: h200" in output
    assert "GPU 1: NVIDIA A30, sm_80, 56 SMs, driver 580.65: unknown to sagegen" in output


@pytest.mark.usefixtures("two_gpus")
def test_json_has_the_same() -> None:
    answer = json.loads(CliRunner().invoke(main, ["gpus", "--json"]).output)
    known = {gpu["name"]: gpu for gpu in answer["known"]}
    assert known["l20"]["sms"] == 92
    assert known["l20"]["peaks"]["e4m3f32"] == 239
    assert [(gpu["product"], gpu["gpu"]) for gpu in answer["present"]] == [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A30", None),
    ]


def test_a_machine_without_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagegen.cli.gpus.detect_gpus", list)
    assert "no visible NVIDIA GPU" in CliRunner().invoke(main, ["gpus"]).output
