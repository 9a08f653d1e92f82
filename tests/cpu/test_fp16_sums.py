"""P·V summed in FP16 (SageAttention2++): one instruction's arithmetic, and whole calls at the end of FP16's range."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

import sagegen.mma_numerics
from sagegen.gpu import find_gpu
from sagegen.mma_rules import default_mma_config
from sagegen.problem import Problem
from sagegen.quantizing import Accumulator, add_products
from sagegen.reference import attention, fp8_accumulator, quantized_attention
from sagegen.rules import Target, broken_rules
from sagegen.space import MMA_PARAMS, MmaConfig, parse_config

PROBLEM = Problem(64, "fp16", is_causal=False)
TARGET = Target(find_gpu("l20"), PROBLEM)
BASE = replace(default_mma_config(TARGET), pv="e4m3f16", p_max=224, v_max=4.5)
VALUES = {p.name: p.values for p in MMA_PARAMS}


def accepted_configs() -> list[MmaConfig]:
    """Every tile, depth and pair of peaks whose largest sum is an FP16 number, 65504 at most."""
    peaks = itertools.product((64, 128), (32, 64, 128), VALUES["p_max"], VALUES["v_max"])
    return [
        replace(BASE, block_k=block_k, accum_depth=depth, p_max=p_max, v_max=v_max)  # type: ignore[arg-type]
        for block_k, depth, p_max, v_max in peaks
        if depth <= block_k and Fraction(p_max) * Fraction(v_max) * depth <= 65504
    ]


ACCEPTED = accepted_configs()


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def run(
    config: MmaConfig, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    return quantized_attention(q, k, v, PROBLEM, config, scale=scale, accumulator="fp16")[0]


# --- one instruction


@pytest.mark.parametrize(
    ("accumulator", "total", "products", "result"),
    [
        # FP16 numbers are 2 apart from 2048, 4 from 4096: ties go to the even one
        ("fp16", 2048.0, {0: 1.0}, 2048.0),
        ("fp16", 2050.0, {0: 1.0}, 2052.0),
        ("fp16", 2048.0, {0: 0.75, 16: 0.75}, 2050.0),
        ("fp16_halves", 2048.0, {0: 0.75, 16: 0.75}, 2048.0),  # each half is lost on its own
        ("fp16_halves", 2048.0, {0: 0.75, 15: 0.75}, 2050.0),
        ("fp16_halves", -2048.0, {0: 2048.0, 1: 1.0, 16: 1.0}, 1.0),  # 2049 of the first half becomes 2048
        ("fp16", -2048.0, {0: 2048.0, 1: 1.0, 16: 1.0}, 2.0),
        ("fp16", 65504.0, {0: 8.0}, 65504.0),
        ("fp16", 65504.0, {0: 16.0}, float("inf")),
        ("fp16", 0.0, dict.fromkeys(range(32), 2016.0), 64512.0),  # 448 * 4.5 from each key, or 224 * 9
        ("fp16", 0.0, {32: 2048.0, 0: 1.0}, 2048.0),  # a second instruction
    ],
)
def test_sums_are_rounded_after_each_instruction(
    accumulator: Accumulator, total: float, products: dict[int, float], result: float
) -> None:
    keys = max(products) // 32 * 32 + 32
    p, v = torch.zeros(1, keys), torch.ones(keys, 1)
    for key, product in products.items():
        p[0, key] = product
    assert add_products(torch.tensor([[total]]), p, v, accumulator).item() == result


@pytest.mark.parametrize(
    ("pv", "architecture", "accumulator"),
    [
        ("e4m3f16", 89, "fp16"),
        ("e4m3f16", 120, "fp16"),
        ("e4m3f16", 90, "fp16_halves"),  # two FP16 products and HADD2 (tests/compile/test_probe.py)
        ("e4m3f32", 89, "fp22"),
        ("e4m3f32", 90, "fp32"),
    ],
)
def test_the_accumulator_follows_from_type_and_architecture(pv: str, architecture: int, accumulator: str) -> None:
    assert fp8_accumulator(replace(BASE, pv=pv), architecture) == accumulator


# --- calls


def test_the_rules_accept_what_fits() -> None:
    assert len(ACCEPTED) == 13 + 10 + 13 + 10 + 6  # counted by hand from the lists of p_max and v_max
    for config in ACCEPTED:
        assert not broken_rules(config, TARGET)


@pytest.mark.parametrize("smooth_v", ["no", "yes"])
@pytest.mark.parametrize("config", ACCEPTED, ids=lambda c: f"bk{c.block_k}-ad{c.accum_depth}-{c.p_max}-{c.v_max}")
def test_constant_and_large_values_pass_at_every_accepted_peak(config: MmaConfig, smooth_v: str) -> None:
    config = replace(config, smooth_v=smooth_v)
    q, k, v = (normal(1, 2, length, 64, seed=seed) for seed, length in enumerate((40, 300, 300)))
    constant = torch.full_like(v, 60000.0)
    constant[..., ::2] = -60000.0
    # equal weights of equal values: every P is p_max and every V v_max, the largest sums that there are
    out = run(config, torch.zeros_like(q), k, constant)
    torch.testing.assert_close(out, constant[:, :, :1].float().expand_as(out), rtol=0.01, atol=0)
    out = run(config, q, k, constant)
    torch.testing.assert_close(out, constant[:, :, :1].float().expand_as(out), rtol=0.01, atol=0)
    for values in (v * 12000, v.abs() * 12000, v + 1):
        exact = attention(q, k, values.half(), out_dtype=torch.float64)
        out = run(config, q, k, values.half()).double()
        cosine = (out * exact).sum() / (out.norm() * exact.norm())
        assert cosine >= 0.999
        assert ((out - exact).norm(dim=-1) <= 0.15 * exact.norm(dim=-1)).all()  # the gate's limit of a row


@pytest.mark.parametrize("conversion", ["i2f", "magic"])
def test_no_weight_exceeds_its_scale_however_large_the_logits(conversion: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 4 million log2 units an exponent is rounded by a quarter: enough for a P of 1.19 * p_max, and an overflow."""
    config = replace(BASE, conversion=conversion)
    q = normal(1, 1, 400, 64, seed=1)
    k = torch.ones(1, 1, 256, 64).half()
    k[:, :, ::64] = -1  # else K less its mean is 0
    v = torch.ones_like(k)
    for scale in (1e5, 3e5, 1e6, 1e7, 1e8):
        assert run(config, q, k, v, scale=scale).isfinite().all(), scale
    if conversion == "i2f":
        monkeypatch.setattr(sagegen.mma_numerics, "_COARSE", math.inf)
        assert not run(config, q, k, v, scale=1e7).isfinite().all()


