"""Checks a call of `attention_varlen`: sequences of many lengths, one behind another without padding."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from sagegen.errors import ArgumentError
from sagegen.problem import Shape
from sagegen.runtime.arguments import Checked, check_heads, check_strided, check_tensors, make_checked
from sagegen.runtime.options import Options, check_options

#: Sequences of whole heads lie one behind another; an option that a caller cannot choose.
LAYOUT = "NHD"

_PACKED = "give q of shape [total_q, heads_q, head_dim], k and v of [total_k, heads_kv, head_dim]"
_STARTS = "give an int32 tensor [sequences + 1] on q's device that rises from 0 to the number of rows"
_LONGEST = "give the length of the longest sequence, or more"


class Sequences(NamedTuple):
    """Where the sequences of a call lie. Values of the tensors are not known to the host.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1]; sequence i has the rows from value i up to value i + 1.
        max_seqlen_q, max_seqlen_k: no sequence has more rows.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def check_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, options: Options) -> Checked:
    """Check all of a call that the host knows. Its shape has the sequences as batch and their longest as lengths.

    Raises:
        TypeError: an argument is of the wrong Python type.
        ArgumentError: an argument has a wrong value, shape, dtype or device; the message names it.
    """
    check_options(options)
    check_tensors(q, k, v, 3, _PACKED)
    _check_sizes(q, k, v)
    _check_starts(q.device, sequences)
    for side, total in (("q", q.shape[0]), ("k", k.shape[0])):
        _check_longest(side, getattr(sequences, f"max_seqlen_{side}"), len(sequences.cu_seqlens_q) - 1, total)
    return make_checked(q, k, v, read_varlen_shape(q, k, sequences), options, is_packed=True)


def read_varlen_shape(q: torch.Tensor, k: torch.Tensor, sequences: Sequences) -> Shape:
    """The shape that holds every sequence of a checked call."""
    longest_q, longest_k = min(sequences.max_seqlen_q, q.shape[0]), min(sequences.max_seqlen_k, k.shape[0])
    return Shape(sequences.cu_seqlens_q.shape[0] - 1, q.shape[1], k.shape[1], longest_q, longest_k)


def _check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x, axis, what, needs, of in (
        ("k", k, 2, "width", q.shape[2], "q"),
        ("v", v, 2, "width", q.shape[2], "q"),
        ("v", v, 0, "length", k.shape[0], "k"),
        ("v", v, 1, "head count", k.shape[1], "k"),
    ):
        if x.shape[axis] != needs:
            raise ArgumentError(f"{name}: {what} {x.shape[axis]} does not match {of}'s {needs}", _PACKED)
    check_heads(q.shape[1], k.shape[1], q.shape[2], "", "check the order of the dims and the GQA ratio")


def _check_starts(device: torch.device, sequences: Sequences) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        starts = getattr(sequences, name)
        if not isinstance(starts, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(starts).__name__}")
        check_strided(name, starts, _STARTS)
        if starts.dtype != torch.int32:
            raise ArgumentError(f"{name}: dtype {starts.dtype} is not torch.int32", f"cast it: {name}.to(torch.int32)")
        if starts.dim() != 1 or len(starts) == 0:
            raise ArgumentError(f"{name}: shape {tuple(starts.shape)} is not [sequences + 1]", _STARTS)
        if starts.device != device:
            raise ArgumentError(f"{name}: on {starts.device}, but q is on {device}", f"move it: {name}.to(q.device)")
    counts = len(sequences.cu_seqlens_q) - 1, len(sequences.cu_seqlens_k) - 1
    if counts[0] != counts[1]:
        raise ArgumentError(f"cu_seqlens_k: {counts[1]} sequences, but cu_seqlens_q has {counts[0]}", _STARTS)


def _check_longest(side: str, longest: object, count: int, total: int) -> None:
    name = f"max_seqlen_{side}"
    if not isinstance(longest, (int, torch.SymInt)) or isinstance(longest, bool):
        raise TypeError(f"{name} must be an int, not {type(longest).__name__}")
    if longest < 0:
        raise ArgumentError(f"{name}={longest} is negative", _LONGEST)
    if total > count * longest:
        raise ArgumentError(
            f"{name}={longest}: {total} rows of {side} do not fit {count} sequences of at most {longest} rows",
            _LONGEST,
        )


def check_starts_values(sequences: Sequences, total_q: int, total_k: int) -> None:
    """Check that the sequences are all of the rows, which the host knows of tensors in its own memory alone.

    Raises:
        ArgumentError: they aren't.
    """
    for side, total in (("q", total_q), ("k", total_k)):
        name, longest = f"cu_seqlens_{side}", getattr(sequences, f"max_seqlen_{side}")
        starts = getattr(sequences, name).tolist()
        if starts[0] != 0:
            raise ArgumentError(f"{name}: begins with {starts[0]}, not 0", _STARTS)
        if starts[-1] != total:
            raise ArgumentError(f"{name}: ends with {starts[-1]}, but {side} has {total} rows", _STARTS)
        for first, last in pairwise(starts):
            if last < first:
                raise ArgumentError(f"{name}: falls from {first} to {last}", _STARTS)
            if last - first > longest:
                raise ArgumentError(f"max_seqlen_{side}={longest}: {name} has a sequence of {last - first}", _LONGEST)
