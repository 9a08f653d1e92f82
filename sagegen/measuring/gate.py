"""The accuracy gate: what a kernel must get right before its speed counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import torch

from sagegen import reference
from sagegen.measuring.call import Allocator, bind_call
from sagegen.measuring.floors import Floor, captured_floor, find_floor, rounding_of
from sagegen.measuring.inputs import DTYPES, INPUT_KINDS, ZERO_CHANNEL, InputKind, Inputs, make_inputs
from sagegen.plan import Loaded
from sagegen.problem import Problem
from sagegen.space import Config


@dataclass(frozen=True, slots=True)
class Figures:
    """How far an output is from the truth; sums run over all of its finite elements.

    Attributes:
        cosine: sum(o r) / sqrt(sum(o^2) sum(r^2)).
        relative_l1: sum|o - r| / sum|r|.
        relative_l2: sqrt(sum (o - r)^2 / sum r^2).
        max_error: max|o - r|.
        scale_ratio: sum(o r) / sum(r^2); below 1 the output is too small.
    """

    cosine: float
    relative_l1: float
    relative_l2: float
    max_error: float
    scale_ratio: float


#: The kind that runs twice and must give the same bits.
REPEATED_KIND = "normal"


@dataclass(frozen=True, slots=True)
class GateResult:
    """The gate's verdict.

    Attributes:
        reason: which kind failed and how; empty when all passed.
        figures: of every kind that ran and gave finite figures.
    """

    passed: bool
    reason: str
    figures: dict[str, Figures]

    def figure_values(self) -> dict[str, dict[str, float]]:
        """Figures as plain values, for journals, registries and messages."""
        return {kind: asdict(figures) for kind, figures in self.figures.items()}


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs, a model's own or the gate's, with the truth: out and lse, float64 and float32, on the inputs' device."""

    inputs: Inputs
    out: torch.Tensor
    lse: torch.Tensor
    is_captured: bool
    checksum: int


class Cases:
    """The gate's cases on one device, made when first asked for and kept: FP64 truth costs more than a candidate.

    Args:
        kinds: by name; the emulator has EMULATED_KINDS.
    """

    def __init__(self, device: torch.device | str, kinds: Mapping[str, InputKind] = INPUT_KINDS) -> None:
        self.device = torch.device(device)
        self._kinds = kinds
        self._cases: dict[tuple[Problem, str], Case] = {}

    def get(self, problem: Problem, kind: str) -> Case:
        """The case of one of the kinds, or of captured inputs added before."""
        if (problem, kind) not in self._cases:
            inputs = make_inputs(self._kinds[kind], problem, self.device)
            self._cases[problem, kind] = _make_case(inputs, problem, is_captured=False)
        return self._cases[problem, kind]

    def add_captured(self, problem: Problem, kind: str, inputs: Inputs) -> None:
        """Keep a model's own inputs, of the problem's head dim, as a further kind; they take the problem's dtype."""
        inputs = inputs.map(lambda x: x.to(self.device, DTYPES[problem.dtype]))
        self._cases[problem, kind] = _make_case(inputs, problem, is_captured=True)

    def forget(self) -> None:
        """Drop all cases, after a candidate wrote into their memory."""
        self._cases.clear()


def _make_case(inputs: Inputs, problem: Problem, *, is_captured: bool) -> Case:
    out, lse = reference.attention(
        inputs.q, inputs.k, inputs.v, is_causal=problem.is_causal, return_lse=True, out_dtype=torch.float64
    )
    return Case(inputs, out, lse, is_captured, _checksum(inputs, out))


def _checksum(inputs: Inputs, out: torch.Tensor) -> int:
    bits = [x.view(torch.int16).sum(dtype=torch.int64) for x in (inputs.q, inputs.k, inputs.v)]
    return int(sum(bits, out.view(torch.int64).sum()))


