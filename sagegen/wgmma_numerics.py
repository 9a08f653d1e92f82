"""The `wgmma` family's softmax and P·V, step by step in FP32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sagegen.operands import MIN_STEP, STEP_UNITS, Operands, TileSums, multiply_qk
from sagegen.quantizing import E4M3_MAX, INT8_MAX, MAGIC, Accumulator, add_products, round_e4m3, round_up_fp32
from sagegen.space import WgmmaConfig

#: Row maximum before any key, and an integer score below every real one: what masked keys count as. A masked float
#: score is -inf, for which the row maximum before any key stands here: -inf times a factor of 0 would be NaN.
_FLOOR = -1e30
_MASKED_SCORE = -float(1 << 24)
#: Rows that choose together, between exponents and between ways to add delta S: those of a consumer warpgroup.
_VOTING_ROWS = 64
#: What is folded into integer scores: less than so many of their units, which are at most so large in log2 units.
_FOLD_LIMIT = 2.0**21
_MAX_FOLDED_FACTOR = 0.25
_TINY_FACTOR = 1e-30
#: Largest step of the packed exponent; the least is MIN_STEP.
_MAX_STEP = 0.75
#: log2 of what P is at a row's maximum: E4M3's end, and what the packed exponent may round up to without leaving it.
_EXACT_TOP = math.log2(E4M3_MAX)
_PACKED_TOP = 8.7
#: Of 2^x below its chord, in E4M3 bits.
_MEAN_SAG = 0.46
#: Steps that a packed exponent spans: an fp16 number of [1024, 2048).
_SPAN = 1023


@dataclass(frozen=True, slots=True)
class _Tile:
    """One key tile: float32 scores without scales, [batch, heads, rows, keys], which are whole but for E4M3; their
    factors, which are masked and what those count as, and delta S."""

    keys: slice
    products: torch.Tensor
    k_scale: torch.Tensor
    factor: torch.Tensor
    hidden: torch.Tensor
    masked_score: float
    delta: torch.Tensor | None


def sum_wgmma_tiles(operands: Operands, config: WgmmaConfig, accumulator: Accumulator) -> TileSums:
    top = _PACKED_TOP if config.bounds_steps else _EXACT_TOP
    out = torch.zeros_like(operands.q8)
    total = torch.zeros_like(operands.q_scale)
    peak = torch.full_like(operands.q_scale, _FLOOR)
    counted = torch.zeros_like(total)  # what the ones column holds of the tile before
    unmasked_tiles = _unmasked_tiles(operands, config)
    exact_total = torch.zeros_like(total)
    fits = _steps_fit(operands) if config.bounds_steps and not operands.want_lse else None
    is_folded = _delta_fits(operands) if config.folds_delta else None
    for index, start in enumerate(range(0, operands.kv_len, config.block_k)):
        keys = slice(start, min(start + config.block_k, operands.kv_len))
        tile = _make_tile(operands, keys, config, accumulator)
        grown, weights, p = _exact_softmax(tile, peak, top)
        if is_folded is not None and is_folded.any():
            folded = _folded_softmax(tile, operands.q_scale, peak, top)
            exact = grown, weights, p
            grown, weights, p = (torch.where(is_folded, a, b) for a, b in zip(folded, exact, strict=True))
        if fits is not None and (fast := fits & (index < unmasked_tiles)).any():
            fast_peak, fast_p = _fast_softmax(tile, operands.q_scale, peak, config)
            grown, p = torch.where(fast, fast_peak, grown), torch.where(fast, fast_p, p)
        alpha = (peak - grown).exp2()
        values = operands.values[:, :, tile.keys]
        if config.accumulation == "one":
            out = add_products(out * alpha, p, values, accumulator)
        else:
            out = out * alpha + add_products(torch.zeros_like(out), p, values, accumulator)
        if config.row_sum == "ones":
            # `overlap` does not zero the column between its last tile and the first masked one
            carried = counted if config.schedule == "overlap" else torch.zeros_like(counted)
            carried = torch.where(unmasked_tiles == index, carried, 0)
            counted = add_products(carried, p, torch.ones_like(values[..., :1]), accumulator)
            total = total * alpha + (counted - carried)
        exact_total = exact_total * alpha + weights.sum(-1, keepdim=True)
        peak = grown
    sees_key = operands.last_key >= 0
    if config.row_sum == "fadd":
        total = exact_total
    total, exact_total = (torch.where(sees_key, x, 0) for x in (total, exact_total))
    return TileSums(out, total, exact_total, torch.where(sees_key, peak, -math.inf), 2.0**top)


def _unmasked_tiles(operands: Operands, config: WgmmaConfig) -> torch.Tensor:
    """The first tiles, whole and seen by every row of a row's block: how many, [rows, 1]."""
    seen = torch.full_like(operands.row, operands.kv_len)
    if operands.is_causal:
        above = operands.row % config.block_q  # rows of the block
        seen = (operands.last_key + 1 - above).clamp(0, operands.kv_len)
    return seen // config.block_k


def _steps_fit(operands: Operands) -> torch.Tensor:
    """Whether the packed exponent holds for all rows that vote with a row, [batch, heads_kv, rows, 1]."""
    # a key's scale is at most the head's peak over 127
    largest = operands.q_scale * (STEP_UNITS / INT8_MAX * operands.k_peak)
    return _agree((largest >= MIN_STEP) & (largest <= _MAX_STEP), operands)


