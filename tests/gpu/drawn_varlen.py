"""Calls of `sagegen.attention_varlen` that hypothesis draws, and the check that takes each again from its fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import strategies as st

import sagegen
from drawn_calls import MEMORIES, SCALES, SEEDS, SIDES
from drawn_checks import check_lse, check_output
from exact_attention import attend, seen_keys, usual_norm

#: Where tensors may lie: the row of all tokens is a batch of one here.
_MEMORIES = tuple(name for name in MEMORIES if not name.startswith(("one_", "fused", "batches")))


@dataclass(frozen=True, slots=True)
class DrawnSequences:
    """One call.

    Attributes:
        lengths: queries and keys, by sequence.
        group: query heads per head of keys.
        memory: where q, k, v and the output lie; None: no output is given.
        slack: of the longest lengths, beyond what they must be.
        seed: of the values.
    """

    lengths: tuple[tuple[int, int], ...]
    heads_kv: int
    group: int
    head_dim: int
    dtype: str
    memory: tuple[str, str, str, str | None]
    is_causal: bool
    window: tuple[int, int] | None
    scale: float | None
    return_lse: bool
    slack: int
    seed: int


@st.composite
def drawn_sequences(
    draw: st.DrawFn,
    *,
    longest: int,
    most: int,
    head_dims: st.SearchStrategy[int],
    dtypes: Sequence[str],
    most_group: int,
) -> DrawnSequences:
    """Up to `most` sequences of `longest` tokens at most on either side; one in six or so has none on one."""
    edges = st.sampled_from([n for n in (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257) if n <= longest])
    length = st.sampled_from((0, *[1] * 3, *[2] * 2)).flatmap(
        lambda kind: (st.just(0), st.integers(1, longest), edges)[kind]
    )
    place = st.sampled_from(("contiguous", *_MEMORIES))
    return DrawnSequences(
        lengths=tuple(draw(st.lists(st.tuples(length, length), min_size=1, max_size=most))),
        heads_kv=draw(st.sampled_from((1, 2, 1, 3))),
        group=draw(st.integers(1, most_group)),
        head_dim=draw(head_dims),
        dtype=draw(st.sampled_from(dtypes)),
        memory=(draw(place), draw(place), draw(place), draw(st.none() | place)),
        is_causal=draw(st.booleans()),
        window=draw(st.none() | st.none() | st.tuples(SIDES, SIDES)),
        scale=draw(SCALES),
        return_lse=draw(st.booleans()),
        slack=draw(st.sampled_from((0, 0, 1, 1000))),
        seed=draw(SEEDS),
    )


def check_sequences(call: DrawnSequences, device: str, backend: str | None = None) -> str:
    """Make a call and compare every sequence with FP64; what answered is returned."""
    generator = torch.Generator().manual_seed(call.seed)
    dtype = getattr(torch, call.dtype)
    q_lengths, kv_lengths = zip(*call.lengths, strict=True)

    def draw(lengths: Sequence[int], heads: int) -> torch.Tensor:
        return torch.randn(sum(lengths), heads, call.head_dim, generator=generator)

    q, k, v = (
        draw(q_lengths, call.heads_kv * call.group),
        draw(kv_lengths, call.heads_kv),
        draw(kv_lengths, call.heads_kv),
    )
    if call.scale:
        q = q * min(1.0, 1 / (abs(call.scale) * math.sqrt(call.head_dim)))
    q, k, v = (
        MEMORIES[place](x.to(device=device, dtype=dtype)[None])[0]
        for place, x in zip(call.memory, (q, k, v), strict=False)
    )
    out = (
        None if call.memory[3] is None else MEMORIES[call.memory[3]](torch.full_like(q, math.nan).contiguous()[None])[0]
    )
    starts = [torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=device) for x in (q_lengths, kv_lengths)]
    before = [x.clone() for x in (q, k, v, *starts)]
    result = sagegen.attention_varlen(
        q,
        k,
        v,
        *starts,
        max(q_lengths) + call.slack,
        max(kv_lengths) + call.slack,
        is_causal=call.is_causal,
        window=call.window,
        scale=call.scale,
        return_lse=call.return_lse,
        out=out,
        backend=backend,
    )
    found, lse = result if call.return_lse else (result, None)
    answer: str = sagegen.last_dispatch().answer
    assert found is out or out is None
    assert (found.shape, found.dtype, found.device) == (q.shape, q.dtype, q.device)
    assert lse is None or (lse.shape, lse.dtype) == ((q.shape[1], q.shape[0]), torch.float32)
    scale = call.head_dim**-0.5 if call.scale is None else call.scale
    parts = zip(*(x.split(n) for x, n in ((q, q_lengths), (k, kv_lengths), (v, kv_lengths))), strict=True)
    for i, part in enumerate(parts):
        own_q, own_k, own_v = (x.transpose(0, 1) for x in part)
        seen = seen_keys(*call.lengths[i], call.is_causal, call.window, device)
        inputs = (own_q, own_k, own_v, seen, scale)
        expected, expected_lse = attend(*inputs)
        rows = found.split(q_lengths)[i].transpose(0, 1).double()
        check_output(answer, rows, expected, expected_lse == -math.inf, own_v, usual_norm(*inputs))
        if lse is not None and call.lengths[i][0]:
            check_lse(answer, lse.split(q_lengths, 1)[i].double(), expected_lse)
    assert all(torch.equal(x, was) for x, was in zip((q, k, v, *starts), before, strict=True)), "an input was written"
    return answer