def largest_weights(p_max: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row maxima as FP32 has them, both signs of 2^12 to 2^26, and the largest weight over p_max that each can have.

    FP64 has the score before FP32 rounded it, half a step above the maximum at most.
    """
    bits = torch.arange(0x45800000, 0x4C800000, 997, dtype=torch.int64).to(torch.int32)
    anchor = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    step = (torch.nextafter(anchor.abs(), torch.tensor(math.inf)) - anchor.abs()).double()
    floor = sagegen.mma_numerics._floor_of(anchor, float(torch.tensor(math.log2(p_max))), BASE)
    return anchor, (anchor.double() + step / 2 - floor.double() - math.log2(p_max)).exp2()


@pytest.mark.parametrize("p_max", VALUES["p_max"])
def test_the_weight_of_the_largest_score_rounds_to_the_scale_or_less(
    p_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4M3 has 7 * 2^n and 7.5 or 8 * 2^n around every p_max: what is less than 1 / 28 above it rounds to it."""
    anchor, weight = largest_weights(p_max)
    assert float(weight.max()) < 1 + 1 / 28
    near = anchor.abs() < 2**18  # a step is at most 1/64 there, and nothing is lost either
    assert float(weight[near].min()) > 1 - 1 / 28
    monkeypatch.setattr(sagegen.mma_numerics, "_COARSE", 2.0**22)
    assert float(largest_weights(p_max)[1].max()) > 1 + 1 / 28  # the nearest number does not do everywhere


@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_key_that_takes_all_the_weight_gives_its_value_without_a_bias(head_dim: int) -> None:
    """Scores of 2^18 to 2^20 log2 units, where FP32's steps are up to 1/16: weight and row sum are off alike."""
    problem = Problem(head_dim, "fp16", is_causal=False)
    k = normal(1, 2, 512, head_dim, seed=4).sign() * 200
    v = normal(1, 2, 512, head_dim, seed=5)
    out, _ = quantized_attention(k, k, v, problem, BASE, accumulator="fp16")
    ratio = float((out.double() * v.double()).sum() / v.double().square().sum())
    assert abs(ratio - 1) < 0.01  # the gate's limit


def test_fp16_sums_lose_little_beside_e4m3() -> None:
    # SageAttention2++ reports the same cosine at all its peaks
    q, k, v = (normal(1, 2, 1024, 64, seed=seed) for seed in range(3))
    exact = attention(q, k, v, out_dtype=torch.float64)

    def error(config: MmaConfig, accumulator: Accumulator) -> float:
        out, _ = quantized_attention(q, k, v, PROBLEM, config, accumulator=accumulator)
        return ((out - exact).norm() / exact.norm()).item()

    plain = error(replace(BASE, pv="e4m3f32", p_max=448, v_max=448), "fp22")
    assert error(BASE, "fp16") == pytest.approx(plain, rel=0.05)


# --- smooth V


NEVER_PROMOTED = parse_config("mma_bq128_bk64_w8_st2_pve4m3f32_ad0_cvi2f_grthread_qs32_ks64_rsskip_qosmem_mb1_svyes")


@pytest.mark.parametrize("config", [NEVER_PROMOTED, replace(BASE, smooth_v="yes")], ids=["never", "fp16"])
def test_smoothing_takes_the_error_of_an_offset_away(config: MmaConfig) -> None:
    q, k, v = (normal(1, 2, 1024, 64, seed=seed) for seed in range(3))
    v = v + 8
    exact = attention(q, k, v, out_dtype=torch.float64)
    accumulator = fp8_accumulator(config, 89)
    smooth, plain = (
        quantized_attention(q, k, v, PROBLEM, replace(config, smooth_v=smooth), accumulator=accumulator)[0]
        for smooth in ("yes", "no")
    )
    # E4M3 rounds normal values with steps of 2^-4 of their size; the offset's own steps are half a unit
    assert (smooth - exact).norm() < (plain - exact).norm() / 4
    assert (smooth - exact).norm() < 0.04 * (exact - 8).norm()


def test_a_row_that_sees_no_key_stays_zero_although_the_mean_comes_back() -> None:
    q, k, v = normal(1, 1, 9, 64, seed=0), normal(1, 1, 5, 64, seed=1), normal(1, 1, 5, 64, seed=2) + 3
    out, _ = quantized_attention(q, k, v, Problem(64, "fp16", True), NEVER_PROMOTED, accumulator="fp22")
    assert (out[:, :, :4] == 0).all()
    assert (out[:, :, 4:] != 0).all()
