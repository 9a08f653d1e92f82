"""INT4 operands of Q·K^T: two values in a byte give, bit for bit, what the same values in INT8 operands give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sagegen.emulator.program import load_emulated
from sagegen.env import read_env
from sagegen.gpu import find_gpu
from sagegen.measuring.call import bind_call, call_program
from sagegen.problem import Problem
from sagegen.rules import Target, default_config
from sagegen.space import parse_config

pytestmark = pytest.mark.emulator

L20 = find_gpu("l20")
#: By where Q is, what Q and K share a scale of, and how many 16-row tiles a warp has.
CONFIGS = {
    "default": default_config(Target(L20, Problem(128, "bf16", is_causal=False, precision="int4"))),
    "registers": parse_config("mma_bq64_bk128_w4_st2_pve4m3f32_ad128_cvi2f_grthread_qs16_ks128_rsskip_qoreg_mb1_qks4"),
    "two_tiles": parse_config("mma_bq64_bk64_w2_st3_pvbf16f32_ad0_cvi2f_grblock_qs32_ks64_rsalways_qosmem_mb1_qks4"),
}
PROBLEMS = [Problem(d, "bf16", causal, "int4") for d in (64, 128) for causal in (False, True)]
#: heads_q, heads_kv, q_len, kv_len: one key, GQA with lengths off every edge, whole tiles.
SHAPES = ((1, 1, 1, 1), (6, 2, 77, 201), (2, 1, 128, 256))


def draw(problem: Problem, shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q with a row of zeros, a NaN and an Inf where it is long; K with an offset and a bad key."""
    heads_q, heads_kv, q_len, kv_len = shape
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1, heads_q, q_len, problem.head_dim, generator=generator).bfloat16()
    k, v = (torch.randn(1, heads_kv, kv_len, problem.head_dim, generator=generator).bfloat16() + 1 for _ in range(2))
    if q_len == 77:
        q[0, 0, 5] = 0
        q[0, 1, 17, 3] = float("nan")
        q[0, 1, 40, 63] = float("-inf")
        k[0, 1, 190, 2] = float("nan")
    return q, k, v


@pytest.mark.parametrize(
    ("problem", "name"),
    [(problem, "default") for problem in PROBLEMS]
    + [(problem, "registers" if problem.is_causal else "two_tiles") for problem in PROBLEMS],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_packed_operands_give_the_bits_of_the_container(problem: Problem, name: str) -> None:
    packed = CONFIGS[name]
    assert packed.qk == "s4"
    programs = [load_emulated(problem, replace(packed, qk=qk), L20, read_env(), workers=2) for qk in ("s4", "s8")]
    for shape in SHAPES:
        inputs = draw(problem, shape)
        calls = [call_program(p, problem, p.config, *inputs, softmax_scale=-0.2, want_lse=True) for p in programs]
        (out, lse), (wanted, wanted_lse) = calls
        assert torch.equal(out.isnan(), wanted.isnan())
        assert torch.equal(out.nan_to_num(7), wanted.nan_to_num(7))
        assert out.isfinite().any()
        # what K's mean adds to the lse is summed over the channels in another order
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_the_query_tile_in_memory_is_two_values_in_a_byte_in_fragment_order() -> None:
    """One row of -7 to 7, by hand: 8 channels of 4 bits a register, 4 registers a lane, the first channel lowest."""
    problem = Problem(64, "bf16", False, "int4")
    config = replace(CONFIGS["default"], mean_span=0, delta="f32", rotate="no", balance="no")  # the row as it is
    program = load_emulated(problem, config, L20, read_env(), workers=1)
    q = torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16)
    q[0, 0, 9] = torch.arange(64).remainder(15) - 7
    k = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16)
    call = bind_call(program, problem, config, q, k, k)
    call.launch()
    fragments = call.workspace[: 32 * 16].view(torch.uint8).reshape(32, 4, 4)  # lane, register, byte
    nibbles = torch.stack([fragments & 15, fragments >> 4], -1).reshape(32, 4, 8)
    for lane in range(32):
        for register in range(
            4
        ):  # PTX ISA, m16n8k64: row lane / 4, 8 below in registers 1 and 3; channels 32 up in 2, 3
            row = lane // 4 + 8 * (register % 2)
            channels = torch.arange(8) + 8 * (lane % 4) + 32 * (register // 2)
            wanted = q[0, 0, row, channels].to(torch.int64) & 15
            assert nibbles[lane, register].tolist() == wanted.tolist(), (lane, register)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_half_as_long_rows_of_k_are_read_without_bank_conflicts(head_dim: int) -> None:
    """Rows of 32 bytes, and of 64: eight of them at equal chunk index must fall into eight groups of four banks."""
    problem = Problem(head_dim, "bf16", False, "int4")
    program = load_emulated(problem, CONFIGS["default"], L20, read_env(), workers=1, count_banks=True)
    call_program(program, problem, program.config, *draw(problem, (1, 1, 128, 256)))
    (reads,) = (use for use in program.bank_counts() if "load_matrix_x4(k," in use.text)
    # 8 warps, 4 tiles, 4 pairs of 8-key tiles, steps of 64 channels; four 8 x 16-byte matrices are 512 bytes
    assert reads.accesses == 8 * 4 * 4 * head_dim // 64
    assert reads.wavefronts == 4 * reads.accesses
