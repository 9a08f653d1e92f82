"""Calls of `sagegen.attention` that hypothesis draws: every argument that has a meaning for the result, small sizes.

A call follows from its fields, which hypothesis prints when it fails: `check_call` of drawn_checks.py takes it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

KERNEL_DTYPES = ("float16", "bfloat16")
ALL_DTYPES = (*KERNEL_DTYPES, "float32", "float64")
KERNEL_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class DrawnMask:
    """An attn_mask.

    Attributes:
        full: of its last dims, of [batch, heads, q_len, kv_len], those that are not broadcast; two to four.
        dtype: torch's name of its type.
        hides: `few` keys, all keys of every third `row`, or `all`.
        is_view: it is expanded to its last dims' full sizes, so that strides are 0.
        spoils: keys and values that it hides from all rows and heads of a batch item are NaN, if it is one of bools.
    """

    full: tuple[bool, ...]
    dtype: str
    hides: str
    is_view: bool
    spoils: bool


@dataclass(frozen=True, slots=True)
class DrawnCall:
    """One call.

    Attributes:
        group: query heads per head of keys.
        memory: where q, k and v lie, keys of MEMORIES; `fused` lies in one buffer with its neighbours that are so too.
        out: None, or where the output lies: a key of OUTPUTS, or `q` itself.
        seed: of the values.
    """

    batch: int
    heads_kv: int
    group: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str
    layout: str
    memory: tuple[str, str, str]
    is_causal: bool
    window: tuple[int, int] | None
    mask: DrawnMask | None
    scale: float | None
    return_lse: bool
    out: str | None
    seed: int

    @property
    def heads_q(self) -> int:
        return self.heads_kv * self.group

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.heads_q, self.q_len, self.kv_len)


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a call, in its layout."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    out: torch.Tensor | None


# --- where tensors lie


def _surround(x: torch.Tensor, *margins: int, start: int) -> torch.Tensor:
    """A view that begins `start` into each of the last dims, with `margins` more elements there, which are NaN."""
    kept = x.dim() - len(margins)
    sizes = [size + more for size, more in zip(x.shape[kept:], margins, strict=True)]
    wide = x.new_full((*x.shape[:kept], *sizes), math.nan)
    inside = tuple(slice(start, start + size) for size in x.shape[kept:])
    return wide[(..., *inside)].copy_(x)


def _after(x: torch.Tensor, elements: int) -> torch.Tensor:
    """A contiguous tensor that begins so many elements into its storage."""
    flat = x.new_full((x.numel() + elements,), math.nan)
    return flat[elements:].view(x.shape).copy_(x)


def _transpose(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


#: By name; the tensor has four dims, heads and tokens in the middle.
MEMORIES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": _transpose,
    "sliced": lambda x: _surround(x, 16, 24, start=8),
    "odd_rows": lambda x: _surround(x, 1, start=0),
    "offset": lambda x: _after(x, 24),
    "misaligned": lambda x: _after(x, 1),
    "channels_apart": lambda x: x.mT.contiguous().mT,
    "batches_reversed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "one_batch": lambda x: x[:1].expand_as(x),
    "one_of_dim_1": lambda x: x[:, :1].expand_as(x),
    "one_of_dim_2": lambda x: x[:, :, :1].expand_as(x),
    "fused": lambda x: x,
}
#: Those in which every element has a place of its own.
OUTPUTS = tuple(name for name in MEMORIES if not name.startswith("one_"))


def _fuse(inputs: Sequence[torch.Tensor], heads: int) -> list[torch.Tensor]:
    """Slices of one buffer, as one projection leaves them: heads of all, one after the other, at each token."""
    by_token = [x if heads == 2 else x.transpose(1, 2) for x in inputs]
    parts = torch.cat(by_token, 2).split([x.shape[2] for x in by_token], 2)
    return [x if heads == 2 else x.transpose(1, 2) for x in parts]


def _place(call: DrawnCall, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    heads, tokens = (1, 2) if call.layout == "HND" else (2, 1)
    placed = [MEMORIES[name](x) for name, x in zip(call.memory, inputs, strict=True)]
    fused = [i for i in range(3) if call.memory[i] == "fused" and placed[i].shape[tokens] == call.kv_len]
    for i, x in zip(fused, _fuse([placed[i] for i in fused], heads) if fused else [], strict=True):
        placed[i] = x
    return placed


# --- what they hold


def make_tensors(call: DrawnCall, device: str) -> Tensors:
    """The tensors of a call; the same values on every device."""
    generator = torch.Generator().manual_seed(call.seed)
    dtype = getattr(torch, call.dtype)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        sizes = (heads, tokens) if call.layout == "HND" else (tokens, heads)
        return torch.randn(call.batch, *sizes, call.head_dim, generator=generator)

    q, k, v = draw(call.heads_q, call.q_len), draw(call.heads_kv, call.kv_len), draw(call.heads_kv, call.kv_len)
    if call.scale:  # scores of normal size: wide ones are for test_random_calls.py
        q = q * min(1.0, 1 / (abs(call.scale) * math.sqrt(call.head_dim)))
    inputs = _place(call, [x.to(device=device, dtype=dtype) for x in (q, k, v)])
    mask = None if call.mask is None else _make_mask(call, call.mask, generator)
    if call.mask is not None and call.mask.spoils and mask is not None and mask.dtype == torch.bool:
        _spoil_hidden(call, inputs, mask)
    out = None
    if call.out == "q":
        out = inputs[0]
    elif call.out is not None:
        out = MEMORIES[call.out](torch.full_like(inputs[0], math.nan, memory_format=torch.contiguous_format))
    return Tensors(*inputs, None if mask is None else mask.to(device), out)


def _make_mask(call: DrawnCall, drawn: DrawnMask, generator: torch.Generator) -> torch.Tensor:
    full = call.score_shape[4 - len(drawn.full) :]
    shape = [size if is_full else 1 for size, is_full in zip(full, drawn.full, strict=True)]
    seen = torch.rand(shape, generator=generator) > 0.3
    if drawn.hides == "row":
        seen[..., ::3, :] = False
    if drawn.hides == "all":
        seen[:] = False
    mask = seen
    if drawn.dtype != "bool":  # quarters, which every type holds
        bias = torch.randint(-8, 9, shape, generator=generator) / 4
        mask = bias.masked_fill(~seen, -math.inf).to(getattr(torch, drawn.dtype))
    return mask.expand(full) if drawn.is_view else mask


def _spoil_hidden(call: DrawnCall, inputs: list[torch.Tensor], mask: torch.Tensor) -> None:
    """NaN in what nobody may see, where each batch item has memory of its own."""
    if not (call.memory[1] in OUTPUTS and call.memory[2] in OUTPUTS):
        return
    hidden = ~mask.expand(call.score_shape).flatten(1, 2).any(1)
    for item, keys in enumerate(hidden):
        for x in inputs[1:]:
            own = x[item] if call.layout == "NHD" else x[item].transpose(0, 1)
            own[keys.to(x.device)] = math.nan


# --- strategies, and what those of packed sequences share with them

SCALES = st.sampled_from((None, None, None, 0.0, -0.25, 0.3, 1))
SEEDS = st.integers(0, 1 << 16)
SIDES = st.sampled_from((-1, -1, 0, 1, 2, 7, 30))


#: What hides keys; causality is drawn apart. `keys` is a mask that hides whole ones, and all that does.
ANYTHING = ("window", "mask", "both", "keys")
#: What kernels do.
BY_KERNELS = ("window", "keys")


def _lengths(longest: int) -> st.SearchStrategy[int]:
    """Of tokens; one in some twenty is 0."""
    edges = [n for n in (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257) if n <= longest]
    return st.sampled_from((0, *[1] * 9, *[2] * 9)).flatmap(
        lambda kind: (st.just(0), st.integers(1, longest), st.sampled_from(edges))[kind]
    )


@st.composite
def _length_pairs(draw: st.DrawFn, longest: int) -> tuple[int, int]:
    """Queries and keys; one in three or so has as many of both."""
    q_len, kv_len = draw(_lengths(longest)), draw(_lengths(longest))
    return q_len, draw(st.sampled_from((kv_len, kv_len, q_len)))


@st.composite
def _masks(draw: st.DrawFn) -> DrawnMask:
    full = tuple(draw(st.lists(st.booleans(), min_size=2, max_size=4)))
    dtype = draw(st.sampled_from(("bool",) * 4 + ALL_DTYPES))
    hides = draw(st.sampled_from(("few", "few", "row", "all")))
    return DrawnMask(full, dtype, hides, draw(st.booleans()), draw(st.booleans()))


@st.composite
def _key_masks(draw: st.DrawFn) -> DrawnMask:
    """Of bools, the same for all rows and heads of a batch item."""
    is_by_key = draw(st.sampled_from((True, True, True, False)))
    full = draw(st.sampled_from(((False,), (False, False), (False, False, False), (True, False, False))))
    hides = draw(st.sampled_from(("few", "few", "few", "all")))
    return DrawnMask((*full, is_by_key), "bool", hides, draw(st.booleans()), draw(st.booleans()))


@st.composite
def drawn_calls(
    draw: st.DrawFn,
    *,
    longest: int,
    head_dims: st.SearchStrategy[int],
    dtypes: Sequence[str],
    hides: Sequence[str] = ANYTHING,
    most_heads: int = 8,
    most_batches: int = 3,
) -> DrawnCall:
    """Calls of `longest` tokens at most; half of them have one of `hides`."""
    heads_kv = draw(st.sampled_from((1, 2, 1, 3)))
    q_len, kv_len = draw(_length_pairs(longest))
    hiding = draw(st.sampled_from((*[None] * len(hides), *hides))) if hides else None
    memory = draw(st.tuples(*[st.sampled_from(tuple(MEMORIES))] * 3))
    memory = draw(st.sampled_from((memory,) * 5 + (("fused",) * 3,)))
    can_be_written = memory[0] in OUTPUTS
    return DrawnCall(
        batch=draw(st.sampled_from((*range(1, most_batches + 1),) * 8 + (0,))),
        heads_kv=heads_kv,
        group=draw(st.integers(1, max(1, most_heads // heads_kv))),
        q_len=q_len,
        kv_len=kv_len,
        head_dim=draw(head_dims),
        dtype=draw(st.sampled_from(dtypes)),
        layout=draw(st.sampled_from(("HND", "NHD"))),
        memory=memory,
        is_causal=draw(st.booleans()) and hiding != "keys",
        window=draw(st.tuples(SIDES, SIDES)) if hiding in ("window", "both") else None,
        mask=draw(_key_masks() if hiding == "keys" else _masks()) if hiding in ("mask", "both", "keys") else None,
        scale=draw(SCALES),
        return_lse=draw(st.booleans()),
        out=draw(st.sampled_from((None, None, *OUTPUTS, *(["q"] if can_be_written else [])))),
        seed=draw(SEEDS),
    )
