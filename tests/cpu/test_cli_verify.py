"""`sagegen verify` and `sagegen bench` with a worker that answers from a script."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner

from sagegen import registry
from sagegen.cli.main import main
from sagegen.gpu import DetectedGpu, find_gpu
from sagegen.measuring import emulated, subjects
from sagegen.measuring.emulated import EmulatedVerdict
from sagegen.measuring.jobs import Finals, Gate, Host, Ping, Reply
from sagegen.problem import Problem
from sagegen.registry import Entry, Provenance, Range, save_entries
from sagegen.render import render
from sagegen.rules import Target, default_config

CAPTURED = Path(__file__).parents[1] / "data" / "smollm2_qkv.safetensors"
FIGURES = {"cosine": 0.99931, "relative_l1": 0.0374, "relative_l2": 0.0375, "max_error": 0.01, "scale_ratio": 0.9991}


def detected(name, index=1):
    gpu = find_gpu(name)
    return DetectedGpu(index, gpu.products[0], gpu.sms, "580.95", gpu.arch, gpu)


class ScriptedWorker:
    """Stands for worker.Worker; `answer` gets every job."""

    made: ClassVar[list] = []

    def __init__(self, gpu_index):
        self.gpu_index = gpu_index
        self.jobs = []
        self.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def run(self, job, timeout_s):
        self.jobs.append(job)
        return self.answer(job)

    def answer(self, job):
        if isinstance(job, Gate):
            assert Path(job.candidate.cubin).read_bytes()
            return Reply("ok", data={"figures": {"normal": FIGURES}, "seconds": 0.2})
        if isinstance(job, Finals):
            data = {"kernel_us": [[1000.0] * 5], "call_us": [[1250.0] * 5], "peers": {"sdpa-flash": [2000.0] * 5}}
            return Reply("ok", data={**data, "absent": {"sdpa-cudnn": "not built in"}})
        if isinstance(job, Host):
            return Reply("ok", data={"attention_us": [39.0, 40.0, 41.0], "sdpa_us": [20.0] * 3})
        return Reply("ok", data={"torch": "2.11"})


@pytest.fixture
def machine(monkeypatch, tmp_path, nvcc):
    """A machine with an L20, a compiler, empty registries and the scripted worker."""
    monkeypatch.setattr(subjects, "detect_gpus", lambda: [detected("h200", 0), detected("l20", 1)])
    monkeypatch.setattr(subjects, "find_toolkit", lambda env: nvcc.toolkit)
    monkeypatch.setattr(registry, "shipped_dir", lambda: tmp_path / "shipped")
    monkeypatch.setenv("SAGEGEN_TUNED_DIR", str(tmp_path / "tuned"))
    monkeypatch.setenv("SAGEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(ScriptedWorker, "made", [])
    monkeypatch.setattr("sagegen.measuring.worker.Worker", ScriptedWorker)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(main, arguments)


def save_default(folder, problem, kv=(1, None), cubin=b"cubin of the registry"):
    """A registry entry for the problem's default config, with its cubin beside it."""
    import hashlib

    source = render(problem, default_config(Target(find_gpu("l20"), problem)))
    digest = hashlib.sha256(cubin).hexdigest()
    entry = Entry(
        problem=problem.name,
        bucket=Range(kv_min=kv[0], kv_max=kv[1]),
        answer="kernel",
        config=source.config.name,
        kernel=source.name,
        cubin_sha256=digest,
        provenance=Provenance(
            kind="measured", gpu="l20", sms=92, launch_abi=1, protocol=1, date="2025-11-29", shape="b1"
        ),
    )
    save_entries(folder / "tuned" / "l20.yaml", "l20", [entry], {digest: cubin})


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_without_a_gpu_both_are_named_with_the_remedy(command, monkeypatch):
    monkeypatch.setattr(subjects, "detect_gpus", lambda: [])
    result = run(command, "--gpu", "h200")
    assert result.exit_code == 2
    assert "on h200, and this machine has no GPU" in result.output
    assert "Remedy: run it on a machine with NVIDIA H200" in result.output


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_with_another_gpu_both_are_named_with_the_remedy(command, monkeypatch):
    monkeypatch.setattr(subjects, "detect_gpus", lambda: [detected("h200")])
    result = run(command, "--gpu", "l20")
    assert result.exit_code == 2
    assert "on l20, but this machine has NVIDIA H200 (h200)" in result.output
    assert "say --gpu h200" in result.output


def test_verify_runs_every_entry_on_the_named_gpu(machine):
    save_default(machine, Problem(64, "bf16", True))
    save_default(machine, Problem(128, "fp16", False))
    result = run("verify", "--gpu", "l20", "--captured", str(CAPTURED))
    assert result.exit_code == 0, result.output
    (worker,) = ScriptedWorker.made
    assert worker.gpu_index == 1
    assert {job.candidate.problem for job in worker.jobs} == {"d64_bf16_causal_int8", "d128_fp16_full_int8"}
    assert {job.captured for job in worker.jobs} == {str(CAPTURED)}
    assert "2 of 2 kernels pass every input kind of the gate." in result.output  # captured with 64 channels per head
    assert f"Warning: nothing in {CAPTURED} fits d128_fp16_full_int8: it was not run there." in result.stderr
    assert "0.99931" in result.output


