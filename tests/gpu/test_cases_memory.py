"""Reports of users of such kernels, as in test_cases.py: memory layouts, streams, graphs, and long or random calls."""

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

import sagegen
from public_calls import BF16, FP16, assert_close, assert_right, draw, draw_qkv, errors, kernel
from sagegen.env import read_env
from sagegen.reference import attention as exact
from sagegen.runtime.dispatch import Dispatcher
from sagegen.runtime.machine import CudaRuntime
from sagegen.runtime.options import Options

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("pinned")]


# --- C: memory layout


def peak_of(call):
    """The result and how much memory the call had at its peak, beyond what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    return result, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_c1_slices_of_one_buffer_without_a_copy(layout):
    packed = draw(1, 2048, 3 * 8 * 128).view(1, 2048, 3, 8, 128)
    q, k, v = packed.unbind(2)
    if layout == "HND":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    dense = [x.contiguous() for x in (q, k, v)]
    kernel(q, k, v, layout=layout)
    kernel(*dense, layout=layout)
    wanted, dense_peak = peak_of(lambda: kernel(*dense, layout=layout))
    out, peak = peak_of(lambda: kernel(q, k, v, layout=layout))
    assert torch.equal(out, wanted)
    assert peak == dense_peak
    assert_close(out, exact(q, k, v, layout=layout, out_dtype=torch.float64))


def test_c3_offsets_beyond_32_bits():
    rows, stride = 257, 1 << 24
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    buffer = torch.empty((rows - 1) * stride + 64, device="cuda", dtype=FP16)
    assert 256 * stride == 1 << 32  # where the last row starts
    v = buffer.as_strided((1, 1, rows, 64), (stride, stride, stride, 1))
    q, k, dense = draw_qkv(1, 1, 1, 64, rows, 64)
    v.copy_(dense)
    assert torch.equal(kernel(q, k, v), kernel(q, k, dense))
    k_view = v.copy_(k)
    assert torch.equal(kernel(q, k_view, dense), kernel(q, k, dense))


def test_c4_stride_of_a_dim_of_one_is_ignored():
    q, k, v = draw_qkv(1, 1, 1, 130, 130, 64)
    odd = [x.as_strided((1, 1, 130, 64), (1 << 40, 12345, 64, 1)) for x in (q, k, v)]
    assert torch.equal(kernel(*odd), kernel(q, k, v))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_c6_half_of_a_gathered_buffer(dim):
    q = draw(2, 8, 100, 64)
    shape = [2, 8, 120, 64]
    shape[dim] *= 2
    k, v = (draw(*shape, seed=s).chunk(2, dim)[1] for s in (1, 2))
    assert k.storage_offset() > 0
    assert torch.equal(kernel(q, k, v), kernel(q, k.contiguous(), v.contiguous()))


@pytest.mark.parametrize("kv_len", [33, 65])
@pytest.mark.parametrize("over", ["heads", "batch"])
def test_c7_expanded_keys_and_values(kv_len, over):
    q = draw(3, 4, 50, 64)
    small = (3, 1, kv_len, 64) if over == "heads" else (1, 4, kv_len, 64)
    k, v = (draw(*small, seed=s).expand(3, 4, kv_len, 64) for s in (1, 2))
    out = assert_right(q, k, v)
    assert torch.equal(out, kernel(q, k.contiguous(), v.contiguous()))


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 1, 0, 3), (0, 1, 3, 2)])
def test_c8_v_in_another_order(order):
    q, k, v = draw_qkv(2, 16, 16, 62, 62, 128, BF16)
    moved = v.permute(order).contiguous().permute(order)  # swaps two dims in memory, one of them may be the last
    assert not moved.is_contiguous()
    assert torch.equal(kernel(q, k, moved), kernel(q, k, v))


def test_output_lies_in_memory_as_q():
    q, k, v = draw_qkv(2, 8, 8, 100, 100, 64)
    assert kernel(q, k, v).is_contiguous()
    swapped = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert kernel(swapped, k, v).stride() == swapped.stride()


# --- D: runtime


def test_d2_side_stream_uses_the_new_q():
    q, k, v = draw_qkv(1, 8, 8, 512, 512, 64)
    fresh = draw(1, 8, 512, 64, seed=77)
    wanted = kernel(fresh, k, v)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=BF16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(20):
            matrix = matrix @ matrix
        q.copy_(fresh)
        out = kernel(q, k, v)
    side.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_d3_second_gpu_leaves_the_current_device():
    q, k, v = (draw(1, 29040, 10, 128, seed=s, dtype=BF16).to("cuda:1") for s in range(3))
    out = kernel(q, k, v, layout="NHD")
    assert torch.cuda.current_device() == 0
    assert out.device == q.device
    assert "tensor(" in repr(out)
    some = slice(None, None, 250)  # rows: scores of all in FP64 would take 67 GB
    assert_close(out[:, some], exact(q[:, some], k, v, layout="NHD", out_dtype=torch.float64))


@pytest.mark.parametrize("is_causal", [False, True])
def test_warm_call_is_captured_by_a_cuda_graph(is_causal):
    q, k, v = draw_qkv(2, 8, 2, 300, 500, 128, BF16)
    kernel(q, k, v, is_causal=is_causal, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernel(q, k, v, is_causal=is_causal, return_lse=True)
    for seed in (5, 6):
        for x, fresh in zip((q, k, v), draw_qkv(2, 8, 2, 300, 500, 128, BF16, seed=seed), strict=True):
            x.copy_(fresh)
        graph.replay()
        wanted, wanted_lse = kernel(q, k, v, is_causal=is_causal, return_lse=True)
        assert torch.equal(out, wanted)
        assert torch.equal(lse, wanted_lse)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("limit", [6 << 20, 1])  # a batch item of two KV heads needs 3 to 5 MiB
def test_a_call_in_parts_gives_the_bits_of_the_whole_in_a_graph_too(limit, layout):
    q, k, v = draw_qkv(3, 8, 2, 2000, 5000, 128, BF16)
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    options = Options(layout=layout, is_causal=True, return_lse=True, backend="kernel")
    values = [getattr(options, name) for name in Options.__slots__]
    dispatcher = Dispatcher(CudaRuntime(), lambda: replace(read_env(), workspace_limit=limit))
    call = partial(dispatcher.attention, q, k, v, None, None, *values)
    whole = sagegen.workspace_bytes(q, k, v, layout=layout, is_causal=True, return_lse=True, backend="kernel")
    assert dispatcher.workspace_bytes(q, k, v, None, *values) < whole
    wanted = kernel(q, k, v, layout=layout, is_causal=True, return_lse=True)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    for found in (call(), captured):
        for x, y in zip(found, wanted, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_16k_tokens(dim, is_causal):
    q, k, v = draw_qkv(1, 16, 4, 16384, 16384, dim, BF16)
    rows = torch.cat([torch.arange(0, 16384, 257), torch.tensor([127, 128, 16383])]).cuda()
    out, lse = kernel(q, k, v, is_causal=is_causal, return_lse=True)
    ref, ref_lse = exact(q, k, v, is_causal=is_causal, return_lse=True, out_dtype=torch.float64, rows=rows)
    assert_close(out[:, :, rows], ref)
    assert out.isfinite().all()
    torch.testing.assert_close(lse[:, :, rows], ref_lse, atol=0.1, rtol=0)


def test_500_random_shapes():
    source = random.Random(0)
    failures = []
    for trial in range(500):
        heads_kv, group = source.choice([1, 2, 3]), source.choice([1, 1, 2, 4, 7])
        q_len, kv_len = (source.choice([source.randint(1, 40), source.randint(41, 600)]) for _ in range(2))
        shape = (source.randint(1, 3), heads_kv * group, heads_kv, q_len, kv_len, source.choice([64, 128]))
        dtype, is_causal = source.choice([FP16, BF16]), source.random() < 0.5
        layout, scale = source.choice(["HND", "NHD"]), source.choice([None, None, 0.05, -0.1])
        q, k, v = draw_qkv(*shape, dtype, seed=trial)
        if layout == "NHD":
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        options = {"is_causal": is_causal, "scale": scale, "layout": layout}
        out, lse = kernel(q, k, v, return_lse=True, **options)
        ref, ref_lse = exact(q, k, v, return_lse=True, out_dtype=torch.float64, **options)
        blind = ref_lse == -math.inf
        l2, cosine = errors(out, ref) if ref.any() else (out.double().norm().item(), 1.0)
        agree = torch.equal(lse == -math.inf, blind) and bool((lse - ref_lse)[~blind].abs().le(0.15).all())
        # a single row has no average: up to 0.07, against 0.04 over many
        if not (out.isfinite().all() and l2 <= 0.1 and cosine >= 0.995 and agree):
            failures.append((shape, dtype, options, l2, cosine, agree))
    assert not failures, f"{len(failures)} of 500, the first: {failures[0]}"
