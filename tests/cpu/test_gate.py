"""The accuracy gate with programs that run on the CPU: the right numerics pass, every fault is caught and named."""

import ctypes
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from sagegen.abi import unpack_constants
from sagegen.measuring.call import call_program
from sagegen.measuring.floors import CAPTURED_FLOOR, E4M3_FLOORS, FLOORS, INT4_FLOORS, Floor, find_floor
from sagegen.measuring.gate import Cases, Figures, GuardedAllocator, figures, run_gate
from sagegen.measuring.inputs import DTYPES, EMULATED_KINDS, INPUT_KINDS, ZERO_CHANNEL, load_captured
from sagegen.problem import Problem, Shape
from sagegen.reference import attention, quantized_attention
from sagegen.space import MmaConfig

CAPTURED = Path(__file__).parents[1] / "data" / "smollm2_qkv.safetensors"
CAUSAL = Problem(64, "fp16", True)
FULL = Problem(64, "bf16", False)
CONFIG = MmaConfig(
    block_q=128,
    block_k=64,
    warps=8,
    stages=2,
    pv="e4m3f32",
    accum_depth=64,
    conversion="i2f",
    granularity="thread",
    q_span=32,
    k_span=64,
    rescale="always",
    q_operand="reg",
    min_blocks=1,
)


def view(address, shape, strides, dtype):
    """A tensor over memory that a launch was given by address."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


@dataclass
class CpuProgram:
    """Stands for a loaded cubin: reads the launch ABI's struct and computes on the CPU what `attend` says.

    `attend(q, k, v, scale)` gives out and lse; `harm(out, lse, addresses)` then does what a faulty kernel would.
    """

    problem: Problem
    attend: object
    harm: object = None
    launches: int = 0

    def prepare(self, plan):
        self.values = unpack_constants(plan.constants)
        self.workspace_bytes = plan.workspace_bytes
        return CpuCall(self, self.values)


@dataclass
class CpuCall:
    program: CpuProgram
    values: dict

    def tensor(self, name, address, heads, length):
        shape = (self.values["kv_heads_total"] // self.values["heads_kv"], heads, length, self.program.problem.head_dim)
        strides = (*(self.values[f"{name}_{axis}_stride"] for axis in ("batch", "head", "token")), 1)
        return view(address, shape, strides, DTYPES[self.program.problem.dtype])

    def launch(self, q, k, v, out, lse, workspace, stream):
        values = self.values
        self.program.launches += 1
        q, out = (self.tensor(n, a, values["heads_q"], values["q_len"]) for n, a in (("q", q), ("out", out)))
        k, v = (self.tensor(n, a, values["heads_kv"], values["kv_len"]) for n, a in (("k", k), ("v", v)))
        result, result_lse = self.program.attend(q, k, v, values["softmax_scale"])
        out.copy_(result)
        lse_out = None
        if lse:
            lse_out = view(lse, out.shape[:3], torch.empty(out.shape[:3]).stride(), torch.float32)
            lse_out.copy_(result_lse)
        if self.program.harm:
            self.program.harm(self, q, k, v, out, lse_out, workspace)


def exact(problem):
    return lambda q, k, v, scale: attention(
        q, k, v, is_causal=problem.is_causal, scale=scale, return_lse=True, compute=torch.float32
    )


@pytest.fixture(scope="module")
def cases():
    """Shared by the tests, as it is by the candidates of a tuner."""
    return Cases("cpu")


@pytest.fixture(scope="module")
def small_cases():
    """Fewer heads and tokens of the kind that runs twice, for faults that show at any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(INPUT_KINDS, "normal", replace(INPUT_KINDS["normal"], shape=Shape(1, 2, 2, 256, 256)))
        yield Cases("cpu")


# --- figures