def figures(out: torch.Tensor, ref: torch.Tensor) -> Figures:
    """Compare an output with the truth; elements where the truth is not finite are left out.

    Two outputs of zeros agree: their cosine and scale ratio are 1.
    """
    known = ref.isfinite()
    o, r = (torch.where(known, x.double(), 0).flatten() for x in (out, ref))
    error = o - r
    dot, o2, r2, e2 = o @ r, o @ o, r @ r, error @ error
    values = torch.stack([dot, o2, r2, e2, error.abs().sum(), r.abs().sum(), error.abs().max()]).tolist()
    dot_, o2_, r2_, e2_, e1_, r1_, peak = values
    if r2_ == 0:
        return Figures(*((1.0, 0.0, 0.0, 0.0, 1.0) if e2_ == 0 else (0.0, math.inf, math.inf, peak, math.inf)))
    cosine = dot_ / math.sqrt(o2_ * r2_) if o2_ > 0 else 0.0
    return Figures(cosine, e1_ / r1_, math.sqrt(e2_ / r2_), peak, dot_ / r2_)


def run_gate(
    program: Loaded,
    problem: Problem,
    config: Config,
    cases: Cases,
    *,
    kinds: Iterable[str] = tuple(INPUT_KINDS),
) -> GateResult:
    """Run every input kind through a program and hold the outputs to their floors; stops at the first failure.

    Outputs and scratch start as NaN and lie between guard zones.

    Args:
        program: the loaded kernels of `problem` and `config`.
        cases: truths on the program's device, kept between candidates.
        kinds: those of `cases`, or added to them.

    Raises:
        RuntimeError: a kernel faulted; the CUDA context is then unusable (torch.AcceleratorError).
        DriverError: a launch was refused.
    """
    found: dict[str, Figures] = {}
    for kind in kinds:
        case = cases.get(problem, kind)
        found_kind, reason = _run_case(program, problem, config, case, kind)
        if found_kind is not None:
            found[kind] = found_kind
        if not reason and _checksum(case.inputs, case.out) != case.checksum:
            cases.forget()
            reason = "wrote into its inputs or other memory"
        if reason:
            return GateResult(False, f"{kind}: {reason}", found)
    return GateResult(True, "", found)


def _run_case(program: Loaded, problem: Problem, config: Config, case: Case, kind: str) -> tuple[Figures | None, str]:
    """Figures of one case, None when they say nothing, and what is wrong, or an empty string.

    Where a wanted lse changes how P is summed, both ways must hold, and the figures are those without it.
    """
    result, reason = _run_call(program, problem, config, case, kind, want_lse=not config.lse_changes_output)
    if config.lse_changes_output and not reason:
        _, reason = _run_call(program, problem, config, case, kind, want_lse=True)
    return result, reason


def _run_call(
    program: Loaded, problem: Problem, config: Config, case: Case, kind: str, *, want_lse: bool
) -> tuple[Figures | None, str]:
    guards = GuardedAllocator()
    call = bind_call(program, problem, config, *_tensors(case.inputs), want_lse=want_lse, allocator=guards)
    call.launch()
    if changed := guards.changed_bytes():
        return None, f"wrote outside its memory ({changed} guard bytes)"
    if wrong := _describe_mismatch(call.out.isfinite(), case.out.isfinite()):
        return None, wrong
    if kind == REPEATED_KIND:
        again_lse = want_lse and config.lse_changes_output
        again = bind_call(program, problem, config, *_tensors(case.inputs), want_lse=again_lse, allocator=guards)
        again.launch()
        if not torch.equal(again.out, call.out):
            return None, f"two runs, the second {'with' if again_lse else 'without'} lse, gave different bits"
    truth = case.out.masked_fill(~call.out.isfinite(), math.nan)  # what may be lost is no error
    result = figures(call.out, truth)
    lse_error = 0.0 if call.lse is None else _lse_error(call.lse, case)
    rounding = rounding_of(config, problem.precision)
    floor = captured_floor(rounding) if case.is_captured else find_floor(kind, rounding)
    return result, _shortfall(result, call.out, truth, lse_error, floor, kind)


