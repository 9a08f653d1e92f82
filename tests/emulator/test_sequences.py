"""Kernels for sequences of their own lengths: each sequence is what it is alone, whatever lies beside it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sagegen
from ragged_calls import UNTOUCHED, BoundRagged, RaggedCall, bind_ragged, check_ragged, draw_ragged, run_ragged
from relative_variants import DEFAULTS, MASKS, problem_of, ragged_variants
from sagegen.emulator.program import load_emulated
from sagegen.env import read_env
from sagegen.errors import EmulatorError
from sagegen.gpu import GPUS
from sagegen.measuring.call import call_program
from sagegen.problem import Problem
from sagegen.rules import Target, broken_rules, default_config
from sagegen.space import parse_config

pytestmark = pytest.mark.emulator

KINDS = [(gpu, mask) for gpu in DEFAULTS for mask in MASKS]
WINDOW = (40, 9)
#: Around edges of query tiles, of 128 and 192 rows, and of key tiles, of 64 to 256 keys, with nothing on either side.
#: The first has more tiles than the second, so that they would meet in scratch if each counted from its own number.
EDGES_Q = (193, 1, 0, 65, 5, 7)
EDGES_KV = (129, 70, 64, 130, 0, 1)


VARIANTS = ragged_variants()


@functools.cache
def load(gpu_name: str, problem: Problem, config_name: str | None = None):
    """A program of the GPU's default config, or of another."""
    target = Target(GPUS[gpu_name], problem)
    config = default_config(target) if config_name is None else parse_config(config_name)
    assert not broken_rules(config, target)
    return load_emulated(problem, config, target.gpu, read_env())


def window_of(problem: Problem) -> tuple[int, int] | None:
    return WINDOW if problem.is_windowed else None