def test_figures_by_hand():
    found = figures(torch.tensor([3.0, 0.0, 4.0]), torch.tensor([3.0, 4.0, 0.0]))
    # o.r = 9, |o|^2 = |r|^2 = 25, o - r = (0, -4, 4)
    assert found == Figures(9 / 25, 8 / 7, math.sqrt(32 / 25), 4, 9 / 25)


def test_scale_ratio_shows_what_cosine_cannot():
    ref = torch.tensor([1.0, -2.0, 3.0])
    found = figures(0.97 * ref, ref)
    assert found.cosine == pytest.approx(1)
    assert found.scale_ratio == pytest.approx(0.97)
    assert found.relative_l1 == found.relative_l2 == pytest.approx(0.03)


def test_zeros_agree_and_differ():
    zeros = torch.zeros(3)
    assert figures(zeros, zeros) == Figures(1, 0, 0, 0, 1)
    assert figures(torch.tensor([0, 2.0, 0]), zeros).cosine == 0
    assert figures(zeros, torch.ones(3)) == Figures(0, 1, 1, 1, 0)


def test_elements_without_a_finite_truth_are_left_out():
    found = figures(torch.tensor([1.0, 7.0]), torch.tensor([1.0, math.nan]))
    assert found == Figures(1, 0, 0, 0, 1)


# --- the gate


@pytest.mark.parametrize("problem", [CAUSAL, FULL], ids=lambda p: p.name)
def test_the_numerics_of_a_config_pass_every_kind(problem, cases):
    def attend(q, k, v, scale):
        out, lse = quantized_attention(*(x.nan_to_num(0, 0, 0) for x in (q, k, v)), problem, CONFIG, scale=scale)
        spoiled = attention(q, k, v, is_causal=problem.is_causal, compute=torch.float32).isnan()
        return out.masked_fill(spoiled, math.nan), lse

    result = run_gate(CpuProgram(problem, attend), problem, CONFIG, cases)
    assert (result.passed, result.reason) == (True, "")
    assert list(result.figures) == list(INPUT_KINDS)
    normal = result.figures["normal"]
    assert normal.relative_l1 == pytest.approx(0.0375, abs=0.002)
    assert result.figure_values()["normal"]["cosine"] == normal.cosine


@pytest.mark.parametrize("problem", [CAUSAL, FULL], ids=lambda p: p.name)
def test_the_numerics_of_a_config_pass_on_a_models_own_inputs(problem, cases):
    captured = load_captured(CAPTURED)
    for name, inputs in captured.items():
        cases.add_captured(problem, name, inputs)
    program = CpuProgram(problem, lambda q, k, v, scale: quantized_attention(q, k, v, problem, CONFIG, scale=scale))
    result = run_gate(program, problem, CONFIG, cases, kinds=captured)
    assert (result.passed, result.reason) == (True, "")
    assert min(f.cosine for f in result.figures.values()) >= CAPTURED_FLOOR.cosine == 0.9993


def scaled(factor):
    def harm(call, q, k, v, out, lse, workspace):
        out.mul_(factor)

    return harm


def skip_last_row(call, q, k, v, out, lse, workspace):
    out[..., -1, :].view(torch.int16).fill_(-1)  # as it was before the launch


def overrun(name):
    def harm(call, q, k, v, out, lse, workspace):
        end = {
            "out": out.data_ptr() + out.numel() * 2,
            "lse": lse.data_ptr() + lse.numel() * 4 if lse is not None else None,
            "workspace": workspace + call.program.workspace_bytes,
        }[name]
        if end:
            ctypes.memset(end, 0, 2)

    return harm


def underrun(call, q, k, v, out, lse, workspace):
    ctypes.memset(workspace - 1, 0, 1)


def write_input(call, q, k, v, out, lse, workspace):
    k[0, 0, 0, 0] += 1


def waver(call, q, k, v, out, lse, workspace):
    out[0, 0, 0, 0] *= 1 + 0.01 * call.program.launches


def ignore_bad_values(call, q, k, v, out, lse, workspace):
    out.nan_to_num_(0.5)


