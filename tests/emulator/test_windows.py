"""Sliding windows in the emulator: by the public API, and kernel against kernel."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sagegen
from exact_attention import attend, seen_keys
from ragged_calls import check_close
from relative_variants import DEFAULTS, windowed_variants
from sagegen.abi import NO_LIMIT
from sagegen.emulator.program import load_emulated
from sagegen.env import read_env
from sagegen.gpu import GPUS
from sagegen.measuring.call import call_program
from sagegen.problem import Problem
from sagegen.rules import Target, broken_rules, default_config
from sagegen.runtime.dispatch import Dispatcher
from sagegen.runtime.machine import CudaRuntime
from sagegen.runtime.options import Options

pytestmark = pytest.mark.emulator

SIDES = st.sampled_from((-1, 0, 1, 5, 63, 64, 65, 1000, 2**31 - 1, 2**40)) | st.integers(0, 150)


def draw(q_len, kv_len, heads=(2, 1), dim=64, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = functools.partial(torch.randn, generator=generator)
    return (
        make(1, heads[0], q_len, dim).to(dtype),
        make(1, heads[1], kv_len, dim).to(dtype) + 1,
        make(1, heads[1], kv_len, dim).to(dtype),
    )


def exact(q, k, v, is_causal, window):
    return attend(q, k, v, seen_keys(q.shape[2], k.shape[2], is_causal, window), q.shape[-1] ** -0.5)


def check(q, k, v, *, is_causal=False, window, **options):
    """By the API, against FP64; what was answered comes back."""
    out, lse = sagegen.attention(
        q, k, v, is_causal=is_causal, window=window, return_lse=True, backend="emulator", **options
    )
    assert sagegen.last_dispatch().answer == "emulator"
    check_close(out, lse, *exact(q, k, v, is_causal, window))
    return out, lse


@functools.cache
def load(gpu_name, problem):
    gpu = GPUS[gpu_name]
    return load_emulated(problem, default_config(Target(gpu, problem)), gpu, read_env())


def run(program, q, k, v, window=None):
    """Output and lse of a kernel itself."""
    return call_program(program, program.problem, program.config, q, k, v, want_lse=True, window=window)


# --- who sees what


@settings(max_examples=15)
@given(
    sides=st.tuples(SIDES, SIDES),
    is_causal=st.booleans(),
    q_len=st.sampled_from((1, 40, 64, 129)),
    kv_len=st.sampled_from((1, 70, 128, 200)),
    seed=st.integers(0, 99),
)
def test_drawn_windows(sides, is_causal, q_len, kv_len, seed):
    check(*draw(q_len, kv_len, seed=seed), is_causal=is_causal, window=sides)


@pytest.mark.parametrize(("q_len", "kv_len"), [(70, 200), (200, 70)], ids=str)
@pytest.mark.parametrize("window", [(10, 3), (0, 0), (3, -1), (-1, 7)], ids=str)
def test_a_window_is_aligned_bottom_right(q_len, kv_len, window):
    """The last query stands at the last key; those that stand before the first key may see nothing."""
    out, lse = check(*draw(q_len, kv_len), window=window)
    blind = max(0, q_len - kv_len - window[1]) if window[1] != -1 else 0
    assert (lse == -math.inf).sum(-1).eq(blind).all()
    assert not out[:, :, :blind].any()


def test_only_its_own_key():
    """Each output is a value, up to how it is rounded."""
    q, k, v = draw(130, 130, heads=(1, 1))
    out, _ = check(q, k, v, window=(0, 0))
    assert (out - v).abs().max() < 0.3
    assert (out - v).norm() < 0.05 * v.norm()


def test_tiles_of_queries_that_see_nothing_at_all():
    """200 queries before 3 keys: the first of their tiles has no key to read."""
    q, k, v = draw(200, 3)
    program = load("l20", Problem(64, "fp16", False, is_windowed=True))
    for right in (0, 1):
        out, lse = run(program, q, k, v, (2, right))
        assert not out[:, :, : 197 - right].any()
        assert (lse[:, :, : 197 - right] == -math.inf).all()
        assert lse[:, :, 197 - right :].isfinite().all()


@pytest.mark.parametrize("gpu_name", DEFAULTS)
@pytest.mark.parametrize("window", [(20, 5), (70, 0), (0, 130), (100, 100)], ids=str)
def test_tiles_before_and_after_the_window_are_not_read(gpu_name, window):
    """NaN in every key of tiles that no row of a query tile sees, so that reading one would show."""
    problem = Problem(64, "bf16", False, is_windowed=True)
    program = load(gpu_name, problem)
    q, k, v = draw(128, 700, dtype=torch.bfloat16)
    block = program.config.block_k
    at = torch.arange(128) + 700 - 128
    first, last = max(0, at[0].item() - window[0]), min(699, at[-1].item() + window[1])
    k[:, :, : first // block * block] = math.nan
    v[:, :, : first // block * block] = math.nan
    k[:, :, (last // block + 1) * block :] = math.nan
    v[:, :, (last // block + 1) * block :] = math.nan
    assert first // block > 0
    out, lse = run(program, q, k, v, window)
    assert out.isfinite().all()
    check_close(out, lse, *exact(q, k, v, False, window))


@pytest.mark.parametrize("window", [(40, 10), (5, -1), (-1, 3), (0, 0), (200, 200)], ids=str)
def test_many_tiles_of_queries_and_keys(window):
    check(*draw(300, 420), window=window)


@pytest.mark.parametrize(("problem", "config"), windowed_variants(), ids=lambda value: value.name)
def test_other_ways_through_the_wgmma_loop(problem, config):
    """Whole tiles first, then those at both ends: many of each, none of some, and keys that are not finite."""
    gpu = GPUS["h200"]
    assert not broken_rules(config, Target(gpu, problem))
    program = load_emulated(problem, config, gpu, read_env())
    for window, q_len, kv_len in (((300, 40), 250, 600), ((90, 9), 400, 200), ((0, 0), 70, 90)):
        q, k, v = draw(q_len, kv_len, heads=(2, 2), dtype=torch.bfloat16)
        k[0, 0, kv_len // 2, 1], v[0, 1, 3, 2] = math.nan, math.inf
        for want_lse in (True, False):  # with an lse a tile's sums are made otherwise
            out, lse = call_program(program, problem, config, q, k, v, want_lse=want_lse, window=window)
            expected, expected_lse = exact(q, k, v, False, window)
            check_close(out, lse if want_lse else None, expected, expected_lse)


# --- what is not finite


@pytest.mark.parametrize("gpu_name", DEFAULTS)
@pytest.mark.parametrize("window", [(30, 12), (0, 0), (-1, 4), (9, -1)], ids=str)
def test_what_is_not_finite_reaches_the_rows_whose_window_holds_it(gpu_name, window):
    """Several bad keys, in one tile and in others, the first of them outside of most windows."""
    problem = Problem(64, "fp16", False, is_windowed=True)
    q, k, v = draw(150, 210, heads=(2, 2))
    q[0, 0, 100, 3] = math.nan
    for key, bad in ((2, math.nan), (120, math.inf), (121, -math.inf), (150, math.nan)):
        k[0, 1, key, 5] = bad
    v[0, 0, 90, 7], v[0, 0, 5, 9] = math.nan, math.inf
    program = load(gpu_name, problem)
    out, lse = run(program, q, k, v, window)
    expected, expected_lse = exact(q, k, v, False, window)
    check_close(out, lse, expected, expected_lse, None if program.config.quantizes_v else v)
    assert lse.isfinite().any() or window[0] == -1


# --- kernels side by side


@pytest.mark.parametrize(
    ("gpu_name", "is_causal", "windows"),
    [
        ("l20", False, [(-1, -1), (1000, 1000), (2**62, -1)]),
        ("l20", True, [(-1, 0), (1000, 0), (NO_LIMIT, 0)]),
        ("a100", True, [(-1, 0), (1000, 0)]),
        ("h200", False, [(-1, -1), (1000, 1000)]),
        ("h200", True, [(-1, 0), (1000, 0)]),
    ],
    ids=["l20-full", "l20-causal", "a100-causal", "h200-full", "h200-causal"],
)
def test_a_window_as_wide_as_everything_is_the_dense_kernel_bit_for_bit(gpu_name, is_causal, windows):
    windowed = Problem(64, "fp16", False, is_windowed=True)
    dense = Problem(64, "fp16", is_causal)
    q, k, v = draw(150, 210, heads=(4, 2))
    k[0, 1, 100, 3] = math.nan
    one, other = load(gpu_name, dense), load(gpu_name, windowed)
    assert one.config == other.config
    expected = run(one, q, k, v)
    for window in windows:
        for x, y in zip(run(other, q, k, v, window), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("window", [(40, 3), (-1, 64), (0, 0)], ids=str)
def test_queries_can_be_smoothed_too(window):
    check(*draw(150, 210), window=window, smooth_q=True)
    assert sagegen.last_dispatch().config.smooths_q


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_precisions(precision):
    q, k, v = draw(70, 130, dtype=torch.bfloat16)
    out = sagegen.attention(
        q, k, v, window=(50, 20), precision=precision, min_cosine=0.9, smooth_v=False, backend="emulator"
    )
    wanted, _ = exact(q, k, v, False, (50, 20))
    assert sagegen.last_dispatch().problem == Problem(64, "bf16", False, precision, is_windowed=True)
    assert (out - wanted).norm() < {"int8": 0.05, "int4": 0.25}[precision] * wanted.norm()


@pytest.mark.parametrize(
    ("is_causal", "window", "mask"),
    [
        (False, (-1, -1), "full"),
        (False, (-1, 0), "causal"),
        (True, (-1, -1), "causal"),
        (True, (-1, 9), "causal"),
        (True, (3, 9), "window"),
        (False, (0, -1), "window"),
    ],
)
def test_a_window_that_other_words_can_say_is_theirs(is_causal, window, mask):
    check(*draw(20, 40), is_causal=is_causal, window=window)
    assert sagegen.last_dispatch().problem.mask == mask


def test_a_window_in_parts_gives_the_bits_of_the_whole():
    q, k, v = draw(70, 150, heads=(4, 2))
    options = Options(window=(20, 3), return_lse=True, backend="emulator")
    values = [getattr(options, name) for name in Options.__slots__]
    results = []
    for limit in (1 << 30, 1):
        dispatcher = Dispatcher(CudaRuntime(), lambda limit=limit: replace(read_env(), workspace_limit=limit))
        results.append(dispatcher.attention(q, k, v, None, None, *values))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
