"""`sagegen.sdpa` on a card against torch's own math on the CPU, in FP64: as it dispatches, and held to a kernel.

The cases, and where they are taken from, are those of tests/cpu/test_sdpa_semantics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import sagegen
from sagegen.errors import UnsupportedError
from sagegen.runtime import sdpa as sdpa_module
from sagegen.runtime.dispatch import dispatcher
from sagegen.runtime.explanation import KERNEL_ANSWERS
from sdpa_cases import CASES, REFUSED, TORCH, Case, make_call, torch_math

pytestmark = pytest.mark.gpu

#: Relative L2 of INT8 scores and FP8 weights, and of torch's attention in 16 bits.
KERNEL_L2, TORCH_L2 = 0.05, 0.003
KERNEL_CASES = [case for case in CASES if case.takes_kernel]


@pytest.fixture
def use_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets SAGEGEN_BACKEND for a dispatcher of this test's own."""

    def use(name: str) -> None:
        monkeypatch.setenv("SAGEGEN_BACKEND", name)
        dispatcher.cache_clear()

    yield use
    dispatcher.cache_clear()


def check(case: Case) -> str:
    """Shape, dtype and values are torch's; what answered comes back."""
    call = make_call(case, torch.float16).to("cuda")
    out = sagegen.sdpa(call.query, call.key, call.value, call.mask, **case.options)
    answer = sagegen.last_dispatch().answer
    expected = torch_math(call, case.options)
    assert (out.shape, out.dtype, out.device.type) == (expected.shape, torch.float16, "cuda")
    limit = KERNEL_L2 if answer in KERNEL_ANSWERS else TORCH_L2
    assert (out.cpu().double() - expected).norm() <= limit * expected.norm(), answer
    return answer


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_is_answered_as_torch_does(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.name)
def test_a_kernel_answers_as_torch_does(case: Case, use_backend: Callable[[str], None]) -> None:
    use_backend("kernel")
    is_empty = case.name.startswith("no_")
    assert check(case) == ("zeros" if is_empty else "kernel")


@pytest.mark.parametrize(
    "name", ["causal", "causal_more_queries", "scale_negative_causal", "5d_gqa", "one_batch_of_keys", "no_keys"]
)
def test_gradients_are_torchs(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    call = make_call(case, torch.float32).to("cuda")
    inputs = call.require_grad()
    expected = torch_math(call, case.options)
    wanted = torch.autograd.grad(expected.square().sum(), inputs, allow_unused=True)
    out = sagegen.sdpa(call.query, call.key, call.value, call.mask, **case.options)
    found = torch.autograd.grad(out.square().sum(), inputs)
    for grad, of in zip(found, wanted, strict=True):
        torch.testing.assert_close(grad, of, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["causal_and_bool_mask", "causal_and_float_mask", "other_heads_without_gqa", "other_batches", "one_dim"]
)
def test_what_torch_refuses_is_refused(name: str) -> None:
    """By its math: torch 2.11's fused attention, on a GPU and in FP16 on the CPU, takes a mask with is_causal."""
    if name.startswith("causal_and") and sdpa_module._takes_causality_with_mask():
        pytest.skip("this torch takes is_causal beside a mask")
    call = make_call(REFUSED[name], torch.float16)
    with pytest.raises(Exception) as torchs:  # noqa: PT011  whatever torch raises
        torch_math(call, REFUSED[name].options)
    call = call.to("cuda")
    with pytest.raises(torchs.type):
        sagegen.sdpa(call.query, call.key, call.value, call.mask, **REFUSED[name].options)


def test_dropout_is_torchs() -> None:
    call = make_call(CASES[0], torch.float16).to("cuda")
    answers = []
    for function in (sagegen.sdpa, TORCH):
        torch.manual_seed(7)
        answers.append(function(call.query, call.key, call.value, dropout_p=0.4))
    assert torch.equal(*answers)
    assert not torch.allclose(answers[0], TORCH(call.query, call.key, call.value))


def test_a_call_held_to_a_kernel_is_never_left_for_torch(use_backend: Callable[[str], None]) -> None:
    use_backend("kernel")
    call = make_call(CASES[0], torch.float16).to("cuda")
    with pytest.raises(UnsupportedError, match="backend='kernel' cannot answer: dropout"):
        sagegen.sdpa(call.query, call.key, call.value, dropout_p=0.4)