def spread_bad_values(call, q, k, v, out, lse, workspace):
    out.fill_(math.nan)


def lose_channels(call, q, k, v, out, lse, workspace):
    """What a kernel does that marks keys, not channels: rows that see the bad value are NaN throughout."""
    out[out.isnan().any(-1)] = math.nan


def touch_zero_channel(call, q, k, v, out, lse, workspace):
    out[0, 0, 0, ZERO_CHANNEL] = 1e-4


def shift_lse(call, q, k, v, out, lse, workspace):
    if lse is not None:
        lse += 0.02


def lose_empty_rows_lse(call, q, k, v, out, lse, workspace):
    if lse is not None:
        lse.nan_to_num_(neginf=0.0)


def garble_one_row(call, q, k, v, out, lse, workspace):
    out[0, 0, 5] = out[0, 0, 6]


def scale_one_row(call, q, k, v, out, lse, workspace):
    out[0, 0, 5] *= 1.02


@pytest.mark.parametrize(
    ("kind", "harm", "reason"),
    [
        ("non_finite", lose_channels, None),
        ("normal", scaled(0.97), "normal: scale ratio 0.9700 is further than 0.01 from 1"),
        ("normal", skip_last_row, "normal: 128 of 32768 outputs are NaN or Inf"),
        ("normal", waver, "normal: two runs, the second without lse, gave different bits"),
        ("off_edge", overrun("out"), "off_edge: wrote outside its memory (2 guard bytes)"),
        ("off_edge", overrun("lse"), "off_edge: wrote outside its memory (2 guard bytes)"),
        ("off_edge", overrun("workspace"), "off_edge: wrote outside its memory (2 guard bytes)"),
        ("off_edge", underrun, "off_edge: wrote outside its memory (1 guard bytes)"),
        ("off_edge", write_input, "off_edge: wrote into its inputs or other memory"),
        ("off_edge", shift_lse, "off_edge: lse is off by 0.02, more than 0.01"),
        ("few_keys", lose_empty_rows_lse, "few_keys: lse is off by inf, more than 0.1"),
        ("v_constant", scaled(1.009), None),
        ("v_constant", scaled(0.985), "v_constant: scale ratio"),
        ("v_constant", scale_one_row, "v_constant: an output is off by 2.0"),
        ("v_zero_channel", touch_zero_channel, "v_zero_channel: a channel of zeros did not stay exactly 0"),
        ("non_finite", ignore_bad_values, "non_finite: 6608 of 102400 outputs are finite where an input was NaN"),
        ("non_finite", spread_bad_values, "non_finite: 86720 of 102400 outputs are NaN or Inf"),
        ("gqa", garble_one_row, "gqa: a row is off by 0."),
    ],
)
def test_fault_is_caught_and_named(kind, harm, reason, small_cases):
    result = run_gate(CpuProgram(CAUSAL, exact(CAUSAL), harm), CAUSAL, CONFIG, small_cases, kinds=[kind])
    assert result.passed == (reason is None)
    assert result.reason.startswith(reason or "")
    assert not any(math.isnan(f.cosine) for f in result.figures.values())


# --- INT4


def negate_one_row(call, q, k, v, out, lse, workspace):
    out[0, 0, 5] *= -1


INT4 = [replace(problem, precision="int4") for problem in (CAUSAL, FULL)]
#: Q smoothed and both rotated, as INT4 needs it; and that with the coarsest scales, which must pass too.
PREPARED = replace(CONFIG, mean_span=128, delta="f16", rotate="yes")
BLOCK = replace(PREPARED, granularity="block")


def coarse(problem, config, change=lambda k: k):
    """A kernel's numerics with INT4 or E4M3 scores; `change` sees K as the kernel would misread it."""

    def attend(q, k, v, scale):
        q, k, v = (x.nan_to_num(0, 0, 0) for x in (q, k, v))
        out, lse = quantized_attention(q, change(k), v, problem, config, scale=scale)
        return out, lse

    return attend