def _delta_fits(operands: Operands) -> torch.Tensor:
    """Whether integer scores start at delta S in all rows that vote with a row, [batch, heads_kv, rows, 1]."""
    assert operands.delta is not None
    is_zero = (operands.q8 == 0).all(-1, keepdim=True)
    inverse = torch.where(is_zero, math.inf, 1 / operands.q_scale)
    reach = operands.delta.largest() * inverse * (1 / operands.k_scale).amax(2, keepdim=True)
    factor = operands.q_scale * operands.k_scale.amax(2, keepdim=True)
    return _agree((reach < _FOLD_LIMIT) & (factor <= _MAX_FOLDED_FACTOR), operands)


def _agree(fits: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Whether all rows that vote with a row say so; both [batch, heads_kv, rows, 1]."""
    groups = -(-operands.q_len // _VOTING_ROWS)
    votes = fits.new_ones(*fits.shape[:2], fits.shape[2] // operands.q_len, groups * _VOTING_ROWS)
    votes[..., : operands.q_len] = fits.view(*votes.shape[:3], operands.q_len)
    agreed = votes.view(*votes.shape[:3], groups, _VOTING_ROWS).all(-1)
    return agreed.repeat_interleave(_VOTING_ROWS, -1)[..., : operands.q_len].reshape(fits.shape)


def _make_tile(operands: Operands, keys: slice, config: WgmmaConfig, accumulator: Accumulator) -> _Tile:
    k_scale = operands.k_scale[:, :, keys].transpose(-1, -2)
    products = multiply_qk(operands, keys, config, accumulator)
    hidden = torch.arange(keys.start, keys.stop, device=products.device) > operands.last_key
    delta = operands.delta.of(keys) if operands.delta else None
    masked_score = _FLOOR if config.has_float_scores else _MASKED_SCORE
    return _Tile(keys, products, k_scale, operands.q_scale * k_scale, hidden, masked_score, delta)


def _exact_softmax(tile: _Tile, peak: torch.Tensor, top: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The row maxima after a tile, P before it is rounded, and P."""
    if tile.delta is not None:
        # one FMA, rounded once
        scores = (tile.products.double() * tile.factor + tile.delta).float().masked_fill_(tile.hidden, -math.inf)
        grown = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = (scores - (grown - top)).exp2()
        return grown, weights, round_e4m3(weights)
    largest = (tile.products.masked_fill(tile.hidden, tile.masked_score) * tile.factor).amax(-1, keepdim=True)
    grown = torch.maximum(peak, largest)
    offset = (grown - top).double()
    # one FMA, rounded once
    weights = (tile.products.double() * tile.factor - offset).float().exp2().masked_fill_(tile.hidden, 0)
    return grown, weights, round_e4m3(weights)


def _folded_softmax(
    tile: _Tile, q_scale: torch.Tensor, peak: torch.Tensor, top: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_exact_softmax`, of integer sums that started at MAGIC plus delta S in whole units."""
    assert tile.delta is not None
    factor = tile.factor.clamp_min(_TINY_FACTOR)
    unit = (1 / q_scale) * (1 / tile.k_scale)
    scores = tile.products + (tile.delta.double() * unit).round().float()
    scores = scores.masked_fill_(tile.hidden, -math.inf)
    grown = torch.maximum(peak, (scores * factor).amax(-1, keepdim=True))
    # one number is subtracted for MAGIC and the maximum, rounded up
    offset = round_up_fp32(MAGIC * factor.double() + (grown - top))
    weights = ((MAGIC + scores.double()) * factor - offset).float().exp2()
    return grown, weights, round_e4m3(weights)


def _fast_softmax(
    tile: _Tile, q_scale: torch.Tensor, peak: torch.Tensor, config: WgmmaConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row maxima after an unmasked tile, and P: by the packed exponent for all keys, or all but some groups of 16.

    All is done by each thread of a quad for its own columns, and only the maximum is shared.
    """
    keys = torch.arange(tile.products.shape[-1], device=tile.products.device)
    is_packed = keys // 16 % config.exact_every != 0 if config.exact_every else torch.ones_like(keys, dtype=torch.bool)
    step = STEP_UNITS * q_scale * tile.k_scale
    scores = (tile.products / 256).floor()
    largest = torch.empty_like(scores)
    for thread in range(4):
        own = keys % 8 // 2 == thread
        largest[..., own] = scores[..., own & is_packed].amax(-1, keepdim=True)
    tops = torch.where(is_packed, (largest + 1) * step * 0.125, tile.products * (step * (1 / STEP_UNITS)))
    grown = torch.maximum(peak, tops.amax(-1, keepdim=True))
    exact = (tile.products.double() * (step * (1 / STEP_UNITS)) - (grown - _PACKED_TOP).double()).float().exp2()
    return grown, torch.where(is_packed, _packed_exponent(scores, step, largest, grown), round_e4m3(exact))


def _packed_exponent(
    scores: torch.Tensor, step: torch.Tensor, largest: torch.Tensor, grown: torch.Tensor
) -> torch.Tensor:
    """P: E4M3 bits by fp16 arithmetic on the scores' upper 16 bits.

    A step is what 256 units of a score are in E4M3 bits, eighths of a power of two.
    """
    step16 = step.half().float()
    base = (1024 - 1024 * step16).half().float()
    byte = 8 * (_PACKED_TOP + 7 - grown) - _MEAN_SAG + 0.5 * step16  # at score 0
    exact = (1024 * step16 + base - 1024 - byte) * (1 / step16)
    zero = exact.clamp_min(-32768).round()  # the score at which P is 0
    zero = torch.maximum(torch.minimum(zero, largest + 1), largest - _SPAN)
    above = (scores - zero).clamp_min(0)
    bits = ((1024 + above) * step16 + base).half().view(torch.int16)  # the sum is exact in FP32
    return (bits & 0xFF).to(torch.uint8).view(torch.float8_e4m3fn).float()
