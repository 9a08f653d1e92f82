"""Inside `patched` torch's scaled_dot_product_attention is ours, for whom and as long as it says."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import sagegen
from sagegen.env import Env
from sagegen.errors import ArgumentError, UnsupportedError
from sagegen.runtime import fallback, library, op
from sagegen.runtime import sdpa as sdpa_module
from sagegen.runtime.dispatch import Dispatcher
from sagegen.runtime.machine import CudaRuntime
from sagegen.runtime.options import Options

F = torch.nn.functional
TORCH = F.scaled_dot_product_attention
Q = torch.randn(1, 2, 5, 64, generator=torch.Generator().manual_seed(0))


class Attention(torch.nn.Module):
    """Asks torch.nn.functional at each call, as most models do."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(), Attention()

    def forward(self, x):
        return self.second(self.first(x))


@pytest.fixture(autouse=True)
def seen(monkeypatch, tmp_path):
    """The min_cosine of each call that reached our dispatcher, by which the tests tell blocks apart."""
    env = Env(tmp_path / "cache", tmp_path / "tuned", False, "warning", None)
    dispatcher, cosines = Dispatcher(CudaRuntime(), lambda: env), []

    def attention(q, k, v, attn_mask, out, *options):
        cosines.append(Options(*options).min_cosine)
        return Dispatcher.attention(dispatcher, q, k, v, attn_mask, out, *options)

    dispatcher.attention = attention
    for module in (op, library, sdpa_module):
        monkeypatch.setattr(module, "dispatcher", lambda: dispatcher)
    fallback.warn_once.cache_clear()
    torch._dynamo.reset()
    yield cosines
    assert F.scaled_dot_product_attention is TORCH


def block(mark, model=None):
    """A block of which `seen` gets `mark`; the reference takes CPU tensors, which are torch's otherwise."""
    return sagegen.patched(model, min_cosine=mark, backend="reference")


def ask():
    return F.scaled_dot_product_attention(Q, Q, Q)


# --- one block


def test_every_option_arrives_under_its_name(monkeypatch):
    asked = {
        "precision": "int4", "min_cosine": 0.5, "smooth_k": True, "smooth_q": False, "smooth_v": True, "rotate": False,
        "backend": "emulator",
    }  # fmt: skip
    found = []

    class Recorder:
        def attention(self, q, k, v, attn_mask, out, *options):
            found.append(Options(*options))
            return q

    monkeypatch.setattr(op, "dispatcher", Recorder)
    with sagegen.patched(**asked):
        F.scaled_dot_product_attention(Q, Q, Q, is_causal=True, scale=0.3)
    assert found == [Options(**asked, is_causal=True, scale=0.3)]


def test_the_answer_is_attention(seen):
    expected = (Q.double() @ Q.double().mT / 8).softmax(-1) @ Q.double()
    with block(0.1):
        torch.testing.assert_close(ask().double(), expected, rtol=0, atol=1e-6)
    assert seen == [0.1]
    assert sagegen.last_dispatch().answer == "reference"


def test_before_and_after_it_is_torchs_own(seen):
    ask()
    with block(0.1):
        assert F.scaled_dot_product_attention is not TORCH
    assert F.scaled_dot_product_attention is TORCH
    ask()
    assert seen == []


def test_blocks_one_after_another_put_the_same_function_there():
    """A new one each time would pile up, and each would be a new function to torch.compile."""
    found = []
    for _ in range(2):
        with block(0.1):
            found.append(F.scaled_dot_product_attention)
    assert found[0] is found[1]


def test_an_exception_ends_it(seen):
    with pytest.raises(KeyError), block(0.1):
        raise KeyError
    assert F.scaled_dot_product_attention is TORCH
    with block(0.2, torch.nn.Linear(1, 1)):  # the name is ours again, this thread is not in the first block
        ask()
    assert seen == []


