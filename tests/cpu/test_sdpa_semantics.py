"""`sagegen.sdpa` on the CPU against torch's own math: the path of a GPU, with the reference or the emulator in it."""

from __future__ import annotations

import pytest
import torch

import sagegen
from sagegen.errors import UnsupportedError
from sagegen.runtime import fallback
from sagegen.runtime import sdpa as sdpa_module
from sagegen.runtime.dispatch import dispatcher
from sdpa_cases import CASES, REFUSED, TORCH, Case, make_call, torch_math

#: Of the emulator: the ways that arguments reach a kernel; a query block of a head takes it tens of milliseconds.
EMULATED = (
    "unequal_lengths",
    "causal",
    "scale_zero",
    "scale_negative",
    "scale_zero_causal",
    "scale_negative_causal",
    "no_keys",
    "3d_permuted",
    "3d_gqa",
    "5d_causal",
    "5d_one_batch",
    "one_batch_of_queries",
    "one_head_of_keys",
    "one_head_of_queries",
    "gqa_one_batch_of_keys",
)
#: What has a gradient of its own: views, broadcasts, hidden rows, no keys at all.
GRADIENTS = (
    "unequal_lengths",
    "causal",
    "causal_fewer_queries",
    "causal_more_queries",
    "scale_negative",
    "scale_zero_causal",
    "scale_negative_causal",
    "scale_negative_fewer_queries",
    "no_queries",
    "no_keys",
    "3d",
    "5d_gqa",
    "5d_batches_that_do_not_merge",
    "one_batch_of_keys",
    "one_head_of_keys",
    "one_head_of_queries",
    "gqa",
    "float_mask_1x4x33x1",
    "float_mask_hides_a_row",
    "bool_mask_hides_a_row",
)
BY_NAME = {case.name: case for case in CASES}

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture
def use_backend(monkeypatch):
    """Sets SAGEGEN_BACKEND for a dispatcher of this test's own."""

    def use(name: str) -> None:
        monkeypatch.setenv("SAGEGEN_BACKEND", name)
        dispatcher.cache_clear()

    fallback.warn_once.cache_clear()
    yield use
    dispatcher.cache_clear()


def check(case: Case, answer: str, dtype: torch.dtype, **tolerance: float) -> None:
    """Shape, dtype and values are torch's; `answer` gave them where a kernel would."""
    call = make_call(case, dtype)
    before = [x.clone() for x in (call.query, call.key, call.value)]
    out = sagegen.sdpa(call.query, call.key, call.value, attn_mask=call.mask, **case.options)
    expected = torch_math(call, case.options)
    assert (out.shape, out.dtype) == (expected.shape, dtype)
    error = (out.double() - expected).norm()
    assert error <= tolerance["l2"] * expected.norm()  # also of NaN
    if case.takes_kernel:
        assert sagegen.last_dispatch().answer == (answer if expected.numel() and case.name != "no_keys" else "zeros")
    assert all(torch.equal(x, y) for x, y in zip((call.query, call.key, call.value), before, strict=True))


@by_name
def test_the_path_of_a_gpu_answers_as_torch_does(case, use_backend):
    use_backend("reference")
    check(case, "reference", torch.float32, l2=1e-5)


@by_name
def test_without_a_backend_torch_answers(case):
    call = make_call(case, torch.float32)
    expected = torch_math(call, case.options)
    out = sagegen.sdpa(call.query, call.key, call.value, call.mask, **case.options)
    assert out.shape == expected.shape
    assert (out - expected).norm() <= 1e-5 * expected.norm()
    assert sagegen.last_dispatch().answer == "sdpa"


@pytest.mark.emulator
@pytest.mark.parametrize("name", EMULATED)
def test_a_kernel_answers_as_torch_does(name, use_backend):
    use_backend("emulator")
    check(BY_NAME[name], "emulator", torch.float16, l2=0.05)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("backend", ["reference", None])
