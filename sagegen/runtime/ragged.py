"""A kernel on batch items of their own lengths, which a table in device memory gives, and what is copied around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sagegen.counts import Ragged
from sagegen.plan import make_plan
from sagegen.runtime.addresses import UNALIGNED, addresses, aligned
from sagegen.runtime.answers import ELEMENT_BYTES, KernelAnswer, Result, copy_inputs, empty_output, into
from sagegen.runtime.arguments import Checked, is_readable, read_strides
from sagegen.runtime.explanation import Explanation
from sagegen.runtime.options import Options
from sagegen.runtime.padding import pad_channels
from sagegen.runtime.prepare import Ground, Inputs


@dataclass(frozen=True, slots=True)
class RaggedAnswer:
    """Runs `inner` on the caller's tensors, or on copies where it can't read or write those.

    Attributes:
        width: channels that q, k and v are padded to; None where the kernel has as many.
        copies: names of the tensors that are copied for their strides.
        anew: the answer to a call whose tensors have other strides.
    """

    inner: KernelAnswer
    width: int | None
    copies: tuple[str, ...]
    anew: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], RaggedAnswer]

    @property
    def explanation(self) -> Explanation:
        return self.inner.explanation

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, out: torch.Tensor | None
    ) -> Result:
        """Attention within each batch item.

        Args:
            q, k, v, out: as the call that this was prepared for has them, or has them packed.
            table: int32 [batch, 4], see `plan.Ragged`.
        """
        addresses(q, k, v)
        width = self.width
        if width is not None:
            q_wide, k_wide, v_wide = (pad_channels(x, width) for x in (q, k, v))
            result = self.inner.run(q_wide, k_wide, v_wide, None, table)
            wide, lse = result if isinstance(result, tuple) else (result, None)
            target = empty_output(q) if out is None else out
            target.copy_(wide[..., : q.shape[-1]])
            return target if lse is None else (target, lse)
        q, k, v = copy_inputs(q, k, v, self.copies)
        if any(x.data_ptr() & UNALIGNED for x in (q, k, v)):  # copies have other strides than the plan
            q, k, v = aligned("q", q), aligned("k", k), aligned("v", v)
            return self.anew(q, k, v, out).run(q, k, v, table, out)
        if out is None or is_readable(out):
            return self.inner.run(q, k, v, out, table)
        return into(out, self.inner.run(q, k, v, None, table))


def prepare_ragged(
    inputs: Inputs,
    out: torch.Tensor | None,
    checked: Checked,
    options: Options,
    ground: Ground,
    ragged: Ragged,
    lse_shape: tuple[int, ...],
) -> RaggedAnswer:
    """The answer to calls of the kind of this one.

    Args:
        inputs: q, k and v, of 4 dims, for their strides.
        out: where the caller wants its output, of 4 dims, for its strides.
        checked: its shape has the lengths that no batch item exceeds.
        lse_shape: of the log-sum-exp, where one is wanted.
    """
    width = checked.padded_width
    q, k, v = copy_inputs(*inputs, checked.copies) if width is None else (pad_channels(x, width) for x in inputs)
    target = out if out is not None and width is None and is_readable(out) else empty_output(q)
    explanation = ground.explanation
    assert explanation.problem is not None
    plan = make_plan(
        explanation.problem,
        ground.program.config,
        checked.shape,
        read_strides(q, k, v, target, options.layout),
        checked.scale,
        options.return_lse,
        window=checked.window,
        ragged=ragged,
    )
    launch = KernelAnswer(
        explanation=explanation,
        prepared=ground.program.prepare(plan),
        workspace_elements=plan.workspace_bytes // ELEMENT_BYTES,
        lse_shape=lse_shape if options.return_lse else None,
        device=target.device,
        index=ground.program.device,
        streams=ground.streams,
        again=ground.again,
    )

    def anew(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> RaggedAnswer:
        if ragged.is_packed:
            q, k, v, out = q[None], k[None], v[None], None if out is None else out[None]
        return prepare_ragged((q, k, v), out, checked, options, ground, ragged, lse_shape)

    return RaggedAnswer(launch, width, checked.copies, anew)
