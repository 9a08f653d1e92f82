"""From a config to the CUDA text that nvcc compiles: one self-contained .cu, the same bytes for the same inputs."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sagegen.abi import fields_of
from sagegen.layout import (
    BARRIER_BYTES,
    DELTA_KEYS,
    DELTA_MEANS,
    K_GROUPS,
    MEAN_TILE,
    QUANTIZE_THREADS,
    QUERY_WARPS,
    make_layout,
    round_up,
    row_unit,
    tile_align,
)
from sagegen.plan import ROLES
from sagegen.problem import Problem
from sagegen.space import Config

if TYPE_CHECKING:
    import jinja2

#: Whose bodies the device layer has: CUDA's, or plain C++ for the emulator.
Target = Literal["cuda", "host"]

#: Forms (operand types, where they lie) and columns.
WgmmaProducts = tuple[tuple[str, int], ...]

_LAYER_BEGIN = "// ---- device layer: begin ({}) ----\n"
_LAYER_END = "// ---- device layer: end ----\n"

#: Declarations of the emulator's runtime, before the host bodies that call it.
_HOST_HEADERS = ("emulator", "emulator_hopper")

_PV_DOC = {
    "e4m3f32": "FP8 (e4m3) with FP32 accumulator, promoted per tile",
    "e4m3f16": "FP8 (e4m3) with FP16 accumulator",
    "f16f32": "FP16 with FP32 accumulator",
    "bf16f32": "BF16 with FP32 accumulator",
}
_UNPROMOTED_DOC = "FP8 (e4m3) with FP32 accumulator, never promoted"


@dataclass(frozen=True, slots=True)
class Source:
    """A rendered kernel source.

    Attributes:
        name: identity of problem and config; part of every kernel's name.
        text: the whole .cu; needs no header of ours and no torch.
    """

    name: str
    problem: Problem
    config: Config
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def roles(self) -> tuple[str, ...]:
        """Its kernels in launch order."""
        return ROLES

    def entry(self, role: str) -> str:
        """The extern "C" name of one of its kernels."""
        return entry_name(role, self.name)

    def target(self, arch: str) -> str:
        """What it is compiled for, to run on a GPU of `arch`: that, or its variant with the family's instructions."""
        return arch + self.config.arch_suffix


def source_name(problem: Problem, config: Config) -> str:
    return f"{problem.name}_{config.name}"


def entry_name(role: str, name: str) -> str:
    return f"{role}_{name}"


def render(problem: Problem, config: Config, target: Target = "cuda") -> Source:
    """Render the quantizers and the attention kernel of `config` for `problem`.

    The text does not depend on the GPU: rules decide which GPUs a config may be built for.

    Args:
        target: `cuda` for nvcc; `host` has the device layer's plain C++ bodies, for the emulator, and is the same text
            outside the two lines that mark the device layer, line numbers included.
    """
    named = Source(source_name(problem, config), problem, config, text="")
    layout = make_layout(config, problem)
    align = tile_align(config, problem)
    values = {
        "source": named,
        "problem": problem,
        "config": config,
        "layout": layout,
        "quantizes_v": config.quantizes_v,
        "pv_doc": _UNPROMOTED_DOC if config.quantizes_v and not config.accum_depth else _PV_DOC[config.pv],
        "p_log2_scale": math.log2(config.p_max),
        "fields": fields_of(config, problem),
        "k_groups": K_GROUPS,
        "quantize_threads": QUANTIZE_THREADS,
        "v_stage_offset": round_up(layout.k_record_bytes, align),
        "tile_align": align,
        "barrier_bytes": BARRIER_BYTES,
        "query_warps": QUERY_WARPS,
        "quantize_min_blocks": _quantize_min_blocks(config, problem),
        "delta_means": DELTA_MEANS,
        "delta_keys": DELTA_KEYS,
        "mean_tile": MEAN_TILE,
        "row_unit": row_unit(config),
    }
    layer = DeviceLayer(_device_layer(problem, config), _wgmma_products(problem, config))
    text = render_template(f"attention_{config.family}.cu.j2", named.name, layer, target, values)
    return Source(named.name, problem, config, text)


