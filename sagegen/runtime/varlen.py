"""From a call of `attention_varlen` to its answer, on the ground that `dispatch.py` lays for all calls."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd import forward_ad

from sagegen.counts import Ragged
from sagegen.runtime.addresses import transformed
from sagegen.runtime.answers import Result
from sagegen.runtime.arguments import check_out, needs_grad
from sagegen.runtime.dispatch import Dispatcher, dispatcher
from sagegen.runtime.memo import Memo
from sagegen.runtime.options import Options, kinds_of
from sagegen.runtime.prepare import Inputs
from sagegen.runtime.ragged import prepare_ragged
from sagegen.runtime.varlen_answers import (
    VarlenAnswer,
    VarlenCastAnswer,
    VarlenKernelAnswer,
    VarlenReferenceAnswer,
    VarlenTorchAnswer,
)
from sagegen.runtime.varlen_arguments import LAYOUT, Sequences, check_starts_values, check_varlen


class VarlenDispatcher:
    """Answers calls with many sequences.

    Args:
        dispatcher: has the machine, the settings, the loaded kernels and the record of the last call.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._memo = Memo[VarlenAnswer]()

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sequences: Sequences,
        out: torch.Tensor | None,
        *options: Any,
    ) -> Result:
        """Answer a call; `options` are the fields of Options in order, but the layout.

        Raises:
            TypeError, ArgumentError: a malformed argument.
            UnsupportedError: no kernel can answer, and the caller or SAGEGEN_STRICT insists on one.
        """
        kind = _kind(q, k, v, sequences, out, options)
        answer = self._memo.answers.get(kind) if kind is not None else None
        if answer is None:
            answer, lasts = self._prepare((q, k, v), sequences, out, (LAYOUT, *options))
            if lasts and kind is not None:
                self._memo.remember(kind, answer)
        if q.device.type == "cpu":  # elsewhere reading them would wait for the device
            _check_values(q, k, sequences)
        self._dispatcher.last = answer.explanation
        return answer.run(q, k, v, sequences, out)

    def _prepare(
        self, inputs: Inputs, sequences: Sequences, out: torch.Tensor | None, values: tuple[Any, ...]
    ) -> tuple[VarlenAnswer, bool]:
        """The answer, and whether it holds for the next such call too."""
        q, k, v = inputs
        options = Options(*values)
        checked = check_varlen(q, k, v, sequences, options)
        if checked.cast is not None:
            answer, lasts = self._prepare((q.to(checked.cast), k.to(checked.cast), v), sequences, out, values)
            return VarlenCastAnswer(answer), lasts
        if out is not None:
            check_out(out, q)
        choose = functools.partial(self._dispatcher.choose, checked, options, q.device, needs_grad(q, k, v))
        explanation, program, lasts = self._dispatcher.find_program(choose(), options, q.device, choose)
        if program is not None:
            ground = self._dispatcher.ground(program, explanation, values)
            one_row = (q[None], k[None], v[None])
            ragged = Ragged(q.shape[0], k.shape[0], is_packed=True)
            lse_shape = (q.shape[1], q.shape[0])
            target = None if out is None else out[None]
            return VarlenKernelAnswer(
                prepare_ragged(one_row, target, checked, options, ground, ragged, lse_shape)
            ), True
        if explanation.answer == "reference":
            return VarlenReferenceAnswer(explanation, options), lasts
        return VarlenTorchAnswer(explanation, options), lasts


def _kind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: Sequences,
    out: torch.Tensor | None,
    options: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """What calls with one answer have in common; None where the checks will name what is wrong."""
    starts_q, starts_k, *longest = sequences
    try:
        kind = (
            *((x.shape, x.stride(), x.dtype, x.device) for x in (q, k, v, starts_q, starts_k)),
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
            forward_ad._current_level >= 0 and needs_grad(q, k, v),
            None if out is None else (out.shape, out.stride(), out.dtype, out.device, out.requires_grad),
            *((type(value), value) for value in longest),
            options,
            kinds_of((LAYOUT, *options)),
        )
        hash(kind)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # no tensors, nested, or options that can't be hashed
        return None
    return kind


def _check_values(q: torch.Tensor, k: torch.Tensor, sequences: Sequences) -> None:
    try:
        check_starts_values(sequences, q.shape[0], k.shape[0])
    except RuntimeError as error:  # no values inside torch.func
        raise transformed() from error


@functools.cache
def varlen_dispatcher() -> VarlenDispatcher:
    """This process's dispatcher of calls with many sequences."""
    return VarlenDispatcher(dispatcher())