@pytest.mark.parametrize("problem", INT4, ids=lambda p: p.name)
@pytest.mark.parametrize("config", [PREPARED, BLOCK], ids=lambda c: c.granularity)
def test_int4_of_any_granularity_passes_floors_of_its_own(problem, config):
    kinds = [kind for kind in EMULATED_KINDS if kind != "non_finite"]
    result = run_gate(
        CpuProgram(problem, coarse(problem, config)), problem, config, Cases("cpu", EMULATED_KINDS), kinds=kinds
    )
    assert (result.passed, result.reason) == (True, "")
    assert result.figures["normal"].cosine < FLOORS["normal"].cosine


@pytest.mark.parametrize("kind", ["channel_offsets", "outliers"])
def test_int4_with_k_smoothed_alone_is_below_its_floors(kind):
    problem = INT4[1]
    program = CpuProgram(problem, coarse(problem, CONFIG))
    result = run_gate(program, problem, CONFIG, Cases("cpu", EMULATED_KINDS), kinds=[kind])
    assert result.reason.startswith(f"{kind}: cosine")


@pytest.mark.parametrize(
    ("change", "harm", "reason"),
    [
        (lambda k: k.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), None, "normal: cosine"),  # nibbles swapped
        (lambda k: k[:, :, torch.arange(k.shape[2]) ^ 1], None, "normal: cosine"),  # keys swapped
        (lambda k: k, scaled(0.97), "v_constant: scale ratio 0.9"),
        (lambda k: k, negate_one_row, "normal: a row is off by 2"),
    ],
)
def test_int4_faults_are_caught_by_its_floors(change, harm, reason):
    problem = INT4[1]
    program = CpuProgram(problem, coarse(problem, PREPARED, change), harm)
    result = run_gate(program, problem, PREPARED, Cases("cpu", EMULATED_KINDS), kinds=[reason.split(":")[0]])
    assert not result.passed
    assert result.reason.startswith(reason)


def test_int4_floors_are_looser_where_scores_count_and_the_same_elsewhere():
    for kind in {*INPUT_KINDS, *EMULATED_KINDS}:
        own, int8 = find_floor(kind, "int4"), find_floor(kind, "int8")
        assert int8 == FLOORS.get(kind, Floor())
        assert own == int8 if "v_o" in kind or kind in ("v_constant", "large_logits") else own.cosine < int8.cosine


# --- FP8 (e4m3) scores

E4M3 = replace(CONFIG, qk="e4m3")


def fade_one_row(call, q, k, v, out, lse, workspace):
    out[0, 0, 5] *= 0.7


@pytest.mark.parametrize("problem", [CAUSAL, FULL], ids=lambda p: p.name)
@pytest.mark.parametrize("granularity", ["thread", "block"])
def test_e4m3_of_any_granularity_passes_floors_of_its_own(problem, granularity):
    config = replace(E4M3, granularity=granularity)
    kinds = [kind for kind in EMULATED_KINDS if kind != "non_finite"]
    program = CpuProgram(problem, coarse(problem, config))
    cases = Cases("cpu", EMULATED_KINDS)
    for name, inputs in load_captured(CAPTURED).items():
        cases.add_captured(problem, name, inputs)
        kinds.append(name)
    result = run_gate(program, problem, config, cases, kinds=kinds)
    assert (result.passed, result.reason) == (True, "")
    assert result.figures["normal"].cosine < FLOORS["normal"].cosine
    as_int8 = run_gate(program, problem, CONFIG, cases, kinds=["channel_offsets"])
    assert as_int8.reason.startswith("channel_offsets: cosine")  # floors go by the config


