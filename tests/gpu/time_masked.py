"""Times calls with windows, masks of keys and packed sequences beside torch, on the GPU alone; no test.

    python tests/gpu/time_masked.py [--lengths 1024 4096] [--head-dims 64 128] [--batch 4] [--heads 32] [--force]

Microseconds of a call in a CUDA graph of many, ours and torch's in turns, median of --rounds; torch's time over ours
with a 95 % interval. Torch is what answers a call with backend="sdpa": with a mask that says the same; padded, for
packed sequences. Those are also timed by torch's own packed attention, where it has one, and beside one dense call of
ours with as many queries and keys. Shipped entries decide what answers; --force takes kernels. Prints Markdown.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

import sagegen
from sagegen.measuring.bench import interleave
from sagegen.measuring.verdict import compare, summarize
from time_calls import make_graph

Calls = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--force", action="store_true", help="kernels wherever there is one")
    given = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; batch {given.batch}, {given.heads} heads, bf16\n"
    )
    print("| kind | head dim | tokens | answer | GPU us | beside | GPU us | its time over ours |")
    print("|---|---|---|---|---|---|---|---|")
    backend = "kernel" if given.force else None
    for head_dim, length in product(given.head_dims, given.lengths):
        shape = (given.batch, given.heads, length, head_dim)
        for kind, calls in {**windows(shape, backend), **key_masks(shape, backend), **packed(shape, backend)}.items():
            for line in rows(kind, shape, calls, given.rounds):
                print(line, flush=True)


def windows(shape: tuple[int, int, int, int], backend: str | None) -> dict[str, Calls]:
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return {
        f"window {window}": {
            "ours": partial(sagegen.attention, *inputs, window=window, backend=backend),
            "torch, masked": partial(sagegen.attention, *inputs, window=window, backend="sdpa"),
            "dense, causal": partial(sagegen.attention, *inputs, is_causal=True),
        }
        for window in ((256, 0), (1024, 1024))
        if max(window) < shape[2]
    }


def key_masks(shape: tuple[int, int, int, int], backend: str | None) -> dict[str, Calls]:
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    batch, length = shape[0], shape[2]
    ends = torch.linspace(length / 2, length, batch, device="cuda")[:, None]
    mask = (torch.arange(length, device="cuda") < ends)[:, None, None]
    return {
        "keys hidden, 1/4": {
            "ours": partial(sagegen.attention, *inputs, attn_mask=mask, backend=backend),
            "torch, masked": partial(sagegen.attention, *inputs, attn_mask=mask, backend="sdpa"),
            "dense, unmasked": partial(sagegen.attention, *inputs),
        }
    }


def packed(shape: tuple[int, int, int, int], backend: str | None) -> dict[str, Calls]:
    """`batch` sequences that together have batch * length tokens, the shortest a third as long as the longest."""
    batch, heads, length, head_dim = shape
    lengths = torch.linspace(0.5, 1.5, batch).mul(length).int()
    lengths[-1] += batch * length - lengths.sum()
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()
    longest = int(lengths.max())
    q, k, v = (torch.randn(batch * length, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    call = partial(sagegen.attention_varlen, q, k, v, starts, starts, longest, longest)
    calls: dict[str, Calls] = {}
    for is_causal in (False, True):
        own: Calls = {
            "ours": partial(call, is_causal=is_causal, backend=backend),
            "torch, padded": partial(call, is_causal=is_causal, backend="sdpa"),
            "dense": partial(
                sagegen.attention,
                *(x.view(batch, length, heads, head_dim) for x in (q, k, v)),
                layout="NHD",
                is_causal=is_causal,
            ),
        }
        if torchs := torchs_packed(q, k, v, starts, longest, is_causal):
            own["torch, packed"] = torchs
        calls[f"packed, {'causal' if is_causal else 'full'}"] = own
    return calls


def torchs_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, is_causal: bool
) -> Callable[[], object] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if "is_causal" in inspect.signature(varlen_attn).parameters:
        return partial(varlen_attn, q, k, v, starts, starts, longest, longest, is_causal=is_causal)
    return partial(varlen_attn, q, k, v, starts, starts, longest, longest, window_size=(-1, 0 if is_causal else -1))


def rows(kind: str, shape: tuple[int, int, int, int], calls: Calls, rounds: int) -> list[str]:
    calls["ours"]()
    answer = sagegen.last_dispatch()
    assert answer is not None
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = make_graph(call)
        except (RuntimeError, TypeError) as error:
            print(f"<!-- {kind} {name}: {str(error).splitlines()[0]} -->")
    times = interleave(graphs, lambda graph: graph(), rounds)
    own = summarize(times["ours"]).median_us
    lines = []
    for name in graphs.keys() - {"ours"}:
        ratio = compare(times[name], times["ours"])
        spread = f"{ratio.ratio:.3f} ({ratio.low:.3f}..{ratio.high:.3f})"
        lines.append(
            f"| {kind} | {shape[3]} | {shape[2]} | {answer.answer} | {own:.1f} | {name} "
            f"| {summarize(times[name]).median_us:.1f} | {spread} |"
        )
    return sorted(lines)


if __name__ == "__main__":
    main()
