"""cuDNN's FP8 attention as a peer: the graph that is asked for, with a stand-in for the module, and its inputs."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
import torch

from sagegen.measuring import cudnn_fp8
from sagegen.measuring.cudnn_fp8 import Fp8Attention, make_graph, quantize_inputs

Q, KV = (2, 4, 32, 16), (2, 2, 32, 16)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[1])).bfloat16()


class NotSupportedError(Exception):
    """As cudnnGraphNotSupportedError: no RuntimeError."""


class FakeTensor:
    count = 0

    def __init__(self, **facts: Any) -> None:
        FakeTensor.count += 1
        self.uid, self.facts = FakeTensor.count, facts

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def keep(value: Any) -> FakeTensor:
            self.facts[name.removeprefix("set_")] = value
            return self

        return keep

    def get_uid(self) -> int:
        return self.uid


class FakeGraph:
    def __init__(self, cudnn: FakeCudnn, options: dict[str, Any]) -> None:
        self.cudnn, self.options, self.steps = cudnn, options, []
        cudnn.graphs.append(self)

    def tensor(self, **facts: Any) -> FakeTensor:
        return FakeTensor(**facts)

    def sdpa_fp8(self, **arguments: Any) -> list[FakeTensor | None]:
        self.arguments = arguments
        self.outputs = [FakeTensor(), None, FakeTensor(), FakeTensor()]
        return self.outputs

    def check_support(self) -> None:
        self.steps.append("check_support")
        if self.cudnn.needs_peaks and not self.outputs[2].facts["output"]:
            raise NotSupportedError("No execution plans support the graph.")

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pack: dict[int, int], workspace: int, handle: int) -> None:
        self.cudnn.executed.append((pack, workspace, handle))

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.steps.append(name)


class FakeCudnn(types.SimpleNamespace):
    __version__ = "1.22.1"
    cudnnGraphNotSupportedError = NotSupportedError  # noqa: N815 - the module's own name
    data_type = types.SimpleNamespace(FP8_E4M3="e4m3", FLOAT="fp32")
    heur_mode = types.SimpleNamespace(A="A", FALLBACK="FALLBACK")

    def __init__(self, needs_peaks: bool = False) -> None:
        super().__init__(needs_peaks=needs_peaks, graphs=[], executed=[], streams=[])

    def pygraph(self, **options: Any) -> FakeGraph:
        return FakeGraph(self, options)

    def create_handle(self) -> int:
        return 77

    def set_stream(self, handle: int, stream: int) -> None:
        self.streams.append((handle, stream))

    def backend_version_string(self) -> str:
        return "9.19.0"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a stand-in where `import cudnn` finds it, and a stream where there is no GPU."""

    def put(cudnn: FakeCudnn) -> FakeCudnn:
        real = importlib.import_module
        monkeypatch.setattr(importlib, "import_module", lambda name: cudnn if name == "cudnn" else real(name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=5))
        cudnn_fp8._make_handle.cache_clear()
        return cudnn

    yield put
    cudnn_fp8._make_handle.cache_clear()


def test_inputs_span_the_range_of_e4m3_and_their_scales_bring_them_back() -> None:
    q, k, v = draw(*Q), draw(*KV), 3 * draw(*KV)
    tensors, output_scale = quantize_inputs(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        assert tensors[name].dtype is torch.float8_e4m3fn
        assert tensors[name].float().abs().max() == 448
        back = tensors[name].float() * tensors[f"descale_{name}"]
        assert torch.nn.functional.cosine_similarity(back.flatten(), tensor.float().flatten(), dim=0) > 0.999
    # an output is a mean of values: its scale is that of V, and undoes `scale_o`
    assert output_scale == pytest.approx(float(v.abs().max()) / 448)
    assert float(tensors["scale_o"]) * output_scale == pytest.approx(1)
    assert float(tensors["scale_s"]) * float(tensors["descale_s"]) == 1
    assert float(tensors["scale_s"]) <= 448
    assert tensors["o"].shape == Q


def test_zeros_have_a_scale_too() -> None:
    tensors, _ = quantize_inputs(*(torch.zeros(Q, dtype=torch.bfloat16) for _ in range(3)))
    assert float(tensors["descale_q"]) == 1
    assert tensors["v"].float().abs().max() == 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_graph_is_of_fp8_in_and_out_with_the_problems_scale(is_causal: bool) -> None:
    cudnn = FakeCudnn()
    tensors, _ = quantize_inputs(draw(*Q), draw(*KV), draw(*KV))
    graph, made = make_graph(cudnn, tensors, is_causal, wants_peaks=False, handle=77)
    assert graph.options["handle"] == 77
    asked = graph.arguments
    assert (asked["use_causal_mask"], asked["generate_stats"], asked["attn_scale"]) == (is_causal, False, 0.25)
    assert asked["k"].facts["dim"] == list(KV)
    assert asked["q"].facts["stride"] == [2048, 512, 16, 1]
    assert asked["q"].facts["data_type"] == made["o"].facts["data_type"] == "e4m3"
    assert asked["descale_k"].facts["data_type"] == "fp32"
    assert made["o"].facts["output"] is True
    assert "amax_s" not in made


def test_a_launch_gives_cudnn_the_tensors_by_their_ids(install: Any) -> None:
    cudnn = install(FakeCudnn())
    call = Fp8Attention(draw(*Q), draw(*KV), draw(*KV), False)
    call.launch()
    (graph,) = cudnn.graphs
    assert graph.steps == [
        "validate",
        "build_operation_graph",
        "create_execution_plans",
        "check_support",
        "build_plans",
    ]
    ((pack, _, handle),) = cudnn.executed
    assert handle == 77
    assert cudnn.streams == [(77, 5)]
    assert pack[graph.arguments["v"].uid] == call.tensors["v"].data_ptr()
    assert pack[graph.outputs[0].uid] == call.tensors["o"].data_ptr()
    assert len(pack) == 10
    assert call.versions == {"cudnn-frontend": "1.22.1", "cudnn": "9.19.0"}


def test_peaks_are_written_only_where_cudnn_insists(install: Any) -> None:
    cudnn = install(FakeCudnn(needs_peaks=True))
    call = Fp8Attention(draw(*Q), draw(*KV), draw(*KV), True)
    call.launch()
    first, second = cudnn.graphs
    assert (first.outputs[2].facts["output"], second.outputs[2].facts["output"]) == (False, True)
    ((pack, _, _),) = cudnn.executed
    assert pack[second.outputs[3].uid] == call.tensors["amax_o"].data_ptr()


def test_the_output_is_scaled_back(install: Any) -> None:
    install(FakeCudnn())
    call = Fp8Attention(draw(*Q), draw(*KV), draw(*KV), False)
    call.tensors["o"].copy_(torch.full(Q, 2.0))
    assert torch.all(call.output() == 2 / call.tensors["scale_o"])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("wants_peaks", [False, True])
def test_cudnn_itself_takes_the_graph_for_hopper(is_causal: bool, wants_peaks: bool) -> None:
    cudnn = pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend: pip install 'sagegen[peers]'")
    tensors, _ = quantize_inputs(draw(2, 4, 256, 128), draw(2, 2, 256, 128), draw(2, 2, 256, 128))
    graph, made = make_graph(cudnn, tensors, is_causal, wants_peaks, sm_version=90)
    graph.validate()
    graph.build_operation_graph()
    assert len({tensor.get_uid() for tensor in made.values()}) == len(made)