@pytest.mark.parametrize(
    ("change", "harm", "reason"),
    [
        (lambda k: k[:, :, torch.arange(k.shape[2]) ^ 1], None, "normal: cosine"),  # keys swapped
        (lambda k: k * 0.9, None, "normal: cosine"),  # a scale that is 448/497 of the right one
        (lambda k: k, scaled(0.97), "normal: scale ratio 0.9"),
        (lambda k: k, fade_one_row, "normal: a row is off by 0.29"),
    ],
)
def test_e4m3_faults_are_caught_by_its_floors(change, harm, reason):
    program = CpuProgram(FULL, coarse(FULL, E4M3, change), harm)
    result = run_gate(program, FULL, E4M3, Cases("cpu", EMULATED_KINDS), kinds=["normal"])
    assert not result.passed
    assert result.reason.startswith(reason)


def test_e4m3_floors_lie_between_int8s_and_int4s():
    for kind in {*INPUT_KINDS, *EMULATED_KINDS}:
        int4, own, int8 = (find_floor(kind, rounding).cosine for rounding in ("int4", "e4m3", "int8"))
        assert int4 <= own <= int8
        assert (own < int8) == (int4 < int8)
    assert set(E4M3_FLOORS) == set(INT4_FLOORS)


def test_passing_candidate_leaves_no_reason(small_cases):
    result = run_gate(CpuProgram(CAUSAL, exact(CAUSAL)), CAUSAL, CONFIG, small_cases, kinds=["normal", "gqa"])
    assert (result.passed, result.reason, list(result.figures)) == (True, "", ["normal", "gqa"])


def test_gate_stops_at_the_first_failure_and_keeps_what_it_found(small_cases):
    program = CpuProgram(CAUSAL, exact(CAUSAL), scaled(0.985))
    result = run_gate(program, CAUSAL, CONFIG, small_cases, kinds=["gqa", "normal"])
    assert result.reason.startswith("gqa: scale ratio 0.985")
    assert list(result.figures) == ["gqa"]
    assert program.launches == 1


def test_truths_are_made_once():
    cases = Cases("cpu")
    assert cases.get(CAUSAL, "few_keys") is cases.get(CAUSAL, "few_keys")
    assert cases.get(FULL, "few_keys") is not cases.get(CAUSAL, "few_keys")


def test_spoiled_inputs_are_made_again():
    cases = Cases("cpu")
    assert not run_gate(CpuProgram(CAUSAL, exact(CAUSAL), write_input), CAUSAL, CONFIG, cases, kinds=["gqa"]).passed
    assert run_gate(CpuProgram(CAUSAL, exact(CAUSAL)), CAUSAL, CONFIG, cases, kinds=["gqa"]).passed


def test_floors_name_kinds_that_exist():
    assert set(FLOORS) <= {*INPUT_KINDS, *EMULATED_KINDS}
    assert set(INT4_FLOORS) <= {*INPUT_KINDS, *EMULATED_KINDS}


def test_guarded_memory_starts_as_nan_between_zones():
    guards = GuardedAllocator()
    memory = guards.empty((3, 5), torch.float16, torch.device("cpu"))
    assert memory.isnan().all()
    assert guards.empty((4,), torch.float32, torch.device("cpu")).isnan().all()
    assert guards.changed_bytes() == 0
    memory.fill_(1)
    assert guards.changed_bytes() == 0


# --- launching


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_call_binds_strides_scale_and_lse(layout):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 33, 64, generator=generator).half()
    k, v = (torch.randn(2, 2, 45, 64, generator=generator).half() for _ in range(2))
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    program = CpuProgram(CAUSAL, exact(CAUSAL))
    out, lse = call_program(program, CAUSAL, CONFIG, q, k, v, softmax_scale=0.3, want_lse=True)
    wanted, wanted_lse = attention(q, k, v, is_causal=True, scale=0.3, return_lse=True, compute=torch.float32)
    assert out.stride() == q.stride()
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    assert call_program(program, CAUSAL, CONFIG, q, k, v)[1] is None
    assert program.values["softmax_scale"] == 64**-0.5
