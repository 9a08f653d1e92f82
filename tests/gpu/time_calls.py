"""Times whole calls of `sagegen.attention` beside torch SDPA, on the host and on the GPU apart; no test.

    python tests/gpu/time_calls.py [--lengths 128 1024] [--head-dims 64 128] [--batch 4] [--heads 32] [--force]

Host: microseconds until a warm call returns, median of 9 batches of 100. GPU: microseconds of a call in a CUDA graph of
many, so that no host is waited for; both in turns, median of --rounds, and torch's time over ours with a 95 % interval.
Shipped entries answer, torch SDPA among them; --force takes kernels where there are any. Prints Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product

import torch

import sagegen
from sagegen.measuring.bench import interleave, time_host
from sagegen.measuring.verdict import compare, summarize

#: GPU time of a graph: long beside the events around it.
GRAPH_US = 4000
WARM_CALLS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 1448, 1449, 2048, 4096])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--force", action="store_true", help="kernels wherever there is one")
    given = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; batch {given.batch}, {given.heads} heads, bf16\n"
    )
    print("| head dim | mask | tokens | answer | host us | SDPA's | GPU us | SDPA's | SDPA's GPU time over ours |")
    print("|---|---|---|---|---|---|---|---|---|")
    for head_dim, is_causal, length in product(given.head_dims, (False, True), given.lengths):
        shape = (given.batch, given.heads, length, head_dim)
        print(row(shape, is_causal, given.force, given.rounds), flush=True)


def row(shape: tuple[int, int, int, int], is_causal: bool, force: bool, rounds: int) -> str:
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    backend = "kernel" if force else None
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: sagegen.attention(q, k, v, is_causal=is_causal, backend=backend),
        "torch": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal),
    }
    calls["ours"]()
    answer = sagegen.last_dispatch()
    assert answer is not None
    host = {name: summarize(time_host(call, torch.cuda.synchronize)).median_us for name, call in calls.items()}
    graphs = {name: make_graph(call) for name, call in calls.items()}
    times = interleave(graphs, lambda graph: graph(), rounds)
    gpu = {name: summarize(own).median_us for name, own in times.items()}
    ratio = compare(times["torch"], times["ours"])
    _, _, length, head_dim = shape
    return (
        f"| {head_dim} | {'causal' if is_causal else 'full'} | {length} | {answer.answer} | {host['ours']:.1f} "
        f"| {host['torch']:.1f} | {gpu['ours']:.1f} | {gpu['torch']:.1f} "
        f"| {ratio.ratio:.3f} ({ratio.low:.3f}..{ratio.high:.3f}) |"
    )


def make_graph(call: Callable[[], object]) -> Callable[[], float]:
    """What replays a graph of calls, and says how many microseconds each took."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(WARM_CALLS):
            call()
    torch.cuda.synchronize()
    count = max(1, round(GRAPH_US / replay_us(capture(call, 1), 1)))
    graph = capture(call, count)
    return lambda: replay_us(graph, count)


def capture(call: Callable[[], object], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / count


if __name__ == "__main__":
    main()
