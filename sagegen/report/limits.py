"""What a GPU can reach at most on a problem, by a probe or by the table of GPUs: the roofs of a roofline."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

from sagegen.gpu import Gpu
from sagegen.problem import Problem, Shape
from sagegen.space import Config

#: `probe`: measured on the GPU by `sagegen probe`; `table`: the GPU table's figure, which mostly is a data sheet's.
Basis = Literal["probe", "table"]

_WGMMA_PROBES = {"s8": "wgmma_s8_ss_n128", "e4m3": "wgmma_e4m3f32_ss_n128", "pv": "wgmma_e4m3f32_rs_n128"}


@dataclass(frozen=True, slots=True)
class Roof:
    """A limit.

    Attributes:
        tops: 1e12 operations of both products a second; of a memory, per operation and byte of intensity.
        is_slope: it grows with the operations per byte: a memory.
    """

    name: str
    tops: float
    basis: Basis
    is_slope: bool = False


def find_roofs(gpu: Gpu, problem: Problem, config: Config) -> list[Roof]:
    """The limits of a config's attention kernel that are known: matrix units, 2^x, device memory.

    The matrix roof is the harmonic mean of the rates of Q·K^T and P·V, which share the operations equally and take
    turns. Each score takes one 2^x and is worth 4 d operations (2 d in each product). Roofs whose rate nobody measured
    or wrote down are left out.
    """
    roofs = []
    dram = gpu.measured.dram_gbs
    roofs.append(
        Roof("device memory", dram / 1e3, "probe", True)
        if dram
        else Roof("device memory", gpu.bandwidth_gbs / 1e3, "table", True)
    )
    if (matrix := _matrix_roof(gpu, config)) is not None:
        roofs.append(matrix)
    if (exponents := gpu.measured.units.get("ex2")) is not None:
        # a probe counts per clock and SM; the boost clock is an upper bound
        rate = exponents * gpu.sms * gpu.boost_mhz / 1e6
        roofs.append(Roof("2^x of all scores", rate * 4 * problem.head_dim, "probe"))
    return roofs


def _matrix_roof(gpu: Gpu, config: Config) -> Roof | None:
    if config.family == "wgmma":
        first = _WGMMA_PROBES["e4m3" if config.has_float_scores else "s8"]
        probed = [gpu.measured.matrix.get(name) for name in (first, _WGMMA_PROBES["pv"])]
        tabled: list[float | None] = [None, None]  # the table has mma.sync's rates, and wgmma's are higher
    else:
        kinds = ("e4m3f32" if config.has_float_scores else "s8", config.pv)
        probed = [gpu.measured.matrix.get(f"mma_{kind}") for kind in kinds]
        tabled = [gpu.peaks.get(kind) for kind in kinds]
    for rates, basis in ((probed, "probe"), (tabled, "table")):
        known = [rate for rate in rates if rate]
        if len(known) == len(rates):
            return Roof("matrix units", statistics.harmonic_mean(known), "probe" if basis == "probe" else "table")
    return None


def least_bytes(config: Config, problem: Problem, shape: Shape) -> float:
    """Bytes that an attention kernel must move at least: Q, K and V read once as it reads them, O written once."""
    q_bytes = 1 if config.q_quantizer == "kernel" else 2
    v_bytes = 1 if config.quantizes_v else 2
    queries = shape.batch * shape.heads_q * shape.q_len
    keys = shape.batch * shape.heads_kv * shape.kv_len
    return float(problem.head_dim * (queries * (q_bytes + 2) + keys * (1 + v_bytes)))