def check(
    gpu_name: str, problem: Problem, call: RaggedCall, config_name: str | None = None, *, want_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, held to attention in FP64."""
    program = load(gpu_name, problem, config_name)
    out, lse = run_ragged(program, problem, call, want_lse=want_lse)
    check_ragged(program, problem, call, out, lse if want_lse else None)
    assert want_lse or (lse == UNTOUCHED).all()
    return out, lse


def alone(gpu_name: str, problem: Problem, call: RaggedCall) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Output, HND, and lse of every sequence by the dense kernel of the same config."""
    dense = replace(problem, is_ragged=False)
    program = load(gpu_name, dense, load(gpu_name, problem).config.name)
    for rows, keys in zip(call.rows, call.keys, strict=True):
        q, k, v = (x[at][None].transpose(1, 2) for x, at in ((call.q, rows), (call.k, keys), (call.v, keys)))
        out, lse = call_program(program, dense, program.config, q, k, v, want_lse=True)
        yield out[0], lse[0]


# --- by the public API


def fused(tokens: int, *, offset: int) -> tuple[torch.Tensor, ...]:
    """q, k, v as slices of one buffer, of which the first element lies `offset` elements behind an aligned address."""
    whole = torch.randn(tokens * 3 * 2 * 64 + offset, generator=torch.Generator().manual_seed(3)).bfloat16()
    return whole[offset:].view(tokens, 3, 2, 64).unbind(1)


@pytest.mark.parametrize("offset", [0, 1])
def test_strided_inputs_at_odd_addresses_are_copied_and_planned_anew(offset):
    """After a call of the same shapes and strides whose addresses were even, and with an output given."""
    starts = torch.tensor([0, 15, 40], dtype=torch.int32)
    for own in (0, offset):
        q, k, v = fused(40, offset=own)
        for out in (None, torch.empty_like(q)):
            answer = sagegen.attention_varlen(q, k, v, starts, starts, 40, 40, out=out, backend="emulator")
            exact = sagegen.attention_varlen(q, k, v, starts, starts, 40, 40, backend="reference")
            assert (answer - exact).float().norm() < 0.05 * exact.float().norm()
        mask = torch.arange(40) < 30
        inputs = [x[None] for x in (q, k, v)]
        answer = sagegen.attention(*inputs, layout="NHD", attn_mask=mask[None, None, None], backend="emulator")
        exact = sagegen.attention(*(x[:, :30] if i else x for i, x in enumerate(inputs)), layout="NHD")
        assert (answer - exact).float().norm() < 0.05 * exact.float().norm()


def test_a_cast_call_with_a_mask_is_remembered_without_it():
    q, k, v = (x[None] for x in fused(40, offset=0))
    for seen in (30, 5):
        mask = (torch.arange(40) < seen)[None, None, None]
        given = (q.float(), k.float(), v)
        answer = sagegen.attention(*given, layout="NHD", attn_mask=mask, backend="emulator")
        exact = sagegen.attention(q, k[:, :seen], v[:, :seen], layout="NHD")
        assert answer.dtype == torch.bfloat16
        assert (answer - exact).float().norm() < 0.05 * exact.float().norm()


# --- what is computed


@pytest.mark.parametrize(("gpu_name", "mask"), KINDS)
def test_sequences_of_lengths_around_tile_edges(gpu_name, mask):
    """NaN before, between and after them; rows of outputs there stay as they were."""
    problem = problem_of(gpu_name, mask)
    call = draw_ragged(problem, EDGES_Q, EDGES_KV, (4, 2), gap=3, window=window_of(problem))
    check(gpu_name, problem, call)


@pytest.mark.parametrize("gpu_name", DEFAULTS)
def test_the_output_is_the_same_without_an_lse(gpu_name):
    problem = problem_of(gpu_name, "causal")
    call = draw_ragged(problem, (70, 0, 5), (70, 3, 90))
    assert torch.equal(check(gpu_name, problem, call)[0], check(gpu_name, problem, call, want_lse=False)[0])


@pytest.mark.parametrize(("problem", "config"), VARIANTS, ids=lambda value: value.name)
def test_other_ways_through_the_wgmma_loop(problem, config):
    assert config.q_quantizer == "kernel"
    call = draw_ragged(problem, (1, 0, 130, 66), (129, 70, 300, 0), gap=2)
    check("h200", problem, call, config.name)
    if config.exponent == "packed":  # with an lse a tile's sums are made otherwise
        check("h200", problem, call, config.name, want_lse=False)


def test_the_variants_are_all_that_a_loop_can_be():
    configs = [config for _, config in VARIANTS]
    for name, wanted in (
        ("schedule", {"plain", "overlap"}),
        ("accumulation", {"one", "two"}),
        ("row_sum", {"ones", "fadd"}),
        ("launch", {"early", "serial"}),
        ("rescale", {"always", "skip"}),
        ("exponent", {"packed", "mufu", "mixed4"}),
    ):
        assert {getattr(config, name) for config in configs} >= wanted, name


LENGTH = st.sampled_from((0, 1, 2, 31, 63, 64, 65, 127, 129)) | st.integers(0, 140)


@pytest.mark.parametrize("gpu_name", ["l20", "h200"])
@settings(max_examples=8)
@given(
    lengths=st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=6),
    gap=st.integers(0, 70),
    is_packed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_drawn_lengths(gpu_name, lengths, gap, is_packed, seed):
    problem = problem_of(gpu_name, "window" if gpu_name == "l20" else "causal")
    window = window_of(problem)
    check(
        gpu_name,
        problem,
        draw_ragged(problem, *zip(*lengths, strict=True), gap=gap, is_packed=is_packed, seed=seed, window=window),
    )


@pytest.mark.parametrize(("gpu_name", "mask"), [("l20", "window"), ("a100", "full"), ("h200", "causal")])
def test_sequences_with_memory_of_their_own(gpu_name, mask):
    """Padding behind each holds NaN."""
    problem = problem_of(gpu_name, mask)
    window = window_of(problem)
    check(
        gpu_name,
        problem,
        draw_ragged(problem, (70, 0, 9, 3), (65, 9, 130, 0), (4, 2), gap=5, is_packed=False, window=window),
    )


@pytest.mark.parametrize("gpu_name", DEFAULTS)
def test_packed_sequences_are_bit_for_bit_those_of_the_dense_kernel(gpu_name):
    """Where statistics of K and V are added up over the same ranges of tokens, of 128 here."""
    problem = problem_of(gpu_name, "full")
    call = draw_ragged(problem, (70, 5, 20), (90, 300, 1))
    results = run_ragged(load(gpu_name, problem), problem, call)
    for i, (out, lse) in enumerate(alone(gpu_name, problem, call)):
        found, found_lse = call.of_rows(*results, i)
        assert torch.equal(found, out)
        assert torch.equal(found_lse, lse)


def test_statistics_over_other_ranges_move_less_than_a_step():
    """Beside 2,500 keys the 300 are added up in ranges of 256, and K's mean may differ in its last bit. Measured: 0."""
    problem = problem_of("l20", "full")
    call = draw_ragged(problem, (20, 3), (300, 2500))
    results = run_ragged(load("l20", problem), problem, call)
    for i, (out, lse) in enumerate(alone("l20", problem, call)):
        found, found_lse = call.of_rows(*results, i)
        assert (found.double() - out.double()).norm() <= 1e-3 * out.double().norm()
        torch.testing.assert_close(found_lse, lse, rtol=0, atol=1e-3)


# --- each by itself


@pytest.mark.parametrize("gpu_name", DEFAULTS)
def test_every_sequence_has_the_mean_of_its_own_keys(gpu_name):
    """Offsets of K that differ by sequence cost nothing; a mean over all would leave a step of INT8 for all values."""
    problem = problem_of(gpu_name, "full")
    call = draw_ragged(problem, (40, 30, 20), (60, 70, 50))
    for i, keys in enumerate(call.keys):
        call.k[keys] += torch.linspace(-60, 60, problem.head_dim)[None, None] * (i - 1)
    check(gpu_name, problem, call)


@pytest.mark.parametrize(("gpu_name", "mask"), KINDS)
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_other_sequence(gpu_name, mask):
    problem = problem_of(gpu_name, mask)
    call = draw_ragged(problem, (70, 66, 40), (70, 130, 40), (4, 2), window=window_of(problem))
    q, k, v = call.q[call.rows[1]], call.k[call.keys[1]], call.v[call.keys[1]]
    q[20, 1, 5], k[110, 1, 7], v[75, 0, 3] = math.nan, math.inf, -math.inf
    results = check(gpu_name, problem, call)
    bad = [not call.of_rows(*results, i)[0].isfinite().all() for i in range(3)]
    assert bad == [False, True, False]


@pytest.mark.parametrize("gpu_name", DEFAULTS)
def test_a_sequence_of_nan_leaves_the_bits_of_others_alone(gpu_name):
    problem = problem_of(gpu_name, "full")
    call = draw_ragged(problem, (70, 30, 40), (70, 30, 40))
    before = run_ragged(load(gpu_name, problem), problem, call)
    for x, at in ((call.q, call.rows), (call.k, call.keys), (call.v, call.keys)):
        x[at[1]] = math.nan
    after = run_ragged(load(gpu_name, problem), problem, call)
    for i in (0, 2):
        for one, other in zip(call.of_rows(*before, i), call.of_rows(*after, i), strict=True):
            assert torch.equal(one, other)
    assert call.of_rows(*after, 1)[0].isnan().all()


# --- tables that say nonsense

#: Sequences of which no two have a row or a key in common, once they are cut to what there is.
APART = {
    "negative": [[-5, 30, -(2**31), 30], [30, 60, 30, -7], [60, -9, 60, -3]],
    "beyond": [[0, 40, 0, 50], [40, 2**30, 50, 2**31 - 1], [95, 500, 90, 400]],
    "late": [[10, 40, 20, 50], [40, 60, 50, 70], [60, 89, 80, 89]],
    "too_long": [[0, 0, 0, 90], [0, 90, 90, 90], [90, 90, 90, 90]],
    "backwards": [[60, 90, 60, 90], [30, 60, 30, 60], [0, 30, 0, 30]],
    "nowhere": [[2**31 - 1] * 4, [-(2**31)] * 4, [2**31 - 1, -(2**31)] * 2],
}
#: Others meet in one place, of outputs or scratch. That is all that may be wrong with them.
MEETING = {
    "falling": [[0, 50, 0, 60], [50, 20, 60, 10], [20, 90, 10, 90]],
    "all": [[0, 90, 0, 90]] * 3,
    "everything": [[-(2**31), 2**31 - 1] * 2] * 3,
}
NUMBER = st.sampled_from((0, 90, -(2**31), 2**31 - 1)) | st.integers(-5, 100)


@pytest.mark.parametrize("gpu_name", DEFAULTS)
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "apart"])
def test_a_table_of_nonsense_touches_no_memory_outside(gpu_name, is_packed):
    """The emulator knows where every tensor ends; of a call it tells the first that is wrong."""
    problem = problem_of(gpu_name, "causal")
    call = draw_ragged(problem, (30, 30, 30), (30, 30, 30), is_packed=is_packed)
    if not is_packed:
        call.q[:], call.k[:], call.v[:] = 1, 1, 1
    bound = bind_ragged(load(gpu_name, problem), problem, call)
    for table in APART.values():
        call.table.copy_(torch.tensor(table))
        bound.launch()
    for table in MEETING.values():
        call.table.copy_(torch.tensor(table))
        launch_meeting(bound)