def test_verify_of_one_problem(machine):
    save_default(machine, Problem(64, "bf16", True))
    save_default(machine, Problem(128, "fp16", False))
    assert run("verify", "--gpu", "l20", "--problem", "d64_bf16_causal_int8").exit_code == 0
    assert len(ScriptedWorker.made[0].jobs) == 1


def test_same_kernel_of_two_buckets_is_verified_once(machine):
    save_default(machine, Problem(64, "bf16", True), (1, 2047))
    save_default(machine, Problem(64, "bf16", True), (2048, None))
    assert "1 of 1 kernels" in run("verify", "--gpu", "l20").output


def test_failed_gate_is_exit_code_one_and_told(machine, monkeypatch):
    save_default(machine, Problem(64, "bf16", True))
    reason = "v_one_long: relative L2 error 0.3300 is above 0.05"
    monkeypatch.setattr(ScriptedWorker, "answer", lambda self, job: Reply("accuracy", reason, {"figures": {}}))
    result = run("verify", "--gpu", "l20", "--json")
    assert result.exit_code == 1
    values = json.loads(result.stdout)
    assert values["failed"] == 1
    assert values["kernels"][0]["reason"] == reason
    assert f"accuracy: {reason}" in result.stderr


def test_nothing_tuned_is_misuse_not_success(machine):
    result = run("verify", "--gpu", "l20")
    assert result.exit_code == 2
    assert "nothing is tuned for l20" in result.output
    assert "sagegen tune --gpu l20" in result.output


def test_verify_builds_a_named_config_for_every_problem_it_is_valid_for(machine):
    result = run("verify", "--gpu", "l20", "--config", "default", "--json")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["kernels"]) == 8
    bf16_only = "mma_bq64_bk64_w4_st2_pvbf16f32_ad0_cvi2f_grthread_qs16_ks64_rsalways_qoreg_mb1"
    kernels = json.loads(run("verify", "--gpu", "l20", "--config", bf16_only, "--json").stdout)["kernels"]
    assert {kernel["problem"].split("_")[1] for kernel in kernels} == {"bf16"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "mma_nonsense"), "field"),
        (("--problem", "d96_fp16_full_int8"), "head_dim=96"),
        (("--captured", str(Path(__file__))), "not a safetensors file"),
    ],
)
def test_wrong_names_are_misuse(machine, arguments, message):
    result = run("verify", "--gpu", "l20", *arguments)
    assert result.exit_code == 2
    assert message in result.output


# --- in the emulator


@pytest.fixture
def emulator(machine, monkeypatch):
    """The emulator's gate answers from a script; what it was asked."""
    asked = []

    def gate(problem, config, gpu, cases, env, *, captured=(), workers=None):
        asked.append((problem, config, gpu.name, tuple(captured)))
        return EmulatedVerdict("ok", "", {"normal": FIGURES}, 0.1)

    monkeypatch.setattr(emulated, "gate_emulated", gate)
    monkeypatch.setattr(subjects, "detect_gpus", lambda: pytest.fail("the emulator needs no GPU"))
    return asked


def test_the_emulator_verifies_each_config_of_the_registry_once(machine, emulator):
    save_default(machine, Problem(64, "bf16", True), (1, 2047))
    save_default(machine, Problem(64, "bf16", True), (2048, None))
    save_default(machine, Problem(128, "fp16", False))
    result = run("verify", "--emulator")
    assert result.exit_code == 0, result.output
    assert [(problem.name, name) for problem, _, name, _ in emulator] == [
        ("d128_fp16_full_int8", "l20"), ("d64_bf16_causal_int8", "l20"),
    ]  # fmt: skip
    assert "2 of 2 kernels pass every input kind in the emulator, on small inputs." in result.output
    assert "measured entry for kv1-2047" in result.output
    assert ScriptedWorker.made == []


def test_the_emulator_verifies_a_named_config_where_it_is_valid(machine, emulator):
    assert run("verify", "--emulator", "--gpu", "h200", "--config", "default").exit_code == 0
    assert len(emulator) == 8
    emulator.clear()
    bf16_only = "mma_bq64_bk64_w4_st2_pvbf16f32_ad0_cvi2f_grthread_qs16_ks64_rsalways_qoreg_mb1"
    assert run("verify", "--emulator", "--config", bf16_only, "--captured", str(CAPTURED)).exit_code == 0
    assert {problem.dtype for problem, *_ in emulator} == {"bf16"}
    # captured with 64 channels per head
    assert {problem.head_dim: len(captured) for problem, _, _, captured in emulator} == {64: 5, 128: 0}


