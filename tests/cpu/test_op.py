"""The public functions, on tensors that a machine without a GPU has."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import sagegen
from sagegen.env import Env
from sagegen.errors import ArgumentError, UnsupportedError
from sagegen.runtime import fallback, library, op
from sagegen.runtime import sdpa as sdpa_module
from sagegen.runtime.answers import empty_output
from sagegen.runtime.dispatch import Dispatcher
from sagegen.runtime.options import Options


@pytest.fixture
def make():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.bfloat16: torch.randn(shape, generator=generator).to(dtype)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A dispatcher of this test's own, with default settings."""
    from sagegen.runtime.dispatch import CudaRuntime

    env = Env(tmp_path / "cache", tmp_path / "tuned", False, "warning", None)
    dispatcher = Dispatcher(CudaRuntime(), lambda: env)
    for module in (op, library, sdpa_module):
        monkeypatch.setattr(module, "dispatcher", lambda: dispatcher)
    fallback.warn_once.cache_clear()
    return dispatcher


def exact(q, k, v, *, is_causal=False):
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores).tril(k.shape[2] - q.shape[2]).bool(), -math.inf)
    return scores.softmax(-1).nan_to_num(0) @ v, scores.logsumexp(-1)


def test_options_are_attentions_keywords_in_order():
    """The op and the dispatcher take them by position."""
    keywords = [p for p in inspect.signature(sagegen.attention).parameters.values() if p.kind is p.KEYWORD_ONLY]
    others = ("attn_mask", "out")
    assert {p.name: p.default for p in keywords if p.name not in others} == {
        name: getattr(Options(), name) for name in Options.__slots__
    }
    schema = [a.name for a in torch.ops.sagegen.attention.default._schema.arguments]
    assert schema == ["q", "k", "v", "attn_mask", *Options.__slots__]
    for other in (sagegen.explain, sagegen.warmup, sagegen.workspace_bytes):
        parameters = inspect.signature(other).parameters
        assert list(parameters) == ["q", "k", "v", *(p.name for p in keywords if p.name != "out")]
        assert all(parameters[p.name] == p for p in keywords if p.name != "out")


