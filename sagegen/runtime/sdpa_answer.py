"""Prepared answers by torch SDPA: with this package's semantics, and as it is where the two agree."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.autograd import forward_ad

from sagegen.runtime.addresses import UNALIGNED
from sagegen.runtime.answers import Result, into
from sagegen.runtime.explanation import Explanation
from sagegen.runtime.fallback import LARGEST_NO_SCALE, attend, has_odd_rows, torch_sdpa
from sagegen.runtime.options import Options


@dataclass(frozen=True, slots=True)
class SdpaAnswer:
    """torch SDPA with this package's semantics."""

    explanation: Explanation
    options: Options
    attn_mask: torch.Tensor | None

    def with_mask(self, attn_mask: torch.Tensor | None) -> SdpaAnswer:
        return replace(self, attn_mask=attn_mask)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
        options = self.options
        result = attend(
            q,
            k,
            v,
            layout=options.layout,
            is_causal=options.is_causal,
            scale=options.scale,
            window=options.window,
            attn_mask=self.attn_mask,
            return_lse=options.return_lse,
        )
        return into(out, result)


@dataclass(frozen=True, slots=True)
class PlainSdpaAnswer:
    """torch SDPA as it is, which spares the host half of a short call.

    Attributes:
        general: for what a kind of call cannot say: addresses, autocast, transforms of torch.func.
        is_causal: where queries and keys are as many, so that both corners are one.
        scale: above 0, in float32 too.
    """

    general: SdpaAnswer
    is_causal: bool
    scale: float
    has_groups: bool
    device_type: str

    @property
    def explanation(self) -> Explanation:
        return self.general.explanation

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
        if torch.is_autocast_enabled(self.device_type) or not _all_aligned(q, k, v):
            return self.general.run(q, k, v, out)
        result = torch_sdpa(q, k, v, is_causal=self.is_causal, scale=self.scale, enable_gqa=self.has_groups)
        return result if out is None else into(out, result)


def prepare_sdpa(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    explanation: Explanation,
    options: Options,
    attn_mask: torch.Tensor | None,
) -> SdpaAnswer | PlainSdpaAnswer:
    """Torch's answer to checked calls of a kind."""
    general = SdpaAnswer(explanation, options, attn_mask)
    if not _is_plain(inputs, options, attn_mask):
        return general
    q, k, _ = inputs
    scale = q.shape[-1] ** -0.5 if options.scale is None else float(options.scale)
    is_causal = options.is_causal and q.shape[2] > 1
    return PlainSdpaAnswer(general, is_causal, scale, q.shape[1] != k.shape[1], q.device.type)


def _is_plain(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], options: Options, attn_mask: torch.Tensor | None
) -> bool:
    """Whether torch means the same by such a call, as far as its kind says."""
    q, k, _ = inputs
    return (
        options.layout == "HND"
        and attn_mask is None
        and options.window is None
        and not options.return_lse
        and (not options.is_causal or q.shape[2] in (1, k.shape[2]))
        and (options.scale is None or options.scale > LARGEST_NO_SCALE)
        and torch.amp.is_autocast_available(q.device.type)
        and forward_ad._current_level < 0  # a tangent comes with the level
        and not any(has_odd_rows(x) for x in inputs)
    )


def _all_aligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether all addresses are multiples of what kernels read at once; not so within torch.func, where none is."""
    try:
        return not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & UNALIGNED
    except RuntimeError:
        return False
