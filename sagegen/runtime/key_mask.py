"""Masks that hide whole keys, as padding of a batch does: kernels get the other keys, and how many they are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sagegen.counts import Ragged
from sagegen.runtime.addresses import UNALIGNED, addresses, check_outside
from sagegen.runtime.answers import Result
from sagegen.runtime.arguments import ALIGNED_ELEMENTS, Checked
from sagegen.runtime.explanation import Explanation
from sagegen.runtime.options import Options
from sagegen.runtime.prepare import Ground, Inputs
from sagegen.runtime.ragged import RaggedAnswer, prepare_ragged


@dataclass(frozen=True, slots=True)
class KeyMaskAnswer:
    """Brings the keys that the mask leaves to the front, batch item by batch item, and runs `inner` on so many.

    Without causality or a window their order is no part of the result. Hidden keys are read by nobody but this copy.

    Attributes:
        attn_mask: see `arguments.is_key_mask`.
        batch, kv_len: of the call.
        layout: of its tensors.
    """

    inner: RaggedAnswer
    attn_mask: torch.Tensor | None
    batch: int
    kv_len: int
    layout: str

    @property
    def explanation(self) -> Explanation:
        return self.inner.explanation

    def with_mask(self, attn_mask: torch.Tensor | None) -> KeyMaskAnswer:
        return replace(self, attn_mask=attn_mask)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
        assert self.attn_mask is not None
        addresses(q, k, v)
        check_outside(self.attn_mask)
        mask = self.attn_mask[..., 0, :]  # of any row, then of any head
        mask = mask if mask.dim() == 1 else mask[..., 0, :]
        mask = mask.expand(self.batch, self.kv_len)
        order = _visible_first(mask)
        # made in every call: a graph that captures it must find it anew
        table = torch.zeros(self.batch, 4, dtype=torch.int32, device=q.device)
        table[:, 1] = q.shape[2 if self.layout == "HND" else 1]
        torch.sum(mask, 1, dtype=torch.int32, out=table[:, 3])
        k, v = (_take_tokens(x, order, self.layout) for x in (k, v))
        return self.inner.run(q, k, v, table, out)


def _visible_first(mask: torch.Tensor) -> torch.Tensor:
    """By batch item the indices of its visible keys, then zeros; bool [batch, kv_len] to int64 of that shape."""
    batch, kv_len = mask.shape
    places = mask.cumsum(1).masked_fill(~mask, 0)  # from 1 on; hidden ones all go to 0, which is cut off
    keys = torch.arange(kv_len, device=mask.device).expand(batch, -1)
    return keys.new_zeros(batch, kv_len + 1).scatter_(1, places, keys)[:, 1:]


def _take_tokens(x: torch.Tensor, order: torch.Tensor, layout: str) -> torch.Tensor:
    """`x` with the tokens of each batch item in `order`, [batch, kv_len]; dense, [batch, tokens, heads, dim]."""
    tokens = x.transpose(1, 2) if layout == "HND" else x
    items = torch.arange(len(order), device=x.device)[:, None]
    # torch moves one element at a time: eight channels are one where they lie so; strides of size-1 dims are asked, too
    *outer, channel = x.stride()
    multiples = (x.shape[-1], x.storage_offset(), *outer)
    is_wide = channel == 1 and not x.data_ptr() & UNALIGNED and all(n % ALIGNED_ELEMENTS == 0 for n in multiples)
    taken = tokens.view(torch.complex128)[items, order].view(x.dtype) if is_wide else tokens[items, order]
    taken = taken.contiguous()  # torch keeps what it can of the strides
    return taken.transpose(1, 2) if layout == "HND" else taken


def prepare_key_mask(
    inputs: Inputs, out: torch.Tensor | None, checked: Checked, options: Options, ground: Ground
) -> KeyMaskAnswer:
    """The answer to calls of the kind of this one, but for its mask; arguments are those of `prepare_kernel`."""
    q, k, _ = inputs
    shape = checked.shape
    dense = torch.empty(shape.batch, shape.kv_len, shape.heads_kv, k.shape[-1], dtype=k.dtype, device="meta")
    sorted_keys = dense.transpose(1, 2) if options.layout == "HND" else dense
    checked = replace(checked, copies=tuple(name for name in checked.copies if name == "q"))
    ragged = Ragged(shape.q_len, shape.kv_len, is_packed=False)
    lse_shape = (shape.batch, shape.heads_q, shape.q_len)
    inner = prepare_ragged((q, sorted_keys, sorted_keys), out, checked, options, ground, ragged, lse_shape)
    return KeyMaskAnswer(inner, None, shape.batch, shape.kv_len, options.layout)