def test_every_option_reaches_the_dispatcher_under_its_name(monkeypatch, make):
    """No two of them are swapped on the way."""
    seen = {}

    class Recorder:
        def attention(self, q, k, v, attn_mask, out, *options):
            seen.update(
                q=q, k=k, v=v, attn_mask=attn_mask, out=out, **dict(zip(Options.__slots__, options, strict=True))
            )

        def explain(self, q, k, v, attn_mask, *options):
            self.attention(q, k, v, attn_mask, None, *options)

        warm_up = workspace_bytes = explain

    monkeypatch.setattr(op, "dispatcher", Recorder)
    q, k, v = make(1), make(1), make(1)
    given = {name: object() for name in (*Options.__slots__, "attn_mask", "out")}
    sagegen.attention(q, k, v, **given)
    assert seen == {"q": q, "k": k, "v": v, **given}
    for other in (sagegen.explain, sagegen.warmup, sagegen.workspace_bytes):
        seen.clear()
        other(q, k, v, **{name: value for name, value in given.items() if name != "out"})
        assert seen == {"q": q, "k": k, "v": v, **given, "out": None}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_cpu_tensors_get_exact_attention(make, is_causal, layout):
    q, k, v = make(2, 6, 9, 40), make(2, 2, 13, 40), make(2, 2, 13, 40)
    expected, expected_lse = exact(q, k, v, is_causal=is_causal)
    if layout == "NHD":
        q, k, v, expected = (x.transpose(1, 2) for x in (q, k, v, expected))
    out, lse = sagegen.attention(q, k, v, layout=layout, is_causal=is_causal, return_lse=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    assert sagegen.last_dispatch().answer == "reference"


@pytest.mark.parametrize("head_dim", [40, 72, 80, 96, 120, 160, 256, 384, 512])
def test_other_head_dims_keep_width_and_contiguity(make, head_dim):
    """A11, A12."""
    q = make(1, 8, 32, head_dim)
    out = sagegen.attention(q, q, q)
    assert out.shape == q.shape
    assert out.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_q_and_k_in_float32_are_cast_to_a_16_bit_v(make, dtype):
    """A15, as rotary embeddings in float32 leave them."""
    q, k, v = make(1, 2, 9, 64, dtype=torch.float32), make(1, 2, 7, 64, dtype=torch.float32), make(1, 2, 7, 64)
    v = v.to(dtype)
    expected, expected_lse = exact(q.to(dtype), k.to(dtype), v)
    for answer in (sagegen.attention, torch.compile(sagegen.attention, fullgraph=True, backend="eager")):
        out, lse = answer(q, k, v, return_lse=True)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    given = torch.empty(1, 2, 9, 64, dtype=dtype)
    assert sagegen.attention(q, k, v, out=given) is given
    assert torch.equal(given, out)
    assert sagegen.explain(q, k, v).answer == "reference"
    masked = sagegen.attention(q, k, v, attn_mask=torch.ones(9, 7, dtype=torch.bool))
    torch.testing.assert_close(masked.double(), expected, rtol=2e-2, atol=1e-2)


def test_a_gradient_reaches_what_was_cast(make):
    q, k, v = (make(1, 2, 9, 64, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.bfloat16))
    q.requires_grad_()
    sagegen.attention(q, k, v).float().square().sum().backward()
    ours, q.grad = q.grad, None
    exact(q, k, v)[0].square().sum().backward()
    assert (ours - q.grad).norm() < 0.02 * q.grad.norm()


def test_a_mask_on_the_cpu(make):
    """A7: a bool mask that hides the last half of the keys."""
    q, k, v = make(1, 2, 5, 64), make(1, 2, 8, 64), make(1, 2, 8, 64)
    mask = torch.arange(8) < 4
    out = sagegen.attention(q, k, v, attn_mask=mask[None])
    torch.testing.assert_close(out.double(), exact(q, k[:, :, :4], v[:, :, :4])[0], rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("scale", [Fraction(1, 3), np.float64(1 / 3), np.float32(1 / 3)])
def test_a_scale_of_any_real_type(make, scale):
    q = make(1, 2, 9, 64)
    expected = sagegen.attention(q, q, q, scale=1 / 3)
    torch.testing.assert_close(sagegen.attention(q, q, q, scale=scale), expected)
    torch.testing.assert_close(sagegen.attention(q, q, q, scale=scale, backend="sdpa"), expected, rtol=2e-2, atol=1e-2)


def test_an_unknown_keyword_is_a_type_error(make):
    """A7."""
    with pytest.raises(TypeError, match="foo"):
        sagegen.attention(make(1, 1, 1, 64), make(1, 1, 1, 64), make(1, 1, 1, 64), foo=1)


@pytest.mark.parametrize("bad", [torch.zeros(1, 1, 2, 64).numpy(), [1.0], None])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_what_is_no_tensor_is_named(make, bad, position):
    inputs = [make(1, 1, 2, 64) for _ in range(3)]
    inputs[position] = bad
    with pytest.raises(TypeError, match=f"{'qkv'[position]} must be a torch"):
        sagegen.attention(*inputs)


def test_inputs_are_never_written(make):
    """B12, here for every answer that needs no GPU."""
    inputs = [make(1, 2, 16, 64) for _ in range(3)]
    before = [x.clone() for x in inputs]
    for options in ({}, {"backend": "sdpa"}, {"window": (2, 2)}, {"return_lse": True}):
        sagegen.attention(*inputs, **options)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_out_is_filled_and_returned(make):
    q = make(1, 2, 5, 64)
    out = torch.full_like(q, math.nan)
    assert sagegen.attention(q, q, q, out=out) is out
    torch.testing.assert_close(out, sagegen.attention(q, q, q))


@pytest.mark.parametrize("head_dim", [1, 5, 100])
def test_out_like_q_fits_at_every_head_dim(make, head_dim):
    q = make(1, 2, 5, head_dim)
    out = torch.full_like(q, math.nan)
    assert sagegen.attention(q, q, q, out=out) is out
    torch.testing.assert_close(out, sagegen.attention(q, q, q))


def test_a_kernel_for_cpu_tensors_is_refused(make):
    q = make(1, 2, 5, 64)
    with pytest.raises(UnsupportedError, match="these are on cpu"):
        sagegen.attention(q, q, q, backend="kernel")


def test_the_emulator_without_a_compiler_is_refused_with_the_remedy(make, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    q = make(1, 2, 5, 64)
    with pytest.raises(UnsupportedError, match=r"backend='emulator' cannot answer.*CXX=no-such.*apt-get install g\+\+"):
        sagegen.attention(q, q, q, backend="emulator")
    assert sagegen.explain(q, q, q, backend="emulator").is_fallback


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, "attn_mask has no kernel"),
        ({"smooth_k": False}, "smooth_k=False has no kernel"),
    ],
)
def test_the_emulator_refuses_what_no_kernel_does(make, change, because):
    q = make(1, 2, 5, 64)
    with pytest.raises(UnsupportedError, match=f"backend='emulator' cannot answer: {because}"):
        sagegen.attention(q, q, q, backend="emulator", **change)


