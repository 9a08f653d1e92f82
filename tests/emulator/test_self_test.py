"""What a kernel is tried on when it is loaded: right ones pass in every kind, wrong ones are told from them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch

from sagegen.emulator.program import EmulatedProgram, load_emulated
from sagegen.env import read_env
from sagegen.errors import SelfTestError
from sagegen.gpu import find_gpu
from sagegen.problem import Problem, parse_problem
from sagegen.rules import Target, default_config
from sagegen.runtime.self_test import check_program
from sagegen.space import parse_config

pytestmark = pytest.mark.emulator

PACKED = "wgmma_c2_bk256_st2_scoverlap_acone_ks256_rsskip_suones_expacked_laearly_qqprologue"


def load(gpu_name: str, problem: Problem, config: str | None = None) -> EmulatedProgram:
    gpu = find_gpu(gpu_name)
    chosen = parse_config(config) if config else default_config(Target(gpu, problem))
    return load_emulated(problem, chosen, gpu, read_env(), workers=2)


def check(program, problem: Problem) -> None:
    check_program(program, "kernel_x", problem, torch.device("cpu"), lambda: 0)


@pytest.mark.parametrize(
    ("gpu", "problem", "config"),
    [
        ("l20", "d64_bf16_full_int8", None),
        ("l20", "d64_fp16_causal_int8", None),  # more queries than keys: some see none
        ("l20", "d128_bf16_full_int4", None),
        ("h200", "d64_bf16_causal_int8", None),
        ("h200", "d64_bf16_full_int4", None),  # smoothed Q, rotated
        ("h200", "d64_bf16_full_int8", PACKED),  # with an lse by the exact exponent
    ],
)
def test_right_kernels_pass(gpu, problem, config):
    problem = parse_problem(problem)
    check(load(gpu, problem, config), problem)


# --- planted


@dataclass
class Tampered:
    """A program whose launches are followed by a change of what they wrote."""

    program: EmulatedProgram
    change: object

    @property
    def config(self):
        return self.program.config

    @property
    def device(self):
        return self.program.device

    def prepare(self, plan):
        call, change = self.program.prepare(plan), self.change

        class Launch:
            def launch(self, *addresses):
                call.launch(*addresses)
                change(*addresses[3:5])

        return Launch()


ROWS, DIM = 128 + 5, 64  # of the L20's default kernel


def values_at(address: int, count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def scale(out, lse):
    values_at(out, ROWS * DIM).mul_(0.94)  # of one head of two


def half_written(out, lse):
    values_at(out + ROWS * DIM, ROWS * DIM // 2).fill_(torch.nan)


def one_element(out, lse):
    values_at(out + 2 * 7 * DIM, 1).fill_(torch.nan)


def past_the_end(out, lse):
    values_at(out + 2 * ROWS * DIM, 1).fill_(0.0)


def before_the_start(out, lse):
    values_at(out - 2, 1).fill_(0.0)


def wrong_lse(out, lse):
    if lse:
        values_at(lse + 4 * 11, 1, torch.float32).add_(0.03)


def no_lse(out, lse):
    if lse:
        values_at(lse + 4 * 11, 1, torch.float32).fill_(torch.nan)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (scale, "output's scale is off by 0.03"),
        (half_written, "relative error of nan"),
        (one_element, "relative error of nan"),
        (past_the_end, "wrote past its output's ends"),
        (before_the_start, "wrote past its output's ends"),
        (wrong_lse, "lse is off by more than it may be, times 1."),
        (no_lse, "lse is off by more than it may be, times nan"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_wrong_kernel_is_refused_with_what_is_wrong(change, said):
    problem = parse_problem("d64_bf16_full_int8")
    with pytest.raises(SelfTestError, match="kernel_x computes wrongly on this machine: it") as caught:
        check(Tampered(load("l20", problem), change), problem)
    assert said in str(caught.value)
    assert "sagegen verify" in str(caught.value)
