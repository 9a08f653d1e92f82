"""Who races for sagegen: tiers by accuracy, entries of the registry, named configs, the gate's word on them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from sagegen import registry
from sagegen.entry import Accuracy
from sagegen.env import read_env
from sagegen.errors import ConfigError, UnknownNameError
from sagegen.gpu import find_gpu
from sagegen.measuring import subjects
from sagegen.measuring.contenders import Contender, Named, gather_contenders, judge, parse_named
from sagegen.measuring.jobs import Gate, Reply
from sagegen.measuring.subjects import Subject
from sagegen.problem import Problem
from sagegen.registry import Entry, Provenance, Range, save_entries
from sagegen.rules import Target, default_config
from sagegen.space import parse_config

H200 = find_gpu("h200")
FULL, CAUSAL = Problem(128, "bf16", False), Problem(128, "bf16", True)
D64 = Problem(64, "bf16", False)
FAST = parse_config("mma_bq128_bk128_w8_st2_pvbf16f32_ad0_cvmagic_grthread_qs16_ks128_rsalways_qoreg_mb1")
GOOD = parse_config("mma_bq128_bk64_w4_st3_pvbf16f32_ad0_cvmagic_grwarp_qs32_ks64_rsskip_qosmem_mb2")


def figures(cosine=0.9995, l1=0.03, offsets=0.9995):
    rest = {"relative_l2": 0.03, "max_error": 0.01, "scale_ratio": 1.0}
    normal = {"cosine": cosine, "relative_l1": l1, **rest}
    return {"normal": normal, "channel_offsets": {"cosine": offsets, "relative_l1": l1, **rest}}


@pytest.mark.parametrize(
    ("known", "tiers"),
    [
        (figures(), ("fine", "coarse")),
        (figures(0.99926), ("fine", "coarse")),  # at four decimals, as the gate has it
        (figures(0.99924), ("coarse",)),
        (figures(l1=0.039), ("coarse",)),
        (figures(offsets=0.9987), ("coarse",)),
        (figures(0.9989), ()),
        ({"normal": {"cosine": 0.9995}}, ("fine", "coarse")),
        ({}, ()),
    ],
)
def test_tiers_follow_from_accuracy(known, tiers) -> None:
    assert Contender(Subject(FULL, FAST, Path("x"), "here"), known).tiers == tiers


def test_names_of_configs_and_of_kernels() -> None:
    assert parse_named("default") == Named(None, None)
    assert parse_named(FAST.name) == Named(None, FAST)
    assert parse_named(f"{CAUSAL.name}_{FAST.name}") == Named(CAUSAL, FAST)
    assert parse_named(f"{D64.name}_default") == Named(D64, None)
    with pytest.raises(UnknownNameError):
        parse_named("mma_nonsense")


@pytest.fixture
def place(monkeypatch, tmp_path, nvcc):
    """An H200 with a compiler and empty registries; its folder, and the compiler."""
    monkeypatch.setattr(subjects, "find_toolkit", lambda env: nvcc.toolkit)
    monkeypatch.setattr(registry, "shipped_dir", lambda: tmp_path / "shipped")
    monkeypatch.setenv("SAGEGEN_TUNED_DIR", str(tmp_path / "tuned"))
    monkeypatch.setenv("SAGEGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path, nvcc


def entry(config, known, cubin, tier=None, problem=FULL, kv=(1, None), answer="kernel"):
    return Entry(
        problem=problem.name,
        bucket=Range(kv_min=kv[0], kv_max=kv[1]),
        answer=answer,
        config=config.name,
        kernel=f"{problem.name}_{config.name}",
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
        tier=tier,
        min_cosine=known["normal"]["cosine"] if known else None,
        accuracy={kind: Accuracy(**values) for kind, values in known.items()},
        provenance=Provenance(
            kind="measured", gpu="h200", sms=132, launch_abi=subjects_abi(), protocol=1, date="2025-11-29", shape="b1"
        ),
    )


def subjects_abi():
    from sagegen.abi import LAUNCH_ABI

    return LAUNCH_ABI


def save(folder, *entries_and_cubins):
    cubins = {hashlib.sha256(cubin).hexdigest(): cubin for _, cubin in entries_and_cubins}
    save_entries(folder / "tuned" / "h200.yaml", "h200", [entry for entry, _ in entries_and_cubins], cubins)


def gather(folder, cases, *named):
    return gather_contenders(H200, cases, [parse_named(name) for name in named], read_env(), folder)


def test_the_registry_sends_its_fine_and_its_coarse_entry(place) -> None:
    folder, nvcc = place
    coarse = entry(FAST, figures(0.9991), b"coarse", "coarse")
    fine = entry(GOOD, figures(), b"fine", "fine", answer="sdpa")
    save(folder, (coarse, b"coarse"), (fine, b"fine"))
    (contenders,) = gather(folder, [(FULL, 4096)]).values()
    assert [(c.subject.config, c.tiers) for c in contenders] == [(GOOD, ("fine", "coarse")), (FAST, ("coarse",))]
    assert [c.subject.cubin.read_bytes() for c in contenders] == [b"fine", b"coarse"]
    assert [c.note for c in contenders] == ["the registry answers SDPA here", ""]
    assert contenders[1].cosine == 0.9991
    assert nvcc.calls == []


def test_an_entry_that_is_coarse_by_its_relative_l1_is_not_the_fine_one(place) -> None:
    folder, _ = place
    coarse = entry(FAST, figures(0.99934, l1=0.0382), b"coarse", "coarse")
    fine = entry(GOOD, figures(), b"fine", "fine")
    save(folder, (coarse, b"coarse"), (fine, b"fine"))
    (contenders,) = gather(folder, [(FULL, 4096)]).values()
    assert [(c.subject.config, c.tiers) for c in contenders] == [(GOOD, ("fine", "coarse")), (FAST, ("coarse",))]


@pytest.mark.parametrize(("min_cosine", "config"), [(0.999, FAST), (0.9992, FAST), (0.9993, GOOD)])
def test_without_peers_the_kernel_of_a_calls_accuracy_is_timed(place, min_cosine, config) -> None:
    folder, _ = place
    coarse, fine = entry(FAST, figures(0.9992), b"coarse", "coarse"), entry(GOOD, figures(), b"fine", "fine")
    save(folder, (coarse, b"coarse"), (fine, b"fine"))
    subject = subjects.subject_for(H200, FULL, 4096, read_env(), folder, min_cosine)
    assert (subject.config, subject.origin) == (config, "measured entry for kv1-")


def test_a_kernel_too_coarse_for_the_call_is_timed_and_says_so(place) -> None:
    folder, _ = place
    save(folder, (entry(FAST, figures(0.998), b"rough"), b"rough"))
    subject = subjects.subject_for(H200, FULL, 4096, read_env(), folder)
    assert (subject.config, subject.origin) == (FAST, "measured entry for kv1-, too coarse for 0.999")


def test_one_entry_for_both_tiers_races_once(place) -> None:
    folder, _ = place
    save(folder, (entry(GOOD, figures(), b"good"), b"good"))
    (contenders,) = gather(folder, [(FULL, 4096)]).values()
    assert [c.tiers for c in contenders] == [("fine", "coarse")]


def test_buckets_have_their_own(place) -> None:
    folder, _ = place
    save(
        folder,
        (entry(GOOD, figures(), b"short", kv=(1, 4095)), b"short"),
        (entry(FAST, figures(), b"long", kv=(4096, None)), b"long"),
    )
    found = gather(folder, [(FULL, 2048), (FULL, 16384)])
    assert [c.subject.config for own in found.values() for c in own] == [GOOD, FAST]


def test_an_entry_of_unknown_accuracy_counts_as_coarse(place) -> None:
    folder, _ = place
    save(folder, (entry(GOOD, {}, b"old"), b"old"))
    (contenders,) = gather(folder, [(FULL, 4096)]).values()
    assert [c.tiers for c in contenders] == [("coarse",)]


def test_without_entries_the_default_config_races_and_meets_the_gate(place) -> None:
    folder, nvcc = place
    found = gather(folder, [(FULL, 4096), (FULL, 16384), (D64, 16384)])
    configs = {case: [c.subject.config for c in own] for case, own in found.items()}
    assert configs[FULL, 4096] == configs[FULL, 16384] == [default_config(Target(H200, FULL))]
    assert all(c.figures == {} for own in found.values() for c in own)
    assert len(nvcc.calls) == 2  # each kernel once


def test_named_configs_race_where_they_are_valid_and_the_registry_elsewhere(place) -> None:
    folder, nvcc = place
    save(folder, (entry(GOOD, figures(), b"good", problem=D64), b"good"))
    cases = [(FULL, 4096), (CAUSAL, 4096), (D64, 4096)]
    found = gather(folder, cases, f"{FULL.name}_{FAST.name}", f"{FULL.name}_{GOOD.name}", f"{CAUSAL.name}_{FAST.name}")
    configs = {problem: [c.subject.config for c in own] for (problem, _), own in found.items()}
    assert configs == {FULL: [FAST, GOOD], CAUSAL: [FAST], D64: [GOOD]}
    assert len(nvcc.calls) == 3
    everywhere = gather(folder, cases, FAST.name)
    assert {c.subject.config for own in everywhere.values() for c in own} == {FAST}


def test_a_config_for_no_row_is_misuse(place) -> None:
    folder, _ = place
    with pytest.raises(UnknownNameError, match="no row of this race is d64_bf16_full_int8"):
        gather(folder, [(FULL, 4096)], f"{D64.name}_{FAST.name}")
    wrong = replace(FAST, pv="f16f32")
    with pytest.raises(ConfigError):
        gather(folder, [(FULL, 4096)], wrong.name)


class ScriptedWorker:
    def __init__(self, reply: Reply) -> None:
        self.reply, self.jobs = reply, []

    def run(self, job: Gate, timeout_s: float) -> Reply:
        self.jobs.append(job)
        return self.reply


def test_the_gate_judges_what_is_not_known() -> None:
    unknown = Contender(Subject(FULL, FAST, Path("x.cubin"), "built here"))
    worker = ScriptedWorker(Reply("ok", data={"figures": figures(0.9991), "seconds": 1.0}))
    judged = judge(unknown, worker)  # type: ignore[arg-type]
    assert judged.tiers == ("coarse",)
    assert [(job.candidate.config, job.kinds) for job in worker.jobs] == [(FAST.name, ("normal", "channel_offsets"))]
    assert judge(judged, worker) is judged  # type: ignore[arg-type]
    assert len(worker.jobs) == 1


def test_who_fails_the_gate_is_in_no_tier_with_the_reason() -> None:
    unknown = Contender(Subject(FULL, FAST, Path("x.cubin"), "built here"))
    failed = judge(unknown, ScriptedWorker(Reply("accuracy", "normal: cosine 0.98", {"figures": {}})))  # type: ignore[arg-type]
    assert failed.tiers == ()
    assert failed.note == "not in the race: accuracy: normal: cosine 0.98"