def test_the_emulator_has_no_gradients_and_only_the_kernels_dtypes(make):
    q = make(1, 2, 5, 64)
    with pytest.raises(UnsupportedError, match="requires a gradient"):
        sagegen.attention(q.clone().requires_grad_(), q, q, backend="emulator")
    with pytest.raises(UnsupportedError, match="float32 has no kernel"):
        sagegen.attention(*[q.float()] * 3, backend="emulator")


def test_the_emulator_explains_which_kernel_it_runs(make, monkeypatch):
    monkeypatch.setattr("sagegen.runtime.dispatch.describe_compiler", lambda answer, env: "g++ 12")
    explanation = sagegen.explain(*[make(1, 2, 5, 64)] * 3, backend="emulator")
    assert explanation.answer == "emulator"
    assert explanation.kernel.startswith("d64_bf16_full_int8_mma_")
    assert "_pve4m3f32_" in explanation.kernel
    assert (explanation.gpu, explanation.provenance) == ("l20", "untuned")
    assert explanation.notes == ("the kernel is compiled at the first call, with g++ 12",)


def test_an_empty_call_of_the_emulator_compiles_nothing(make, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    q = make(1, 2, 0, 64)
    assert sagegen.attention(q, q, q, backend="emulator").shape == q.shape


def test_gradients_flow(make, caplog):
    """A18."""
    q, k, v = (make(1, 2, 5, 64, dtype=torch.float32).requires_grad_() for _ in range(3))
    sagegen.attention(q, k, v, is_causal=True).square().sum().backward()
    found = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    exact(q, k, v, is_causal=True)[0].square().sum().backward()
    for grad, x in zip(found, (q, k, v), strict=True):
        torch.testing.assert_close(grad, x.grad, rtol=1e-4, atol=1e-5)
    assert "gradient" in caplog.records[0].getMessage()


def test_explain_says_what_a_call_would_do(make):
    q = make(1, 2, 5, 64)
    assert str(sagegen.explain(q, q, q)).startswith("reference: tensors are on the CPU")
    assert isinstance(sagegen.explain(q, q, q), sagegen.Explanation)
    with pytest.raises(ArgumentError, match="layout"):
        sagegen.explain(q, q, q, layout="NDH")


# --- torch.compile and fake tensors


CASES = {
    "plain": ({}, (1, 4, 33, 96), None),
    "causal": ({"is_causal": True, "scale": 0.3}, (2, 4, 33, 64), None),
    "lse": ({"return_lse": True}, (2, 4, 17, 64), None),
    "nhd": ({"layout": "NHD", "return_lse": True}, (2, 17, 4, 64), (1, 2)),
    "transposed": ({}, (2, 17, 4, 64), (1, 2)),
    "window": ({"window": (3, 4)}, (1, 2, 9, 64), None),
    "transposed window": ({"window": (3, 4)}, (1, 9, 2, 64), (1, 2)),
}


def inputs_of(case, make):
    options, shape, swap = CASES[case]
    inputs = [make(*shape) for _ in range(3)]
    if swap and options.get("layout") != "NHD":
        inputs = [x.transpose(*swap) for x in inputs]
    return inputs, options


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case, make):
    """D5."""
    inputs, options = inputs_of(case, make)
    values = [getattr(Options(**options), name) for name in Options.__slots__]
    results = torch.library.opcheck(torch.ops.sagegen.attention.default, (*inputs, None, *values))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("case", CASES)
