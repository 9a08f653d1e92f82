"""Bugs planted into the rendered text are found, each with its kind and line: the emulator sees what it must."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from sagegen.emulator.agreement import check_agreement
from sagegen.emulator.program import load_source
from sagegen.env import read_env
from sagegen.errors import EmulatorError
from sagegen.problem import Problem
from sagegen.render import render
from sagegen.space import parse_config

pytestmark = pytest.mark.emulator

ADA, HOPPER = 89, 90
E4M3 = "mma_bq128_bk64_w8_st2_pve4m3f32_ad64_cvi2f_grthread_qs32_ks64_rsalways_qosmem_mb1"
#: Two promotions a tile and three stages.
DEEP = "mma_bq128_bk64_w8_st3_pve4m3f32_ad32_cvi2f_grthread_qs32_ks64_rsalways_qosmem_mb1"
BF16 = "mma_bq128_bk64_w8_st2_pvbf16f32_ad0_cvi2f_grthread_qs32_ks64_rsalways_qoreg_mb1"
FP16_SUMS = "mma_bq128_bk64_w8_st2_pve4m3f16_ad64_cvi2f_grthread_qs32_ks64_rsalways_qosmem_mb1_pm224_vm4p5_svyes"
INT4 = E4M3 + "_qks4"
WGMMA = "wgmma_c3_bk128_st2_scplain_acone_ks64_rsskip_suones_exmufu"
EARLY = WGMMA + "_laearly"
PROLOGUE = "wgmma_c2_bk128_st2_scplain_acone_ks128_rsskip_suones_expacked_laearly_qqprologue"
WGMMA_SMOOTH_Q = "wgmma_c2_bk128_st2_scplain_acone_ks64_rsskip_suones_exmufu_laearly_ms64_dsf16"
BALANCED = E4M3 + "_ms64_blyes"
PACKED = "wgmma_c2_bk128_st3_scoverlap_acone_ks128_rsskip_suones_expacked"
CAUSAL = Problem(64, "bf16", True)
FULL = Problem(64, "bf16", False)
CAUSAL_INT4 = Problem(128, "bf16", True, "int4")
#: The loop's barrier, by the comment that stands beside it only there.
LOOP_BARRIER = "device::block_sync();              //"


@dataclass(frozen=True)
class Bug:
    """Replacements in the rendered text and what must be said about them.

    Attributes:
        edits: (old, new); every occurrence is replaced.
        kind: of the error.
        line: a piece of the line that the error must name, in the patched text.
    """

    name: str
    edits: tuple[tuple[str, str], ...]
    kind: str
    line: str
    config: str = E4M3
    problem: Problem = CAUSAL


BUGS = [
    # delta S
    Bug(
        "delta_read_before_it_came",
        (("        device::mbarrier_wait(&barriers.delta_full[stage.index], stage.parity);\n", ""),),
        "in_flight",
        "const uint4 words = chunks[4 * chunk];",
        WGMMA_SMOOTH_Q + "_qke4m3",
    ),
    Bug(
        "delta_announced_before_the_last_one_was_read",
        (
            (
                "    device::mbarrier_wait(&barriers.v_free[stage.index], stage.parity ^ 1);\n    uint64_t",
                "    uint64_t",
            ),
            (
                "DELTA_BYTES, delta_full);\n",
                "DELTA_BYTES, delta_full);\n"
                "    device::mbarrier_wait(&barriers.v_free[stage.index], stage.parity ^ 1);\n",
            ),
        ),
        "bad_barrier",
        "mbarrier_arrive_expect_tx(delta_full, DELTA_BYTES)",
        WGMMA_SMOOTH_Q + "_qke4m3",
    ),
    Bug(
        "folded_delta_not_awaited",
        (("K_RECORD_BYTES + DELTA_BYTES);", "K_RECORD_BYTES);"),),
        "bad_barrier",
        "DELTA_BYTES, k_full",
        WGMMA_SMOOTH_Q,
    ),
    Bug(
        "offset_without_the_bias",
        (("device::fma_up(MAGIC, factor[span]", "device::fma_up(MAGIC - 64.0f, factor[span]"),),
        "wrong_result",
        "out_row",
        WGMMA_SMOOTH_Q,
    ),
    # balance
    Bug(
        "means_subtracted_before_they_are_written",
        (("        device::block_sync();  // the mean is there, and what led to it is read\n", ""),),
        "uninitialized",
        "device::unpack_io(*mean_word(p, kv_head_of(p, q_head), index, channel + i), mean[i], mean[i + 1]);",
        BALANCED,
    ),
    Bug(
        "factors_read_before_they_are_there",
        (
            (
                "        balance[channel] = of_keys ? 1.0f / factor : factor;\n    }\n    device::block_sync();\n",
                "        balance[channel] = of_keys ? 1.0f / factor : factor;\n    }\n",
            ),
        ),
        "uninitialized",
        "x[step][side][i] = device::multiply(x[step][side][i], balance[",
        BALANCED,
    ),
    # asynchronous copies
    Bug(
        "dropped_async_wait",
        (("device::async_wait<STAGES - 2>();", ""),),
        "in_flight",
        "*reinterpret_cast<const uint4*>(q_tile",
    ),
    Bug(
        "wait_covers_one_group_too_few",
        (("async_wait<STAGES - 2>", "async_wait<STAGES - 1>"),),
        "in_flight",
        "*reinterpret_cast<const uint4*>(q_tile",
    ),
    Bug("one_stage_too_few", (("tile % STAGES", "tile % (STAGES - 1)"),), "in_flight", "load_matrix_x4(k,", DEEP),
    Bug(
        "copy_without_commit",
        (("        device::async_commit();\n", ""),),
        "in_flight",
        "reinterpret_cast<const uint4*>(q_tile",
    ),
    Bug(
        "stage_filled_before_the_barrier",
        (
            (LOOP_BARRIER, "copy_tile(tile + STAGES - 1); " + LOOP_BARRIER),
            ("        copy_tile(tile + STAGES - 1);\n\n", "\n"),
        ),
        "race",
        "async_copy_16(shared + byte",
    ),
    # barriers
    Bug("missing_block_sync", (("        " + LOOP_BARRIER, "        //"),), "race", "load_matrix_x4(k,"),
    Bug(
        "race_between_warps_of_the_quantizer",
        (
            (
                "            scratch.row_bad[row] = bad;\n        }\n    }\n    device::block_sync();",
                "            scratch.row_bad[row] = bad;\n        }\n    }",
            ),
        ),
        "race",
        "scratch.row_peak[first + 8 * k",
    ),
    Bug(
        "barrier_that_some_warps_skip",
        (
            (
                "    store_output(p, q_head",
                "    if (device::warp_index() < 3) device::block_sync();\n    store_output(p, q_head",
            ),
        ),
        "deadlock",
        "if (device::warp_index() < 3) device::block_sync();",
    ),
    Bug(
        "two_barriers_that_meet",
        (
            (
                "    store_output(p, q_head",
                "    if (device::warp_index() < 3) device::block_sync();\n    else\n        device::block_sync();\n"
                "    store_output(p, q_head",
            ),
        ),
        "divergence",
        "device::block_sync();",
    ),
    Bug(
        "collective_in_a_branch_of_lanes",
        (
            (
                "largest = device::max(largest, device::shuffle_xor(largest, 2));",
                "if (device::lane_index() < 16) largest = device::max(largest, device::shuffle_xor(largest, 2));",
            ),
        ),
        "divergence",
        "shuffle_xor",
    ),
    Bug(
        "loop_that_never_ends",
        (
            (
                "    store_output(p, q_head",
                "    for (int i = 1; i != 0;) i = i == 7 ? 1 : i + 2;\n    store_output(p, q_head",
            ),
        ),
        "endless_loop",
        "for (int i = 1;",
    ),
    # memory
    Bug(
        "read_one_row_past_the_end",
        (("if (token < p.kv_len) words", "if (token <= p.kv_len) words"),),
        "out_of_bounds",
        "reinterpret_cast<const uint4*>(channels)",
    ),
    Bug(
        "stride_off_by_one_row",
        (("BLOCK_K + first_row) * p.v_token_stride", "BLOCK_K + first_row + 1) * p.v_token_stride"),),
        "out_of_bounds",
        "async_copy_16_or_zero",
        BF16,
        FULL,
    ),
    Bug(
        "rows_written_past_the_end",
        (("            if (row >= p.q_len) continue;\n", ""),),
        "out_of_bounds",
        "reinterpret_cast<uint32_t*>(out_row",
    ),
    Bug(
        "stages_larger_than_shared_memory",
        (("constexpr int STAGE_BYTES = ", "constexpr int STAGE_BYTES = 8192 + "),),
        "out_of_bounds",
        "async_copy_16(shared + byte",
    ),
    Bug(
        "index_past_an_array",
        (("partial[first_row][8 * vector + i] = sum[i]", "partial[first_row + 1][8 * vector + i] = sum[i]"),),
        "out_of_bounds",
        "partial[first_row + 1]",
    ),
    Bug(
        "misaligned_vector",
        (("+ 8 * (vector % 2)) = quantized", "+ 4 + 8 * (vector % 2)) = quantized"),),
        "misaligned",
        "= quantized",
    ),
    Bug(
        "scale_never_stored",
        (("        scratch.row_scale[row_of_thread] = scale;\n", ""),),
        "uninitialized",
        "sign / scratch.row_scale",
    ),
    Bug(
        "input_overwritten",
        (("head_pointer(p.out, q_head", "head_pointer(const_cast<uint16_t*>(p.q), q_head"),),
        "read_only",
        "reinterpret_cast<uint32_t*>(out_row",
    ),
    Bug(
        "blocks_that_write_the_same_word",
        (("if (tile == 0) region<float>", "region<float>"),),
        "race",
        "p.v_scales_offset)[static_cast<int64_t>(kv_head)",
    ),
    Bug(
        "division_by_zero",
        (
            (
                "    const int quad_lane = device::lane_index() % 4;",
                "    const int quad_lane = 4 / (p.q_len - p.q_len);",
            ),
        ),
        "division_by_zero",
        "4 / (p.q_len - p.q_len)",
    ),
    Bug(
        "row_sums_that_start_as_anything",
        (("            row_sum[m][half] = 0.0f;\n", ""),),
        "wrong_result",
        "out_row",
        BF16,
    ),
    Bug(
        "output_tile_that_starts_as_anything",
        (("    OutputTile o = {};", "    OutputTile o;"),),
        "wrong_result",
        "out_row",
        BF16,
    ),
    Bug(
        "word_written_after_another_block_read_it",
        (
            (
                "    store_output(p, q_head",
                "    if (device::thread_index() == 0)\n"
                "        region<float>(p, p.q_scales_offset)[device::block_index() == 0] = 1.0f;\n"
                "    store_output(p, q_head",
            ),
        ),
        "race",
        "p.q_scales_offset",
    ),
    # FP16 sums and smooth V
    Bug(
        "statistics_of_v_overwritten_while_they_are_read",
        (("        device::block_sync();  // what was there before is read\n", ""),),
        "race",
        "partial[",
        FP16_SUMS,
    ),
    Bug(
        "fp16_pairs_swapped",
        (("r[m][side][0], promoted[0], promoted[1]", "r[m][side][0], promoted[1], promoted[0]"),),
        "wrong_result",
        "out_row",
        FP16_SUMS,
    ),
    Bug(
        "mean_that_does_not_come_back",
        ((", sees_keys ? means[channel] : 0.0f", ", 0.0f"),),
        "wrong_result",
        "out_row",
        FP16_SUMS,
    ),
    # arithmetic
    Bug(
        "swapped_scale_index",
        (("[K_GROUPS * span + lane % 4]", "[K_GROUPS * span + lane / 8]"),),
        "wrong_result",
        "out_row",
    ),
    Bug(
        "wrong_v_permutation",
        (("8 * (w / 2) + 2 * (quad % 4) + w % 2", "4 * (quad % 4) + w"),),
        "wrong_result",
        "out_row",
    ),
    Bug("causal_bound_off_by_one", (("causal_gap + 1 : kv_len", "causal_gap : kv_len"),), "wrong_result", "out_row"),
    Bug(
        "tail_not_masked",
        (("if ((tile + 1) * BLOCK_K > unmasked_keys) mask", "if (false) mask"),),
        "wrong_result",
        "out_row",
        E4M3,
        FULL,
    ),
    Bug("promotion_skipped", ((": sum + r[m][side][i];", ": sum;"),), "wrong_result", "out_row", DEEP),
    Bug(
        "rescale_skipped",
        (("device::fma(sum, alpha[m][i / 2], r[m][side][i])", "sum + r[m][side][i]"),),
        "wrong_result",
        "out_row",
    ),
    Bug("lse_without_its_bias", (("log2_sum * LN_2 + bias", "log2_sum * LN_2"),), "wrong_result", "p.lse["),
    # the wgmma family: bulk copies, mbarriers, operands in shared memory
    Bug(
        "k_not_waited_for",
        (
            (
                "            if (!is_k_here) wait_for_k(stage);\n            device::wgmma_fence(s);",
                "            device::wgmma_fence(s);",
            ),
        ),
        "in_flight",
        "device::wgmma_s8(s",
        WGMMA,
    ),
    Bug(
        "work_not_waited_for",
        (("        device::mbarrier_wait(&barriers.work_full[count % 2], count / 2 % 2);\n", ""),),
        "uninitialized",
        "barriers.work[count % 2]",
        WGMMA,
    ),
    Bug(
        "slot_filled_without_asking",
        (("        device::mbarrier_wait(&barriers.work_free[slot], (count / 2 + 1) % 2);\n", ""),),
        "race",
        "barriers.work[slot] = index",
        PACKED,  # as many stages as tiles, which order what they hold and no more
    ),
    Bug(
        "predecessor_not_waited_for",
        (("    device::wait_for_predecessor();\n#pragma unroll 1", "#pragma unroll 1"),),
        "dependency",
        "device::bulk_load(",
        EARLY,
    ),
    Bug(
        "votes_read_before_all_have_voted",
        (
            (
                "= is_exact;\n    device::named_barrier_sync(1 + group, 128);\n",
                "= is_exact;\n",
            ),
        ),
        "uninitialized",
        "votes[0]",
        PACKED,
    ),
    Bug(
        "votes_overwritten_before_all_have_read",
        (("    device::named_barrier_sync(1 + group, 128);  // all have read", "    // all have read"),),
        "race",
        "= is_exact",
        PACKED,
    ),
    Bug(
        "lse_of_rounded_weights",
        (("device::log2_approx(exact_sum)", "device::log2_approx(sum)"),),
        "wrong_result",
        "p.lse[",
        WGMMA,
    ),
    Bug(
        "sums_of_v_read_before_all_have_added",
        (
            (
                "    device::block_sync();\n    if (device::thread_index() < HEAD_DIM) {\n        const float sum",
                "    if (device::thread_index() < HEAD_DIM) {\n        const float sum",
            ),
        ),
        "race",
        "scratch.v_sum",
        WGMMA,
    ),
    Bug(
        "stage_filled_without_asking",
        (("    device::mbarrier_wait(&barriers.k_free[stage.index], stage.parity ^ 1);\n", ""),),
        "bad_barrier",
        "mbarrier_arrive_expect_tx(k_full",
        WGMMA,
    ),
    Bug(
        "wrong_parity",
        (("k_free[stage.index], stage.parity ^ 1", "k_free[stage.index], stage.parity"),),
        "deadlock",
        "device::mbarrier_wait",
        WGMMA,
    ),
    Bug(
        "stage_released_too_early",
        (
            (
                "            device::wgmma_wait<0>(s);\n            release(&barriers.k_free[stage.index]);",
                "            release(&barriers.k_free[stage.index]);\n            device::wgmma_wait<0>(s);",
            ),
        ),
        "race",
        "device::bulk_load(k_stage",
        WGMMA,
    ),
    Bug(
        "bytes_miscounted",
        (
            (
                "mbarrier_arrive_expect_tx(k_full, K_RECORD_BYTES)",
                "mbarrier_arrive_expect_tx(k_full, K_RECORD_BYTES + 16)",
            ),
        ),
        "deadlock",
        "device::mbarrier_wait",
        WGMMA,
    ),
    Bug(
        "ones_without_proxy_fence",
        (("    device::fence_proxy_async();\n", ""),),
        "proxy",
        "device::wgmma_e4m3",
        WGMMA,
    ),
    Bug(
        "accumulators_without_fence",
        (("            device::wgmma_fence(o, p_operand);\n", ""),),
        "fence",
        "device::wgmma_e4m3",
        WGMMA,
    ),
    Bug(
        "scores_read_before_the_wait",
        (("            device::wgmma_wait<1>(s);\n", ""),),
        "in_flight",
        "",
        PACKED,
    ),
    Bug(
        "wrong_swizzle_of_v",
        (
            (
                "swizzled<V_PANEL>(channel, chunk % (V_PANEL / 16))",
                "swizzled<V_PANEL>(channel ^ 1, chunk % (V_PANEL / 16))",
            ),
        ),
        "wrong_result",
        "out_row",
        WGMMA,
    ),
    Bug(
        "v_mean_not_added_back",
        (("channel[0], channel[MEANS_ROW * HEAD_DIM])", "channel[0], 0.0f)"),),
        "wrong_result",
        "out_row",
        WGMMA,
    ),
    # two INT4 in a byte
    Bug(
        "nibbles_of_k_swapped",
        (
            (
                "const uint32_t quantized = pack_int4(x, inverse);",
                "uint32_t quantized = pack_int4(x, inverse);\n"
                "        quantized = (quantized >> 4 & 0x0f0f0f0fu) | (quantized & 0x0f0f0f0fu) << 4;",
            ),
        ),
        "wrong_result",
        "out_row",
        INT4,
        CAUSAL_INT4,
    ),
    Bug(
        "int4_that_reaches_8",
        (("INT4_MAX = 7;", "INT4_MAX = 8;"),),  # 8 is stored as -8
        "wrong_result",
        "out_row",
        INT4,
        CAUSAL_INT4,
    ),
    Bug(
        "second_step_of_int4_without_the_swizzle",
        (("(k_lane ^ (32 * step))", "(k_lane + 32 * step)"),),
        "uninitialized",
        "load_matrix_x4(k,",
        INT4,
        CAUSAL_INT4,
    ),
    # queries that the attention kernel quantizes
    Bug(
        "queries_without_proxy_fence",
        (("        device::fence_proxy_async();  // what these threads wrote is what wgmma reads\n", ""),),
        "proxy",
        "device::wgmma_s8",
        PROLOGUE,
    ),
    Bug(
        "queries_read_before_they_came",
        (("        device::async_wait<0>();  // each thread reads what it copied\n", ""),),
        "in_flight",
        "device::unpack_io(words.x",
        PROLOGUE,
    ),
    Bug(
        "queries_written_over_those_in_use",
        (
            (
                "(&barriers.work_free[slot], (count / 2 + 1) % 2);\n        if (device::thread",
                "(&barriers.work_free[slot], 1);\n        if (device::thread",
            ),
        ),
        "race",
        "",
        PROLOGUE,
    ),
    Bug(
        "next_work_read_before_it_is_known",
        (("        device::named_barrier_sync(QUERY_BARRIER, QUERY_THREADS);\n", ""),),
        "uninitialized",
        "index = barriers.next_work[slot]",
        PROLOGUE,
    ),
    Bug(
        "slot_not_released_by_the_producer",
        (("        device::mbarrier_arrive(&barriers.work_free[count % 2]);  // the index is read\n", ""),),
        "deadlock",
        "device::mbarrier_wait",
        PROLOGUE,
    ),
    Bug(
        "queries_ready_too_early",
        (
            (
                "        release(&barriers.work_full[slot]);\n        if (device::thread",
                "        if (device::thread",
            ),
            (
                "        quantize_rows(p, shared, make_work",
                "        release(&barriers.work_full[slot]);\n        quantize_rows(p, shared, make_work",
            ),
        ),
        "race",
        "",
        PROLOGUE,
    ),
    Bug(
        "means_of_k_read_before_the_quantizer_ends",
        (
            (
                "    load_rows(p, shared, index);\n    device::wait_for_predecessor();\n",
                "    load_rows(p, shared, index);\n",
            ),
        ),
        "dependency",
        "",
        PROLOGUE,
    ),
    Bug(
        "too_many_registers",
        (("CONSUMER_REGISTERS = 160", "CONSUMER_REGISTERS = 168"),),
        "deadlock",
        "mbarrier_wait",
        WGMMA,
    ),
]


def draw(problem: Problem, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads whose lengths end within tiles: several tiles each way, K with an offset."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, heads, 200, problem.head_dim, generator=generator)
    k = torch.randn(1, 2, 333, problem.head_dim, generator=generator) + 1
    v = torch.randn(1, 2, 333, problem.head_dim, generator=generator)
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def run(problem: Problem, config: str, edits: tuple[tuple[str, str], ...] = ()) -> tuple[str, str]:
    """Emulate a patched kernel; the text before and after."""
    source = render(problem, parse_config(config), target="host")
    text = source.text
    for old, new in edits:
        assert old in text, f"the template no longer has {old!r}"
        text = text.replace(old, new)
    architecture = HOPPER if config.startswith("wgmma") else ADA
    program = load_source(replace(source, text=text), architecture, read_env())
    # persistent blocks take several works each: enough to use every slot twice
    check_agreement(program, *draw(problem, heads=6 if source.config.is_persistent else 2))
    return source.text, text


@pytest.mark.parametrize(("problem", "config"), sorted({(bug.problem, bug.config) for bug in BUGS}, key=str))
def test_unpatched_kernels_pass(problem: Problem, config: str) -> None:
    run(problem, config)


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_planted_bug_is_found_with_its_kind_and_line(bug: Bug) -> None:
    with pytest.raises(EmulatorError) as caught:
        run(bug.problem, bug.config, bug.edits)
    error = caught.value
    quoted = next((line for line in str(error).splitlines() if line.strip().startswith(f"{error.line} | ")), "")
    assert error.kind == bug.kind, str(error)
    assert bug.line in quoted, str(error)
    assert error.kernel in ("stats", "quantize", "attention")
    assert error.block >= 0
    assert error.thread >= 0


def test_a_bug_is_reported_the_same_in_every_run() -> None:
    messages = set()
    for _ in range(3):
        with pytest.raises(EmulatorError) as caught:
            run(CAUSAL, E4M3, (("        " + LOOP_BARRIER, "        //"),))
        messages.add(str(caught.value))
    assert len(messages) == 1