@pytest.mark.parametrize("gpu_name", DEFAULTS)
@pytest.mark.parametrize("first", [300, 770, 800])
def test_slots_before_the_first_sequence_hold_no_tile(gpu_name, first):
    """Tokens that no sequence has: more than a slot of queries, in which the first one would have tiles below 0."""
    problem = problem_of(gpu_name, "full")
    call = draw_ragged(problem, (400, 400), (30, 30))
    call.table.copy_(torch.tensor([[first, 800, 0, 30], [800, 800, 30, 60]]))
    launch_meeting(bind_ragged(load(gpu_name, problem), problem, call))


@pytest.mark.parametrize("gpu_name", ["l20", "h200"])
@settings(max_examples=10)
@given(st.lists(st.lists(NUMBER, min_size=4, max_size=4), min_size=3, max_size=3))
def test_drawn_tables_touch_no_memory_outside(gpu_name, table):
    problem = problem_of(gpu_name, "causal")
    call = draw_ragged(problem, (30, 30, 30), (30, 30, 30))
    call.table.copy_(torch.tensor(table))
    launch_meeting(bind_ragged(load(gpu_name, problem), problem, call))


def launch_meeting(bound: BoundRagged) -> None:
    """Launch sequences that may be in each other's way: blocks write one place, or read what another did not write."""
    try:
        bound.launch()
    except EmulatorError as error:
        if error.kind not in ("race", "uninitialized"):
            raise
