"""The argument combinations of torch's documentation of scaled_dot_product_attention, and torch's own math for them.

Shapes are [..., heads, tokens, dim]. Inputs are drawn on the CPU, so every device is given the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

#: Torch's, whatever a test puts in its place.
TORCH = torch.nn.functional.scaled_dot_product_attention

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One call that torch answers.

    Attributes:
        name: of the test.
        query, key: shapes.
        value: shape, the key's unless given.
        mask: shape of attn_mask, which is bool; None has none.
        is_float: the mask is added to the scores instead; what a bool one would hide gets -inf.
        hidden: a row of the mask that hides every key.
        permuted: heads lie behind tokens in memory, as a projection leaves them.
        options: further arguments.
        takes_kernel: a kernel answers where head dim and dtype suit it, so nothing of `attention` is left out.
    """

    name: str
    query: Size
    key: Size
    value: Size | None = None
    mask: Size | None = None
    is_float: bool = False
    hidden: int | None = None
    permuted: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    takes_kernel: bool = False


def _kernel(
    name: str, query: Size, key: Size, value: Size | None = None, permuted: bool = False, **options: Any
) -> Case:
    return Case(name, query, key, value, permuted=permuted, options=options, takes_kernel=True)


def _torch(name: str, query: Size, key: Size, value: Size | None = None, **options: Any) -> Case:
    return Case(name, query, key, value, options=options)


Q, K = (2, 4, 33, 64), (2, 4, 70, 64)
#: Of the scores of Q and K, [2, 4, 33, 70]; the first has as many dims as torch takes at least.
MASKS = (
    (33, 70), (1, 70), (33, 1), (4, 33, 70), (4, 1, 70), (1, 33, 1), (2, 1, 33, 70), (1, 4, 33, 70), (2, 4, 33, 70),
    (2, 1, 1, 70), (1, 4, 33, 1), (2, 4, 1, 70), (2, 4, 33, 1),
)  # fmt: skip

PLAIN = [
    _kernel("unequal_lengths", Q, K),
    _kernel("causal", Q, Q, is_causal=True),
    _kernel("causal_of_one", (2, 4, 1, 64), (2, 4, 1, 64), is_causal=True),
    _torch("causal_decode", (2, 4, 1, 64), K, is_causal=True),
    _torch("causal_fewer_queries", Q, K, is_causal=True),
    _torch("causal_more_queries", K, Q, is_causal=True),
    _kernel("scale_none", Q, K, scale=None),
    _kernel("scale_zero", Q, K, scale=0.0),
    _kernel("scale_negative", Q, K, scale=-0.2),
    _kernel("scale_negative_causal", Q, Q, scale=-0.2, is_causal=True),
    _kernel("scale_zero_causal", Q, Q, scale=0.0, is_causal=True),
    _torch("scale_negative_fewer_queries", Q, K, scale=-0.2, is_causal=True),
    _torch("scale_zero_more_queries", K, Q, scale=0.0, is_causal=True),
    _kernel("no_queries", (2, 4, 0, 64), K),
    _kernel("no_keys", Q, (2, 4, 0, 64)),
    _torch("no_keys_causal", Q, (2, 4, 0, 64), is_causal=True),
    _kernel("no_batch", (0, 4, 33, 64), (0, 4, 70, 64)),
    _torch("narrow_values", Q, K, (2, 4, 70, 24)),
    _torch("wide_values", Q, Q, (2, 4, 33, 96), is_causal=True),
]