def test_without_a_backend_cpu_tensors_are_torchs_without_complaint(seen, caplog):
    with caplog.at_level(logging.WARNING), sagegen.patched():
        assert torch.equal(ask(), TORCH(Q, Q, Q))
    assert seen == []
    assert caplog.records == []
    assert sagegen.last_dispatch().reason == "tensors are on cpu"


@pytest.mark.parametrize("backend", ["kernel", "emulator"])
def test_a_backend_that_needs_a_kernel_raises_where_torch_would_answer(backend):
    mask = torch.ones(5, 5, dtype=torch.bool)
    with (
        sagegen.patched(backend=backend),
        pytest.raises(
            UnsupportedError, match=f"{backend}' cannot answer: attn_mask has no kernel but .*; leave backend"
        ),
    ):
        F.scaled_dot_product_attention(Q, Q, Q, mask)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"precision": "int3"}, ArgumentError, "precision='int3' does not exist"),
        ({"min_cosine": 2.0}, ArgumentError, "min_cosine=2.0"),
        ({"rotate": 1}, TypeError, "rotate must be a bool or None"),
        ({"backend": "cuda"}, ArgumentError, "backend='cuda'"),
        ({"model": Attention}, TypeError, "model must be a torch.nn.Module or None, not type"),
        ({"layout": "NHD"}, TypeError, "layout"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_patched(wrong, error, says):
    with pytest.raises(error, match=says), sagegen.patched(**wrong):
        pass
    assert F.scaled_dot_product_attention is TORCH


def test_torchs_own_callers_of_the_name_are_reached(seen):
    layer = torch.nn.MultiheadAttention(64, 2, batch_first=True)  # in training mode: no fast path
    with block(0.1), torch.no_grad():
        layer(Q[0], Q[0], Q[0], need_weights=False)
    assert seen == [0.1]


# --- blocks in blocks


def test_the_innermost_block_answers_and_the_outer_one_comes_back(seen):
    with block(0.1):
        ask()
        with block(0.2):
            ask()
            with contextlib.suppress(KeyError), block(0.3):
                ask()
                raise KeyError
            ask()
        ask()
    assert seen == [0.1, 0.2, 0.3, 0.2, 0.1]


def test_blocks_may_end_in_any_order(seen):
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(block(0.1))
    second.enter_context(block(0.2))
    first.close()
    ask()
    second.close()
    ask()
    with block(0.3, torch.nn.Linear(1, 1)):
        ask()
    assert seen == [0.2]


# --- a module's block


def test_a_modules_block_holds_while_its_forward_runs(seen):
    model, other = Pair(), Attention()
    with block(0.1, model):
        model(Q)
        other(Q)
        ask()
        model.first(Q)
    model(Q)
    assert seen == [0.1, 0.1]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("begun_last", ["module", "thread"])
def test_of_a_modules_block_and_the_threads_the_one_that_began_last_answers(seen, begun_last):
    model = Attention()
    blocks = [block(0.1), block(0.2, model)] if begun_last == "module" else [block(0.2, model), block(0.1)]
    with blocks[0], blocks[1]:
        model(Q)
        ask()
    assert seen == [0.2 if begun_last == "module" else 0.1, 0.1]


@pytest.mark.parametrize("begun_last", ["outer", "inner"])
def test_of_two_modules_blocks_the_one_that_began_last_answers(seen, begun_last):
    model = Pair()
    blocks = [block(0.1, model), block(0.2, model.second)]
    with contextlib.ExitStack() as stack:
        for one in blocks if begun_last == "inner" else reversed(blocks):
            stack.enter_context(one)
        model(Q)
    assert seen == ([0.1, 0.2] if begun_last == "inner" else [0.1, 0.1])


@pytest.mark.parametrize("where", ["forward", "pre-hook", "hook"])
def test_an_exception_in_the_module_leaves_its_block(seen, where):
    def fail(*_):
        raise KeyError

    model = Attention()
    if where == "forward":
        model.forward = fail
    else:
        (model.register_forward_pre_hook if where == "pre-hook" else model.register_forward_hook)(fail)
    with block(0.1, model):
        with pytest.raises(KeyError):
            model(Q)
        seen.clear()
        ask()
    assert seen == []


def test_an_exception_before_the_modules_block_leaves_no_other(seen):
    def fail(*_):
        raise KeyError

    model = Attention()
    with block(0.1), block(0.2, model):
        handle = torch.nn.modules.module.register_module_forward_pre_hook(fail)
        try:
            with pytest.raises(KeyError):
                model(Q)
        finally:
            handle.remove()
        ask()
    assert seen == [0.1]


# --- threads and tasks


def in_thread(work):
    """Run `work` in a thread of its own, to its end."""
    errors = []

    def run():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert errors == []


def test_threads_have_the_options_of_their_own_blocks(seen):
    """Two in blocks of their own and one in none, at the same time."""
    meet, found = threading.Barrier(3, timeout=30), {}

    def work(mark):
        with block(mark) if mark else contextlib.nullcontext():
            for _ in range(20):
                meet.wait()
                before = sagegen.last_dispatch()
                ask()
                found.setdefault(mark, []).append(sagegen.last_dispatch() is not before)
            meet.wait()

    threads = [threading.Thread(target=work, args=(mark,)) for mark in (0.1, 0.2, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(seen) == [0.1] * 20 + [0.2] * 20
    assert found[None] == [False] * 20


def test_a_thread_that_starts_inside_a_block_is_not_in_it(seen):
    with block(0.1):
        in_thread(ask)
    assert seen == []


def test_a_modules_block_holds_in_every_thread_that_runs_it(seen):
    model = Attention()
    with block(0.1, model):
        in_thread(lambda: model(Q))
    assert seen == [0.1]


def test_the_last_block_of_all_threads_restores_the_name(seen):
    began, ends = threading.Event(), threading.Event()

    def work():
        with block(0.2):
            began.set()
            assert ends.wait(30)
            ask()

    thread = threading.Thread(target=work)
    with block(0.1):
        thread.start()
        assert began.wait(30)
    assert F.scaled_dot_product_attention is not TORCH
    ask()
    ends.set()
    thread.join(30)
    assert F.scaled_dot_product_attention is TORCH
    assert seen == [0.2]


def test_a_task_that_outlives_a_block_is_no_longer_in_it(seen):
    """asyncio tasks and callbacks run in a copy of the context in which they were made."""
    with block(0.1):
        context = contextvars.copy_context()
        context.run(ask)
    with block(0.2, torch.nn.Linear(1, 1)):
        context.run(ask)
    assert seen == [0.1]


# --- other people's patches


@pytest.fixture
def patch():
    """Puts a function over torch's name, as another library does; it notes its calls and asks the one before."""

    def put(calls):
        before = F.scaled_dot_product_attention

        def theirs(*args, **kwargs):
            calls.append(None)
            return before(*args, **kwargs)

        F.scaled_dot_product_attention = theirs
        return theirs

    yield put
    F.scaled_dot_product_attention = TORCH


def test_a_patch_from_before_answers_outside_blocks_and_comes_back(seen, patch):
    calls = []
    theirs = patch(calls)
    with block(0.1):
        ask()
        assert calls == []
        in_thread(ask)
        assert len(calls) == 1
    assert F.scaled_dot_product_attention is theirs
    assert seen == [0.1]


def test_a_patch_from_inside_a_block_stays_and_goes_on_to_torch(seen, patch):
    calls = []
    with block(0.1):
        theirs = patch(calls)
        ask()
    assert F.scaled_dot_product_attention is theirs
    assert torch.equal(ask(), TORCH(Q, Q, Q))
    with block(0.2):
        ask()
    assert F.scaled_dot_product_attention is theirs
    ask()
    assert seen == [0.1, 0.2]
    assert len(calls) == 3


def test_a_patch_undone_after_its_block_leaves_what_the_next_block_restores(seen, patch):
    """They put back what they found, which was ours and has ended."""
    with block(0.1):
        found = F.scaled_dot_product_attention
        patch([])
    F.scaled_dot_product_attention = found
    ask()
    with block(0.2):
        ask()
    assert seen == [0.2]
    assert F.scaled_dot_product_attention is TORCH


# --- torch.compile


def test_compiled_calls_inside_a_block_are_in_the_graph(seen):
    counter = CompileCounter()
    compiled = torch.compile(Attention(), fullgraph=True, backend=counter)
    compiled(Q)
    for _ in range(10):  # more blocks than torch compiles a function for
        with block(0.1):
            torch.testing.assert_close(compiled(Q), TORCH(Q, Q, Q))
    with block(0.2):
        compiled(Q)
    compiled(Q)
    assert seen == [0.1] * 10 + [0.2]
    assert counter.frame_count == 3  # outside, 0.1, 0.2


def test_a_compiled_modules_own_block(seen):
    counter = CompileCounter()
    compiled = torch.compile(Pair(), fullgraph=True, backend=counter)
    for _ in range(10):
        with block(0.1, compiled):
            compiled(Q)
    compiled(Q)
    assert seen == [0.1] * 20
    assert counter.frame_count == 2


def test_threads_share_a_compiled_module_but_not_its_graphs(seen):
    compiled = torch.compile(Attention(), fullgraph=True, backend="eager")
    with block(0.1):
        compiled(Q)
        in_thread(lambda: compiled(Q))
        compiled(Q)
    assert seen == [0.1, 0.1]


def test_a_block_of_a_module_inside_a_graph_is_refused_with_the_remedy(seen):
    """A context variable can't be set inside a graph; that must not pass for a call without options."""
    model = Pair()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with block(0.1, torch.nn.Linear(1, 1)):
        compiled(Q)  # has a graph of the name being ours and no block around
    with (
        block(0.2, model.second),
        pytest.raises(torch._dynamo.exc.Unsupported, match="give it the module that"),
    ):
        compiled(Q)
    assert seen == []


def test_without_fullgraph_a_block_of_a_module_inside_breaks_the_graph_and_holds(seen):
    model = Pair()
    compiled = torch.compile(model, backend="eager")
    with block(0.1, model.second):
        compiled(Q)
    with block(0.3, model.second):
        compiled(Q)
    compiled(Q)
    assert seen == [0.1, 0.3]


@pytest.mark.parametrize(
    ("shapes", "is_ours"),
    [
        (((3, 2, 5, 64), (1, 2, 5, 64), (1, 2, 5, 64)), True),  # by views
        (((1, 2, 5, 64), (1, 2, 7, 64), (1, 2, 7, 32)), False),  # V narrower than Q and K
        (((1, 2, 5, 64), (1, 2, 7, 64), (1, 2, 7, 64)), True),
        (((1, 4, 5, 64), (1, 2, 7, 64), (1, 2, 7, 64)), True),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_of_shapes_that_only_torch_takes_are_torchs(seen, shapes, is_ours, dynamic):
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes)
    gqa = q.shape[1] != k.shape[1]
    compiled = torch.compile(
        lambda *x: F.scaled_dot_product_attention(*x, enable_gqa=gqa), fullgraph=True, backend="eager", dynamic=dynamic
    )
    with block(0.1):
        torch.testing.assert_close(compiled(q, k, v), TORCH(q, k, v, enable_gqa=gqa))
    assert seen == [0.1] * is_ours


def test_compiled_calls_that_need_a_gradient_have_one():
    compiled = torch.compile(Attention(), fullgraph=True, backend="aot_eager")
    x, y = (Q.clone().requires_grad_() for _ in range(2))
    with block(0.1):
        compiled(x).square().sum().backward()
    TORCH(y, y, y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
