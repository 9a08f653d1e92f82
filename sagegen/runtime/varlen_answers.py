"""Prepared answers to calls of `attention_varlen`, as `answers.py` has them for `attention`.

Each has the `explanation` of why it was chosen and one method, `run(q, k, v, sequences, out)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from sagegen.runtime.addresses import check_outside
from sagegen.runtime.answers import ReferenceAnswer, Result, empty_output, into
from sagegen.runtime.explanation import Explanation
from sagegen.runtime.options import Options
from sagegen.runtime.ragged import RaggedAnswer
from sagegen.runtime.varlen_arguments import Sequences
from sagegen.runtime.varlen_fallback import attend_varlen


class VarlenAnswer(Protocol):
    """What the dispatcher keeps per kind of call."""

    @property
    def explanation(self) -> Explanation: ...

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, out: torch.Tensor | None
    ) -> Result: ...


@dataclass(frozen=True, slots=True)
class VarlenKernelAnswer:
    """A kernel of ours. Sequences without keys, or without queries, are its business as well."""

    inner: RaggedAnswer

    @property
    def explanation(self) -> Explanation:
        return self.inner.explanation

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, out: torch.Tensor | None
    ) -> Result:
        starts_q, starts_k = sequences.cu_seqlens_q, sequences.cu_seqlens_k
        check_outside(starts_q, starts_k)
        table = torch.stack((starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:]), 1)
        return self.inner.run(q, k, v, table, out)


@dataclass(frozen=True, slots=True)
class VarlenTorchAnswer:
    """torch SDPA of padded sequences, and zeros where there is nothing to compute."""

    explanation: Explanation
    options: Options

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, out: torch.Tensor | None
    ) -> Result:
        options = self.options
        result = attend_varlen(
            q,
            k,
            v,
            sequences,
            is_causal=options.is_causal,
            scale=options.scale,
            window=options.window,
            return_lse=options.return_lse,
        )
        return into(out, result)


@dataclass(frozen=True, slots=True)
class VarlenReferenceAnswer:
    """The exact reference, sequence by sequence; reads cu_seqlens, which are the CPU's."""

    explanation: Explanation
    options: Options

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, out: torch.Tensor | None
    ) -> Result:
        inner = ReferenceAnswer(self.explanation, self.options)
        ends_q, ends_k = (pairwise(starts.tolist()) for starts in sequences[:2])
        results = [
            inner.run(q[None, first:last], k[None, first_key:last_key], v[None, first_key:last_key], None)
            for (first, last), (first_key, last_key) in zip(ends_q, ends_k, strict=True)
        ]
        outputs = [result[0] if isinstance(result, tuple) else result for result in results]
        target = empty_output(q) if out is None else out
        target.copy_(torch.cat(outputs, 1)[0])
        lses = [result[1] for result in results if isinstance(result, tuple)]
        return (target, torch.cat(lses, 2)[0]) if lses else target


@dataclass(frozen=True, slots=True)
class VarlenCastAnswer:
    """Casts q and k to v's type, which the output has then, and runs `inner`."""

    inner: VarlenAnswer

    @property
    def explanation(self) -> Explanation:
        return self.inner.explanation

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, out: torch.Tensor | None
    ) -> Result:
        return self.inner.run(q.to(v.dtype), k.to(v.dtype), v, sequences, out)
