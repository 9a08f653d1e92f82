"""The random calls of tests/gpu/test_random_calls.py, a few small ones, in the emulator: kernels and limits fit."""

from __future__ import annotations

import pytest
import torch

from call_errors import Errors, find_fault, measure
from kernel_kinds import KINDS, KernelKind
from random_calls import PoisonedAllocator, RandomCall, draw_call, make_inputs
from sagegen.emulator.program import load_emulated
from sagegen.env import read_env
from sagegen.gpu import GPUS
from sagegen.measuring.call import bind_call
from sagegen.reference import attention
from sagegen.rules import Target

pytestmark = pytest.mark.emulator

SMALL = 1 << 15


def small_calls(kind: KernelKind) -> list[RandomCall]:
    """The first two calls of one problem, of those that a card would give to the kind, with few scores."""
    names = [kind.name for kind in KINDS]
    found = []
    for index in range(10_000):
        call = draw_call(index)
        shape = call.shape
        scores = shape.batch * shape.heads_q * shape.q_len * shape.kv_len
        if call.pick(names) == kind.name and scores <= SMALL and shape.kv_len > 64:
            found += [call] if not found or call.problem == found[0].problem else []
        if len(found) == 2:
            break
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_small_random_calls_are_right(kind: KernelKind) -> None:
    calls = small_calls(kind)
    problem, gpu = calls[0].problem, GPUS["h200"]
    config = kind.find_config(Target(gpu, problem))
    assert config is not None
    program = load_emulated(problem, config, gpu, read_env(), workers=2)
    for call in calls:
        x = make_inputs(call, "cpu")
        bound = bind_call(
            program, problem, config, x.q, x.k, x.v, want_lse=call.want_lse, allocator=PoisonedAllocator()
        )
        bound.launch()
        ref, ref_lse = attention(x.q, x.k, x.v, is_causal=problem.is_causal, return_lse=True, out_dtype=torch.float64)
        errors = Errors(*measure(bound.out, bound.lse, ref, ref_lse).tolist())
        assert find_fault(call, errors) == "", call
