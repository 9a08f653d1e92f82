"""Integer sums of Q K^T that start at delta S: what they give, and who falls back on adding it afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sagegen import wgmma_numerics
from sagegen.emulator.program import EmulatedProgram, load_emulated
from sagegen.env import read_env
from sagegen.gpu import find_gpu
from sagegen.measuring.call import call_program
from sagegen.problem import Problem
from sagegen.reference import attention, quantized_attention
from sagegen.space import parse_config

pytestmark = pytest.mark.emulator

H200 = find_gpu("h200")
#: A mask, which also leaves whole tiles unmasked; both types of delta S, spans and schedules.
KERNELS = {
    "plain": (
        Problem(64, "bf16", is_causal=True),
        parse_config("wgmma_c2_bk128_st2_scplain_acone_ks64_rsskip_suones_exmufu_ms64_dsf16"),
    ),
    "overlap": (
        Problem(128, "fp16", is_causal=False),
        parse_config("wgmma_c2_bk128_st3_scoverlap_acone_ks128_rsskip_suones_exmufu_laearly_ms64"),
    ),
}
#: Of the output's relative L2 and of the lse by its size or 1, as in test_configs.py.
OUT_LIMIT, LSE_LIMIT = 6e-4, 1e-5
QUERIES, KEYS = 250, 400
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def programs() -> dict[str, EmulatedProgram]:
    return {
        name: load_emulated(problem, config, H200, read_env(), workers=2) for name, (problem, config) in KERNELS.items()
    }


def draw(problem: Problem, q_mean: float) -> Inputs:
    generator = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(1, 2, tokens, problem.head_dim, generator=generator) for tokens in (QUERIES, KEYS, KEYS))
    q += q_mean * (1 + torch.rand(1, 2, 1, problem.head_dim, generator=generator))
    k += 5 * torch.randn(1, 2, 1, problem.head_dim, generator=generator)
    dtype = torch.bfloat16 if problem.dtype == "bf16" else torch.float16
    return q.to(dtype), k.to(dtype), v.to(dtype)


def one_large_group(q: torch.Tensor) -> None:
    q[:, :, 128:192] += 300


def one_bad_row(q: torch.Tensor) -> None:
    q[:, :, 130, 3] = torch.nan


def large_factor(q: torch.Tensor) -> None:
    q[:, :, 10] *= 2000


#: Queries' mean in their deviations, what else is done to them, and which groups of 64 rows fold delta S.
CASES: dict[str, tuple[float, Callable[[torch.Tensor], None] | None, list[bool]]] = {
    "offset": (3, None, [True, True, True, True]),
    "large_mean": (300, None, [False, False, False, False]),
    "one_large_group": (1, one_large_group, [True, True, False, True]),
    "row_of_nan": (1, one_bad_row, [True, True, True, True]),
    "large_factor": (1, large_factor, [False, True, True, True]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_folding_gives_its_numerics_and_only_where_it_fits(
    programs: dict[str, EmulatedProgram], name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, config = KERNELS[name]
    q_mean, alter, wanted_votes = CASES[case]
    q, k, v = draw(problem, q_mean)
    if alter:
        alter(q)
    kept = torch.arange(QUERIES) != (130 if case == "row_of_nan" else -1)
    out, lse = call_program(programs[name], problem, config, q, k, v, want_lse=True)
    assert lse is not None
    assert out[:, :, kept].isfinite().all()
    assert out[:, :, ~kept].isnan().all()
    # the reference has no rows that are NaN; to the mean this one counts as 0
    votes = []
    fits = wgmma_numerics._delta_fits
    monkeypatch.setattr(wgmma_numerics, "_delta_fits", lambda operands: votes.append(fits(operands)) or votes[-1])
    clean = q.nan_to_num(0) if case == "row_of_nan" else q
    wanted, wanted_lse = quantized_attention(clean, k, v, problem, config, accumulator="fp22", want_lse=True)
    assert votes[0][0, :, ::64, 0].tolist() == [wanted_votes] * 2
    wanted = wanted.to(out.dtype).double()
    error = (out.double() - wanted)[:, :, kept].norm() / wanted[:, :, kept].norm()
    assert error.item() <= OUT_LIMIT
    lse_error = ((lse - wanted_lse).abs() / wanted_lse.abs().clamp_min(1))[:, :, kept].max()
    assert lse_error.item() <= LSE_LIMIT

    # had the kernel folded nothing, it would show; what it must not fold leaves its integers' range, and shows above
    if any(wanted_votes):
        monkeypatch.setattr(wgmma_numerics, "_delta_fits", lambda _: torch.zeros_like(votes[0]))
        _, other_lse = quantized_attention(clean, k, v, problem, config, accumulator="fp22", want_lse=True)
        off = ((lse - other_lse).abs() / other_lse.abs().clamp_min(1))[:, :, kept].max()
        assert off.item() > 2 * LSE_LIMIT

    if case in ("offset", "row_of_nan"):
        exact = attention(clean, k, v, is_causal=problem.is_causal, out_dtype=torch.float64)
        cosine = torch.cosine_similarity(out[:, :, kept].double().flatten(), exact[:, :, kept].flatten(), 0)
        assert cosine.item() > 0.999


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_that_is_its_mean_has_exact_scores(programs: dict[str, EmulatedProgram], name: str) -> None:
    """Its integers are zeros: as a whole number of units of anything, delta S would be off."""
    problem, config = KERNELS[name]
    q, k, v = draw(problem, 1)
    q, k = q[:, :, :1].contiguous(), k * 20
    _, lse = call_program(programs[name], problem, config, q, k, v, want_lse=True)
    _, exact = attention(q, k, v, is_causal=problem.is_causal, return_lse=True, out_dtype=torch.float64)
    assert lse is not None
    torch.testing.assert_close(lse.double(), exact.double(), rtol=2e-5 if config.delta == "f32" else 2e-3, atol=1e-4)
