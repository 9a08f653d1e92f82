"""A kernel's answer to a kind of call: its plans on a loaded program, and what is copied around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sagegen.plan import Loaded
from sagegen.runtime.answers import (
    ELEMENT_BYTES,
    Answer,
    CopyAnswer,
    CopyOutAnswer,
    KernelAnswer,
    PadAnswer,
    Result,
    Streams,
    copy_inputs,
    empty_output,
)
from sagegen.runtime.arguments import Checked, is_readable, read_strides
from sagegen.runtime.explanation import Explanation
from sagegen.runtime.fallback import warn_once
from sagegen.runtime.options import Options
from sagegen.runtime.padding import pad_channels
from sagegen.runtime.splitting import plan_parts, prepare_parts, workspace_bytes

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ground:
    """What a kernel's answer stands on.

    Attributes:
        program: its kernels, loaded.
        explanation: why this kernel.
        streams: where it launches.
        workspace_limit: bytes of scratch above which a call is split.
        again: dispatches anew, for inputs whose addresses no kernel can read.
    """

    program: Loaded
    explanation: Explanation
    streams: Streams
    workspace_limit: int
    again: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Result]


def prepare_kernel(
    inputs: Inputs, out: torch.Tensor | None, checked: Checked, options: Options, ground: Ground
) -> Answer:
    """The answer to calls of the kind of this one.

    Args:
        inputs: q, k and v of a call, for their strides.
        out: where the caller wants its output, for its strides.
    """
    width = checked.padded_width
    if width is not None:
        q, k, v = (pad_channels(x, width) for x in inputs)
        return PadAnswer(_prepare_launch((q, k, v), empty_output(q), checked, options, ground), width)
    q, k, v = copy_inputs(*inputs, checked.copies)
    writes_out = out is not None and is_readable(out)
    if out is not None and not writes_out:
        warn_once("out is copied in every call: its last dim is not contiguous, or rows are not 16 bytes apart")
    target = out if out is not None and writes_out else empty_output(q)
    launch = _prepare_launch((q, k, v), target, checked, options, ground)
    answer = CopyAnswer(launch, checked.copies) if checked.copies else launch
    return answer if out is None or writes_out else CopyOutAnswer(answer)


def _prepare_launch(
    inputs: Inputs, target: torch.Tensor, checked: Checked, options: Options, ground: Ground
) -> KernelAnswer:
    """The launches for tensors of these strides, which the kernel can read and write."""
    shape, program, explanation = checked.shape, ground.program, ground.explanation
    assert explanation.problem is not None
    parts = plan_parts(
        explanation.problem,
        program.config,
        shape,
        read_strides(*inputs, target, options.layout),
        checked.scale,
        options.return_lse,
        ground.workspace_limit,
        checked.window,
    )
    return KernelAnswer(
        explanation=explanation,
        prepared=prepare_parts(program, parts),
        workspace_elements=workspace_bytes(parts) // ELEMENT_BYTES,
        lse_shape=(shape.batch, shape.heads_q, shape.q_len) if options.return_lse else None,
        device=target.device,
        index=program.device,
        streams=ground.streams,
        again=ground.again,
    )