def _tensors(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs.q, inputs.k, inputs.v


def _describe_mismatch(finite: torch.Tensor, known: torch.Tensor) -> str:
    """What is wrong with where an output is finite, or an empty string.

    Nothing may be finite that the truth is not. A row that a bad key reaches may lose all its channels, since kernels
    mark keys; a row that none reaches may lose nothing.
    """
    spoiled = int((~finite & known.all(-1, keepdim=True)).sum())
    lost = int((finite & ~known).sum())
    if spoiled:
        return f"{spoiled} of {finite.numel()} outputs are NaN or Inf"
    return f"{lost} of {finite.numel()} outputs are finite where an input was NaN or Inf" if lost else ""


def _lse_error(lse: torch.Tensor, case: Case) -> float:
    """Largest error of the lse; rows without keys must be -inf, rows that bad values reach are left out."""
    known = case.out.isfinite().all(-1)
    error = torch.where(lse == case.lse, 0, (lse - case.lse).abs())  # -inf - -inf is NaN
    error = torch.where(error.isnan(), math.inf, error)
    return float(torch.where(known, error, 0).max())


def _row_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Largest |o - r| / |r| of a row with a finite truth; a row that should be 0 and is not counts as infinite."""
    error, length = (out.double() - ref).norm(dim=-1), ref.norm(dim=-1)
    ratio = torch.where(error == 0, 0, error / length)
    return float(torch.where(length.isfinite(), ratio, 0).max())


def _shortfall(
    result: Figures, out: torch.Tensor, truth: torch.Tensor, lse_error: float, floor: Floor, kind: str
) -> str:
    """What misses the floor, or an empty string."""
    if round(result.cosine, 4) < floor.cosine:
        return f"cosine {result.cosine:.5f} is below {floor.cosine}"
    if abs(result.scale_ratio - 1) > floor.scale:
        return f"scale ratio {result.scale_ratio:.4f} is further than {floor.scale} from 1"
    if result.relative_l2 > floor.relative_l2:
        return f"relative L2 error {result.relative_l2:.4f} is above {floor.relative_l2}"
    row_error = _row_error(out, truth)
    if row_error > floor.row_error:
        return f"a row is off by {row_error:.3g} of its length, more than {floor.row_error}"
    if floor.relative_error < math.inf:
        worst = float(((out.double() - truth).abs() / truth.abs()).max())
        if worst > floor.relative_error:
            return f"an output is off by {worst:.2%}, more than {floor.relative_error:.0%}"
    if floor.lse_error is not None and lse_error > floor.lse_error:
        return f"lse is off by {lse_error:.3g}, more than {floor.lse_error}"
    if kind == "v_zero_channel" and bool((out[..., ZERO_CHANNEL] != 0).any()):
        return "a channel of zeros did not stay exactly 0"
    return ""


class GuardedAllocator(Allocator):
    """Memory that starts as NaN in every type and lies between zones whose bytes must not change."""

    ZONE_BYTES = 4096
    ZONE_VALUE = 0xA5
    FILL_VALUE = 0xFF  # a NaN in fp16, bf16, fp32 and e4m3

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        buffer = torch.full((size + 2 * self.ZONE_BYTES,), self.ZONE_VALUE, dtype=torch.uint8, device=device)
        self._buffers.append(buffer)
        inner = buffer[self.ZONE_BYTES : self.ZONE_BYTES + size]
        return inner.fill_(self.FILL_VALUE).view(dtype).view(shape)

    def changed_bytes(self) -> int:
        """Bytes of guard zones that were written to. Waits for the device."""
        zones = [zone for b in self._buffers for zone in (b[: self.ZONE_BYTES], b[-self.ZONE_BYTES :])]
        return int(torch.cat(zones).ne(self.ZONE_VALUE).sum())