def test_gradients_are_torchs(name, backend, use_backend):
    if backend:
        use_backend(backend)
    call, options = make_call(BY_NAME[name], torch.float32), BY_NAME[name].options
    inputs = call.require_grad()
    expected = torch_math(call, options)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    wanted = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    (sagegen.sdpa(call.query, call.key, call.value, call.mask, **options) * weights).sum().backward()
    for x, grad in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(x.grad, grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("only", [0, 1, 2])
@pytest.mark.parametrize("name", ["unequal_lengths", "no_keys", "no_queries", "no_batch"])
def test_one_input_alone_may_require_a_gradient(name, only, use_backend):
    use_backend("reference")
    call = make_call(BY_NAME[name], torch.float32)
    inputs = [call.query, call.key, call.value]
    inputs[only].requires_grad_()
    sagegen.sdpa(*inputs).sum().backward()
    assert inputs[only].grad is not None


@pytest.mark.parametrize("backend", ["reference", "emulator", None])
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name, backend, use_backend):
    if backend:
        use_backend(backend)
    case = REFUSED[name]
    call = make_call(case, torch.float16)
    arguments = (call.query, call.key, call.value, call.mask)
    if name.startswith("causal_and") and sdpa_module._takes_causality_with_mask():
        pytest.skip("this torch takes is_causal beside a mask")
    with pytest.raises(Exception) as torchs:  # noqa: PT011  whatever torch raises
        TORCH(*arguments, **case.options)
    # where a kernel is insisted on, most of what torch refuses is no call for a kernel
    is_torchs = backend != "emulator" or name.startswith("causal_and")
    expected = torchs.type if is_torchs else UnsupportedError
    with pytest.raises(expected) as ours:
        sagegen.sdpa(*arguments, **case.options)
    assert ours.type is expected


@pytest.mark.parametrize("backend", ["reference", None])
def test_dropout_is_torchs(backend, use_backend):
    if backend:
        use_backend(backend)
    call = make_call(BY_NAME["unequal_lengths"], torch.float32)
    answers = []
    for function in (sagegen.sdpa, TORCH):
        torch.manual_seed(7)
        answers.append(function(call.query, call.key, call.value, dropout_p=0.4))
    assert torch.equal(*answers)
    assert not torch.allclose(answers[0], TORCH(call.query, call.key, call.value))
    assert not sagegen.sdpa(call.query, call.key, call.value, dropout_p=1.0).any()


@pytest.mark.parametrize("backend", ["emulator", "kernel"])
@pytest.mark.parametrize(
    ("name", "because"),
    [
        ("causal_more_queries", "top-left"),
        ("bool_mask_33x70", "attn_mask"),
        ("narrow_values", "width of the values"),
        ("5d_batches_that_do_not_merge", "without a copy"),
    ],
)
def test_a_backend_with_kernels_is_never_left_for_torch(name, because, backend, use_backend):
    use_backend(backend)
    call = make_call(BY_NAME[name], torch.float16)
    with pytest.raises(UnsupportedError, match=f"backend='{backend}' cannot answer: .*{because}"):
        sagegen.sdpa(call.query, call.key, call.value, call.mask, **BY_NAME[name].options)


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), True])
def test_a_scale_that_only_torch_takes(scale, use_backend):
    use_backend("reference")
    call = make_call(BY_NAME["unequal_lengths"], torch.float32)
    out = sagegen.sdpa(call.query, call.key, call.value, scale=scale)
    assert torch.equal(out.nan_to_num(9), TORCH(call.query, call.key, call.value, scale=scale).nan_to_num(9))


@pytest.mark.parametrize(
    "name", ["causal", "3d_permuted", "5d_gqa", "one_head_of_keys", "values_of_3d", "narrow_values", "gqa_mask"]
)
def test_compiled_calls_answer_as_torch_does(name, use_backend):
    use_backend("reference")
    torch._dynamo.reset()
    call, options = make_call(BY_NAME[name], torch.float32), BY_NAME[name].options
    compiled = torch.compile(lambda *x: sagegen.sdpa(*x, **options), fullgraph=True, backend="aot_eager")
    out = compiled(call.query, call.key, call.value, call.mask)
    expected = torch_math(call, options)
    assert out.shape == expected.shape
    assert (out - expected).norm() <= 1e-5 * expected.norm()


def test_compiled_calls_take_a_scale_that_varies(use_backend):
    use_backend("reference")
    torch._dynamo.reset()
    call = make_call(BY_NAME["unequal_lengths"], torch.float32)
    compiled = torch.compile(lambda scale, *x: sagegen.sdpa(*x, scale=scale), fullgraph=True, backend="aot_eager")
    for scale in (0.1, -0.2, 0.3):
        expected = torch_math(call, {"scale": scale})
        assert (compiled(scale, call.query, call.key, call.value) - expected).norm() <= 1e-5 * expected.norm()


def test_compiled_calls_are_not_left_for_torch_either(use_backend):
    use_backend("emulator")
    torch._dynamo.reset()
    call = make_call(BY_NAME["narrow_values"], torch.float16)
    with pytest.raises(Exception, match="backend='emulator' cannot answer"):
        torch.compile(sagegen.sdpa, backend="aot_eager")(call.query, call.key, call.value)
