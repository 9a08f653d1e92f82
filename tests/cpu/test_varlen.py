"""`attention_varlen` on CPU tensors: packed sequences are what each is alone, whoever answers."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import sagegen
from sagegen.env import Env
from sagegen.errors import ArgumentError, UnsupportedError
from sagegen.gpu import GPUS
from sagegen.runtime import fallback, library, op, varlen_fallback
from sagegen.runtime.device import Device
from sagegen.runtime.dispatch import CudaRuntime, Dispatcher
from sagegen.runtime.options import Options
from sagegen.runtime.varlen import VarlenDispatcher
from sagegen.runtime.varlen_arguments import Sequences

#: A16: some rows have no keys.
A16_Q, A16_K = (76, 34, 146), (1, 1, 1)


class OnH200(CudaRuntime):
    """CPU tensors pass for an H200's."""

    def device(self, device):
        return Device("cuda", 0, "NVIDIA H200", "sm_90", GPUS["h200"])


@pytest.fixture
def use(monkeypatch, tmp_path):
    """Puts a dispatcher on a machine and with settings of the test's own in the process's place."""

    def install(runtime=None, **settings):
        env = Env(
            **{
                "cache_dir": tmp_path / "cache",
                "tuned_dir": tmp_path / "tuned",
                "strict": False,
                "log": "warning",
                "nvcc": None,
                **settings,
            }
        )
        own = Dispatcher(runtime or CudaRuntime(), lambda: env)
        many = VarlenDispatcher(own)
        for module in (op, library):
            monkeypatch.setattr(module, "dispatcher", lambda: own)
            monkeypatch.setattr(module, "varlen_dispatcher", lambda: many)
        return own

    fallback.warn_once.cache_clear()
    return install


@pytest.fixture(autouse=True)
def fresh(use):
    return use()