def test_compiled_calls_do_not_break_the_graph(case, make):
    """D5: results and strides are eager's."""
    inputs, options = inputs_of(case, make)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: sagegen.attention(*x, **options), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        ours, eager = compiled(*inputs), sagegen.attention(*inputs, **options)
        pairs = zip(ours, eager, strict=True) if isinstance(ours, tuple) else [(ours, eager)]
        for one, other in pairs:
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride() or "window" in options
        inputs = [x + 1 for x in inputs]


def test_compiled_calls_with_a_mask_and_an_out(make):
    torch._dynamo.reset()
    q, mask, out = make(1, 2, 8, 64), torch.rand(8, 8) > 0.5, make(1, 2, 8, 64)
    compiled = torch.compile(
        lambda q, m, o: sagegen.attention(q, q, q, attn_mask=m, out=o, return_lse=True), fullgraph=True, backend="eager"
    )
    compiled(q, mask, out)
    torch.testing.assert_close(out, sagegen.attention(q, q, q, attn_mask=mask))


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(2, 2, 8, 64),
        torch.empty(1, 2, 8, 64, dtype=torch.int32),
        torch.empty(1, 1, 8, 64).expand(1, 2, 8, 64),
    ],
    ids=["shape", "dtype", "overlap"],
)
def test_compiled_calls_refuse_an_out_that_does_not_fit(make, out):
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, o: sagegen.attention(q, q, q, out=o), backend="eager")
    with pytest.raises(ArgumentError, match="out: "):
        compiled(make(1, 2, 8, 64, dtype=torch.float32), out)


def test_forward_differentiation_is_torchs(make):
    q, k, v, tangent = (make(1, 2, 9, 64, dtype=torch.float32) for _ in range(4))
    _, expected = torch.func.jvp(lambda x: exact(x, k, v)[0], (q,), (tangent,))
    sagegen.attention(q, k, v)
    with torch.autograd.forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        out = sagegen.attention(torch.autograd.forward_ad.make_dual(q, tangent), k, v)
        found = torch.autograd.forward_ad.unpack_dual(out).tangent
    assert sagegen.last_dispatch().answer == "sdpa"
    torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=1e-4)


def test_compiled_calls_that_need_a_gradient_have_one(make):
    torch._dynamo.reset()
    q, k, v = (make(1, 2, 9, 64, dtype=torch.float32).requires_grad_() for _ in range(3))
    compiled = torch.compile(lambda *x: sagegen.attention(*x, is_causal=True), fullgraph=True, backend="aot_eager")
    compiled(q, k, v).square().sum().backward()
    ours = q.grad.clone()
    q.grad = None
    exact(q, k, v, is_causal=True)[0].square().sum().backward()
    torch.testing.assert_close(ours, q.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_float_mask_alone_may_require_a_gradient(make, compiles):
    torch._dynamo.reset()
    q, k, v = (make(1, 2, 9, 64, dtype=torch.float32) for _ in range(3))
    bias = make(9, 9, dtype=torch.float32).requires_grad_()

    def function(*x):
        return sagegen.attention(*x[:3], attn_mask=x[3])

    if compiles:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    function(q, k, v, bias).square().sum().backward()
    ours = bias.grad.clone()
    bias.grad = None
    ((q @ k.mT / 8 + bias).softmax(-1) @ v).square().sum().backward()
    torch.testing.assert_close(ours, bias.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fake_tensors_have_a_shape_and_are_not_launched(device):
    with FakeTensorMode():
        q = torch.empty(2, 3, 4, 64, dtype=torch.float16, device=device)
        out, lse = sagegen.attention(q, q, q, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 3, 4, 64), (2, 3, 4), torch.float32)
    assert out.device.type == device


def test_meta_tensors_have_a_shape(caplog):
    q = torch.empty(2, 3, 4, 64, dtype=torch.float16, device="meta")
    assert sagegen.attention(q, q, q).shape == q.shape
    assert caplog.records == []


def test_parameters_count_as_plain_tensors(make):
    q = torch.nn.Parameter(make(1, 2, 5, 64), requires_grad=False)
    torch.testing.assert_close(sagegen.attention(q, q, q), sagegen.attention(q.data, q.data, q.data))


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3, 4, 64), (768, 256, 64, 1), (768, 256, 64, 1)),
        ((2, 3, 4, 64), (768, 64, 192, 1), (768, 64, 192, 1)),  # dense, tokens before heads
        ((2, 3, 4, 64), (2304, 64, 576, 1), (768, 64, 192, 1)),  # a slice of one: dense again, same order
        ((2, 3, 64, 4), (768, 256, 1, 64), (768, 256, 4, 1)),  # dim not contiguous
    ],
)
def test_the_outputs_strides(shape, strides, expected):
    q = torch.zeros(8192, dtype=torch.float16).as_strided(shape, strides)
    assert empty_output(q).stride() == expected