def _quantize_min_blocks(config: Config, problem: Problem) -> int:
    """Resident blocks per SM, which hide the latency of the quantizer's loads: fewer where a thread holds much."""
    prepared = config.smooths_q or config.rotates
    if config.family == "mma":
        return (2 if prepared else 3) - (problem.head_dim > 128)
    if prepared and config.block_k > (128 if config.rotates or config.balances else 192):
        return 1
    return 3 if config.block_k <= 128 and not prepared else 2


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """The include files that a text uses, in order, and the wgmma products in them: form and columns."""

    includes: Sequence[str]
    wgmma_products: WgmmaProducts = ()


def render_template(template: str, name: str, layer: DeviceLayer, target: Target, values: Mapping[str, object]) -> str:
    """The text of one template.

    Args:
        template: a file of templates/, which has the device layer between its marker lines.
        name: of the source, for the compiler's line table.
        values: what the template names, beside the device layer.
    """
    includes, products = layer.includes, layer.wgmma_products
    text = _environment().get_template(template).render(values, device_layer=includes, wgmma_products=products)
    return _swap_device_layer(text, layer, name) if target == "host" else text


def _device_layer(problem: Problem, config: Config) -> list[str]:
    """The include files that this config uses, and no others: a new feature's file leaves old texts as they were."""
    if config.family == "wgmma":
        return [
            "thread",
            "math",
            f"convert_{problem.dtype}",
            "convert_e4m3",
            "shared_memory",
            "named_barrier",
            "mbarrier",
            "bulk_copy",
            "convert_half2",
            "packed",
            "atomic",
            "grid",
            *(["dependent_launch"] if config.launch == "early" else []),
            "register_budget",
            "wgmma",
            *([f"mma_io_{problem.dtype}"] if config.smooths_q else []),
            *(["square_root"] if config.balances else []),
        ]
    names = [
        "thread",
        "math",
        f"convert_{problem.dtype}",
        "shared_memory",
        "mma_qk_e4m3" if config.has_float_scores else f"mma_{config.qk}",
        "mma_e4m3_f16" if config.sums_in_fp16 else f"mma_{config.pv.removesuffix('f32')}",
    ]
    if config.quantizes_v:
        names[3:3] = ["convert_e4m3", "atomic"]
    elif config.has_float_scores:
        names[3:3] = ["convert_e4m3"]
    if config.sums_in_fp16 or config.delta == "f16":
        names[-1:-1] = ["convert_half2"]
    if config.smooths_q:
        names += [f"mma_io_{problem.dtype}"]
    if config.balances:
        names += ["multiply", "square_root"]
    return names


def _wgmma_products(problem: Problem, config: Config) -> WgmmaProducts:
    """The wgmma shapes of a config: form and columns."""
    if config.family != "wgmma":
        return ()
    ones = 8 if config.row_sum == "ones" else 0
    return ((f"{config.qk}_ss", config.block_k), ("e4m3_rs", problem.head_dim + ones))


def _swap_device_layer(text: str, layer: DeviceLayer, name: str) -> str:
    """`text` with the host bodies of `layer` between its markers; lines after them keep their numbers."""
    before, rest = text.split(_LAYER_BEGIN.format("cuda"))
    cuda_layer, after = rest.split(_LAYER_END)
    end_line = 2 + (before + cuda_layer).count("\n")
    bodies = "\n".join(_read_include("host", file) for file in (*_HOST_HEADERS, *layer.includes))
    lines = f'#line 1 "device_layer"\n{bodies}\n#line {end_line} "{name}.cu"\n'
    return f"{before}{_LAYER_BEGIN.format('host')}{lines}{_LAYER_END}{after}"


def _read_template(name: str) -> str:
    return importlib.resources.files("sagegen.templates").joinpath(name).read_text(encoding="utf-8")


def _read_include(target: Target, name: str, products: WgmmaProducts = ()) -> str:
    """One file of the device layer; `wgmma` is a template, since its instructions spell out every register."""
    if (target, name) == ("cuda", "wgmma"):
        template = _environment().get_template(f"include/{target}/{name}.cuh.j2")
        return template.render(wgmma_products=products).rstrip()
    return _read_template(f"include/{target}/{name}.cuh").rstrip()


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_template),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["read_include"] = functools.partial(_read_include, "cuda")
    return environment
