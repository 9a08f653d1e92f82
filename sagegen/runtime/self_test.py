"""A loaded kernel's self-test: two tiny calls among NaN, held to exact attention, before any answer relies on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sagegen import reference
from sagegen.counts import Ragged
from sagegen.errors import SelfTestError
from sagegen.plan import Loaded, Strides, TensorStrides, make_plan
from sagegen.problem import Dtype, Precision, Problem, Shape

_DTYPES: dict[Dtype, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
#: Two query heads on one KV head.
_HEADS_Q = 2
#: Tokens past each end that hold NaN: no kernel may read one into a result, or write one.
_BEYOND = 16
#: Of kernels with a window: some tiles are hidden from all rows, some from a few, some from none.
_WINDOW = (70, 9)
_NAN_BYTE = 0xFF  # a word of them is NaN in every type


@dataclass(frozen=True, slots=True)
class _Limit:
    """The most of a tiny call's errors: twice what default kernels have, since scales may be coarser.

    Attributes:
        relative_l2: |out - exact| / |exact|.
        scale: |out . exact / exact . exact - 1|.
        lse: absolute, of rows that see many keys.
    """

    relative_l2: float
    scale: float
    lse: float


_LIMITS: dict[Precision, _Limit] = {"int8": _Limit(0.075, 0.02, 0.02), "int4": _Limit(0.4, 0.04, 0.4)}
#: The lse of a row that sees one key is a score. Rounding Q and K to a step of s puts it off by s / sqrt(6), where the
#: largest of a group is four times the usual and s 4 / 127: four of that are 0.05 in INT8, 2.5 times the limit. Of more
#: keys errors are averaged.
_LONE_KEY = 2.5
#: Channels up to which a kernel's error on these inputs is known to keep the limit for all rows.
_NARROW = 128


def check_program(
    program: Loaded, name: str, problem: Problem, device: torch.device, raw_stream: Callable[[], int]
) -> None:
    """Run `program` on a tiny problem, without and with an lse, and compare; waits for the device.

    Lengths end past tile edges; outputs, scratch and the tokens around q, k and v are NaN before.

    Args:
        name: the kernel's, for messages.
        raw_stream: of `device`, which is current.

    Raises:
        SelfTestError: the results are wrong.
        DriverError: a launch was refused.
    """
    config = program.config
    shape = Shape(1, _HEADS_Q, 1, config.block_q + 5, 2 * config.block_k + 3)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn((1, heads, tokens, problem.head_dim), generator=generator).to(_DTYPES[problem.dtype])
        for heads, tokens in ((_HEADS_Q, shape.q_len), (1, shape.kv_len), (1, shape.kv_len))
    )
    window = _WINDOW if problem.is_windowed else None
    exact, exact_lse = reference.attention(
        q, k, v, is_causal=problem.is_causal, window=window, return_lse=True, out_dtype=torch.float64
    )
    limit = _LIMITS[problem.precision]
    first_key, last_key = reference.visible_keys(
        torch.arange(shape.q_len), shape.q_len, shape.kv_len, problem.is_causal, window
    )
    few_keys = (_LONE_KEY / (last_key - first_key + 1).clamp_min(1).sqrt()).clamp_min(1)
    lse_limit = limit.lse * (few_keys if problem.head_dim > _NARROW else torch.ones(()))
    for want_lse in (False, True):
        out, lse = _call(program, problem, shape, (q, k, v), want_lse, device, raw_stream)
        rows = slice(_BEYOND, _BEYOND + shape.q_len)
        _check_output(out[:, :, rows].double(), exact, limit, name)
        if not torch.cat((out[:, :, :_BEYOND], out[:, :, rows.stop :]), 2).isnan().all():
            raise _failure(name, "it wrote past its output's ends")
        if want_lse:
            same = lse == exact_lse  # infinities among them
            excess = (lse - exact_lse).abs().masked_fill(same, 0) / lse_limit
            _check_figure("lse is off by more than it may be, times", excess.max(), 1, name)


def _check_output(out: torch.Tensor, exact: torch.Tensor, limit: _Limit, name: str) -> None:
    _check_figure("output has a relative error of", (out - exact).norm() / exact.norm(), limit.relative_l2, name)
    scale = (out * exact).sum() / exact.square().sum()
    _check_figure("output's scale is off by", (scale - 1).abs(), limit.scale, name)


def _check_figure(what: str, figure: torch.Tensor, most: float, name: str) -> None:
    if not figure.item() <= most:  # NaN is not
        raise _failure(name, f"its {what} {figure.item():.3g}, {most} is the most")


def _failure(name: str, what: str) -> SelfTestError:
    remedy = "compare it with exact attention by: sagegen verify; SAGEGEN_SELF_TEST=0 loads kernels untested"
    return SelfTestError(f"{name} computes wrongly on this machine: {what}", remedy)


def _call(
    program: Loaded,
    problem: Problem,
    shape: Shape,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    want_lse: bool,
    device: torch.device,
    raw_stream: Callable[[], int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output with what surrounds it, and the lse; both on the CPU."""
    # all is made on the CPU and copied: kernels of torch's own would have to be loaded first
    q, k, v = (_surround(x).to(device) for x in inputs)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype).to(device)
    lse = torch.full((*q.shape[:2], shape.q_len), torch.nan).to(device)
    strides = TensorStrides(*(Strides(*x.stride()[:3]) for x in (q, k, v, out)))
    window = _WINDOW if problem.is_windowed else None
    ragged = Ragged(shape.q_len, shape.kv_len, is_packed=False) if problem.is_ragged else None
    scale = problem.head_dim**-0.5
    plan = make_plan(problem, program.config, shape, strides, scale, want_lse, window=window, ragged=ragged)
    scratch = torch.full((plan.workspace_bytes,), _NAN_BYTE, dtype=torch.uint8).to(device)
    q_at, k_at, v_at, out_at = (x[:, :, _BEYOND:].data_ptr() for x in (q, k, v, out))
    lse_at = lse.data_ptr() if want_lse else 0
    addresses = (q_at, k_at, v_at, out_at, lse_at, scratch.data_ptr(), raw_stream())
    if ragged is None:
        program.prepare(plan).launch(*addresses)
    else:
        sequences = torch.tensor([0, shape.q_len, 0, shape.kv_len], dtype=torch.int32).to(device)
        program.prepare(plan).launch(*addresses, sequences.data_ptr())
    return out.cpu(), lse.cpu()  # waits


def _surround(x: torch.Tensor) -> torch.Tensor:
    """`x` with tokens of NaN before and after its own."""
    whole = torch.full((*x.shape[:2], x.shape[2] + 2 * _BEYOND, x.shape[3]), torch.nan, dtype=x.dtype)
    whole[:, :, _BEYOND : _BEYOND + x.shape[2]] = x
    return whole