DIMS = [
    _torch("2d", (33, 64), (70, 64)),
    _kernel("3d", (4, 33, 64), (4, 70, 64)),
    _kernel("3d_causal", (4, 33, 64), (4, 33, 64), is_causal=True, scale=0.2),
    _kernel("3d_permuted", (4, 33, 64), (4, 70, 64), permuted=True),
    _kernel("3d_gqa", (4, 33, 64), (2, 70, 64), enable_gqa=True),
    Case("3d_mask", (4, 33, 64), (4, 70, 64), mask=(4, 1, 70)),
    Case("3d_float_mask", (4, 33, 64), (4, 70, 64), mask=(33, 70), is_float=True),
    _kernel("5d", (2, 3, 2, 33, 64), (2, 3, 2, 70, 64)),
    _kernel("5d_causal", (2, 3, 2, 33, 64), (2, 3, 2, 33, 64), is_causal=True, scale=-0.2),
    _kernel("5d_permuted", (2, 3, 2, 33, 64), (2, 3, 2, 70, 64), permuted=True),
    _kernel("5d_gqa", (2, 3, 4, 33, 64), (2, 3, 2, 70, 64), enable_gqa=True),
    _kernel("5d_one_batch", (2, 3, 2, 33, 64), (1, 1, 2, 70, 64)),
    Case("5d_mask", (2, 3, 2, 33, 64), (2, 3, 2, 70, 64), mask=(3, 1, 33, 70)),
    _torch("5d_batches_that_do_not_merge", (2, 3, 2, 33, 64), (3, 2, 70, 64)),
    _kernel("6d", (2, 1, 3, 2, 33, 64), (2, 1, 3, 2, 70, 64)),
]

BROADCAST = [
    _kernel("one_batch_of_keys", (3, 4, 33, 64), (1, 4, 70, 64)),
    _kernel("one_batch_of_queries", (1, 4, 33, 64), (3, 4, 70, 64)),
    _kernel("more_batches_of_values", (1, 4, 33, 64), (1, 4, 70, 64), (3, 4, 70, 64)),
    _kernel("one_head_of_keys_and_values", Q, (2, 1, 70, 64)),
    _kernel("one_head_of_keys", Q, (2, 1, 70, 64), K),
    _kernel("one_head_of_values", Q, K, (2, 1, 70, 64)),
    _kernel("one_head_of_queries", (2, 1, 33, 64), K),
    _kernel("one_head_causal", Q, (2, 1, 33, 64), is_causal=True),
    _kernel("keys_of_3d", Q, (4, 70, 64)),
    _kernel("keys_of_2d", Q, (70, 64)),
    _kernel("queries_of_3d", (4, 33, 64), K),
    _kernel("queries_of_2d_permuted", (33, 64), K, permuted=True),
    _kernel("values_of_3d", Q, K, (4, 70, 64)),
    Case("mask_and_one_batch_of_keys", (3, 4, 33, 64), (1, 4, 70, 64), mask=(3, 1, 1, 70)),
]

GQA = [
    _kernel("gqa", Q, (2, 2, 70, 64), enable_gqa=True),
    _kernel("gqa_causal", (1, 6, 33, 64), (1, 3, 33, 64), enable_gqa=True, is_causal=True),
    _kernel("mqa_scale", Q, (2, 1, 70, 64), enable_gqa=True, scale=-0.2),
    _kernel("gqa_of_equal_heads", Q, K, enable_gqa=True),
    _kernel("gqa_one_batch_of_keys", (3, 4, 33, 64), (1, 2, 70, 64), enable_gqa=True),
    _kernel("gqa_one_head_of_keys", Q, (2, 1, 70, 64), (2, 2, 70, 64), enable_gqa=True),
    _torch("gqa_of_two_ratios", Q, (2, 2, 70, 64), (2, 4, 70, 64), enable_gqa=True),
    Case("gqa_mask", Q, (2, 2, 70, 64), mask=(2, 1, 1, 70), options={"enable_gqa": True}),
]

