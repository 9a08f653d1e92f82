"""Does an emulated kernel compute its own numerics? Its output against the same steps in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sagegen.emulator.library import Report, Session
from sagegen.emulator.program import EmulatedCall, EmulatedProgram
from sagegen.emulator.report import make_error
from sagegen.measuring.call import BoundCall, bind_call
from sagegen.reference import fp8_accumulator, quantized_attention

#: Largest relative L2 between a kernel and its numerics, both rounded to the output's dtype. Over the space 2.2e-4 was
#: the most (tests/emulator/test_configs.py): exp2's last bit moves a P to its neighbour now and then.
RELATIVE_L2 = 1e-3
#: Largest error of the log-sum-exp, absolute.
LSE_ERROR = 1e-3


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a kernel is from its numerics: relative L2 of the output, largest error of the lse."""

    relative_l2: float
    lse_error: float


def check_agreement(
    program: EmulatedProgram, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None = None
) -> Agreement:
    """Run a call and hold it to `quantized_attention` of the program's config.

    Where a wanted lse changes how P is summed, the call also runs without one, and the larger errors are returned.

    Args:
        q: [batch, heads_q, q_len, head_dim], finite, on the CPU; any strides with contiguous channels.
        k, v: [batch, heads_kv, kv_len, head_dim], likewise.
        softmax_scale: of the scores; None is 1/sqrt(head_dim).

    Raises:
        EmulatorError: a kernel did what no kernel may do; or, kind `wrong_result`, an output or lse is off: the message
            says which one is the worst, and the line that wrote it.
    """
    found = _agreement(program, q, k, v, softmax_scale, want_lse=True)
    if not program.config.lse_changes_output:
        return found
    without = _agreement(program, q, k, v, softmax_scale, want_lse=False)
    return Agreement(max(found.relative_l2, without.relative_l2), found.lse_error)


def _agreement(
    program: EmulatedProgram,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    *,
    want_lse: bool,
) -> Agreement:
    accumulator = fp8_accumulator(program.config, program.architecture)
    wanted, wanted_lse = quantized_attention(
        q, k, v, program.problem, program.config, scale=softmax_scale, accumulator=accumulator, want_lse=want_lse
    )
    call = bind_call(program, program.problem, program.config, q, k, v, softmax_scale=softmax_scale, want_lse=want_lse)
    found: list[Agreement] = []

    def inspect(session: Session) -> None:
        found.append(_compare(program, session, call, wanted.to(q.dtype).float(), wanted_lse))

    assert isinstance(call.prepared, EmulatedCall)
    call.prepared.launch_and_inspect(inspect, *call.addresses())
    return found[0]


def _compare(
    program: EmulatedProgram, session: Session, call: BoundCall, wanted: torch.Tensor, wanted_lse: torch.Tensor
) -> Agreement:
    out_error = _error(call.out.float(), wanted)
    relative_l2 = float(out_error.double().norm() / wanted.double().norm().clamp_min(1e-30))
    if not relative_l2 <= RELATIVE_L2:
        what = f"the output is off by {relative_l2:.2e} (relative L2), more than {RELATIVE_L2:g}"
        raise _wrong_result(program, session, "out", call.out, wanted, out_error, what)
    if call.lse is None:
        return Agreement(relative_l2, 0.0)
    lse_error = _error(call.lse, wanted_lse)
    if not float(lse_error.max()) <= LSE_ERROR:
        what = f"the lse is off by {float(lse_error.max()):.2e}, more than {LSE_ERROR:g}"
        raise _wrong_result(program, session, "lse", call.lse, wanted_lse, lse_error, what)
    return Agreement(relative_l2, float(lse_error.max()))


def _error(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Absolute error; 0 where both are the same infinity, infinite where only one is finite."""
    error = torch.where(found == wanted, 0, (found - wanted).abs())
    return torch.where(error.isnan(), torch.inf, error)


def _wrong_result(
    program: EmulatedProgram,
    session: Session,
    name: str,
    tensor: torch.Tensor,
    wanted: torch.Tensor,
    error: torch.Tensor,
    what: str,
) -> Exception:
    """The error about a tensor's worst element, with the place that wrote it."""
    index = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
    offset = sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))
    writer = session.writer_of(tensor.data_ptr() + offset * tensor.element_size())
    message = f"{what}; worst: {name}{index} is {tensor[tuple(index)]:.6g}, not {wanted[tuple(index)]:.6g}"
    message += ", written here" if writer else ", never written"
    block, thread, site = (writer.block, writer.thread, writer.site) if writer else (-1, -1, 0)
    report = Report("wrong_result", block, thread, 0, site, message)
    return make_error(report, "attention", program.text, program.library.path, program.show_lines)