def starts(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def draw(q_lengths, k_lengths, heads_q=2, heads_kv=2, dim=16, dtype=torch.float32, seed=0):
    """q, k, v and where the sequences lie."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(total, heads, dim, generator=generator).to(dtype)
        for total, heads in ((sum(q_lengths), heads_q), (sum(k_lengths), heads_kv), (sum(k_lengths), heads_kv))
    )
    return q, k, v, starts(q_lengths), starts(k_lengths), max(q_lengths, default=0), max(k_lengths, default=0)


def exact(call, *, is_causal=False, window=(-1, -1), scale=None):
    """Output [total_q, heads, dim] and lse [heads, total_q] in FP64, row by row from the definition."""
    q, k, v, starts_q, starts_k, *_ = call
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    for i in range(len(starts_q) - 1):
        first, last = starts_q[i].item(), starts_q[i + 1].item()
        first_key, end = starts_k[i].item(), starts_k[i + 1].item()
        for row in range(first, last):
            at = end - (last - row)  # the row's causal position among the keys
            low, high = first_key, end
            if window[0] >= 0:
                low = max(low, at - window[0])
            if is_causal or window[1] >= 0:
                high = min(high, at + 1 + (0 if is_causal else window[1]))
            if low >= high:
                continue
            keys, values = (x[low:high].double().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("hd,khd->hk", q[row].double(), keys) * scale
            lse[:, row] = scores.logsumexp(-1)
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return out, lse


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


# --- what is computed


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a16_rows_without_keys(backend):
    call = draw(A16_Q, A16_K, heads_q=1, heads_kv=1, dim=32)
    out, lse = sagegen.attention_varlen(*call, is_causal=True, return_lse=True, backend=backend)
    seeing = torch.tensor([75, 109, 255])  # bottom-right: the last row of each alone
    blind = torch.ones(256, dtype=torch.bool)
    blind[seeing] = False
    assert (out[blind] == 0).all()
    assert (lse[:, blind] == -math.inf).all()
    close(out[seeing], call[2])
    close(lse, exact(call, is_causal=True)[1])


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": -0.3}], ids=str)
def test_packed_equals_one_by_one(backend, options):
    q_lengths, k_lengths = (5, 0, 33, 1, 12), (9, 4, 33, 20, 3)
    call = draw(q_lengths, k_lengths, heads_q=4, heads_kv=2, dim=40, dtype=torch.bfloat16)
    out, lse = sagegen.attention_varlen(*call, return_lse=True, backend=backend, **options)
    assert (out.shape, out.dtype) == (call[0].shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((4, sum(q_lengths)), torch.float32)
    rows, keys = call[0].split(q_lengths), [x.split(k_lengths) for x in call[1:3]]
    alone = [
        sagegen.attention(q[None], k[None], v[None], layout="NHD", return_lse=True, backend=backend, **options)
        for q, k, v in zip(rows, *keys, strict=True)
    ]
    tolerance = 0 if backend == "reference" else 1e-2
    close(out, torch.cat([one[0][0] for one in alone]), tolerance)
    close(lse, torch.cat([one[1][0] for one in alone], 1), tolerance and 1e-5)


LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5)
SIDE = st.integers(-1, 5)


@settings(max_examples=150)
@given(
    lengths=LENGTHS,
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    dim=st.sampled_from([1, 8, 40, 64]),
    is_causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(SIDE, SIDE)),
    backend=st.sampled_from(["reference", "sdpa"]),
    slack=st.integers(0, 3),
    chunk=st.sampled_from([1, 3000, 1 << 28]),
)
def test_random_sequences(lengths, heads, dim, is_causal, window, backend, slack, chunk):
    *call, longest_q, longest_k = draw(*zip(*lengths, strict=True), *heads, dim)
    options = {"is_causal": is_causal, "window": window, "backend": backend}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fallback, "_CHUNK_BYTES", chunk)
        out, lse = sagegen.attention_varlen(*call, longest_q + slack, longest_k + slack, return_lse=True, **options)
    expected, expected_lse = exact(call, is_causal=is_causal, window=window or (-1, -1))
    close(out, expected, 1e-4)
    close(lse, expected_lse, 1e-4)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_one_sequence_holds_leaves_no_trace_in_others(backend, is_causal):
    call = draw((5, 3, 20), (7, 20, 4))
    expected, expected_lse = exact(call, is_causal=is_causal)
    for x, rows in ((call[0], slice(5, 8)), (call[1], slice(7, 27)), (call[2], slice(7, 27))):
        x[rows] = math.nan
    out, lse = sagegen.attention_varlen(*call, is_causal=is_causal, return_lse=True, backend=backend)
    others = [*range(5), *range(8, 28)]
    close(out[others], expected[others])
    close(lse[:, others], expected_lse[:, others])
    assert out[5:8].isnan().all()


@pytest.mark.parametrize("backend", ["reference", "sdpa", None])
def test_a_window_is_each_sequences_own(backend):
    call = draw((6, 9), (6, 4))
    close(sagegen.attention_varlen(*call, window=(2, 1), backend=backend), exact(call, window=(2, 1))[0])
    assert sagegen.last_dispatch().answer == (backend or "reference")


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"), [((), ()), ((0, 0), (0, 0)), ((0,), (5,)), ((3, 4), (0, 0)), ((2, 3), (0, 3))]
)
@pytest.mark.parametrize("backend", ["reference", "sdpa", None])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_nothing_to_see(q_lengths, k_lengths, backend, needs_grad):
    call = draw(q_lengths, k_lengths)
    expected, expected_lse = exact(call)
    for x in call[:3]:
        x.requires_grad_(needs_grad)
    out, lse = sagegen.attention_varlen(*call, return_lse=True, backend=backend)
    close(out, expected)
    close(lse, expected_lse)
    if needs_grad:
        out.sum().backward()
        assert call[0].grad.eq(0).all() or sum(k_lengths)


def test_zero_heads_and_one_sequence():
    call = draw((5,), (7,), heads_q=0, heads_kv=0)
    assert sagegen.attention_varlen(*call).shape == (5, 0, 16)
    q, k, v, *rest = draw((5,), (7,))
    alone = sagegen.attention(q[None], k[None], v[None], layout="NHD")[0]
    assert torch.equal(sagegen.attention_varlen(q, k, v, *rest), alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_q_and_k_in_float32_are_cast_to_a_16_bit_v(dtype, backend):
    q, k, v, *rest = draw((5, 3), (7, 4))
    expected, _ = exact((q.to(dtype), k.to(dtype), v.to(dtype), *rest))
    out = torch.empty_like(q, dtype=dtype)
    for _ in range(2):
        assert sagegen.attention_varlen(q, k, v.to(dtype), *rest, out=out, backend=backend) is out
        close(out, expected, 2e-2)


@pytest.mark.parametrize("chunk", [1, 1 << 28])
def test_gradients_are_torchs_and_exact(monkeypatch, chunk, caplog):
    """Padding, rows without keys and NaN in other sequences give none."""
    monkeypatch.setattr(fallback, "_CHUNK_BYTES", chunk)
    call = draw((5, 0, 9, 2), (7, 3, 4, 2), heads_q=4)
    inputs = [x.requires_grad_() for x in call[:3]]
    weights = torch.linspace(-1, 1, call[0].numel()).view(call[0].shape)
    (sagegen.attention_varlen(*call, is_causal=True) * weights).sum().backward()
    assert "requires a gradient" in sagegen.last_dispatch().reason
    assert "requires a gradient" in caplog.text
    found = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    (exact(call, is_causal=True)[0] * weights).sum().backward()
    for grad, x in zip(found, inputs, strict=True):
        close(grad, x.grad)


def test_gradients_of_other_sequences_survive_nan():
    q, k, v, *rest = draw((3, 9), (4, 7))
    with torch.no_grad():
        q[:3], k[:4], v[:4] = math.nan, math.nan, math.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    sagegen.attention_varlen(*inputs, *rest)[3:].sum().backward()
    assert all(x.grad[first:].isfinite().all() for x, first in ((q, 3), (k, 4), (v, 4)))


def test_tangents_are_not_lost():
    q, k, v, *rest = draw((5, 3), (7, 4))
    tangent = torch.ones_like(q)
    _, expected = torch.func.jvp(lambda x: exact((x, k, v, *rest))[0], (q,), (tangent,))
    with torch.autograd.forward_ad.dual_level(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        dual = torch.autograd.forward_ad.make_dual(q, tangent)
        found = torch.autograd.forward_ad.unpack_dual(sagegen.attention_varlen(dual, k, v, *rest)).tangent
    close(found, expected, 1e-4)


def test_out_is_filled_and_returned_even_over_the_inputs():
    for backend in ("reference", "sdpa"):
        call = draw((5, 3), (5, 3))
        expected, expected_lse = exact(call)
        out, lse = sagegen.attention_varlen(*call, out=call[1], return_lse=True, backend=backend)
        assert out is call[1]
        close(out, expected)
        close(lse, expected_lse)


def test_inputs_are_never_written():
    call = draw((5, 3), (7, 4))
    before = [x.clone() for x in call[:5]]
    for options in ({}, {"backend": "sdpa"}, {"window": (2, 2)}, {"return_lse": True}):
        sagegen.attention_varlen(*call, **options)
    assert all(torch.equal(x, y) for x, y in zip(call, before, strict=False))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_any_strides(backend):
    q, k, v, *rest = draw((5, 3), (7, 4))
    expected = exact((q, k, v, *rest))[0]
    q, k = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
    v = torch.stack([v, v], -1)[..., 0]
    wide = torch.stack(rest[:2], 1)
    close(sagegen.attention_varlen(q, k, v, wide[:, 0], wide[:, 1], *rest[2:], backend=backend), expected)


# --- who answers


def test_who_answers_and_why(use):
    call = draw((5, 3), (7, 4), dtype=torch.float16)
    sagegen.attention_varlen(*call)
    last = sagegen.last_dispatch()
    assert (last.answer, last.reason, last.problem.name) == (
        "reference", "tensors are on the CPU", "d64_fp16_full_int8_ragged",
    )  # fmt: skip
    sagegen.attention_varlen(*call, backend="sdpa")
    assert str(sagegen.last_dispatch()) == "sdpa: backend='sdpa' was asked for"
    use(disabled=True)
    sagegen.attention_varlen(*call)
    assert str(sagegen.last_dispatch()) == "sdpa: SAGEGEN_DISABLE=1 is set"
    with pytest.raises(UnsupportedError, match="SAGEGEN_DISABLE"):
        sagegen.attention_varlen(*call, backend="kernel")
    use(backend="sdpa")
    sagegen.attention_varlen(*call)
    assert sagegen.last_dispatch().answer == "sdpa"
    assert not sagegen.last_dispatch().is_fallback


def test_on_a_gpu_torch_answers_what_no_kernel_does_and_says_so_once(use, caplog):
    use(OnH200())
    call = draw((5, 3), (7, 4), dtype=torch.float16)
    for _ in range(2):
        close(sagegen.attention_varlen(*call, smooth_k=False), exact(call)[0], 1e-2)
    last = sagegen.last_dispatch()
    assert (last.answer, last.is_fallback, last.gpu) == ("sdpa", True, "h200")
    assert last.reason.startswith("smooth_k=False has no kernel")
    assert [record.getMessage() for record in caplog.records] == [f"torch SDPA answers: {last.reason}"]


@pytest.mark.parametrize("backend", ["kernel", "emulator"])
def test_a_kernel_that_is_asked_for_and_cannot_answer_is_refused(use, backend):
    call = draw((5, 3), (7, 4), dim=64, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match=f"backend='{backend}' cannot answer"):
        sagegen.attention_varlen(*call, backend=backend)
    use(OnH200(), backend=backend)
    with pytest.raises(UnsupportedError, match=f"backend='{backend}' cannot answer"):
        sagegen.attention_varlen(*call)


def test_strict_refuses_torchs_answer_and_not_zeros(use):
    use(OnH200(), strict=True)
    with pytest.raises(UnsupportedError, match=r"no kernel can answer: torch\.float32"):
        sagegen.attention_varlen(*draw((5, 3), (7, 4), dtype=torch.float32))
    assert (sagegen.attention_varlen(*draw((5, 3), (0, 0))) == 0).all()
    assert sagegen.last_dispatch().answer == "zeros"


def test_a_warm_call_chooses_nothing_and_still_reads_where_sequences_are(fresh, monkeypatch):
    call = draw((5, 3), (7, 4))
    sagegen.attention_varlen(*call)
    monkeypatch.setattr(fresh, "choose", None)
    for q_lengths, k_lengths in (((4, 4), (6, 5)), ((5, 3), (4, 7))):
        other = [*call[:3], starts(q_lengths), starts(k_lengths), *call[5:]]
        close(sagegen.attention_varlen(*other), exact(other)[0])
    with pytest.raises(ArgumentError, match="max_seqlen_q=5: cu_seqlens_q has a sequence of 7"):
        sagegen.attention_varlen(*call[:3], starts((1, 7)), *call[4:])


def test_calls_that_differ_do_not_share_an_answer():
    call = draw((5, 3), (7, 4))
    for options in ({}, {"is_causal": True}, {"scale": 1.0}, {"window": (1, 1)}):
        close(sagegen.attention_varlen(*call, **options), exact(call, **options)[0])
    call[0].requires_grad_()
    assert sagegen.attention_varlen(*call).requires_grad
    with torch.no_grad():
        assert not sagegen.attention_varlen(*call).requires_grad


# --- torch.compile, fake tensors, transforms


def test_the_op_takes_the_options_in_order():
    schema = [a.name for a in torch.ops.sagegen.attention_varlen.default._schema.arguments]
    assert schema == ["q", "k", "v", *Sequences._fields, *Options.__slots__[1:]]


def test_every_option_reaches_the_dispatcher_under_its_name(monkeypatch):
    seen = {}

    class Recorder:
        def attention(self, q, k, v, sequences, out, *options):
            seen.update(sequences._asdict(), out=out, **dict(zip(Options.__slots__[1:], options, strict=True)))

    monkeypatch.setattr(op, "varlen_dispatcher", Recorder)
    x = torch.ones(1)
    given_options = {name: object() for name in (*Options.__slots__[1:], "out", *Sequences._fields[2:])}
    sagegen.attention_varlen(x, x, x, x, x, **given_options)
    assert seen == {"cu_seqlens_q": x, "cu_seqlens_k": x, **given_options}


CASES = {
    "plain": {},
    "lse": {"return_lse": True, "is_causal": True, "scale": 0.3},
    "torch": {"backend": "sdpa", "return_lse": True},
    "window": {"window": (2, 1)},
}


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    values = [getattr(Options(**CASES[case]), name) for name in Options.__slots__[1:]]
    results = torch.library.opcheck(torch.ops.sagegen.attention_varlen.default, (*draw((5, 3), (7, 4)), *values))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_calls_do_not_break_the_graph(case, dynamic):
    torch._dynamo.reset()
    options = CASES[case]
    compiled = torch.compile(
        lambda *x: sagegen.attention_varlen(*x, **options), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for lengths in (((5, 3), (7, 4)), ((5, 8, 2), (7, 1, 4)), ((9,), (0,))):
        call = draw(*lengths)
        ours, eager = compiled(*call), sagegen.attention_varlen(*call, **options)
        for one, other in zip(ours, eager, strict=True) if isinstance(ours, tuple) else [(ours, eager)]:
            torch.testing.assert_close(one, other)


def test_dynamic_lengths_compile_once():
    torch._dynamo.reset()
    compiled = torch.compile(sagegen.attention_varlen, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in (((5, 3), (7, 4)), ((6, 8, 2), (7, 2, 4)), ((9, 2, 3, 4), (8, 3, 5, 6))):
            call = draw(*lengths)
            close(compiled(*call), exact(call)[0])


def test_compiled_calls_that_need_a_gradient_have_one():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: sagegen.attention_varlen(*x, is_causal=True), fullgraph=True, backend="aot_eager"
    )
    for lengths in (((5, 3), (7, 4)), ((5, 8, 2), (7, 1, 4))):
        call = draw(*lengths)
        inputs = [x.requires_grad_() for x in call[:3]]
        compiled(*call).square().sum().backward()
        ours = [x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        exact(call, is_causal=True)[0].square().sum().backward()
        for grad, x in zip(ours, inputs, strict=True):
            close(grad, x.grad, 1e-4)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fake_tensors_have_a_shape_and_are_not_launched(device):
    with FakeTensorMode():
        q, cu = torch.empty(9, 4, 64, device=device), torch.empty(3, dtype=torch.int32, device=device)
        out, lse = sagegen.attention_varlen(q, q, q, cu, cu, 9, 9, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((9, 4, 64), (4, 9), torch.float32)
    assert out.device.type == device


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "window": (2, -1)}, {"return_lse": True}], ids=str)
def test_torchs_answer_never_waits_for_the_device(options):
    """Fake tensors have no values: whatever asks for one raises."""
    with FakeTensorMode():
        q, k = (torch.empty(9, heads, 64, device="cuda", dtype=torch.float16) for heads in (4, 2))
        cu = torch.empty(3, dtype=torch.int32, device="cuda")
        varlen_fallback.attend_varlen(q, k, k, Sequences(cu, cu, 9, 9), **options)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [[0, 5, 3, 8], [-9, 2, 4, 8], [0, 9, 20, 30], [8, 5, 3, 0], [-(2**31), 2**31 - 1, 0, 2**31 - 1], [0, 2, 2, 3]],
    ids=str,
)
@pytest.mark.parametrize("side", ["q", "k"])
def test_torch_reads_no_memory_of_others_whatever_the_values(wrong, side, is_causal):
    """They are not checked on a GPU: an index out of range would end the process' CUDA context."""
    q, k, v, cu_q, cu_k, *_ = draw((3, 2, 3), (3, 2, 3))
    wrong = torch.tensor(wrong, dtype=torch.int32)
    sequences = Sequences(wrong, cu_k, 4, 4) if side == "q" else Sequences(cu_q, wrong, 4, 4)
    out, lse = varlen_fallback.attend_varlen(q, k, v, sequences, is_causal=is_causal, return_lse=True)
    assert out.isfinite().all()
    assert not lse.isnan().any()


def test_meta_tensors_have_a_shape():
    q, cu = torch.empty(9, 4, 64, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    assert sagegen.attention_varlen(q, q, q, cu, cu, 9, 9).shape == q.shape


def test_transforms_that_hide_where_sequences_are_are_refused():
    q, k, v, cu_q, cu_k, *longest = draw((5, 3), (7, 4))
    with pytest.raises(UnsupportedError, match=r"torch.func's transforms"):
        torch.func.vmap(lambda cu: sagegen.attention_varlen(q, k, v, cu, cu_k, *longest))(torch.stack([cu_q, cu_q]))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_vmap_over_what_is_attended(backend):
    q, k, v, *rest = draw((5, 3), (7, 4))
    many = torch.stack([q, 2 * q])
    out = torch.func.vmap(lambda x: sagegen.attention_varlen(x, k, v, *rest, backend=backend))(many)
    for one, given_q in zip(out, many, strict=True):
        close(one, exact((given_q, k, v, *rest))[0])
