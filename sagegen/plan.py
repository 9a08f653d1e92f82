"""From a shape to launches: grids, workspace and the packed parameters of one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from sagegen.abi import NO_LIMIT, pack_constants
from sagegen.counts import Counts, Ragged, count
from sagegen.errors import ArgumentError
from sagegen.layout import (
    DELTA_KEYS,
    DELTA_MEANS,
    MEAN_TILE,
    QUANTIZE_THREADS,
    REGION_ALIGN,
    Layout,
    ceil_div,
    make_layout,
    round_up,
)
from sagegen.problem import Problem, Shape
from sagegen.space import Config

Role = Literal["stats", "quantize", "attention"]
#: Kernels of one source in launch order: statistics of K and V, quantizers, attention.
ROLES: tuple[Role, ...] = ("stats", "quantize", "attention")

_MAX_GRID = 2**31 - 1
#: Kernels index tokens with 32 bits and may count one tile past the end.
_MAX_TOKENS = 2**30
#: And add a window's sides to them.
_MAX_WINDOWED_TOKENS = 2**29
#: Of the counter behind V's scales with which persistent blocks share their works.
_COUNTER_BYTES = 16


@dataclass(frozen=True, slots=True)
class Strides:
    """Strides of one tensor in elements; the channel stride is 1."""

    batch: int
    head: int
    token: int


@dataclass(frozen=True, slots=True)
class TensorStrides:
    """Strides of the four tensors of a call."""

    q: Strides
    k: Strides
    v: Strides
    out: Strides


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: a 1-D grid, threads per block, dynamic shared memory in bytes.

    Attributes:
        is_persistent: blocks fetch works themselves; `grid` counts the works, and one block per SM is enough.
        starts_early: its blocks may start before the launch before it has ended; they wait for it themselves.
    """

    role: Role
    grid: int
    threads: int
    smem_bytes: int
    is_persistent: bool = False
    starts_early: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything of a call that its pointers do not change.

    Attributes:
        launches: in order.
        workspace_bytes: scratch that the call needs, alive until its last launch has run.
        constants: the launch ABI's struct after its pointers.
    """

    launches: tuple[Launch, ...]
    workspace_bytes: int
    constants: bytes


class Launcher(Protocol):
    """A plan on a loaded program: `launch.PreparedCall` on a GPU, `emulator.program.EmulatedCall` on the CPU."""

    def launch(
        self, q: int, k: int, v: int, out: int, lse: int, workspace: int, stream: int, sequences: int = 0
    ) -> None:
        """Launch all kernels in order; arguments are addresses, `lse` 0 when it is not wanted, and a stream.

        Args:
            sequences: of a ragged plan's lengths.
        """

    def launch_role(self, role: Role, q: int, k: int, v: int, out: int, lse: int, workspace: int, stream: int) -> None:
        """Launch one kernel, on a workspace that those before it have filled."""


class Loaded(Protocol):
    """A source's kernels, loaded where they can run."""

    @property
    def config(self) -> Config: ...

    @property
    def device(self) -> int: ...

    def prepare(self, plan: Plan) -> Launcher: ...


def make_plan(
    problem: Problem,
    config: Config,
    shape: Shape,
    strides: TensorStrides,
    softmax_scale: float,
    want_lse: bool,
    *,
    whole: Shape | None = None,
    window: tuple[int, int] | None = None,
    ragged: Ragged | None = None,
) -> Plan:
    """The plan of one call, or of a part of one.

    Args:
        shape: all counts >= 1. Lengths of a ragged call are the longest that its sequences may have.
        strides: of q, k, v and out, in elements.
        softmax_scale: multiplies q . k.
        want_lse: whether the log-sum-exp is written.
        whole: of the call that this is a part of: statistics are added up in the order in which all of it would add
            them, so the results are the same bits.
        window: keys that a query sees before and after its own, -1 for all: of a windowed problem.
        ragged: of a ragged problem.

    Raises:
        ArgumentError: a length exceeds 2^30 tokens, 2^29 with a window, or the call needs more thread blocks than a
            grid can have.
    """
    assert problem.is_windowed == (window is not None)
    assert problem.is_ragged == (ragged is not None)
    _check_lengths(shape, ragged, _MAX_TOKENS if window is None else _MAX_WINDOWED_TOKENS)
    layout = make_layout(config, problem)
    counts = count(config, shape, layout, whole or shape, ragged)
    sizes = _region_sizes(problem, config, layout, counts, want_lse)
    if config.smooths_q:
        sizes |= _smooth_q_sizes(problem, config, layout, counts)
    if config.balances:
        sizes |= _balance_sizes(problem, counts)
    if window is not None:  # mma's records say it themselves
        sizes["bad_keys_offset"] = counts.all_k_tiles * config.block_k * 4 if config.family == "wgmma" else 0
    offsets, workspace = _place_regions(sizes)
    values: dict[str, int | float] = {
        **offsets,
        **_stride_values(strides),
        "heads_q": shape.heads_q,
        "heads_kv": shape.heads_kv,
        "q_len": shape.q_len,
        "kv_len": shape.kv_len,
        "q_tiles": counts.q_tiles,
        "k_tiles": counts.k_tiles,
        "kv_heads_total": counts.kv_heads,
        "q_heads_total": counts.q_heads,
        "splits": counts.splits,
        "split_tokens": counts.split_tokens,
        "softmax_scale": softmax_scale,
    }
    if config.balances:
        values |= {"ranges": counts.ranges, "range_spans": counts.range_spans}
    if window is not None:
        left, right = (NO_LIMIT if side < 0 else min(side, NO_LIMIT) for side in window)
        values |= {"window_left": left, "window_right": right}
    if ragged is not None:
        values |= {"q_tokens": ragged.q_tokens, "kv_tokens": ragged.kv_tokens}
        values["q_item_tokens"] = 0 if ragged.is_packed else ragged.q_tokens
        values["kv_item_tokens"] = 0 if ragged.is_packed else ragged.kv_tokens
    return Plan(_launches(config, layout, counts), workspace, pack_constants(values))


