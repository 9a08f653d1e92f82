"""Calls whose scratch exceeds the limit: which parts they run in, and where these begin."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagegen.abi import unpack_constants
from sagegen.gpu import GPUS
from sagegen.plan import Strides, TensorStrides, make_plan
from sagegen.problem import Problem, Shape
from sagegen.rules import Target, default_config
from sagegen.runtime.arguments import read_strides
from sagegen.runtime.splitting import Part, plan_parts, prepare_parts, split, workspace_bytes

MIB = 1 << 20
PROBLEM = Problem(64, "fp16", False)
CONFIGS = [default_config(Target(GPUS[name], PROBLEM)) for name in ("l20", "h200")]

shapes = st.builds(
    lambda batch, group, heads_kv: Shape(batch, group * heads_kv, heads_kv, 100, 300),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 9),
)


def heads_of(shape: Shape) -> int:
    """A need of one byte per query head of all batch items."""
    return shape.batch * shape.heads_q


@given(shapes, st.integers(0, 400))
def test_parts_take_every_head_once_in_order_and_keep_within_the_limit(shape, limit):
    parts = split(shape, heads_of, limit)
    taken = [pair for part in parts for pair in itertools.product(part.batch, part.heads_kv)]
    assert taken == list(itertools.product(range(shape.batch), range(shape.heads_kv)))
    group = shape.heads_q // shape.heads_kv
    for part in parts:
        size = len(part.batch) * len(part.heads_kv) * group
        assert size == heads_of(part.shape(shape))
        assert size <= limit or (len(part.batch), len(part.heads_kv)) == (1, 1)


@given(shapes, st.integers(0, 400))
def test_heads_are_split_only_where_one_batch_item_is_too_much(shape, limit):
    parts = split(shape, heads_of, limit)
    if shape.heads_q <= limit:
        assert all(part.heads_kv == range(shape.heads_kv) for part in parts)
    else:
        assert all(len(part.batch) == 1 for part in parts)


@pytest.mark.parametrize(
    ("limit", "parts"),
    [
        (40, [(range(5), range(2))]),
        (39, [(range(3), range(2)), (range(3, 5), range(2))]),  # 3 and 2 items, not 4 and 1
        (8, [(range(i, i + 1), range(2)) for i in range(5)]),
        (7, [(range(i, i + 1), range(h, h + 1)) for i in range(5) for h in range(2)]),
        (0, [(range(i, i + 1), range(h, h + 1)) for i in range(5) for h in range(2)]),  # cannot be split further
    ],
)
def test_parts_by_hand(limit, parts):
    shape = Shape(batch=5, heads_q=8, heads_kv=2, q_len=1, kv_len=1)
    assert split(shape, heads_of, limit) == tuple(itertools.starmap(Part, parts))


def strides_of(shape: Shape, layout: str) -> TensorStrides:
    def empty(heads: int, tokens: int) -> torch.Tensor:
        sizes = (heads, tokens) if layout == "HND" else (tokens, heads)
        return torch.empty(shape.batch, *sizes, PROBLEM.head_dim, dtype=torch.float16, device="meta")

    k = empty(shape.heads_kv, shape.kv_len)
    q = empty(shape.heads_q, shape.q_len)
    return read_strides(q, k, k, q, layout)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
@given(shape=shapes, limit=st.integers(0, 4 * MIB))
def test_every_part_begins_at_its_first_batch_item_and_head(layout, config, shape, limit):
    """The offsets are those that torch gives the views of a part."""
    parts = plan_parts(PROBLEM, config, shape, strides_of(shape, layout), 1.0, True, limit)
    pieces = split(shape, lambda s: _needs(config, shape, s), limit)
    q = torch.empty(shape.batch, shape.heads_q, shape.q_len, 64, dtype=torch.float16, device="meta")
    k = torch.empty(shape.batch, shape.heads_kv, shape.kv_len, 64, dtype=torch.float16, device="meta")
    if layout == "NHD":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    lse = torch.empty(shape.batch, shape.heads_q, shape.q_len, dtype=torch.float32, device="meta")
    group = shape.heads_q // shape.heads_kv
    for part, piece in zip(parts, pieces, strict=True):
        item, head = piece.batch.start, piece.heads_kv.start
        query, key = q[item:, head * group :], k[item:, head:]
        out = [x.storage_offset() * 2 for x in (query, key, key, query)]
        assert part.offsets == (*out, lse[item:, head * group :].storage_offset() * 4)


def _needs(config, whole: Shape, part: Shape) -> int:
    strides = Strides(0, 0, 0)
    all_strides = TensorStrides(strides, strides, strides, strides)
    return make_plan(PROBLEM, config, part, all_strides, 1.0, True, whole=whole).workspace_bytes


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
@given(shape=shapes, kv_len=st.sampled_from((300, 100_000)), limit=st.integers(MIB // 8, 64 * MIB))
def test_parts_share_scratch_within_the_limit_and_sum_up_alike(config, shape, kv_len, limit):
    shape = replace(shape, kv_len=kv_len)
    whole = make_plan(PROBLEM, config, shape, strides_of(shape, "HND"), 1.0, False)
    parts = plan_parts(PROBLEM, config, shape, strides_of(shape, "HND"), 1.0, False, limit)
    if whole.workspace_bytes <= limit:
        assert [part.plan for part in parts] == [whole]
    else:
        assert len(parts) > 1 or (shape.batch, shape.heads_kv) == (1, 1)
        single = _needs(config, shape, Shape(1, shape.heads_q // shape.heads_kv, 1, shape.q_len, shape.kv_len))
        assert workspace_bytes(parts) <= max(limit, single)
    # another order of additions would give other bits
    tokens = {unpack_constants(part.plan.constants)["split_tokens"] for part in parts}
    assert tokens == {unpack_constants(whole.constants)["split_tokens"]}


class Recorder:
    """A loaded program that notes what its calls are launched with."""

    config, device = CONFIGS[0], 0

    def __init__(self) -> None:
        self.prepared: list[object] = []
        self.launches: list[tuple[object, tuple[int, ...]]] = []

    def prepare(self, plan):
        self.prepared.append(plan)
        recorder = self

        class Call:
            def launch(self, *addresses: int) -> None:
                recorder.launches.append((plan, addresses))

        return Call()


def test_parts_are_launched_in_order_on_one_workspace_and_equal_plans_prepared_once():
    shape = Shape(batch=3, heads_q=4, heads_kv=2, q_len=100, kv_len=300)
    program = Recorder()
    parts = plan_parts(PROBLEM, CONFIGS[0], shape, strides_of(shape, "HND"), 1.0, False, 0)
    prepare_parts(program, parts).launch(1000, 2000, 3000, 4000, 0, 5000, 7)
    assert len(program.prepared) == 1
    q_head, k_head = 100 * 64 * 2, 300 * 64 * 2
    assert [addresses for _, addresses in program.launches] == [
        (1000 + 2 * i * q_head, 2000 + i * k_head, 3000 + i * k_head, 4000 + 2 * i * q_head, 0, 5000, 7)
        for i in range(6)
    ]


def test_a_call_that_is_not_split_is_its_plans_own():
    shape = Shape(batch=1, heads_q=2, heads_kv=2, q_len=100, kv_len=300)
    program = Recorder()
    call = prepare_parts(program, plan_parts(PROBLEM, CONFIGS[0], shape, strides_of(shape, "HND"), 1.0, False, MIB))
    call.launch(1, 2, 3, 4, 5, 6, 7)
    assert [addresses for _, addresses in program.launches] == [(1, 2, 3, 4, 5, 6, 7)]


@pytest.mark.parametrize(("config", "tokens"), list(zip(CONFIGS, (12_544, 25_088), strict=True)))
def test_a_part_adds_statistics_up_as_the_whole_would(config, tokens):
    """1,024 blocks over 128 heads of K, or of K and V, are 8 or 4 splits; one batch item alone would have 16."""
    shape = Shape(batch=4, heads_q=32, heads_kv=32, q_len=100, kv_len=100_000)
    parts = plan_parts(PROBLEM, config, shape, strides_of(shape, "HND"), 1.0, False, 512 * MIB)
    assert len(parts) == 4
    assert {unpack_constants(part.plan.constants)["split_tokens"] for part in parts} == {tokens}
