"""Diverse configs on a card: each computes its own numerics, and passes the gate if tuning tries it."""

from pathlib import Path

import pytest
import torch

from picked_configs import LEFT_ALONE, TRIED
from sagegen.launch import load_program
from sagegen.measuring.call import call_program
from sagegen.measuring.floors import captured_floor, find_floor
from sagegen.measuring.gate import Cases, figures, run_gate
from sagegen.measuring.inputs import INPUT_KINDS, load_captured
from sagegen.problem import DTYPES, TUNED_HEAD_DIMS, Problem
from sagegen.reference import fp8_accumulator, quantized_attention

pytestmark = pytest.mark.gpu

CAPTURED = Path(__file__).parents[1] / "data" / "smollm2_qkv.safetensors"
CASES = [
    pytest.param(Problem(d, t, causal), index, id=f"{Problem(d, t, causal).name}-{index}")
    for d in TUNED_HEAD_DIMS
    for t in DTYPES
    for causal in (False, True)
    for index in range(TRIED + LEFT_ALONE)
]


@pytest.fixture(scope="module")
def cases():
    return Cases("cuda")


@pytest.fixture
def program(kernels, problem, index):
    kernel = kernels[problem][index]
    program = load_program(kernel.cubin.read_bytes(), kernel.name, problem, kernel.config, 0)
    yield program
    program.unload()


@pytest.mark.parametrize(("problem", "index"), [case for case in CASES if case.values[1] < TRIED])
def test_the_gate_judges_a_config_that_tuning_tries_by_its_numerics(program, problem, index, cases, gpu):
    """The default passes. Another may be too coarse for a kind: then its reference is, and the kernel as far off."""
    kinds = {**INPUT_KINDS}
    if problem.head_dim == 64:
        captured = load_captured(CAPTURED)
        kinds |= captured
        for name, inputs in captured.items():
            cases.add_captured(problem, name, inputs)
    for kind in kinds:
        result = run_gate(program, problem, program.config, cases, kinds=[kind])
        if result.passed:
            continue
        assert index > 0, f"{program.config.name}: {result.reason}"
        case = cases.get(problem, kind)
        q, k, v = case.inputs.q, case.inputs.k, case.inputs.v
        accumulator = fp8_accumulator(program.config, gpu.compute_capability)
        out, _ = quantized_attention(q, k, v, problem, program.config, accumulator=accumulator)
        own, found = figures(out, case.out), result.figures[kind]
        assert found.cosine == pytest.approx(own.cosine, abs=1e-4), result.reason
        assert found.scale_ratio == pytest.approx(own.scale_ratio, abs=1e-3), result.reason
        floor = captured_floor("int8") if case.is_captured else find_floor(kind, "int8")
        assert own.cosine < floor.cosine + 1e-4 or abs(own.scale_ratio - 1) > floor.scale - 1e-3, result.reason


@pytest.mark.parametrize(("problem", "index"), CASES)
def test_config_computes_its_own_numerics(program, problem):
    generator = torch.Generator("cuda").manual_seed(0)
    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    q = torch.randn(2, 6, 700, problem.head_dim, device="cuda", generator=generator).to(dtype)
    k, v = (
        (torch.randn(2, 2, 900, problem.head_dim, device="cuda", generator=generator) + offset).to(dtype)
        for offset in (4, 0.5)
    )
    out, lse = call_program(program, problem, program.config, q, k, v, want_lse=True)
    wanted, wanted_lse = quantized_attention(q, k, v, problem, program.config)
    # rounding of the output: 2^-12 for fp16, 2^-9 for bf16; the config's own error is 0.01 to 0.04
    relative_l2 = ((out - wanted).norm() / wanted.norm()).item()
    assert relative_l2 < 0.006, program.config.name
    # bf16 keys lie on a coarse grid, so a mean that differs in its last bit can round one channel to the next step;
    # that moves a score by up to 127 steps: 0.02 in log2 units here, less once summed
    torch.testing.assert_close(lse, wanted_lse, atol=5e-3, rtol=0)
