"""cuDNN's FP8 attention through nvidia-cudnn-frontend: a peer of `sagegen bench --peers`, used by nothing else.

q, k, v and the output are e4m3 with one scale per tensor: on Hopper cuDNN has no other FP8 forward (no 16-bit output,
no bottom-right mask). Quantizing the inputs is done here, once, and is not part of a launch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch

_E4M3_MAX = 448.0
#: Of the unnormalized probabilities, which are at most 1; a power of two below the largest e4m3 value.
_PROBABILITY_SCALE = 256.0
_SCALAR = [1, 1, 1, 1]


class Fp8Attention:
    """One call on fixed tensors, ready to launch as often as wanted.

    Args:
        q: [batch, heads_q, length, head_dim], 16-bit, on a Hopper GPU or newer.
        k, v: [batch, heads_kv, length, head_dim].
        is_causal: cuDNN's mask here is top-left, so it needs equal lengths.

    Raises:
        ImportError: nvidia-cudnn-frontend is not installed, or finds no cuDNN.
        Exception: cuDNN has no plan for the call; cudnn.cudnnGraphNotSupportedError says why.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> None:
        self._cudnn = _import_cudnn()
        self.tensors, self._output_scale = quantize_inputs(q, k, v)
        self._handle = _make_handle()
        stream = torch.cuda.current_stream(q.device).cuda_stream
        self._cudnn.set_stream(handle=self._handle, stream=stream)
        graph, ids = self._find_plan(is_causal)
        self._graph = graph
        self._workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)
        self._pack = {ids[name]: tensor.data_ptr() for name, tensor in self.tensors.items() if name in ids}

    def launch(self) -> None:
        self._graph.execute(self._pack, self._workspace.data_ptr(), handle=self._handle)

    def output(self) -> torch.Tensor:
        """What the last launch gave, float32, q's shape."""
        return self.tensors["o"].float() * self._output_scale

    @property
    def versions(self) -> dict[str, str]:
        return {"cudnn-frontend": self._cudnn.__version__, "cudnn": self._cudnn.backend_version_string()}

    def _find_plan(self, is_causal: bool) -> tuple[Any, dict[str, int]]:
        """A built graph and its tensors' ids: without the outputs `amax_*`, which nobody reads, if cuDNN can."""
        try:
            return self._build(is_causal, wants_peaks=False)
        except Exception:  # of several kinds, by how far cuDNN came
            return self._build(is_causal, wants_peaks=True)

    def _build(self, is_causal: bool, wants_peaks: bool) -> tuple[Any, dict[str, int]]:
        graph, made = make_graph(self._cudnn, self.tensors, is_causal, wants_peaks, handle=self._handle)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self._cudnn.heur_mode.A, self._cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph, {name: tensor.get_uid() for name, tensor in made.items()}


def quantize_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[dict[str, torch.Tensor], float]:
    """Tensors of a call by the names of cuDNN's arguments, `o` among them, and what to multiply `o` with."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        scale = float(tensor.abs().max()) / _E4M3_MAX or 1.0
        tensors[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        tensors[f"descale_{name}"] = _scalar(scale, q)
    output_scale = float(tensors["descale_v"])  # an output is a mean of values, so never larger than the largest
    scales = {
        "descale_s": 1 / _PROBABILITY_SCALE,
        "scale_s": _PROBABILITY_SCALE,
        "scale_o": 1 / output_scale,
        "amax_s": 0.0,
        "amax_o": 0.0,
    }
    tensors.update({name: _scalar(value, q) for name, value in scales.items()})
    tensors["o"] = torch.empty_like(tensors["q"])
    return tensors, output_scale


def make_graph(
    cudnn: Any, tensors: Mapping[str, torch.Tensor], is_causal: bool, wants_peaks: bool, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """The graph of one call, not yet validated, and its own tensors by name.

    Args:
        cudnn: the module.
        tensors: as `quantize_inputs` gives them; only shapes and strides count.
        wants_peaks: whether `amax_s` and `amax_o` are written.
        options: of cudnn.pygraph, e.g. `handle`.
    """
    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, **options)

    def declare(name: str, kind: Any) -> Any:
        tensor = tensors[name]
        return graph.tensor(name=name, dim=list(tensor.shape), stride=list(tensor.stride()), data_type=kind)

    made = {name: declare(name, e4m3) for name in ("q", "k", "v")}
    scales = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    made.update({name: declare(name, fp32) for name in scales})
    head_dim = tensors["q"].shape[-1]
    # of the arguments for a mask this deprecated one is known to every version of cuDNN with FP8 attention
    out, _, amax_s, amax_o = graph.sdpa_fp8(
        **made, attn_scale=head_dim**-0.5, use_causal_mask=is_causal, generate_stats=False
    )
    shape, strides = list(tensors["o"].shape), list(tensors["o"].stride())
    made["o"] = out.set_output(True).set_dim(shape).set_stride(strides).set_data_type(e4m3)
    for name, peak in (("amax_s", amax_s), ("amax_o", amax_o)):
        peak.set_output(wants_peaks).set_dim(_SCALAR).set_stride(_SCALAR).set_data_type(fp32)
        if wants_peaks:
            made[name] = peak
    return graph, made


def _scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full(_SCALAR, value, dtype=torch.float32, device=like.device)


@functools.cache
def _make_handle() -> int:
    """One for the process: it is never destroyed."""
    handle: int = _import_cudnn().create_handle()
    return handle


def _import_cudnn() -> Any:
    """The module, which finds the libcudnn that torch has loaded."""
    try:
        return importlib.import_module("cudnn")
    except ImportError as error:
        raise ImportError(
            f"nvidia-cudnn-frontend cannot be imported ({error}); pip install nvidia-cudnn-frontend"
        ) from error
