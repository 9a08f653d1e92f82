"""Every family and every value of every parameter in the emulator, against the same numerics step by step in PyTorch.

Outputs are compared with the reference rounded to their type: the rounding itself, 1.6e-3 of bf16's relative L2, would
hide faults that are ten times the difference of the two. What is left comes of exp2 and the order of sums, whose last
bits now and then round one P, or one output, to its neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagegen.measuring.call import Allocator, bind_call, call_program
from sagegen.measuring.inputs import DTYPES as TORCH_DTYPES
from sagegen.measuring.inputs import INPUT_KINDS, Inputs, draw_normal
from sagegen.problem import DTYPES, HEAD_DIMS, PRECISIONS, TUNED_HEAD_DIMS, Shape
from sagegen.reference import attention, quantized_attention
from sagegen.space import FAMILIES

pytestmark = pytest.mark.emulator

#: Largest relative L2 of a call, and of the worst of its rows; measured: 2.2e-4 and 1.9e-3.
CALL_LIMIT, ROW_LIMIT = 6e-4, 6e-3
#: Largest error of the lse, by its size or 1; measured: 2.4e-6.
LSE_LIMIT = 1e-5
#: Of FP8 products by family: mma.sync has an emulated one on sm_90.
ACCUMULATORS = {"mma": {"fp22", "fp32", "fp16", "fp16_halves"}, "wgmma": {"fp22"}}
#: Keys that the statistics of K and V are reduced over at least (sagegen/plan.py).
SPLIT_TOKENS = 128


# --- the set covers the space


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_every_parameter_has_a_variant(family, variants):
    own = [variant for variant in variants if variant.config.family == family]
    for param in FAMILIES[family].params:
        assert {getattr(variant.config, param.name) for variant in own} == set(param.values), param.name
    problems = {variant.problem for variant in own}
    assert {p.head_dim for p in problems} == set(HEAD_DIMS if family == "mma" else TUNED_HEAD_DIMS)
    assert {p.dtype for p in problems} == set(DTYPES)
    assert {p.is_causal for p in problems} == {False, True}
    quantized = [variant for variant in own if variant.config.quantizes_v]
    assert {variant.accumulator for variant in quantized} == ACCUMULATORS[family]


def test_every_precision_has_a_variant(variants):
    assert {variant.problem.precision for variant in variants} == set(PRECISIONS)


# --- what a call is


def gaps(x):
    """A view with rows, heads and channels around it that are NaN."""
    wide = x.new_full((*x.shape[:2], x.shape[2] + 3, x.shape[3] + 24), math.nan)
    return wide[:, :, 2 : 2 + x.shape[2], 8 : 8 + x.shape[3]].copy_(x)


def fused(inputs):
    """Views of one projection's output, [batch, tokens, (heads_q + 2 heads_kv) * head_dim]; lengths must be equal."""
    heads = [x.shape[1] for x in (inputs.q, inputs.k, inputs.v)]
    joined = torch.cat([x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v)], dim=2)
    return Inputs(*(x.transpose(1, 2) for x in joined.split(heads, dim=2)))


def expanded(inputs):
    """All heads of K and V, and all batches of Q, are one in memory."""
    return Inputs(inputs.q[:1].expand_as(inputs.q), *(x[:, :1].expand_as(x) for x in (inputs.k, inputs.v)))


#: Where the elements of q, k and v lie in memory. The emulator refuses every access to what lies between them.
LAYOUTS = {
    "HND": lambda inputs: inputs,
    "NHD": lambda inputs: inputs.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "gaps": lambda inputs: inputs.map(gaps),
    "tokens_first": lambda inputs: inputs.map(lambda x: x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)),
    "expanded": expanded,
    "fused": fused,
}


class OutputWithGaps(Allocator):
    """Puts the output into a larger tensor."""

    def empty(self, shape, dtype, device):
        plain = super().empty(shape, dtype, device)
        return gaps(plain) if len(shape) == 4 else plain


