"""The tables of `sagegen ablate`: which recipes they compare, on which inputs, and the order that the papers found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from sagegen.ablation.recipe import Granularity, PvType, QkType, Recipe, Width
from sagegen.problem import Shape

#: Heads of the synthetic inputs, each with outliers of its own.
HEADS = 8
HEAD_DIM = 64
#: Rows of the accumulator's table: few, so that long chains of keys are cheap.
_FEW_ROWS = 16
#: And of the table of p_max and v_max.
_SOME_ROWS = 128
_CHAIN_KEYS = (1024, 8192, 32768)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: a recipe on synthetic inputs of a kind and shape."""

    label: str
    recipe: Recipe
    kind: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Table:
    """What is compared.

    Attributes:
        ranked_by: the figure that orders the rows, of the ones that the papers quote for this.
        orders: chains of rows, each (label, kind), from the best to the worst, as the papers have them.
        takes_tensors: whether captured inputs may stand in for the synthetic ones: not where shapes are the subject.
        shows_flushed: whether the share of V that becomes zero is a column.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    ranked_by: Literal["cosine", "relative_l1"] = "cosine"
    orders: tuple[tuple[tuple[str, str], ...], ...] = ()
    takes_tensors: bool = True
    shows_flushed: bool = False


_INT4 = Recipe(qk="int4", pv="exact")
_ROUGH = replace(_INT4, smooth_q=False, smooth_k=False)


def make_table(name: str, tokens: int) -> Table:
    """The table of a name of TABLE_NAMES for `tokens` rows and keys."""
    return _MAKERS[name](tokens)


def _even(tokens: int) -> Shape:
    return Shape(1, HEADS, HEADS, tokens, tokens)


def _chain(kind: str, *labels: str) -> tuple[tuple[str, str], ...]:
    return tuple((label, kind) for label in labels)


def _smoothing(tokens: int) -> Table:
    recipes = {
        "Q and K": _INT4,
        "Q": replace(_INT4, smooth_k=False),
        "K": replace(_INT4, smooth_q=False),
        "SmoothQuant-style": replace(_ROUGH, balance="max"),
        "Hadamard": replace(_ROUGH, rotate=True),
        "none": _ROUGH,
    }
    kind = "biased_channels"
    rows = tuple(Row(label, recipe, kind, _even(tokens)) for label, recipe in recipes.items())
    best = ("Q and K", "Q", "K", "SmoothQuant-style")
    orders = (_chain(kind, *best, "none"), _chain(kind, *best, "Hadamard"))
    return Table("smoothing", "Smoothing: INT4 per thread, exact P·V", rows, orders=orders)


def _granularity(tokens: int) -> Table:
    spans: tuple[Granularity, ...] = get_args(Granularity)
    rows = tuple(Row(f"per {s}", replace(_INT4, granularity=s), "large_tokens", _even(tokens)) for s in spans)
    orders = (_chain("large_tokens", *(row.label for row in rows)),)
    return Table("granularity", "Granularity: INT4, Q and K smoothed, exact P·V", rows, orders=orders)


def _pv_type(tokens: int) -> Table:
    kinds: tuple[PvType, ...] = get_args(PvType)
    rows = tuple(Row(pv, Recipe(qk="int4", pv=pv), "sink", _even(tokens)) for pv in kinds)
    orders = (_chain("sink", "e4m3", "e5m2", "int8"),)
    return Table("pv-type", "Type of P and V: INT4 per thread, Q and K smoothed", rows, orders=orders)


def _smooth_v(tokens: int) -> Table:
    rows = tuple(
        Row(label, Recipe(smooth_v=smooth), kind, _even(tokens))
        for kind in ("biased_values", "normal")
        for label, smooth in (("smoothed", True), ("as it is", False))
    )
    orders = (_chain("biased_values", "smoothed", "as it is"),)
    return Table("smooth-v", "Smoothing of V: INT8 per thread, E4M3", rows, "relative_l1", orders)


def _accumulator(tokens: int) -> Table:
    rows, orders, kind = [], [], "lifted_values"
    widths: tuple[Width, ...] = get_args(Width)
    for keys in _CHAIN_KEYS:
        for width in widths:
            for two_level in (True, False) if width != "fp32" else (True,):
                recipe = Recipe(accumulator=width, two_level=two_level)
                if width == "fp16":
                    recipe = replace(recipe, p_max=224.0, v_max=4.5)
                level = "" if width == "fp32" else ", two-level" if two_level else ", one sum"
                shape = Shape(1, 1, 1, _FEW_ROWS, keys)
                rows.append(Row(f"{width}{level}, {keys} keys", recipe, kind, shape))
        orders.append(_chain(kind, f"fp22, two-level, {keys} keys", f"fp22, one sum, {keys} keys"))
    title = "Accumulator of P·V: E4M3, promoted every 64 keys or never; 16 rows"
    return Table("accumulator", title, tuple(rows), "relative_l1", tuple(orders), takes_tensors=False)


def _pmax_vmax(tokens: int) -> Table:
    base = Recipe(accumulator="fp16")
    pairs = (
        (448.0, 4.5, 32),
        (224.0, 9.0, 32),
        (224.0, 4.5, 64),
        (112.0, 9.0, 64),
        (448.0, 2.25, 64),
        (112.0, 2.25, 64),
    )
    recipes = {"fp32, 448, 448": Recipe()} | {
        f"fp16, {p:g}, {v:g}, every {depth}": replace(base, p_max=p, v_max=v, accum_depth=depth)
        for p, v, depth in pairs
    }
    rows = tuple(
        Row(label, recipe, kind, Shape(1, HEADS, HEADS, min(tokens, _SOME_ROWS), tokens))
        for kind in ("normal", "large_values")
        for label, recipe in recipes.items()
    )
    title = "Accumulator, p_max, v_max, keys between promotions: INT8 per thread, E4M3; at most 128 rows"
    return Table("pmax-vmax", title, rows, "relative_l1", shows_flushed=True)


def _qk_2x2(tokens: int) -> Table:
    smooth = Recipe(pv="exact")
    plain = replace(smooth, smooth_q=False, smooth_k=False, granularity="tensor")
    kind = "biased_channels"
    types: tuple[tuple[QkType, str], ...] = (("int8", "INT8"), ("e4m3", "FP8"))
    rows = tuple(
        Row(f"{label}, {how}", replace(recipe, qk=qk), kind, _even(tokens))
        for qk, label in types
        for how, recipe in (("smoothed, per thread", smooth), ("plain, per tensor", plain))
    )
    orders = tuple(_chain(kind, f"{x}, smoothed, per thread", f"{x}, plain, per tensor") for x in ("INT8", "FP8"))
    return Table("qk-2x2", "Type of Q·K^T with and without the techniques: exact P·V", rows, orders=orders)


def _shapes(tokens: int) -> Table:
    lengths = ((1, tokens), (77, tokens), (tokens, 77), (tokens // 2 + 3, tokens), (tokens, tokens // 2 + 3))
    shapes = {f"{q} x {k} tokens": Shape(1, HEADS, HEADS, q, k) for q, k in lengths}
    short = min(tokens, 256)
    shapes |= {f"{n} heads": Shape(1, n, n, short, short) for n in (1, 2, 4, 8, 16, 32, 64)}
    shapes |= {f"{n} heads, {kv} of K and V": Shape(1, n, kv, short, short) for n, kv in ((9, 3), (32, 8), (64, 1))}
    variants: tuple[tuple[str, QkType], ...] = (("8b", "int8"), ("4b", "int4"))
    rows = tuple(
        Row(f"{label}, {bits}", Recipe(qk=qk), "biased_channels", shape)
        for label, shape in shapes.items()
        for bits, qk in variants
    )
    title = "Cross-attention and head counts: 8b is INT8, 4b is INT4; per thread, Q and K smoothed, E4M3"
    return Table("shapes", title, rows, takes_tensors=False)


def _rotation(tokens: int) -> Table:
    types: tuple[QkType, ...] = ("int4", "int8")
    spans: tuple[Granularity, ...] = ("thread", "token")
    how = {
        "smoothed": _INT4,
        "rotated": replace(_INT4, rotate=True),
        "rotated, balanced": replace(_INT4, rotate=True, balance="rms"),
    }
    rows = tuple(
        Row(f"{qk} per {span}, {label}", replace(recipe, qk=qk, granularity=span), "wide_channels", _even(tokens))
        for qk in types
        for span in spans
        for label, recipe in how.items()
    )
    return Table("rotation", "Rotation and balance after smoothing Q and K: exact P·V", rows)


_MAKERS: dict[str, Callable[[int], Table]] = {
    "smoothing": _smoothing,
    "granularity": _granularity,
    "pv-type": _pv_type,
    "smooth-v": _smooth_v,
    "accumulator": _accumulator,
    "pmax-vmax": _pmax_vmax,
    "qk-2x2": _qk_2x2,
    "shapes": _shapes,
    "rotation": _rotation,
}
#: Every table, in the order that the command prints them.
TABLE_NAMES = tuple(_MAKERS)
