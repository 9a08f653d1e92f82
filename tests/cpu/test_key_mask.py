"""Keys that a mask leaves, brought to the front: what a kernel's plan counts on, wherever the caller's tensors lie."""

from __future__ import annotations

import pytest
import torch

from drawn_calls import MEMORIES
from sagegen.runtime.key_mask import _take_tokens, _visible_first


def test_visible_keys_come_first_in_their_order():
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    assert _visible_first(mask).tolist() == [[1, 2, 4, 0, 0], [0, 0, 0, 0, 0], [0, 1, 2, 3, 4]]
    assert _visible_first(mask[:1, 1:2].expand(2, 7)).tolist() == [list(range(7))] * 2


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "sizes", [(2, 3, 5, 64), (1, 1, 5, 64), (1, 3, 1, 128), (2, 1, 4, 20), (1, 1, 1, 256)], ids=str
)
def test_tokens_are_dense_wherever_they_lay(layout, memory, sizes):
    """Strides of size-1 dims among them, and those that torch keeps when it indexes."""
    batch, heads, tokens, dim = sizes
    shape = sizes if layout == "HND" else (batch, tokens, heads, dim)
    x = MEMORIES[memory](torch.randn(shape, generator=torch.Generator().manual_seed(0)).half())
    order = torch.arange(tokens).flip(0).expand(batch, tokens)
    taken = _take_tokens(x, order, layout)
    assert torch.equal(taken, x.flip(2 if layout == "HND" else 1))
    dense = torch.empty(batch, tokens, heads, dim)
    assert taken.stride() == (dense.transpose(1, 2) if layout == "HND" else dense).stride()
    assert taken.data_ptr() % 16 == 0