# --- sdpa()


TORCH = torch.nn.functional.scaled_dot_product_attention


def test_sdpa_has_torchs_signature():
    documented = " ".join(TORCH.__doc__.split("(", 1)[1].split(")", 1)[0].split())  # a builtin has no other
    ours = [str(p.replace(annotation=p.empty)) for p in inspect.signature(sagegen.sdpa).parameters.values()]
    assert ", ".join(ours) == documented


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((1, 2, 5, 64), (1, 2, 5, 64)), {}),
        (((1, 2, 5, 64), (1, 2, 9, 64)), {"is_causal": True}),  # torch: top-left
        (((1, 4, 5, 64), (1, 2, 5, 64)), {"enable_gqa": True, "scale": 0.3}),
        (((2, 5, 64), (2, 5, 64)), {"is_causal": True}),
        (((5, 64), (7, 64)), {}),
        (((3, 2, 5, 64), (1, 2, 5, 64)), {}),  # broadcast batch
    ],
)
def test_sdpa_answers_as_torch_does(make, shapes, options):
    q, k, v = make(*shapes[0]), make(*shapes[1]), make(*shapes[1])
    torch.testing.assert_close(sagegen.sdpa(q, k, v, **options), TORCH(q, k, v, **options))


class OnCuda(torch.Tensor):
    """Says that it is on a GPU, so that what sdpa() does with such tensors can be seen without one."""

    @property
    def device(self):
        return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("shapes", "options", "because"),
    [
        (((1, 2, 5, 64), (1, 2, 9, 64)), {"is_causal": True}, "top-left"),
        (((1, 2, 5, 64), (1, 2, 5, 64)), {"dropout_p": 0.1}, "dropout"),
        (((1, 2, 5, 64), (1, 2, 5, 64)), {"attn_mask": torch.zeros(5, 5).bool()}, "attn_mask"),
        (((1, 2, 5, 64), (1, 2, 5, 32)), {}, "width"),
        (((1, 2, 5, 64), (1, 2, 5, 64)), {"scale": math.inf}, "finite"),
        (((1, 4, 5, 64), (1, 2, 5, 64)), {}, "enable_gqa"),
        (((9, 2, 5, 64), (9, 2, 5, 64)), {}, "q: not today"),
        (((2, 3, 2, 5, 64), (3, 2, 5, 64)), {}, "without a copy"),
        (((3, 2, 5, 64), (1, 2, 5, 64)), {}, None),
        (((2, 5, 64), (2, 5, 64)), {}, None),
        (((1, 2, 5, 64), (1, 2, 5, 64)), {}, None),
        (((1, 2, 5, 64), (1, 2, 9, 64)), {}, None),
        (((1, 4, 5, 64), (1, 2, 5, 64)), {"is_causal": True, "enable_gqa": True, "scale": 0.5}, None),
        # masks that hide whole keys, and others: of inputs that are views, or of rows
        (((2, 2, 5, 64), (2, 2, 9, 64)), {"attn_mask": torch.ones(2, 1, 1, 9).bool()}, None),
        (((2, 2, 5, 64), (2, 2, 9, 64)), {"attn_mask": torch.ones(9).bool().expand(2, 2, 5, 9)}, None),
        (((2, 2, 5, 64), (1, 2, 9, 64)), {"attn_mask": torch.ones(2, 1, 1, 9).bool()}, "attn_mask"),
        (((2, 5, 64), (2, 9, 64)), {"attn_mask": torch.ones(1, 9).bool()}, "attn_mask"),
        (((2, 2, 5, 64), (2, 2, 9, 64)), {"attn_mask": torch.zeros(2, 1, 1, 9)}, "attn_mask"),
    ],
)
def test_sdpa_uses_kernels_only_where_torchs_rules_hold(make, monkeypatch, fresh, shapes, options, because):
    called, torchs = [], []

    def attention(q, k, v, **given):
        if q.shape[0] == 9:
            raise ArgumentError("q: not today")
        called.append(given)
        return q

    monkeypatch.setattr(sdpa_module, "attention", attention)
    monkeypatch.setattr(sdpa_module, "torch_sdpa", lambda *args, **given: torchs.append((args[3:], given)))
    q, k = (make(*shape).as_subclass(OnCuda) for shape in shapes)
    sagegen.sdpa(q, k, k, **options)
    if because is None:
        (given,) = called
        assert given.pop("attn_mask") is options.get("attn_mask")
        assert given == {"is_causal": options.get("is_causal", False), "scale": options.get("scale")}
        assert torchs == []
    else:
        assert called == []
        (args, given) = torchs[0]
        mask, dropout_p, is_causal = args
        assert mask is options.get("attn_mask")
        assert (dropout_p, is_causal) == (options.get("dropout_p", 0.0), options.get("is_causal", False))
        assert given == {"scale": options.get("scale"), "enable_gqa": options.get("enable_gqa", False)}
        assert because in fresh.last.reason


