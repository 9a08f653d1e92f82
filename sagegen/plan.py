"""From a shape to launches: grids, workspace and the packed parameters of one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from sagegen.abi import pack_constants
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
    quantized_rows,
    round_up,
    spans_of_range,
    tokens_of_split,
)
from sagegen.problem import Problem, Shape
from sagegen.space import Config

Role = Literal["stats", "quantize", "attention"]
#: Kernels of one source in launch order: statistics of K and V, quantizers, attention.
ROLES: tuple[Role, ...] = ("stats", "quantize", "attention")

_MAX_GRID = 2**31 - 1
#: Kernels index tokens with 32 bits and may count one tile past the end.
_MAX_TOKENS = 2**30
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

    def launch(self, q: int, k: int, v: int, out: int, lse: int, workspace: int, stream: int) -> None:
        """Launch all kernels in order; arguments are addresses, `lse` 0 when it is not wanted, and a stream."""

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
) -> Plan:
    """The plan of one call, or of a part of one.

    Args:
        shape: all counts >= 1.
        strides: of q, k, v and out, in elements.
        softmax_scale: multiplies q . k.
        want_lse: whether the log-sum-exp is written.
        whole: of the call that this is a part of: statistics are added up in the order in which all of it would add
            them, so the results are the same bits.

    Raises:
        ArgumentError: a length exceeds 2^30 tokens, or the call needs more thread blocks than a grid can have.
    """
    if max(shape.q_len, shape.kv_len) > _MAX_TOKENS:
        raise ArgumentError(f"q, k: {max(shape.q_len, shape.kv_len)} tokens are more than 2^30", "split the sequence")
    layout = make_layout(config, problem)
    kv_heads = shape.batch * shape.heads_kv
    q_heads = shape.batch * shape.heads_q
    group = shape.heads_q // shape.heads_kv
    q_tiles = ceil_div(shape.q_len, config.block_q)
    q_rows = quantized_rows(config, shape.q_len) if config.q_quantizer == "kernel" else 0
    k_tiles = ceil_div(shape.kv_len, config.block_k)
    all_heads = kv_heads if whole is None else whole.batch * whole.heads_kv
    split_tokens = tokens_of_split(all_heads * config.measured_tensors, shape.kv_len)
    splits = ceil_div(shape.kv_len, split_tokens)
    means = q_tiles * layout.means_per_tile  # of a query head
    sizes = _region_sizes(problem, config, layout, q_heads, kv_heads, q_rows, k_tiles, splits, want_lse)
    if config.smooths_q:
        sizes |= _smooth_q_sizes(problem, layout, q_heads, kv_heads, q_tiles, k_tiles)
        sizes["delta_scales_offset"] *= 1 + config.folds_delta  # and the largest of each span
    ranges: dict[str, int] = {}
    if config.balances:
        range_spans = spans_of_range(means, group)
        ranges = {"ranges": ceil_div(means, range_spans), "range_spans": range_spans}
        sizes |= _balance_sizes(problem, kv_heads * splits, q_heads * ranges["ranges"])
    offsets, workspace = _place_regions(sizes)

    quantize_blocks = q_heads * (q_rows // config.quantize_rows) + kv_heads * k_tiles * (2 if config.quantizes_v else 1)
    quantize_blocks += kv_heads * ceil_div(means * group, DELTA_MEANS) * ceil_div(k_tiles * config.block_k, DELTA_KEYS)
    statistics_blocks = kv_heads * splits * config.measured_tensors + q_heads * ranges.get("ranges", means)
    early = config.launch == "early"
    launches = (
        # never early: what the caller's kernels wrote must be there, and what they read must be done with
        Launch("stats", statistics_blocks, QUANTIZE_THREADS, 0),
        Launch("quantize", quantize_blocks, QUANTIZE_THREADS, 0, starts_early=early),
        Launch("attention", q_heads * q_tiles, config.threads, layout.smem_bytes, config.is_persistent, early),
    )
    for launch in launches:
        if launch.grid > _MAX_GRID:
            raise ArgumentError(
                f"q, k: the call needs {launch.grid} thread blocks, more than a grid holds", "split it along the batch"
            )
    constants = pack_constants(
        {
            **offsets,
            **ranges,
            **_stride_values(strides),
            "heads_q": shape.heads_q,
            "heads_kv": shape.heads_kv,
            "q_len": shape.q_len,
            "kv_len": shape.kv_len,
            "q_tiles": q_tiles,
            "k_tiles": k_tiles,
            "kv_heads_total": kv_heads,
            "q_heads_total": q_heads,
            "splits": splits,
            "split_tokens": split_tokens,
            "softmax_scale": softmax_scale,
        }
    )
    return Plan(launches, workspace, constants)


def _region_sizes(
    problem: Problem,
    config: Config,
    layout: Layout,
    q_heads: int,
    kv_heads: int,
    q_rows: int,
    k_tiles: int,
    splits: int,
    want_lse: bool,
) -> dict[str, int]:
    """Bytes of every workspace region that all kernels have, in order."""
    rows = q_heads * q_rows
    channels = kv_heads * problem.head_dim
    counter = _COUNTER_BYTES if config.is_persistent else 0
    return {
        "q_tiles_offset": rows * layout.qk_row_bytes,
        "q_scales_offset": rows * 4,
        "lse_bias_offset": rows * 4 if want_lse else 0,
        "k_records_offset": kv_heads * k_tiles * layout.k_record_bytes,
        "v_records_offset": kv_heads * k_tiles * layout.v_record_bytes,
        "k_sums_offset": channels * splits * 4 * config.statistics,
        "v_peaks_offset": channels * splits * 4 * config.v_statistics if config.quantizes_v else 0,
        "v_scales_offset": channels * 4 * config.head_rows + counter if config.quantizes_v else 0,
    }


def _smooth_q_sizes(
    problem: Problem, layout: Layout, q_heads: int, kv_heads: int, q_tiles: int, k_tiles: int
) -> dict[str, int]:
    """Bytes of the regions that smoothing Q adds."""
    means = q_tiles * layout.means_per_tile
    rows = kv_heads * round_up(q_heads // kv_heads * means, MEAN_TILE)
    return {
        "q_means_offset": rows * problem.head_dim * 2,
        "deltas_offset": q_heads * q_tiles * k_tiles * layout.delta_bytes,
        "delta_scales_offset": q_heads * means * 4,
    }


def _balance_sizes(problem: Problem, k_rows: int, q_rows: int) -> dict[str, int]:
    """Bytes of the regions that balance adds: rows of sums of squares of every channel."""
    return {"k_squares_offset": k_rows * problem.head_dim * 4, "q_squares_offset": q_rows * problem.head_dim * 4}


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