MASKED = [
    Case(f"{kind}_mask_{'x'.join(map(str, mask))}", Q, K, mask=mask, is_float=kind == "float", options={"scale": scale})
    for mask in MASKS
    for kind, scale in (("bool", None), ("float", -0.2))
] + [
    Case("bool_mask_hides_a_row", Q, K, mask=(33, 70), hidden=2),
    Case("float_mask_hides_a_row", Q, K, mask=(33, 70), hidden=2, is_float=True),
    Case("bool_mask_hides_a_row_of_a_head", Q, K, mask=(4, 33, 70), hidden=5),
    Case("bool_mask_hides_all", Q, K, mask=(1, 70), hidden=0),
    Case("bool_mask_hides_rows_by_one_column", Q, K, mask=(33, 1), hidden=7),
    Case("bool_mask_of_a_square", Q, Q, mask=(33, 33)),
]

CASES = [*PLAIN, *DIMS, *BROADCAST, *GQA, *MASKED]

#: Calls that torch refuses.
REFUSED = {
    "causal_and_bool_mask": Case("", Q, Q, mask=(33, 33), options={"is_causal": True}),
    "causal_and_float_mask": Case("", Q, Q, mask=(33, 33), is_float=True, options={"is_causal": True}),
    "other_heads_without_gqa": _torch("", Q, (2, 2, 70, 64)),
    "heads_no_multiple": _torch("", Q, (2, 3, 70, 64), enable_gqa=True),
    "gqa_one_head_of_queries": _torch("", (2, 1, 33, 64), K, enable_gqa=True),
    "gqa_without_heads": _torch("", (33, 64), (70, 64), enable_gqa=True),
    "other_batches": _torch("", Q, (3, 4, 70, 64)),
    "other_widths": _torch("", Q, (2, 4, 70, 32)),
    "one_dim": _torch("", (64,), K),
    "mask_too_short": Case("", Q, K, mask=(33, 69)),
    "mask_of_more_batches": Case("", (1, 4, 33, 64), (1, 4, 70, 64), mask=(2, 1, 33, 70)),
    "mask_of_one_dim": Case("", Q, K, mask=(70,)),
    "dropout_above_one": _torch("", Q, K, dropout_p=1.5),
}


@dataclass(frozen=True, slots=True)
class Call:
    """The tensors of a case."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None

    def to(self, device: str) -> Call:
        return Call(*(None if x is None else x.to(device) for x in (self.query, self.key, self.value, self.mask)))

    def require_grad(self) -> list[torch.Tensor]:
        """The tensors that have a gradient, which they require from now on."""
        tensors = [x for x in (self.query, self.key, self.value, self.mask) if x is not None and x.is_floating_point()]
        return [x.requires_grad_() for x in tensors]


def make_call(case: Case, dtype: torch.dtype) -> Call:
    """The tensors of a case on the CPU; the same for each call. Values of all types are those that `dtype` holds."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape: Size) -> torch.Tensor:
        x = torch.randn(shape, generator=generator).to(torch.float16).to(dtype)
        return x.transpose(-3, -2).contiguous().transpose(-3, -2) if case.permuted and x.dim() > 2 else x

    query, key, value = draw(case.query), draw(case.key), draw(case.value or case.key)
    return Call(query, key, value, _make_mask(case, generator, dtype))


def _make_mask(case: Case, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor | None:
    if case.mask is None:
        return None
    seen = torch.rand(case.mask, generator=generator) > 0.3
    if case.hidden is not None:
        seen[..., case.hidden, :] = False
    if not case.is_float:
        return seen
    bias = torch.randn(case.mask, generator=generator).to(torch.float16).to(dtype)
    return bias.masked_fill(~seen, -torch.inf)


def torch_math(call: Call, options: Mapping[str, Any]) -> torch.Tensor:
    """Torch's own answer in FP64, by its math backend on the CPU; keeps the graph of the call's tensors."""
    query, key, value, mask = (
        None if x is None else x.cpu().double() if x.is_floating_point() else x.cpu()
        for x in (call.query, call.key, call.value, call.mask)
    )
    with sdpa_kernel(SDPBackend.MATH):
        return TORCH(query, key, value, attn_mask=mask, **options)