def _check_lengths(shape: Shape, ragged: Ragged | None, most: int) -> None:
    tokens = max(shape.q_len, shape.kv_len)
    if ragged is not None:
        items = 1 if ragged.is_packed else shape.batch
        tokens = max(tokens, items * ragged.q_tokens, items * ragged.kv_tokens)
    if tokens > most:
        raise ArgumentError(f"q, k: {tokens} tokens are more than {most}", "split the sequence")


def _launches(config: Config, layout: Layout, counts: Counts) -> tuple[Launch, ...]:
    """Raises ArgumentError: a grid is too large."""
    delta_blocks = ceil_div(counts.means * counts.group, DELTA_MEANS)
    delta_blocks *= ceil_div(counts.k_tiles * config.block_k, DELTA_KEYS)
    key_blocks = counts.all_k_tiles * (2 if config.quantizes_v else 1)
    quantize_blocks = counts.q_rows // config.quantize_rows + key_blocks + counts.kv_heads * delta_blocks
    q_blocks = counts.q_heads * (counts.ranges if config.balances else counts.means)
    statistics_blocks = counts.kv_heads * counts.splits * config.measured_tensors + q_blocks
    early = config.launch == "early"
    launches = (
        # never early: what the caller's kernels wrote must be there, and what they read must be done with
        Launch("stats", statistics_blocks, QUANTIZE_THREADS, 0),
        Launch("quantize", quantize_blocks, QUANTIZE_THREADS, 0, starts_early=early),
        Launch("attention", counts.all_q_tiles, config.threads, layout.smem_bytes, config.is_persistent, early),
    )
    for launch in launches:
        if launch.grid > _MAX_GRID:
            raise ArgumentError(
                f"q, k: the call needs {launch.grid} thread blocks, more than a grid holds", "split it along the batch"
            )
    return launches


def _region_sizes(problem: Problem, config: Config, layout: Layout, counts: Counts, want_lse: bool) -> dict[str, int]:
    """Bytes of every workspace region that all kernels have, in order."""
    rows = counts.q_rows
    channels = counts.kv_heads * problem.head_dim
    counter = _COUNTER_BYTES if config.is_persistent else 0
    splits = channels * counts.splits * 4
    return {
        "q_tiles_offset": rows * layout.qk_row_bytes,
        "q_scales_offset": rows * 4,
        "lse_bias_offset": rows * 4 if want_lse else 0,
        "k_records_offset": counts.all_k_tiles * layout.k_record_bytes,
        "v_records_offset": counts.all_k_tiles * layout.v_record_bytes,
        "k_sums_offset": splits * config.statistics,
        "v_peaks_offset": splits * config.v_statistics if config.quantizes_v else 0,
        "v_scales_offset": channels * 4 * config.head_rows + counter if config.quantizes_v else 0,
    }


def _smooth_q_sizes(problem: Problem, config: Config, layout: Layout, counts: Counts) -> dict[str, int]:
    """Bytes of the regions that smoothing Q adds."""
    rows = counts.kv_heads * round_up(counts.group * counts.means, MEAN_TILE)
    scales = 1 + config.folds_delta  # and the largest of each span
    return {
        "q_means_offset": rows * problem.head_dim * 2,
        "deltas_offset": counts.all_q_tiles * counts.k_tiles * layout.delta_bytes,
        "delta_scales_offset": counts.q_heads * counts.means * 4 * scales,
    }


def _balance_sizes(problem: Problem, counts: Counts) -> dict[str, int]:
    """Bytes of the regions that balance adds: rows of sums of squares of every channel."""
    row = problem.head_dim * 4
    return {
        "k_squares_offset": counts.kv_heads * counts.splits * row,
        "q_squares_offset": counts.q_heads * counts.ranges * row,
    }


def _place_regions(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Offset of every workspace region, and the workspace's size."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += round_up(size, REGION_ALIGN)
    return offsets, end


def _stride_values(strides: TensorStrides) -> dict[str, int | float]:
    values: dict[str, int | float] = {}
    for tensor in ("q", "k", "v", "out"):
        own: Strides = getattr(strides, tensor)
        for axis in ("batch", "head", "token"):
            values[f"{tensor}_{axis}_stride"] = getattr(own, axis)
    return values