@dataclass(frozen=True)
class Call:
    """Shape and layout of a call, its scale, and whether it wants the lse."""

    shape: Callable[[object], Shape]
    layout: str = "HND"
    scale: float | None = None
    wants_lse: bool = True


#: By what they reach. Shapes are batch, heads of Q, heads of K and V, queries, keys.
CALLS = {
    "one_key": Call(lambda c: Shape(1, 1, 1, 1, 1)),
    "below_edges": Call(lambda c: Shape(1, 4, 2, c.block_q - 1, c.block_k - 1), "gaps"),
    "at_edges": Call(lambda c: Shape(2, 2, 2, c.block_q, c.block_k), "NHD"),
    "above_edges": Call(lambda c: Shape(1, 2, 1, c.block_q + 1, c.block_k + 1), "tokens_first", wants_lse=False),
    "many_tiles": Call(lambda c: Shape(1, 2, 1, c.block_q + 5, (2 * c.stages + 1) * c.block_k + 3), "expanded"),
    "one_query": Call(lambda c: Shape(2, 2, 1, 1, 2 * c.block_k), "NHD", wants_lse=False),
    "more_queries_than_keys": Call(lambda c: Shape(1, 1, 1, 2 * c.block_q + 3, c.block_k // 2 + 1), "gaps"),
    "self_attention": Call(lambda c: Shape(2, 1, 1, c.block_q + c.block_k // 2, c.block_q + c.block_k // 2), "fused"),
    "long": Call(lambda c: Shape(1, 1, 1, 17, 1100)),
    "scale_zero": Call(lambda c: Shape(1, 1, 1, 33, c.block_k + 33), scale=0.0),
    "scale_negative": Call(lambda c: Shape(1, 1, 1, 33, c.block_k + 33), "NHD", scale=-0.2),
    "scale_given": Call(lambda c: Shape(1, 1, 1, 33, c.block_k + 33), scale=0.4, wants_lse=False),
}


def make_inputs(variant, shape, layout="HND", alter=None, seed=0):
    inputs = draw_normal(shape, variant.problem.head_dim, torch.Generator().manual_seed(seed))
    if alter:
        alter(inputs, variant.problem.is_causal)
    return LAYOUTS[layout](inputs.map(lambda x: x.to(TORCH_DTYPES[variant.problem.dtype])))


def tensors(inputs):
    return inputs.q, inputs.k, inputs.v


def run_reference(variant, inputs, scale=None, accumulator=None, wants_lse=True):
    return quantized_attention(
        *tensors(inputs), variant.problem, variant.config,
        scale=scale, accumulator=accumulator or variant.accumulator, want_lse=wants_lse,
    )  # fmt: skip


def run_nearest_reference(variant, inputs, scale, wants_lse, out):
    """Of each row, the numerics with this scale, or one that differs in its last bit, whichever is nearest to `out`.

    The packed exponent rounds a row's score of P = 0 to a whole step. K's mean is summed in another order here and
    there, and where its last bit decides the rounding of a tie, both roundings are right (seen in 1 of 1,473 tests).
    """
    wanted, wanted_lse = run_reference(variant, inputs, scale, wants_lse=wants_lse)
    if not variant.config.bounds_steps or wants_lse or scale == 0:
        return wanted, wanted_lse
    scale = variant.problem.head_dim**-0.5 if scale is None else scale
    for ulps in (2, -2):
        other, _ = run_reference(variant, inputs, scale * (1 + ulps * 2**-23), wants_lse=wants_lse)
        is_nearer = (out.float() - other).norm(dim=-1) < (out.float() - wanted).norm(dim=-1)
        wanted = torch.where(is_nearer.unsqueeze(-1), other, wanted)
    return wanted, wanted_lse


def ways(config):
    """Whether calls that show all that a config does want the lse."""
    return (True, False) if config.lse_changes_output else (True,)


def check_close(out, lse, wanted, wanted_lse):
    """Rows must not hold NaN; `lse` may be None."""
    wanted = wanted.to(out.dtype).float()
    error = (out.float() - wanted).norm(dim=-1)
    size = wanted.norm(dim=-1)
    assert (error.norm() <= CALL_LIMIT * size.norm()).item(), f"off by {error.norm() / size.norm():.1e}"
    assert (error <= ROW_LIMIT * size).all(), f"a row is off by {(error / size).max():.1e}"
    if lse is not None:
        assert torch.equal(lse.isinf(), wanted_lse.isinf())
        error = (lse - wanted_lse).abs() / wanted_lse.abs().clamp_min(1)
        assert (error.masked_fill(lse == -math.inf, 0) <= LSE_LIMIT).all(), f"lse off by {error.max():.1e}"


def check_call(program, variant, inputs, scale=None, wants_lse=True):
    allocator = OutputWithGaps() if inputs.q.stride(2) > inputs.q.shape[3] else None
    call = bind_call(
        program, variant.problem, variant.config, *tensors(inputs),
        softmax_scale=scale, want_lse=wants_lse, allocator=allocator,
    )  # fmt: skip
    call.launch()
    check_close(call.out, call.lse, *run_nearest_reference(variant, inputs, scale, wants_lse, call.out))
    return call.out


# --- calls


@pytest.mark.parametrize("name", CALLS)
def test_call_computes_the_configs_numerics(variant, program, name):
    call = CALLS[name]
    inputs = make_inputs(variant, call.shape(variant.config), call.layout)
    blind = max(0, inputs.q.shape[2] - inputs.k.shape[2]) if variant.problem.is_causal else 0
    for wants_lse in {call.wants_lse, *ways(variant.config)}:
        out = check_call(program, variant, inputs, call.scale, wants_lse)
        assert (out[:, :, :blind] == 0).all()


def test_calls_reach_what_they_are_for(variants):
    shapes = [(v.config, v.problem.is_causal, call.shape(v.config)) for v in variants for call in CALLS.values()]
    for config, _, _ in shapes:
        keys = {s.kv_len for c, _, s in shapes if c == config}
        assert {1, config.block_k - 1, config.block_k, config.block_k + 1} <= keys
        assert max(keys) > 2 * config.stages * config.block_k, "stages are not used twice"
        assert max(keys) > 8 * SPLIT_TOKENS, "few splits"
    assert any(is_causal and s.q_len > s.kv_len for _, is_causal, s in shapes)
    assert {call.layout for call in CALLS.values()} == set(LAYOUTS)


#: Inputs that no other fault hides: what each is for stands in INPUT_KINDS.
KINDS = ("k_offset", "channel_offsets", "outliers", "v_constant", "v_zero_channel", "large_logits")


@pytest.mark.typical
@pytest.mark.parametrize("kind", KINDS)
def test_unusual_values(variant, program, kind):
    shape = Shape(1, 2, 2, variant.config.block_q // 2 + 3, variant.config.block_q + variant.config.block_k + 3)
    for wants_lse in ways(variant.config):
        check_call(program, variant, make_inputs(variant, shape, alter=INPUT_KINDS[kind].alter), wants_lse=wants_lse)


@pytest.mark.typical
def test_sums_may_reach_the_end_of_the_accumulators_range(variant, program):
    inputs = make_inputs(variant, Shape(1, 1, 1, 40, 2 * variant.config.block_k))
    inputs.q.zero_()  # equal weights of equal values: every P and every V is as large as can be
    inputs.v.fill_(60000.0 if variant.problem.dtype == "fp16" else 1e30)
    inputs.v[..., ::2].neg_()
    for wants_lse in ways(variant.config):
        out = check_call(program, variant, inputs, wants_lse=wants_lse)
        torch.testing.assert_close(out, inputs.v[:, :, :1].expand_as(out), rtol=0.01, atol=0)


@pytest.mark.typical
@pytest.mark.parametrize("zero", ["q", "k", "v"])
def test_zeros(variant, program, zero):
    inputs = make_inputs(variant, Shape(1, 1, 1, 40, variant.config.block_k + 9))
    getattr(inputs, zero).zero_()
    for wants_lse in ways(variant.config):
        out = check_call(program, variant, inputs, wants_lse=wants_lse)
        assert zero != "v" or not out.any()


# --- values that are not finite


def spoil(clean, bad, key):
    """`clean` with the `bad` values, one in a query of head 0, a key of head 1 and a value of head 2.

    Their rows of 0 in both.
    """
    spoiled = clean.map(torch.clone)
    places = ((3, clean.q[:, 0], spoiled.q[:, 0]), (key, clean.k[:, 1], spoiled.k[:, 1]),
              (key, clean.v[:, 2], spoiled.v[:, 2]))  # fmt: skip
    for value, (token, tensor, other) in zip(bad, places, strict=True):
        tensor[:, token] = other[:, token] = 0
        other[:, token, 5] = value
    return spoiled


#: Of a query, a key and a value. Each variant meets one of these, and so each value in one place.
BAD_VALUES = ((math.nan, math.inf, -math.inf), (math.inf, -math.inf, math.nan), (-math.inf, math.nan, math.inf))


@pytest.mark.typical
def test_bad_values_reach_the_rows_that_see_them(variant, variants, program):
    config, is_causal = variant.config, variant.problem.is_causal
    q_len, gap = config.block_q + 5, 7
    clean = make_inputs(variant, Shape(1, 4, 4, q_len, q_len + gap))
    bad = gap + q_len // 2  # when causal, half of the queries see it
    spoiled = spoil(clean, BAD_VALUES[variants.index(variant) % len(BAD_VALUES)], bad)
    out, lse = call_program(program, variant.problem, config, *tensors(spoiled), want_lse=True)

    exact, exact_lse = attention(*tensors(spoiled), is_causal=is_causal, return_lse=True)
    must, may = exact.isnan(), exact.isnan()
    if config.quantizes_v:
        must = may = must.any(-1, keepdim=True).expand_as(must)
    elif is_causal:  # a hidden value is multiplied by 0, if the row's tile reads it: NaN
        tile_ends = torch.arange(q_len) // config.block_q * config.block_q + config.block_q - 1
        may[0, 2, tile_ends + gap >= bad // config.block_k * config.block_k, 5] = True
    assert (out.isnan() | ~must).all()
    assert (may | ~out.isnan()).all()
    assert torch.equal(lse.isnan(), must.any(-1) if config.quantizes_v else exact_lse.isnan())
    assert not out.isinf().any()
    wanted, wanted_lse = run_reference(variant, clean)
    check_close(torch.where(out.isnan(), wanted.to(out.dtype), out), torch.where(lse.isnan(), wanted_lse, lse),
                wanted, wanted_lse)  # fmt: skip


@pytest.mark.typical
def test_values_that_are_not_finite_leave_no_trace_in_rows_that_do_not_see_them(variant, program):
    config = variant.config
    if not config.quantizes_v:
        pytest.skip("needs V quantized: a 16-bit V has no means or scales")
    clean = make_inputs(variant, Shape(1, 1, 1, config.block_q + 9, config.block_q + 9))
    clean.v.add_(3)  # 0 is far from all that is finite
    clean.v[:, :, -20:] = 0
    spoiled = clean.map(torch.clone)
    spoiled.v[:, :, -20:] = math.nan
    for wants_lse in ways(config):
        wanted, _ = call_program(program, variant.problem, config, *tensors(clean), want_lse=wants_lse)
        out, _ = call_program(program, variant.problem, config, *tensors(spoiled), want_lse=wants_lse)
        blind = out.shape[2] - 20 if variant.problem.is_causal else 0
        assert torch.equal(out[:, :, :blind], wanted[:, :, :blind])
        assert out[:, :, blind:].isnan().all()


@pytest.mark.typical
def test_rows_that_see_no_key_are_zero_whatever_they_meet(variant, program):
    queries, keys = variant.config.block_q + 7, 5
    q, k, v = (torch.full_like(x, math.nan) for x in tensors(make_inputs(variant, Shape(1, 1, 1, queries, keys))))
    v[..., 8:] = 0
    out, lse = call_program(program, variant.problem, variant.config, q, k, v, want_lse=True)
    blind = queries - keys if variant.problem.is_causal else 0
    assert (out[:, :, :blind] == 0).all()
    assert (lse[:, :, :blind] == -math.inf).all()
    assert out[:, :, blind:].isnan().all()
    assert lse[:, :, blind:].isnan().all()


def test_values_that_are_all_nan(variants, programs):
    variant = next(variant for variant in variants if variant.config.quantizes_v)
    inputs = make_inputs(variant, Shape(1, 1, 1, 40, 40))
    inputs.v[:] = math.nan  # several threads mark the same key
    out, _ = call_program(programs[variant], variant.problem, variant.config, *tensors(inputs))
    assert out.isnan().all()


# --- accumulators, determinism, draws


def test_fp8_products_have_the_accumulator_of_the_gpu(variants, programs):
    for variant in variants:
        if not variant.config.quantizes_v:
            continue
        inputs = make_inputs(variant, Shape(1, 1, 1, 64, 512))
        inputs.v.abs_()  # sums grow, and what is cut off them adds up
        if variant.config.smooths_v:  # up to the middle: as many keys have V below its mean
            inputs.v[:, :, 256:].neg_()
        # with the lse, so that P is by the exact exponent alone
        out, _ = call_program(programs[variant], variant.problem, variant.config, *tensors(inputs), want_lse=True)
        distance = {}
        for accumulator in ("fp22", "fp32", "fp16", "fp16_halves") if variant.config.sums_in_fp16 else ("fp22", "fp32"):
            wanted, _ = run_reference(variant, inputs, accumulator=accumulator)
            distance[accumulator] = (out.float() - wanted.to(out.dtype).float()).norm().item()
        right = distance.pop(variant.accumulator)
        # roundings to FP16 do not add up as cuts do: beside them one of bf16's roundings weighs more, measured 1/8.9
        assert right < min(distance.values()) / (5 if variant.config.sums_in_fp16 else 10), variant.name


@pytest.mark.typical
def test_results_are_the_same_bits_every_time_and_on_any_number_of_workers(variant, program):
    inputs = make_inputs(variant, Shape(1, 1, 1, variant.config.block_q + 1, 200))
    for wants_lse in ways(variant.config):
        runs = [
            call_program(runner, variant.problem, variant.config, *tensors(inputs), want_lse=wants_lse)
            for runner in (program, program, replace(program, workers=1))
        ]
        for out, lse in runs[1:]:
            assert torch.equal(out, runs[0][0])
            assert lse is None or torch.equal(lse, runs[0][1])


@given(st.data())
@settings(max_examples=30)
def test_any_call(variants, programs, data):
    variant = data.draw(st.sampled_from(variants), "variant")
    layout = data.draw(st.sampled_from(list(LAYOUTS)), "layout")
    batch, heads_kv, group = (data.draw(st.integers(1, most), name) for most, name in ((2, "b"), (2, "h"), (3, "g")))
    q_len, kv_len = data.draw(st.integers(1, 150), "q_len"), data.draw(st.integers(1, 300), "kv_len")
    shape = Shape(batch, heads_kv * group, heads_kv, q_len, q_len if layout == "fused" else kv_len)
    scale = data.draw(st.none() | st.floats(-0.5, 0.5, width=32), "scale")
    inputs = make_inputs(variant, shape, layout, seed=data.draw(st.integers(0, 9), "seed"))
    check_call(programs[variant], variant, inputs, scale, data.draw(st.booleans(), "wants_lse"))