@pytest.mark.parametrize("shape", [(5, 7), (5, 1), (2, 1, 5, 7)])
def test_rows_that_a_bool_mask_hides_are_0_on_a_gpu_too(make, monkeypatch, fresh, shape):
    """Where torch's fused kernels give such rows the mean of the values."""
    given = []

    def fused(q, k, v, mask, *rest, **options):
        given.append(mask)
        return torch.ones(q.shape)

    monkeypatch.setattr(sdpa_module, "torch_sdpa", fused)
    q, k = make(2, 3, 5, 64), make(2, 3, 7, 64)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[..., 2, :] = False
    out = sagegen.sdpa(*(x.as_subclass(OnCuda) for x in (q, k, k, mask)))
    assert given[0].any(-1).all()
    assert out[:, :, 2].eq(0).all()
    assert out[:, :, [0, 1, 3, 4]].eq(1).all()


@pytest.mark.parametrize("bad", [torch.zeros(64), [[1.0]]], ids=["one dim", "list"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_call_gets_torchs_own_error(make, bad, place):
    inputs = [make(1, 2, 5, 64, dtype=torch.float32) for _ in range(3)]
    inputs[place] = bad
    with pytest.raises((RuntimeError, TypeError)) as torchs:
        TORCH(*inputs)
    with pytest.raises(torchs.type) as ours:
        sagegen.sdpa(*inputs)
    assert str(ours.value) == str(torchs.value)


def test_a_mask_with_is_causal_is_refused_on_a_gpu_too(make):
    q = make(2, 3, 5, 64).as_subclass(OnCuda)
    with pytest.raises(RuntimeError, match="attn_mask: excludes is_causal=True"):
        sagegen.sdpa(q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=True)


def test_sdpa_does_not_call_itself_when_it_replaces_torchs(make, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sagegen.sdpa)
    q = make(1, 2, 5, 64)
    expected, _ = exact(q, q, q)
    for answer in (
        torch.nn.functional.scaled_dot_product_attention(q, q, q),
        sagegen.attention(q, q, q, backend="sdpa"),
    ):
        torch.testing.assert_close(answer.double(), expected, rtol=2e-2, atol=1e-2)


# --- the package


def test_importing_the_package_loads_nothing():
    script = (
        "import sys; import sagegen; "
        "heavy = {'torch', 'numpy', 'msgspec', 'yaml', 'jinja2', 'optuna', 'click', 'rich', 'cuda'}; "
        "heavy.add('sagegen.runtime.op'); "
        "print(sorted(heavy & set(sys.modules))); sagegen.SagegenError; print('torch' in sys.modules); "
        "sagegen.attention; print('torch' in sys.modules, 'attention' in dir(sagegen))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "False", "True True"]


def test_public_names():
    for name in sagegen.__all__:
        assert getattr(sagegen, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        sagegen.atention  # noqa: B018