@pytest.mark.parametrize("where", [("--emulator",), ("--gpu", "l20")], ids=["emulator", "gpu"])
def test_captured_inputs_that_fit_no_problem_are_misuse(machine, monkeypatch, where):
    arguments = ("verify", *where, "--config", "default", "--captured", str(CAPTURED))
    result = run(*arguments, "--problem", "d128_fp16_full_int8")
    assert result.exit_code == 2
    assert f"nothing in {CAPTURED}, of head dim 64, fits d128_fp16_full_int8" in result.stderr
    assert "Remedy: name a problem of that head dim" in result.stderr


def test_a_file_of_no_tensors_is_misuse(machine):
    empty = machine / "empty.safetensors"
    empty.write_bytes((2).to_bytes(8, "little") + b"{}")
    for command in (("verify", "--emulator", "--config", "default", "--captured"), ("ablate", "--tensors")):
        result = run(*command, str(empty))
        assert (result.exit_code, "empty.safetensors has no tensors" in result.stderr) == (2, True)


def test_json_says_which_problems_the_captured_inputs_did_not_fit(machine, emulator):
    words = ("--config", "default", "--problem", "d64_fp16_full_int8", "--problem", "d128_fp16_full_int8")
    result = run("verify", "--emulator", *words, "--captured", str(CAPTURED), "--json")
    assert json.loads(result.stdout)["without_captured"] == ["d128_fp16_full_int8"]


def test_a_config_that_no_problem_takes_is_misuse(machine, emulator):
    fp8 = default_config(Target(find_gpu("l20"), Problem(64, "bf16", False))).name
    result = run("verify", "--emulator", "--gpu", "a100", "--config", fp8)
    assert result.exit_code == 2
    assert "pv_arch" in result.output


def test_nothing_tuned_is_misuse_in_the_emulator_too(machine, emulator):
    result = run("verify", "--emulator", "--gpu", "rtx4090")
    assert result.exit_code == 2
    assert "nothing is tuned for rtx4090" in result.output
    result = run("verify", "--emulator", "--gpu", "rtx4090", "--problem", "d64_fp16_full_int4")
    assert "nothing is tuned for rtx4090 and d64_fp16_full_int4" in result.stderr
    assert "sagegen tune --gpu rtx4090 --head-dim 64 --dtype fp16 --full --precision int4" in result.stderr


def test_without_a_host_compiler_the_emulator_is_misuse(machine, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = run("verify", "--emulator", "--config", "default")
    assert result.exit_code == 2
    assert "CXX=no-such-compiler was not found" in result.output
    assert "Remedy: apt-get install g++" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"), [((), "add --emulator to verify without a GPU"), (("--banks", "--gpu", "l20"), "--banks")]
)
def test_options_that_go_together(arguments, message):
    result = run("verify", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_bench_times_the_registrys_kernel_beside_its_peers(machine):
    save_default(machine, Problem(128, "bf16", True))
    table = machine / "bench.md"
    result = run(
        "bench", "--gpu", "l20", "--head-dim", "128", "--causal", "--tokens", "1024,4096", "--heads-kv", "8",
        "--rounds", "5", "--markdown", str(table), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    jobs = [job for job in ScriptedWorker.made[0].jobs if isinstance(job, Finals)]
    assert [(j.shape.q_len, j.shape.heads_q, j.shape.heads_kv, j.rounds, j.peers) for j in jobs] == [
        (1024, 32, 8, 5, True),
        (4096, 32, 8, 5, True),
    ]
    values = json.loads(result.stdout)
    assert values["machine"]["torch"] == "2.11"
    assert values["comparisons"][0]["speed"]["ratio"] == 1.6
    assert values["comparisons"][0]["origin"] == "measured entry for kv1-"
    assert "sdpa-cudnn could not run: not built in" in table.read_text()


def test_bench_falls_back_to_the_default_config(machine):
    result = run("bench", "--gpu", "l20", "--head-dim", "64", "--full", "--tokens", "1024")
    assert result.exit_code == 0, result.output
    assert "default, built here" in result.output
    assert "host time of a warm call: sagegen.attention 40.0 us (39.4..40.6), torch SDPA 20.0 us" in result.output
    assert isinstance(ScriptedWorker.made[0].jobs[0], Ping)


def test_failed_bench_is_exit_code_one(machine, monkeypatch):
    monkeypatch.setattr(
        ScriptedWorker, "answer", lambda self, job: Reply("ok" if isinstance(job, Ping) else "timeout", "no answer")
    )
    result = run("bench", "--gpu", "l20", "--head-dim", "64", "--full", "--tokens", "1024,2048")
    assert result.exit_code == 1
    assert result.output.count("timeout: no answer") >= 2
    assert "host time of a warm call: not measured, no answer" in result.output


@pytest.mark.parametrize("tokens", ["", "0", "1024,x", "-5"])
def test_bench_refuses_lengths_that_are_none(tokens):
    result = run("bench", "--gpu", "l20", "--tokens", tokens)
    assert result.exit_code == 2
    assert "no list of token counts" in result.output
