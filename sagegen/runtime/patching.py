"""`patched`: torch's scaled_dot_product_attention answered by `sdpa`, for the calls inside a block alone.

While any block is open, `torch.nn.functional.scaled_dot_product_attention` is a router. It asks a context variable, so
each thread and each asyncio task by itself, for the options of the block that it is in, and leaves calls outside any
to the function that was there before. Blocks may end in any order, and others may patch the name in between.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from sagegen.runtime.options import DEFAULT_MIN_COSINE, Options, check_options
from sagegen.runtime.sdpa import sdpa_with

_Function = Callable[..., torch.Tensor]
_NAME = "scaled_dot_product_attention"


@dataclass(slots=True, eq=False)
class _Block:
    """One `with patched(...)`.

    Attributes:
        options: keywords of `attention`.
        number: counts blocks in the order in which they began; the highest is the innermost.
        is_open: False from the block's end on, for tasks and threads that still hold a copy of its context.
    """

    options: Mapping[str, Any]
    number: int
    is_open: bool = True


@dataclass(slots=True, eq=False)
class _Hooked:
    """The open blocks of modules, by number, and these as text.

    Compiled graphs are guarded by the text: by themselves they do not notice that a module inside has a new hook.
    """

    blocks: dict[int, str]
    text: str = ""


@dataclass(slots=True, eq=False)
class _Router:
    """A function for torch's name that stands before `original`, and how many open blocks count on it."""

    original: _Function
    function: _Function
    users: int = 0


#: The blocks that a context is in, the innermost last.
_BLOCKS: ContextVar[tuple[_Block, ...]] = ContextVar("sagegen_patched", default=())
_HOOKED = _Hooked({})
_NUMBERS = itertools.count()
_LOCK = threading.Lock()
#: One for each function that a block found, kept for good: torch.compile would compile anew for a router that is new.
_ROUTERS: list[_Router] = []


@contextmanager
def patched(
    model: torch.nn.Module | None = None,
    *,
    precision: str = "auto",
    min_cosine: float = DEFAULT_MIN_COSINE,
    smooth_k: bool | None = None,
    smooth_q: bool | None = None,
    smooth_v: bool | None = None,
    rotate: bool | None = None,
    backend: str | None = None,
) -> Iterator[None]:
    """A block in which torch.nn.functional.scaled_dot_product_attention is `sagegen.sdpa` with these options.

    Of several blocks around a call the one that began last answers. A block ends with what was before it, after an
    exception too. A patch of the same name that someone else made is kept: one from before answers all calls outside
    blocks, one from inside a block stays when that ends.

    Out of reach are callers that do not ask torch.nn.functional at each call: modules that did `from
    torch.nn.functional import scaled_dot_product_attention`, and C++ code such as the fast path that
    torch.nn.MultiheadAttention and TransformerEncoderLayer take in eval mode without gradients
    (`torch.backends.mha.set_fastpath_enabled(False)` turns it off). A module cannot be pickled whole inside a block of
    its own, nor scripted by torch.jit inside any: save its state_dict, or do it outside.

    Under torch.compile a call inside the block is part of the graph, with fullgraph=True too, and is compiled again
    for other options. Of a compiled module give `patched` what torch.compile returned.

    Args:
        model: None: calls of this thread (or asyncio task) inside the block. A module: calls while its forward runs,
            in whatever thread, and no others; `model.forward(...)` called directly is not seen, its hooks are not run.
        precision, min_cosine, smooth_k, smooth_q, smooth_v, rotate: as in `sagegen.attention`.
        backend: as in `sagegen.attention`. None leaves CPU tensors, and what no kernel does, to torch. `kernel` and
            `emulator` raise UnsupportedError where torch would have to answer.

    Raises:
        TypeError, ArgumentError: an argument is wrong; nothing was patched.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or None, not {type(model).__name__}")
    options: dict[str, Any] = {
        "precision": precision,
        "min_cosine": min_cosine,
        "smooth_k": smooth_k,
        "smooth_q": smooth_q,
        "smooth_v": smooth_v,
        "rotate": rotate,
        "backend": backend,
    }
    check_options(Options(**options))
    block = _Block(options, next(_NUMBERS))
    router = _install()
    try:
        with _entered(block) if model is None else _hooked(model, block):
            yield
    finally:
        block.is_open = False
        _uninstall(router)


@contextmanager
def _entered(block: _Block) -> Iterator[None]:
    """This context is in `block`."""
    _enter(block)
    try:
        yield
    finally:
        _leave(block)


@contextmanager
def _hooked(model: torch.nn.Module, block: _Block) -> Iterator[None]:
    """Whoever runs `model`'s forward is in `block` meanwhile."""

    def before(module: torch.nn.Module, args: Any) -> None:
        _enter(block)

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        _leave(block)

    handles = [
        model.register_forward_pre_hook(before),
        model.register_forward_hook(after, always_call=True),  # after an exception in the forward too
    ]
    _note_hooked(block.number, f"{id(model)} {block.options}")
    try:
        yield
    finally:
        _note_hooked(block.number, None)
        for handle in handles:
            handle.remove()


def _note_hooked(number: int, what: str | None) -> None:
    with _LOCK:
        if what is None:
            del _HOOKED.blocks[number]
        else:
            _HOOKED.blocks[number] = what
        _HOOKED.text = "; ".join(_HOOKED.blocks.values())


def _enter(block: _Block) -> None:
    if torch.compiler.is_compiling():  # with fullgraph=True this is the error that the user reads
        torch._dynamo.graph_break(
            msg="sagegen.patched(model) can't enter its block inside a graph: give it the module that torch.compile "
            "returned, or leave model away"
        )
    around = (other for other in _BLOCKS.get() if other.is_open)
    _BLOCKS.set(tuple(sorted((*around, block), key=lambda other: other.number)))


def _leave(block: _Block) -> None:
    blocks = [other for other in _BLOCKS.get() if other.is_open]
    if block in blocks:  # not so where another hook raised before ours could enter
        blocks.remove(block)
    _BLOCKS.set(tuple(blocks))


def _innermost() -> _Block | None:
    """The block whose options hold for a call of this context; None outside all blocks."""
    for block in reversed(_BLOCKS.get()):
        if block.is_open:
            return block
    return None


def _install() -> _Router:
    """Make sure that torch's name is a router, and count one more user of it."""
    with _LOCK:
        current: _Function = getattr(torch.nn.functional, _NAME)
        router = next((r for r in _ROUTERS if current is r.function or current is r.original), None)
        if router is None:
            router = _make_router(current)
            _ROUTERS.append(router)
        setattr(torch.nn.functional, _NAME, router.function)
        router.users += 1
        return router


def _uninstall(router: _Router) -> None:
    """Count one user less; the last one puts back what was there before, unless someone patched over it."""
    with _LOCK:
        router.users -= 1
        if not router.users and getattr(torch.nn.functional, _NAME) is router.function:
            setattr(torch.nn.functional, _NAME, router.original)


def _make_router(original: _Function) -> _Router:
    @functools.wraps(original)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            bool(_HOOKED.text)  # read, so that the graph is guarded by it
        block = _innermost()
        return original(*args, **kwargs) if block is None else sdpa_with(block.options, *args, **kwargs)

    return _Router(original, scaled_dot_product_attention)
