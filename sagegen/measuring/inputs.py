"""Inputs of the accuracy gate, by kind, and a model's own captured q, k and v.

All draws come from a CPU generator, so a kind has the same values on every machine and its figures can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import torch

from sagegen.errors import ArgumentError
from sagegen.problem import Problem, Shape

_CAPTURED_FORM = "store fp16 or bf16 tensors <name>.q, <name>.k, <name>.v as [batch, heads, tokens, dim]"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Inputs:
    """q [batch, heads_q, q_len, head_dim], k and v [batch, heads_kv, kv_len, head_dim]; any strides but the last, 1."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def shape(self) -> Shape:
        return Shape(self.q.shape[0], self.q.shape[1], self.k.shape[1], self.q.shape[2], self.k.shape[2])

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        return Inputs(change(self.q), change(self.k), change(self.v))


@dataclass(frozen=True, slots=True)
class InputKind:
    """A kind of input: what it is for, its shape, and how it differs from normal draws.

    Attributes:
        why: the fault that it shows.
        alter: takes normal float32 inputs and the mask's causality, and changes them in place.
        layout: how the tensors lie in memory; NHD gives the kernel strides other than the contiguous ones.
    """

    name: str
    why: str
    shape: Shape
    alter: Callable[[Inputs, bool], None]
    layout: Literal["HND", "NHD"] = "HND"


def make_inputs(kind: InputKind, problem: Problem, device: torch.device | str, seed: int = 0) -> Inputs:
    """The inputs of one kind, in the problem's head dim and dtype."""
    generator = torch.Generator().manual_seed(seed)
    inputs = draw_normal(kind.shape, problem.head_dim, generator)
    kind.alter(inputs, problem.is_causal)
    inputs = inputs.map(lambda x: x.to(DTYPES[problem.dtype]).to(device))
    if kind.layout == "NHD":
        inputs = inputs.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    return inputs


def draw_normal(shape: Shape, head_dim: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Inputs:
    """Unit normal q, k, v on the generator's device."""

    def draw(heads: int, length: int) -> torch.Tensor:
        size = (shape.batch, heads, length, head_dim)
        return torch.randn(size, generator=generator, device=generator.device, dtype=dtype)

    return Inputs(
        draw(shape.heads_q, shape.q_len), draw(shape.heads_kv, shape.kv_len), draw(shape.heads_kv, shape.kv_len)
    )


def _unchanged(inputs: Inputs, is_causal: bool) -> None:
    pass


def _offset_keys(inputs: Inputs, is_causal: bool) -> None:
    # channel means of 7 to 13 beside a spread of a few, as in the keys of SmolLM2
    inputs.k.add_(10 * torch.cos(torch.arange(inputs.k.shape[-1])))


def _offset_channels(inputs: Inputs, is_causal: bool) -> None:
    inputs.q[..., 5::64] += 10
    inputs.k[..., 5::64] += 10


def _stretch_channels(inputs: Inputs, is_causal: bool) -> None:
    inputs.q[..., 5::64] *= 10
    inputs.k[..., 5::64] *= 10


def _hold_values(inputs: Inputs, is_causal: bool) -> None:
    inputs.v.copy_(inputs.v[:, :, :1].clone())


def _lift_values(inputs: Inputs, is_causal: bool) -> None:
    inputs.v.add_(1)


def _one_values(inputs: Inputs, is_causal: bool) -> None:
    inputs.v.fill_(1)


def _zero_channel(inputs: Inputs, is_causal: bool) -> None:
    inputs.v[..., ZERO_CHANNEL] = 0


def _large_logits(inputs: Inputs, is_causal: bool) -> None:
    """q and k of +-200, each query equal to one key it sees, so that the output is that key's value."""
    inputs.k.copy_(inputs.k.sign() * 200)
    rows = torch.arange(inputs.q.shape[2])
    inputs.q.copy_(inputs.k[:, :, rows - rows % 97 // 2 if is_causal else rows.flip(0)])


def _spoil(key: int, value: int) -> Callable[[Inputs, bool], None]:
    """One head each with a bad query, a bad key and a bad value, and one without.

    Args:
        value: the first key of its tile: where P·V is 16 bits, rows of the tile above it would get the NaN too.
    """

    def alter(inputs: Inputs, is_causal: bool) -> None:
        inputs.q[:, 0, 40, 3] = math.nan
        inputs.k[:, 1, key, 0] = math.inf
        inputs.v[:, 2, value, 7] = math.nan

    return alter


ZERO_CHANNEL = 3
_LONG = Shape(batch=1, heads_q=2, heads_kv=2, q_len=512, kv_len=16384)
_EVEN = Shape(batch=1, heads_q=4, heads_kv=4, q_len=2048, kv_len=2048)
_ALL = (
    InputKind("normal", "the figure that papers quote", replace(_EVEN, heads_q=8, heads_kv=8), _unchanged),
    InputKind("k_offset", "K without smoothing", replace(_EVEN, q_len=512), _offset_keys),
    InputKind("channel_offsets", "Q and K with biased channels", _EVEN, _offset_channels),
    InputKind("outliers", "Q and K with wide channels", _EVEN, _stretch_channels),
    InputKind("v_constant", "weights that do not add up to 1", replace(_EVEN, q_len=512), _hold_values),
    InputKind("v_offset_long", "a chain of FP8 sums that loses bits", _LONG, _lift_values),
    InputKind("v_one_long", "the same, at its worst", _LONG, _one_values),
    InputKind("v_zero_channel", "a scale of 0", replace(_EVEN, q_len=512), _zero_channel),
    InputKind("large_logits", "overflow before the softmax", replace(_EVEN, q_len=1024, kv_len=1024), _large_logits),
    InputKind("off_edge", "tails of tiles, lengths that differ", Shape(1, 4, 4, 321, 1001), _unchanged),
    InputKind("few_keys", "rows that see no key, when causal", Shape(1, 8, 8, 200, 77), _unchanged),
    InputKind("gqa", "heads that share K and V, strides", Shape(2, 6, 2, 777, 777), _unchanged, "NHD"),
    InputKind("non_finite", "NaN that spreads or gets lost", Shape(1, 4, 4, 400, 400), _spoil(300, 256)),
)
#: Every kind of the gate, in the order it runs.
INPUT_KINDS = {kind.name: kind for kind in _ALL}


def _resized(name: str, *shape: int) -> InputKind:
    return replace(INPUT_KINDS[name], shape=Shape(*shape))


_SMALL = (
    _resized("normal", 1, 2, 2, 256, 256),
    _resized("k_offset", 1, 2, 2, 130, 300),
    _resized("channel_offsets", 1, 2, 2, 200, 300),
    _resized("outliers", 1, 2, 2, 200, 300),
    _resized("v_constant", 1, 1, 1, 130, 1536),
    InputKind("v_one_4k", "a chain of FP8 sums that loses bits, at its worst", Shape(1, 1, 1, 16, 4096), _one_values),
    _resized("v_zero_channel", 1, 1, 1, 130, 200),
    _resized("large_logits", 1, 1, 1, 256, 256),
    _resized("off_edge", 1, 2, 2, 161, 301),
    _resized("few_keys", 1, 2, 2, 200, 77),
    _resized("gqa", 2, 6, 2, 137, 137),
    replace(_resized("non_finite", 1, 4, 4, 200, 200), alter=_spoil(150, 128)),
)
#: The gate's kinds at sizes that the emulator runs in seconds, under the same names where the same floors hold.
EMULATED_KINDS = {kind.name: kind for kind in _SMALL}


def load_captured(path: Path) -> dict[str, Inputs]:
    """Captured inputs from a safetensors file with tensors `<name>.q`, `<name>.k`, `<name>.v`, fp16 or bf16, HND.

    Returns:
        Inputs by name, at least one, on the CPU; all finite, and of shapes that one call takes.

    Raises:
        ArgumentError: the file is not in that form.
    """
    captured = _read_captured(path)
    if not captured:
        raise ArgumentError(f"{path} has no tensors", _CAPTURED_FORM)
    for name, inputs in captured.items():
        _check_captured(f"{path}: {name}", inputs)
    return captured


def fitting_names(captured: Mapping[str, Inputs], problem: Problem) -> list[str]:
    """The captured inputs that kernels of `problem` take: of its head dim, and in the range of its dtype."""
    largest = torch.finfo(DTYPES[problem.dtype]).max
    return [
        name
        for name, inputs in captured.items()
        if inputs.q.shape[-1] == problem.head_dim
        and all(float(x.abs().max()) <= largest for x in (inputs.q, inputs.k, inputs.v))
    ]


def _check_captured(where: str, inputs: Inputs) -> None:
    q, k, v = inputs.q, inputs.k, inputs.v
    for part, x in (("q", q), ("k", k), ("v", v)):
        if x.numel() == 0:
            raise ArgumentError(f"{where}.{part} is empty: {tuple(x.shape)}", "leave that layer out of the file")
        if bad := int((~x.isfinite()).sum()):
            raise ArgumentError(f"{where}.{part} has {bad} values that are NaN or Inf", "capture it again")
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
        raise ArgumentError(
            f"{where}: {shapes} do not fit each other",
            "store one batch and one head dim for all three, and as many heads and tokens of v as of k",
        )
    if q.shape[1] % k.shape[1]:
        raise ArgumentError(
            f"{where}: q has {q.shape[1]} heads, not a multiple of the {k.shape[1]} of k and v",
            "store all heads of the layer, or whole groups of query heads with their k and v",
        )


def _read_captured(path: Path) -> dict[str, Inputs]:
    try:
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = msgspec.json.decode(data[8:start], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        stored = {name: msgspec.json.decode(entry, type=_Stored) for name, entry in header.items()}
        tensors = {name: _read(entry, data, start) for name, entry in stored.items()}
        names = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
        return {name: Inputs(tensors[f"{name}.q"], tensors[f"{name}.k"], tensors[f"{name}.v"]) for name in names}
    except (OSError, KeyError, ValueError, RuntimeError, msgspec.DecodeError) as error:
        raise ArgumentError(
            f"{path} is not a safetensors file of captured inputs: {error!r}", _CAPTURED_FORM
        ) from error


class _Stored(msgspec.Struct):
    """One entry of a safetensors header."""

    dtype: Literal["F16", "BF16"]
    shape: tuple[int, int, int, int]
    data_offsets: tuple[int, int]


def _read(stored: _Stored, data: bytes, start: int) -> torch.Tensor:
    dtype = torch.float16 if stored.dtype == "F16" else torch.bfloat16
    first, last = (start + offset for offset in stored.data_offsets)
    if first == last:  # which torch takes for a mistake
        return torch.empty(0, dtype=dtype).reshape(stored.shape)
    return torch.frombuffer(bytearray(data[first:last]), dtype=dtype).reshape(stored.shape)
