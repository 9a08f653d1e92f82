"""Which answer a call gets, what is launched for it, and what is done once and never again.

A recorder stands in for the machine: CPU tensors pass for an H200's, and launches are noted instead of run.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import logging
import math
import re
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from msgspec import structs

from sagegen import build, registry, toolkit
from sagegen.abi import CONSTANT_STRUCT, FIELDS, LAUNCH_ABI, POINTERS
from sagegen.env import Env
from sagegen.errors import ArgumentError, DriverError, RegistryError, SelfTestError, ToolchainError, UnsupportedError
from sagegen.gpu import GPUS
from sagegen.problem import Problem
from sagegen.registry import Entry, Provenance, Range, Timing
from sagegen.rules import Target, default_config
from sagegen.runtime import dispatch, fallback, fetch, memo, programs
from sagegen.runtime.device import Device
from sagegen.runtime.dispatch import Dispatcher
from sagegen.runtime.options import Options
from sagegen.space import parse_config
from sagegen.store import Store, make_key

CAUSAL, FULL = Problem(64, "fp16", True), Problem(64, "fp16", False)
CONFIG = default_config(Target(GPUS["h200"], FULL))
STREAM = 77


@dataclass
class FakeCall:
    """Notes what it is launched with; `plan` is what it was prepared for."""

    machine: FakeMachine
    plan: object
    program: FakeProgram

    def launch(self, *addresses: int) -> None:
        self.machine.launches.append((self, addresses))


@dataclass
class FakeProgram:
    machine: FakeMachine
    cubin: bytes
    name: str
    config: object
    device: int

    def prepare(self, plan: object) -> FakeCall:
        return FakeCall(self.machine, plan, self)


@dataclass
class FakeMachine:
    """A runtime that records: an H200 as device 0, whose tensors lie in the CPU's memory."""

    here: Device = field(default_factory=lambda: Device("cuda", 0, "NVIDIA H200", "sm_90", GPUS["h200"]))
    current: int = 0
    capturing: bool = False
    broken: bool = False
    wrong: bool = False
    wrong_names: tuple[str, ...] = ()
    load_seconds: float = 0
    loads: list[FakeProgram] = field(default_factory=list)
    tried: list[tuple[FakeProgram, str, Problem, int]] = field(default_factory=list)
    launches: list[tuple[FakeCall, tuple[int, ...]]] = field(default_factory=list)
    guarded: list[int] = field(default_factory=list)

    def device(self, device):
        return self.here

    def load_program(self, cubin, name, problem, config, index):
        if self.broken:
            self.loads.append(None)
            raise DriverError("CUDA driver: CUDA_ERROR_NO_BINARY_FOR_GPU while loading", "check the driver")
        time.sleep(self.load_seconds)
        self.loads.append(FakeProgram(self, cubin, name, config, index))
        return self.loads[-1]

    def check_program(self, program, name, problem, index):
        self.tried.append((program, name, problem, index))
        if self.wrong or any(wrong in name for wrong in self.wrong_names):
            raise SelfTestError(f"{name} computes wrongly on this machine: it does", "see: sagegen verify")

    def raw_stream(self, index):
        return STREAM

    def current_device(self):
        return self.current

    @contextlib.contextmanager
    def guard(self, index):
        self.guarded.append(index)
        before, self.current = self.current, index
        yield
        self.current = before

    def is_capturing(self):
        return self.capturing

    @property
    def constants(self) -> dict[str, float]:
        """The parameters that the last launch's plan was packed with."""
        names = [f.name for f in FIELDS[len(POINTERS) :]]
        return dict(zip(names, CONSTANT_STRUCT.unpack(self.launches[-1][0].plan.constants), strict=True))


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


@pytest.fixture
def env(tmp_path, monkeypatch) -> Env:
    """Empty registries, an empty store, and no nvcc anywhere."""

    def find_toolkit(env):
        raise ToolchainError("nvcc was not found in: PATH", "pip install 'sagegen[nvcc]'")

    monkeypatch.setattr(registry, "shipped_dir", lambda: tmp_path / "shipped")
    monkeypatch.setattr(toolkit, "find_toolkit", find_toolkit)
    fallback.warn_once.cache_clear()
    return Env(cache_dir=tmp_path / "cache", tuned_dir=tmp_path / "tuned", strict=False, log="warning", nvcc=None)


@pytest.fixture
def dispatcher(machine, env) -> Dispatcher:
    return Dispatcher(machine, lambda: env)


def make_entry(
    problem=FULL, kv=(1, None), cubin=b"cubin", kind="measured", abi=LAUNCH_ABI, config=CONFIG, **rest
) -> Entry:
    return Entry(
        problem=problem.name,
        bucket=Range(kv_min=kv[0], kv_max=kv[1]),
        config=config.name,
        kernel=f"{problem.name}_{config.name}",
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
        provenance=Provenance(
            kind=kind,
            gpu="h200",
            sms=132,
            launch_abi=abi,
            protocol=1,
            date="2025-11-29",
            shape="b1 h32/32 q4096 kv4096",
        ),
        **{"answer": "kernel", "min_cosine": 0.9995, **rest},
    )


def ship(env: Env, *entries: Entry, gpu: str = "h200", cubins: tuple[bytes, ...] = (b"cubin",)) -> None:
    """Put entries and their cubins into the user's layer."""
    named = {hashlib.sha256(cubin).hexdigest(): cubin for cubin in cubins}
    registry.save_entries(env.tuned_dir / f"{gpu}.yaml", gpu, entries, named)


def call(dispatcher: Dispatcher, q, k=None, v=None, *, attn_mask=None, out=None, **options):
    values = Options(**options)
    k = q if k is None else k
    fields = [getattr(values, name) for name in Options.__slots__]
    return dispatcher.attention(q, k, k if v is None else v, attn_mask, out, *fields)


def tensor(*shape: int, dtype=torch.float16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


# --- a tuned kernel answers


def test_a_kernel_is_launched_with_the_tensors_addresses(dispatcher, machine, env):
    ship(env, make_entry())
    q, k, v = tensor(2, 4, 5, 64), tensor(2, 2, 7, 64), tensor(2, 2, 7, 64)
    out, lse = call(dispatcher, q, k, v, return_lse=True, scale=0.25)
    ((launched, addresses),) = machine.launches
    assert launched.program.cubin == b"cubin"
    assert launched.program.name == f"d64_fp16_full_int8_{CONFIG.name}"
    assert addresses[:5] == (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
    assert addresses[6] == STREAM
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
    constants = machine.constants
    sizes = {"heads_q": 4, "heads_kv": 2, "q_len": 5, "kv_len": 7, "q_heads_total": 8, "kv_heads_total": 4}
    assert {name: constants[name] for name in sizes} == sizes
    assert constants["softmax_scale"] == 0.25
    assert [constants[f"k_{axis}_stride"] for axis in ("batch", "head", "token")] == [2 * 7 * 64, 7 * 64, 64]
    assert dispatcher.last.answer == "kernel"
    assert dispatcher.last.provenance == "measured"


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("head_dim", [1, 40, 63])
def test_a_head_between_widths_is_padded_with_zeros_and_keeps_its_scale(dispatcher, machine, env, head_dim, layout):
    ship(env, make_entry())
    q, k, v = tensor(2, 4, 4, head_dim), tensor(2, 4, 4, head_dim).transpose(1, 2), tensor(2, 4, 4, head_dim)
    seen = []

    def launch(self, *addresses):
        (read,) = {constants[f"{x}_token_stride"] for x in "qkv"}
        assert read == (64 if layout == "HND" else 4 * 64)
        for address in addresses[:3]:
            words = (ctypes.c_uint16 * (2 * 4 * 4 * 64)).from_address(address)
            seen.append(torch.tensor(list(words), dtype=torch.int32).to(torch.int16).view(torch.float16))
        torch.frombuffer((ctypes.c_uint16 * 2048).from_address(addresses[3]), dtype=torch.float16).fill_(0.5)

    call(dispatcher, q, k, v, layout=layout)
    constants = machine.constants
    assert constants["softmax_scale"] == pytest.approx(head_dim**-0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeCall, "launch", launch)
        out = call(dispatcher, q, k, v, layout=layout)
    for given, read in zip((q, k, v), seen, strict=True):
        read = read.view(2, 4, 4, 64)
        assert torch.equal(read[..., :head_dim], given)
        assert read[..., head_dim:].eq(0).all()
    assert out.shape == q.shape
    assert out.is_contiguous()
    assert out.eq(0.5).all()


def test_padded_calls_write_any_out_and_say_that_they_copy(dispatcher, machine, env, caplog):
    ship(env, make_entry())
    q = tensor(2, 4, 5, 40)
    out = torch.empty(2, 4, 40, 5, dtype=torch.float16).transpose(2, 3)
    assert call(dispatcher, q, out=out) is out
    assert len(machine.launches) == 1
    assert "head_dim 40 is padded to 64: q, k, v and out are copied" in messages(caplog)


def test_an_out_that_no_kernel_can_write_is_copied_to(dispatcher, machine, env):
    ship(env, make_entry())
    q = tensor(2, 4, 5, 64)
    out = torch.zeros(2, 4, 64, 5, dtype=torch.float16).transpose(2, 3)
    returned, lse = call(dispatcher, q, out=out, return_lse=True)
    assert returned is out
    assert lse.shape == (2, 4, 5)
    ((_, addresses),) = machine.launches
    assert addresses[3] != out.data_ptr()
    assert machine.constants["out_token_stride"] == 64


def test_without_lse_its_address_is_null(dispatcher, machine, env):
    ship(env, make_entry())
    assert isinstance(call(dispatcher, tensor(1, 1, 3, 64)), torch.Tensor)
    assert machine.launches[0][1][4] == 0


def test_nhd_has_the_strides_of_its_axes(dispatcher, machine, env):
    ship(env, make_entry())
    call(dispatcher, tensor(2, 5, 4, 64), layout="NHD")
    constants = machine.constants
    assert (constants["heads_q"], constants["q_len"]) == (4, 5)
    for name in ("q", "k", "v", "out"):
        assert [constants[f"{name}_{axis}_stride"] for axis in ("batch", "head", "token")] == [5 * 4 * 64, 64, 4 * 64]


def test_a_transposed_query_gets_a_transposed_output(dispatcher, machine, env):
    """A model's [batch, tokens, heads, dim] buffer seen as HND: the output goes back without a copy."""
    ship(env, make_entry())
    out = call(dispatcher, tensor(2, 5, 4, 64).transpose(1, 2))
    assert out.transpose(1, 2).is_contiguous()
    assert machine.constants["out_token_stride"] == 4 * 64


def test_a_warm_call_looks_nothing_up(dispatcher, machine, env, monkeypatch):
    ship(env, make_entry())
    call(dispatcher, tensor(1, 2, 5, 64), is_causal=False)
    for module, names in (
        (dispatch, ("choose", "find_cubin", "plan_parts", "check_call", "warn_once", "prepare_kernel")),
        (programs, ("find_cubin", "build_cubin")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, None)
    call(dispatcher, tensor(1, 2, 5, 64), is_causal=False)
    assert len(machine.launches) == 2
    assert machine.launches[0][0] is machine.launches[1][0]
    assert len(machine.loads) == 1


def test_programs_are_shared_and_plans_are_not(dispatcher, machine, env):
    ship(env, make_entry())
    for q_len in (5, 6):
        call(dispatcher, tensor(1, 2, q_len, 64))
    assert len(machine.loads) == 1
    assert machine.launches[0][0] is not machine.launches[1][0]
    assert machine.constants["q_len"] == 6


@pytest.mark.parametrize(
    "change",
    [
        {"is_causal": True},
        {"scale": 0.5},
        {"layout": "NHD"},
        {"return_lse": True},
    ],
)
def test_calls_that_differ_do_not_share_an_answer(dispatcher, machine, env, change):
    ship(env, make_entry(FULL), make_entry(CAUSAL))
    q = tensor(2, 2, 2, 64)
    call(dispatcher, q)
    call(dispatcher, q, **change)
    assert machine.launches[0][0] is not machine.launches[1][0]


def test_strides_are_part_of_a_calls_kind(dispatcher, machine, env):
    ship(env, make_entry())
    q, wide = tensor(1, 2, 5, 64), tensor(1, 2, 5, 128)
    call(dispatcher, q, q, q)
    call(dispatcher, q, q, wide[..., :64])
    assert machine.constants["v_token_stride"] == 128


def test_lengths_that_do_not_fit_are_refused_after_calls_that_did(dispatcher, machine, env):
    """Same strides, same kind of call otherwise: a kernel would read past the end of v."""
    ship(env, make_entry())
    q, buffer = tensor(1, 2, 5, 64), tensor(1, 2, 9, 64)
    call(dispatcher, q, buffer[:, :, :8], buffer[:, :, :8])
    with pytest.raises(ArgumentError, match="v: length 7"):
        call(dispatcher, q, buffer[:, :, :8], buffer[:, :, :7])
    assert len(machine.launches) == 1


def test_a_mask_changes_the_answer_of_a_known_call_and_back(dispatcher, machine, env):
    ship(env, make_entry())
    q, mask = tensor(1, 2, 5, 64), torch.ones(5, 5, dtype=torch.bool)
    for attn_mask in (mask, None, mask, None):
        call(dispatcher, q, attn_mask=attn_mask)
        assert dispatcher.last.answer == ("kernel" if attn_mask is None else "sdpa")
    assert len(machine.launches) == 2


def test_mask_kinds_and_lengths_pick_their_own_entries(dispatcher, machine, env):
    """E10, and one cubin per bucket."""
    ship(
        env,
        make_entry(FULL, (1, 9), b"short"),
        make_entry(FULL, (10, None), b"long"),
        make_entry(CAUSAL, (1, None), b"causal"),
        cubins=(b"short", b"long", b"causal"),
    )
    for kv_len, options in ((9, {}), (10, {}), (9, {"is_causal": True})):
        call(dispatcher, tensor(1, 2, 3, 64), tensor(1, 2, kv_len, 64), **options)
    assert [launch[0].program.cubin for launch in machine.launches] == [b"short", b"long", b"causal"]


# --- masks of keys


@pytest.fixture
def keys_by_kernel(monkeypatch):
    """Kernels for masks of keys are at hand; the fake machine notes what they are given instead of running them."""
    monkeypatch.setattr(programs.Programs, "find", _find_any)


def _find_any(self, explanation, device, env):
    return FakeProgram(self._runtime, b"any", explanation.kernel, explanation.config, 0), True


def read_table(at: int, batch: int) -> list[list[int]]:
    numbers = (ctypes.c_int32 * (4 * batch)).from_address(at)
    return [list(numbers[4 * i : 4 * i + 4]) for i in range(batch)]


@dataclass
class KeysSeen:
    """A kernel for masks of keys that reads, at the addresses it is given, what there is at the time."""

    machine: FakeMachine
    plan: object
    kv_len: int
    seen: list[tuple[list[list[int]], list[float]]] = field(default_factory=list)

    def launch(self, *addresses):
        values = (ctypes.c_uint16 * (2 * self.kv_len * 64)).from_address(addresses[2])
        first_channels = torch.tensor(list(values[::64]), dtype=torch.int32).short().view(torch.float16)
        self.seen.append((read_table(addresses[7], 2), first_channels.tolist()))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_keys_that_a_mask_leaves_are_brought_to_the_front_and_counted(
    dispatcher, machine, keys_by_kernel, monkeypatch, layout
):
    """One head: values are the keys' numbers, so what the kernel gets is the order."""
    launched = []

    def prepare(self, plan):
        launched.append(KeysSeen(machine, plan, 6))
        return launched[-1]

    monkeypatch.setattr(FakeProgram, "prepare", prepare)
    q, v = tensor(2, 1, 5, 64), torch.arange(12.0).half().view(2, 1, 6, 1).repeat(1, 1, 1, 64)
    mask = torch.tensor([[0, 1, 0, 1, 1, 0], [1, 1, 1, 0, 1, 1]]).bool()
    if layout == "NHD":
        q, v = q.transpose(1, 2), v.transpose(1, 2)
    for given_mask in (mask, ~mask, torch.zeros_like(mask)):
        call(dispatcher, q, v, v, attn_mask=given_mask[:, None, None], layout=layout)
        (last,) = launched
        table, order = last.seen[-1]
        assert table == [[0, 5, 0, int(row.sum())] for row in given_mask]
        for item in range(2):
            kept = given_mask[item].nonzero().flatten() + 6 * item
            assert order[6 * item : 6 * item + len(kept)] == kept.tolist()


@pytest.mark.parametrize("shape", [(1, 6), (1, 1, 6), (1, 1, 1, 6), (2, 1, 1, 6)], ids=str)
def test_a_remembered_answer_takes_the_new_mask_and_keeps_none_alive(dispatcher, machine, keys_by_kernel, shape):
    q, k = tensor(2, 2, 5, 64), tensor(2, 2, 6, 64)
    for seen in (4, 2, 6):
        mask = torch.arange(6).expand(shape) < seen
        call(dispatcher, q, k, attn_mask=mask)
        assert dispatcher.last.answer == "kernel"
        assert dispatcher.last.problem == Problem(64, "fp16", False, is_ragged=True)
        gone = weakref.ref(mask)
        del mask
        gc.collect()
        assert gone() is None
    assert len({id(launched) for launched, _ in machine.launches}) == 1  # prepared once
    assert len(machine.launches) == 3


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (torch.ones(5, 6), {}),  # added to scores
        (torch.ones(5, 6).bool(), {}),  # rows differ
        (torch.ones(2, 1, 6).bool(), {}),  # heads differ
        (torch.ones(1, 6).bool(), {"is_causal": True}),
        (torch.ones(1, 6).bool(), {"window": (1, 1)}),
    ],
    ids=str,
)
def test_other_masks_are_torchs_and_are_not_kept_alive_either(dispatcher, machine, keys_by_kernel, mask, options):
    q, k = tensor(2, 2, 5, 64), tensor(2, 2, 6, 64)
    for _ in range(2):
        own = mask.clone()
        call(dispatcher, q, k, attn_mask=own, **options)
        assert (dispatcher.last.answer, machine.launches) == ("sdpa", [])
        gone = weakref.ref(own)
        del own
        gc.collect()
        assert gone() is None


def test_masked_calls_go_where_the_entry_says_unless_a_kernel_is_asked_for(dispatcher, machine, env, keys_by_kernel):
    ship(env, make_entry(answer="sdpa"))
    q, mask = tensor(2, 2, 5, 64), torch.ones(2, 1, 1, 5, dtype=torch.bool)
    for backend, answer in ((None, "sdpa"), ("kernel", "kernel"), (None, "sdpa")):
        call(dispatcher, q, attn_mask=mask, backend=backend)
        assert (dispatcher.last.answer, dispatcher.last.is_fallback) == (answer, False)
    assert len(machine.launches) == 1


def test_the_scratch_of_a_masked_call_is_that_of_its_ragged_plan(dispatcher, machine, keys_by_kernel, monkeypatch):
    monkeypatch.setattr(dispatch, "describe_compiler", lambda *_: "a compiler")
    q, mask = tensor(2, 2, 300, 64), torch.ones(2, 1, 1, 300, dtype=torch.bool)
    values = [getattr(Options(), name) for name in Options.__slots__]
    call(dispatcher, q, attn_mask=mask)
    ((launched, _),) = machine.launches
    told = dispatcher.workspace_bytes(q, q, q, mask, *values)
    assert told == launched.plan.workspace_bytes
    assert scratch_of(monkeypatch, lambda: call(dispatcher, q, attn_mask=mask)) == [told]


def test_a_call_on_another_device_restores_the_current_one(dispatcher, machine, env):
    ship(env, make_entry())
    machine.current = 3
    call(dispatcher, tensor(1, 2, 5, 64))
    assert machine.guarded == [0]
    assert machine.current == 3


def test_threads_share_a_program_but_no_parameter_buffer(dispatcher, machine, env):
    ship(env, make_entry())
    machine.load_seconds = 0.05
    meet = threading.Barrier(4)

    def work():
        meet.wait()
        for _ in range(3):
            call(dispatcher, tensor(1, 2, 5, 64))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(machine.loads) == 1
    assert len({id(launch[0]) for launch in machine.launches}) == 4
    assert dispatcher.last is None  # this thread called nothing


def test_the_memo_is_bounded(dispatcher, machine, env, monkeypatch):
    monkeypatch.setattr(memo, "_LIMIT", 3)
    ship(env, make_entry())
    for q_len in (1, 2, 3, 4, 4):
        call(dispatcher, tensor(1, 1, q_len, 64))
    assert len(dispatcher._local.answers) == 1
    assert len(machine.launches) == 5


# --- memory that kernels can't read or write


def test_unreadable_strides_are_copied_and_said_once(dispatcher, machine, env, caplog):
    ship(env, make_entry())
    v = tensor(1, 2, 64, 5).transpose(2, 3)
    for _ in range(2):
        call(dispatcher, tensor(1, 2, 5, 64), v=v)
    assert machine.constants["v_token_stride"] == 64
    assert machine.launches[-1][1][2] != v.data_ptr()
    assert [m for m in messages(caplog) if m.startswith("v is copied")] == messages(caplog)
    assert len(messages(caplog)) == 1


def test_an_unaligned_address_is_copied_call_by_call(dispatcher, machine, env, caplog):
    """Addresses are no part of the memo: the same kind of call is right before and after."""
    ship(env, make_entry())
    buffer = tensor(1 + 2 * 5 * 64)
    aligned, shifted = buffer[:-1].view(1, 2, 5, 64), buffer[1:].view(1, 2, 5, 64)
    for k in (aligned, shifted, aligned):
        call(dispatcher, aligned, k, aligned)
    read = [launch[1][1] for launch in machine.launches]
    assert read[0] == read[2] == aligned.data_ptr()
    assert read[1] % 16 == 0
    assert read[1] != shifted.data_ptr()
    assert [m[:11] for m in messages(caplog)] == ["k is copied"]


def test_out_is_written_in_place(dispatcher, machine, env):
    ship(env, make_entry())
    q = tensor(1, 2, 5, 64)
    out = torch.empty(1, 5, 2, 64, dtype=torch.float16).transpose(1, 2)
    before = out._version
    assert call(dispatcher, q, out=out) is out
    assert machine.launches[0][1][3] == out.data_ptr()
    assert machine.constants["out_token_stride"] == 128
    assert out._version > before
    result, lse = call(dispatcher, q, out=out, return_lse=True)
    assert result is out
    assert lse.shape == (1, 2, 5)


def test_out_over_an_input_is_written_by_way_of_scratch(dispatcher, machine, env):
    ship(env, make_entry())
    q, k = tensor(1, 2, 5, 64), tensor(1, 2, 5, 64)
    assert call(dispatcher, q, k, k, out=k) is k
    assert machine.launches[0][1][3] != k.data_ptr()


def test_out_at_an_unaligned_address_is_written_by_way_of_scratch(dispatcher, machine, env):
    ship(env, make_entry())
    out = torch.empty(1 + 2 * 5 * 64, dtype=torch.float16)[1:].view(1, 2, 5, 64)
    assert call(dispatcher, tensor(1, 2, 5, 64), out=out) is out
    assert machine.launches[0][1][3] % 16 == 0


def test_out_of_strides_that_no_kernel_writes_is_a_copy(dispatcher, machine, env, caplog):
    ship(env, make_entry())
    out = torch.ones(1, 2, 64, 5, dtype=torch.float16).transpose(2, 3)
    for _ in range(2):
        assert call(dispatcher, tensor(1, 2, 5, 64), out=out) is out
        assert machine.launches[-1][1][3] not in (0, out.data_ptr())
    assert (machine.constants["out_token_stride"], machine.constants["out_head_stride"]) == (64, 320)
    assert [m[:13] for m in messages(caplog)] == ["out is copied"]


def test_an_unfitting_out_launches_nothing(dispatcher, machine, env):
    ship(env, make_entry())
    with pytest.raises(ArgumentError, match="out: dtype"):
        call(dispatcher, tensor(1, 2, 5, 64), out=torch.empty(1, 2, 5, 64))
    assert machine.launches == []


@pytest.mark.parametrize(("q_len", "kv_len", "batch"), [(0, 5, 1), (5, 0, 1), (5, 5, 0)])
def test_empty_calls_launch_nothing(dispatcher, machine, env, q_len, kv_len, batch):
    ship(env, make_entry())
    q, k = tensor(batch, 2, q_len, 64), tensor(batch, 2, kv_len, 64)
    out, lse = call(dispatcher, q, k, return_lse=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert lse.shape == (batch, 2, q_len)
    assert machine.launches == []
    assert dispatcher.last.answer == "zeros"


def test_an_empty_call_keeps_the_graph(dispatcher):
    q = tensor(1, 2, 5, 64).requires_grad_()
    call(dispatcher, q, tensor(1, 2, 0, 64)).sum().backward()
    assert (q.grad == 0).all()


# --- torch answers


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"window": (3, 3)}, "window"),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, "attn_mask"),
        ({"precision": "int4"}, "int4"),
        ({"smooth_k": False}, "smooth_k"),
        ({"smooth_q": True}, "_ms192 is not at hand: nvcc was not found"),
    ],
)
def test_what_no_kernel_does_is_answered_by_torch_and_said_once(dispatcher, machine, env, caplog, options, because):
    ship(env, make_entry())
    q = tensor(1, 2, 5, 64)
    for _ in range(3):
        out = call(dispatcher, q, **options)
    assert out.isfinite().all()
    assert machine.launches == []
    assert [because in m for m in messages(caplog)] == [True]
    assert dispatcher.last.is_fallback
    assert because in dispatcher.last.reason


def test_a_new_mask_is_used_every_time(dispatcher, env):
    q = tensor(1, 1, 2, 64)
    v = torch.tensor([1.0, 2.0]).half()[None, None, :, None].expand(1, 1, 2, 64)
    for keep in (0, 1):
        mask = torch.tensor([keep == 0, keep == 1])[None]
        assert (call(dispatcher, q, q, v, attn_mask=mask) == keep + 1).all()


def test_gradients_are_left_to_torch(dispatcher, machine, env, caplog):
    """A18: never an output without a graph; the same tensors under no_grad get the kernel."""
    ship(env, make_entry())
    q = tensor(1, 2, 5, 64).requires_grad_()
    call(dispatcher, q).sum().backward()
    assert q.grad.abs().sum() > 0
    assert "gradient" in messages(caplog)[0]
    assert machine.launches == []
    with torch.no_grad():
        call(dispatcher, q)
    assert len(machine.launches) == 1


def test_where_torch_is_faster_it_answers_without_complaint(dispatcher, machine, env, caplog):
    """D6: the registry says so for the length."""
    ship(env, make_entry(kv=(1, 512), answer="sdpa"), make_entry(kv=(513, None)))
    for _ in range(2):
        call(dispatcher, tensor(1, 2, 512, 64))
    assert machine.launches == []
    assert messages(caplog) == []
    assert dispatcher.last.answer == "sdpa"
    assert not dispatcher.last.is_fallback
    call(dispatcher, tensor(1, 2, 513, 64))
    assert len(machine.launches) == 1


def test_a_forced_kernel_runs_where_torch_is_faster(dispatcher, machine, env):
    ship(env, make_entry(answer="sdpa"))
    call(dispatcher, tensor(1, 2, 5, 64), backend="kernel")
    assert len(machine.launches) == 1


@pytest.mark.parametrize(("asked", "launches"), [(0.9995, 1), (0.9996, 0)])
def test_an_entry_must_reach_the_callers_cosine(dispatcher, machine, env, asked, launches):
    ship(env, make_entry(min_cosine=0.9995))
    call(dispatcher, tensor(1, 2, 5, 64), min_cosine=asked)
    assert len(machine.launches) == launches


@pytest.mark.parametrize(("asked", "launches"), [(0.999, 1), (0.9991, 0)])
def test_an_unmeasured_accuracy_serves_the_default_floor_only(dispatcher, machine, env, asked, launches):
    ship(env, make_entry(min_cosine=None, kind="predicted"))
    call(dispatcher, tensor(1, 2, 5, 64), min_cosine=asked)
    assert len(machine.launches) == launches


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_forced_backends(dispatcher, machine, env, caplog, backend):
    ship(env, make_entry())
    q = tensor(1, 2, 5, 64)
    expected = torch.softmax(q.float() @ q.float().mT / 8, -1) @ q.float()
    torch.testing.assert_close(call(dispatcher, q, backend=backend).float(), expected, rtol=1e-2, atol=1e-3)
    assert machine.launches == []
    assert messages(caplog) == []
    assert dispatcher.last.answer == backend


def test_a_forced_kernel_that_cannot_run_raises_why(dispatcher, env):
    ship(env, make_entry())
    with pytest.raises(UnsupportedError, match="head_dim 384 has no kernel, 256 is the widest"):
        call(dispatcher, tensor(1, 2, 5, 384), backend="kernel")


def test_the_environments_backend_holds_unless_the_call_says_otherwise(machine, env):
    ship(env, make_entry())
    dispatcher = Dispatcher(machine, lambda: Env(env.cache_dir, env.tuned_dir, False, "warning", None, "sdpa"))
    call(dispatcher, tensor(1, 2, 5, 64))
    assert machine.launches == []
    call(dispatcher, tensor(1, 2, 5, 64), backend="kernel")
    assert len(machine.launches) == 1


def test_a_wrong_backend_in_the_environment_is_named(machine, env):
    dispatcher = Dispatcher(machine, lambda: Env(env.cache_dir, env.tuned_dir, False, "warning", None, "cudnn"))
    with pytest.raises(ArgumentError, match="SAGEGEN_BACKEND='cudnn'"):
        call(dispatcher, tensor(1, 2, 5, 64))


def strict(env: Env) -> Env:
    return Env(env.cache_dir, env.tuned_dir, True, "warning", None)


def test_strict_refuses_what_would_fall_back(machine, env):
    dispatcher = Dispatcher(machine, lambda: strict(env))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="head_dim 384"):
            call(dispatcher, tensor(1, 2, 5, 384))


def test_strict_allows_torch_where_it_is_faster_or_asked_for(machine, env):
    ship(env, make_entry(answer="sdpa"))
    dispatcher = Dispatcher(machine, lambda: strict(env))
    call(dispatcher, tensor(1, 2, 5, 64))
    call(dispatcher, tensor(1, 2, 5, 96), backend="sdpa")


@pytest.mark.parametrize("backend", [None, "sdpa", "reference"])
def test_disabled_torch_answers_without_complaint_or_fallback(machine, env, caplog, backend):
    """Under SAGEGEN_STRICT, too; whatever SAGEGEN_BACKEND and SAGEGEN_PIN say, and where a kernel would be at hand."""
    ship(env, make_entry())
    settings = replace(env, disabled=True, strict=True, backend="kernel", pin=CONFIG.name)
    dispatcher = Dispatcher(machine, lambda: settings)
    q, mask = tensor(1, 2, 5, 64), torch.eye(5, dtype=torch.bool)
    expected = torch.softmax(q.float() @ q.float().mT / 8, -1) @ q.float()
    torch.testing.assert_close(call(dispatcher, q, backend=backend).float(), expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(call(dispatcher, q, attn_mask=mask, backend=backend), q)
    assert (dispatcher.last.answer, dispatcher.last.is_fallback) == ("sdpa", False)
    assert dispatcher.last.reason == "SAGEGEN_DISABLE=1 is set"
    assert machine.launches == []
    assert messages(caplog) == []


def test_disabled_tensors_on_the_cpu_go_to_torch_too(machine, env):
    machine.here = Device("cpu", -1)
    dispatcher = Dispatcher(machine, lambda: replace(env, disabled=True))
    call(dispatcher, tensor(1, 2, 5, 64))
    assert dispatcher.last.reason == "SAGEGEN_DISABLE=1 is set"


@pytest.mark.parametrize("backend", ["kernel", "emulator"])
def test_disabled_a_kernel_that_the_call_names_is_refused(machine, env, backend):
    dispatcher = Dispatcher(machine, lambda: replace(env, disabled=True))
    with pytest.raises(
        UnsupportedError, match=f"backend='{backend}' cannot answer: SAGEGEN_DISABLE=1 is set; leave backend="
    ):
        call(dispatcher, tensor(1, 2, 5, 64), backend=backend)


def test_disabled_what_the_caller_leaves_to_torch_is_no_fallback(machine, env, caplog):
    """As `sdpa` with a mask, which under SAGEGEN_STRICT would raise."""
    dispatcher = Dispatcher(machine, lambda: replace(env, disabled=True, strict=True))
    dispatcher.answer_by_torch("dropout has no kernel", "cuda")
    assert (dispatcher.last.reason, dispatcher.last.is_fallback) == ("SAGEGEN_DISABLE=1 is set", False)
    assert messages(caplog) == []


#: Not CONFIG, the default one.
PINNED = "wgmma_c2_bk128_st2_scplain_actwo_ks128_rsskip_suones_exmufu"


def test_a_pinned_config_is_built_and_launched_instead_of_the_tuned_one(machine, env, compiler, caplog):
    ship(env, make_entry())
    dispatcher = Dispatcher(machine, lambda: replace(env, pin=PINNED))
    assert CONFIG.name != PINNED
    for kv_len in (5, 5000):
        call(dispatcher, tensor(1, 2, 5, 64), tensor(1, 2, kv_len, 64))
    assert [program.name for program in machine.loads] == [f"d64_fp16_full_int8_{PINNED}"]
    assert len(machine.launches) == 2
    assert len(compiler.calls) == 1
    assert [m for m in messages(caplog) if "SAGEGEN_PIN decides on the config" in m] == messages(caplog)[-1:]


def test_a_pinned_config_that_the_registry_has_needs_no_nvcc(machine, env):
    ship(env, make_entry(kv=(1, 9)))
    dispatcher = Dispatcher(machine, lambda: replace(env, pin=CONFIG.name))
    call(dispatcher, tensor(1, 2, 5, 64), tensor(1, 2, 5000, 64))
    assert [program.cubin for program in machine.loads] == [b"cubin"]


def test_a_wrong_pin_in_the_environment_is_named(machine, env):
    dispatcher = Dispatcher(machine, lambda: replace(env, pin="fast"))
    with pytest.raises(ArgumentError, match="SAGEGEN_PIN='fast'"):
        call(dispatcher, tensor(1, 2, 5, 64))


def test_the_emulator_takes_no_cuda_tensors(dispatcher, machine, env):
    ship(env, make_entry())
    with pytest.raises(UnsupportedError, match=r"runs on CPU tensors, these are on cuda: move them with \.cpu"):
        call(dispatcher, tensor(1, 2, 5, 64), backend="emulator")
    assert machine.launches == []
    assert machine.loads == []


def test_the_environment_can_ask_for_the_emulator(machine, env, monkeypatch):
    """Its program is loaded once per kernel, launched with plain addresses and no stream, whatever is tuned."""
    loads = []

    def load(problem, config, gpu, env):
        loads.append((problem, config, gpu.name))
        return FakeProgram(machine, b"", "emulated", config, -1)

    monkeypatch.setattr(programs, "load_emulated", load)
    machine.here = Device("cpu", -1)
    dispatcher = Dispatcher(machine, lambda: Env(env.cache_dir, env.tuned_dir, False, "warning", None, "emulator"))
    q, k = tensor(1, 4, 5, 64), tensor(1, 2, 7, 64)
    for _ in range(2):
        out = call(dispatcher, q, k)
    call(dispatcher, q, tensor(1, 2, 9, 64))
    assert loads == [(FULL, default_config(Target(GPUS["l20"], FULL)), "l20")]
    assert [addresses[0] for _, addresses in machine.launches] == [q.data_ptr()] * 3
    assert machine.launches[1][1][3] == out.data_ptr()
    assert {addresses[6] for _, addresses in machine.launches} == {0}
    assert dispatcher.last.answer == "emulator"


# --- entries that are less than ideal


def test_a_borrowed_entry_says_so_once_with_the_command(dispatcher, machine, env, caplog):
    ship(env, make_entry(), gpu="h100")
    for q_len in (5, 6):
        call(dispatcher, tensor(1, 2, q_len, 64))
    assert len(machine.launches) == 2
    assert messages(caplog) == [
        "h200 has no entry for d64_fp16_full_int8, h100's is borrowed; "
        "to tune it here: sagegen tune --gpu h200 --dtype fp16"
    ]


def test_a_predicted_entry_says_so(dispatcher, env, caplog):
    ship(env, make_entry(kind="predicted"))
    call(dispatcher, tensor(1, 2, 5, 64))
    assert "predicted, not measured" in messages(caplog)[0]
    assert dispatcher.last.provenance == "predicted"


def test_an_accuracy_of_the_emulator_serves_and_says_so(dispatcher, machine, env, caplog):
    entry = make_entry(kind="predicted", min_cosine=0.9993)
    ship(env, structs.replace(entry, provenance=structs.replace(entry.provenance, accuracy_from="emulator")))
    call(dispatcher, tensor(1, 2, 5, 64), min_cosine=0.9993)
    assert len(machine.launches) == 1
    assert any("was never measured on h200 and is the emulator's" in message for message in messages(caplog))


def test_a_length_above_every_bucket_never_gets_the_small_variant(dispatcher, machine, env, caplog):
    """E12. Here nvcc is absent, so torch answers; a default config is built where it is there."""
    ship(env, make_entry(kv=(1, 2047)))
    call(dispatcher, tensor(1, 1, 1, 64), tensor(1, 1, 2048, 64))
    assert machine.launches == []
    assert "nothing is tuned" in " ".join(dispatcher.last.notes)
    assert dispatcher.last.is_fallback


def test_a_length_below_every_bucket_gets_the_next_longer_and_says_so(dispatcher, machine, env, caplog):
    ship(env, make_entry(kv=(100, None)))
    call(dispatcher, tensor(1, 1, 5, 64))
    assert len(machine.launches) == 1
    assert "no bucket of d64_fp16_full_int8 holds this length" in messages(caplog)[0]
    assert messages(caplog)[0].endswith("sagegen tune --gpu h200 --dtype fp16")


def test_an_unknown_gpu_borrows_from_its_architecture(machine, env, caplog):
    machine.here = Device("cuda", 0, "NVIDIA H800", "sm_90", None)
    ship(env, make_entry())
    call(Dispatcher(machine, lambda: env), tensor(1, 1, 5, 64))
    assert len(machine.launches) == 1
    assert "NVIDIA H800 has no entry" in messages(caplog)[0]


def test_an_unknown_gpu_of_an_untuned_architecture_gets_torch(machine, env):
    machine.here = Device("cuda", 0, "NVIDIA T4", "sm_75", None)
    dispatcher = Dispatcher(machine, lambda: env)
    call(dispatcher, tensor(1, 1, 5, 64))
    assert "NVIDIA T4 (sm_75) is no known GPU" in dispatcher.last.reason


def test_a_broken_registry_is_named_and_the_rest_serves(dispatcher, machine, env, caplog):
    """E11."""
    ship(env, make_entry(), gpu="h100")
    (env.tuned_dir / "h200.yaml").write_text("schema: 1\n")
    call(dispatcher, tensor(1, 1, 5, 64))
    assert len(machine.launches) == 1
    assert "h200.yaml:2: the file is cut short" in messages(caplog)[0]


def test_a_broken_registry_is_an_error_under_strict(machine, env):
    env.tuned_dir.mkdir()
    (env.tuned_dir / "h200.yaml").write_text("schema: 1\n")
    with pytest.raises(RegistryError, match=r"h200\.yaml:2"):
        call(Dispatcher(machine, lambda: strict(env)), tensor(1, 1, 5, 64))


# --- where cubins come from


def test_no_entry_and_no_nvcc_gives_torch_and_the_command(dispatcher, machine, env, caplog):
    """E1."""
    q = tensor(1, 2, 5, 64)
    expected = torch.softmax(q.float() @ q.float().mT / 8, -1) @ q.float()
    torch.testing.assert_close(call(dispatcher, q).float(), expected, rtol=1e-2, atol=1e-3)
    call(dispatcher, tensor(1, 2, 6, 64))
    assert machine.loads == []
    (message,) = messages(caplog)
    assert "nvcc was not found in: PATH" in message
    assert message.endswith("pip install 'sagegen[nvcc]'")


def test_a_stored_cubin_needs_no_nvcc(dispatcher, machine, env):
    """D7, warm: the registry names a cubin that lies in the kernel store only."""
    entry = make_entry(cubin=b"stored")
    ship(env, entry, cubins=())
    key = make_key(str(entry.kernel), "text", "sm_90", "V13.0", ())
    Store(env.cache_dir / "kernels").publish(key, "text", b"stored", {})
    call(dispatcher, tensor(1, 2, 5, 64))
    assert machine.loads[0].cubin == b"stored"


@pytest.fixture
def compiler(env, monkeypatch, make_nvcc):
    """The stand-in compiler, at hand, and slower than a caller's patience."""
    nvcc = make_nvcc(seconds=0.3)
    monkeypatch.setattr(toolkit, "find_toolkit", lambda env: nvcc.toolkit)
    monkeypatch.setattr(fetch, "_PATIENCE_S", 0.1)
    return nvcc


def test_with_nvcc_an_untuned_problem_gets_the_default_config(dispatcher, machine, env, compiler, caplog):
    """D7, cold: it says that it compiles, then works; the next process finds the kernel."""
    for q_len in (5, 6):
        call(dispatcher, tensor(1, 2, q_len, 64))
    assert machine.loads[0].name == f"d64_fp16_full_int8_{CONFIG.name}"
    assert len(machine.launches) == 2
    assert len(compiler.calls) == 1
    name = f"d64_fp16_full_int8_{CONFIG.name}"
    assert messages(caplog)[0] == f"compiling {name} for sm_90; this happens once"
    assert messages(caplog)[1].startswith(f"compiled {name} in ")
    assert any("nothing is tuned" in m and m.endswith("sagegen tune --gpu h200 --dtype fp16") for m in messages(caplog))
    caplog.clear()
    call(Dispatcher(machine, lambda: env), tensor(1, 2, 5, 64))
    assert len(compiler.calls) == 1
    assert messages(caplog) == []
    assert machine.loads[1].cubin == machine.loads[0].cubin
    assert dispatcher.last.provenance == "untuned"


def test_with_nvcc_a_missing_cubin_is_built_from_its_entry(dispatcher, machine, env, compiler):
    ship(env, make_entry(), cubins=())
    call(dispatcher, tensor(1, 2, 5, 64))
    assert len(compiler.calls) == 1
    assert dispatcher.last.provenance == "measured"


def test_a_cubin_of_another_launch_abi_is_not_loaded(dispatcher, machine, env, compiler):
    ship(env, make_entry(abi=LAUNCH_ABI + 1))
    call(dispatcher, tensor(1, 2, 5, 64))
    assert machine.loads[0].cubin != b"cubin"
    assert len(compiler.calls) == 1


def test_a_changed_cubin_is_not_loaded(dispatcher, machine, env, caplog):
    ship(env, make_entry())
    (file,) = (env.tuned_dir / "h200").glob("*.cubin.gz")
    file.write_bytes(b"changed")
    call(dispatcher, tensor(1, 2, 5, 64))
    assert machine.loads == []
    assert any(str(file) in m and "digest" in m for m in messages(caplog))
    assert dispatcher.last.answer == "sdpa"


def test_a_changed_cubin_is_an_error_under_strict_though_another_entry_could_answer(machine, env):
    two_entries(env)
    digest = hashlib.sha256(b"coarse").hexdigest()
    (file,) = (env.tuned_dir / "h200").glob(f"{digest[:16]}.cubin.gz")
    file.write_bytes(b"changed")
    dispatcher = Dispatcher(machine, lambda: strict(env))
    for _ in range(2):
        with pytest.raises(RegistryError, match=f"{re.escape(str(file))}: the file is not the cubin"):
            call(dispatcher, tensor(1, 2, 5, 64))
    assert machine.launches == []


def test_a_build_that_fails_is_tried_once(dispatcher, machine, env, compiler, monkeypatch, caplog):
    attempts = []

    def fail(sources, *_args, **_options):
        attempts.append(sources)
        name = sources[0].name
        return {name: build.BuildFailure(name, "compile", "error: no such thing", "")}

    monkeypatch.setattr(build, "build_batch", fail)
    for q_len in (5, 6):
        call(dispatcher, tensor(1, 2, q_len, 64))
    assert len(attempts) == 1
    assert "error: no such thing" in dispatcher.last.reason


def test_a_cubin_that_the_driver_refuses_gives_torch(dispatcher, machine, env):
    ship(env, make_entry())
    machine.broken = True
    for q_len in (5, 6):
        call(dispatcher, tensor(1, 2, q_len, 64))
    assert len(machine.loads) == 1
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in dispatcher.last.reason


def test_a_cold_call_inside_graph_capture_takes_torch_and_is_not_remembered(dispatcher, machine, env):
    ship(env, make_entry())
    machine.capturing = True
    call(dispatcher, tensor(1, 2, 5, 64))
    assert machine.loads == []
    assert "capture" in dispatcher.last.reason
    machine.capturing = False
    call(dispatcher, tensor(1, 2, 5, 64))
    assert len(machine.launches) == 1
    machine.capturing = True  # warm now, for new lengths too
    call(dispatcher, tensor(1, 2, 6, 64))
    assert len(machine.launches) == 2


# --- entries whose kernel cannot be had

COARSE = CONFIG.name.replace("ks64", "ks128")


def two_entries(env: Env) -> None:
    """Of one bucket: a coarse one, which answers first, and a fine one."""
    coarse = {"config": parse_config(COARSE), "tier": "coarse", "min_cosine": 0.9991}
    ship(env, make_entry(cubin=b"coarse", **coarse), make_entry(tier="fine"), cubins=(b"coarse", b"cubin"))


def test_the_next_entry_answers_where_the_first_ones_kernel_is_wrong(dispatcher, machine, env, caplog):
    two_entries(env)
    machine.wrong_names = (COARSE,)
    for length in (5, 6, 5):
        call(dispatcher, tensor(1, 2, length, 64))
    assert [launched.program.cubin for launched, _ in machine.launches] == [b"cubin"] * 3
    (message,) = messages(caplog)
    assert message.startswith(f"d64_fp16_full_int8_{COARSE} is passed over: ")
    assert dispatcher.last.answer == "kernel"


def test_what_is_passed_over_is_explained_at_the_first_call(dispatcher, machine, env):
    two_entries(env)
    machine.wrong_names = (COARSE,)
    call(dispatcher, tensor(1, 2, 5, 64))
    (other, *_) = [text for text in dispatcher.last.passed_over if "computes wrongly" in text]
    assert other.startswith(f"d64_fp16_full_int8_{COARSE}: ")


def test_torch_answers_where_no_entrys_kernel_can_be_had(dispatcher, machine, env):
    two_entries(env)
    machine.wrong = True
    for length in (5, 6):
        call(dispatcher, tensor(1, 2, length, 64))
        assert (dispatcher.last.answer, dispatcher.last.is_fallback) == ("sdpa", True)
        assert "computes wrongly" in dispatcher.last.reason
    assert machine.launches == []
    assert len(machine.tried) == 2


@pytest.mark.parametrize("has_compiler", [False, True])
def test_a_pinned_config_whose_cubin_is_wrong_is_built_or_left(machine, env, request, has_compiler):
    if has_compiler:
        request.getfixturevalue("compiler")
    ship(env, make_entry())
    machine.wrong = True
    dispatcher = Dispatcher(machine, lambda: replace(env, pin=CONFIG.name))
    call(dispatcher, tensor(1, 2, 5, 64))
    assert dispatcher.last.answer == "sdpa"
    why = "computes wrongly" if has_compiler else "nvcc was not found"  # of the last that was tried
    assert why in dispatcher.last.reason
    assert len(machine.tried) == 1 + has_compiler
    assert machine.launches == []


# --- trying a kernel when it is loaded, and ahead


def test_a_kernel_is_tried_once_when_it_is_loaded(dispatcher, machine, env):
    ship(env, make_entry())
    for length in (5, 6, 5):
        call(dispatcher, tensor(1, 2, length, 64))
    (tried,) = machine.tried
    assert tried == (machine.loads[0], f"d64_fp16_full_int8_{CONFIG.name}", FULL, 0)
    assert len(machine.launches) == 3


def test_a_kernel_that_computes_wrongly_is_not_used(dispatcher, machine, env, caplog):
    ship(env, make_entry())
    machine.wrong = True
    q = tensor(1, 2, 5, 64)
    for length in (5, 6):
        call(dispatcher, tensor(1, 2, length, 64))
    assert machine.launches == []
    assert len(machine.tried) == 1  # remembered, not tried for every length
    assert dispatcher.last.answer == "sdpa"
    (message,) = messages(caplog)
    assert "computes wrongly on this machine" in message
    assert message.endswith("sagegen verify")
    with pytest.raises(UnsupportedError, match="computes wrongly"):
        call(Dispatcher(machine, lambda: strict(env)), q)


def test_kernels_go_untried_where_the_user_says_so(machine, env):
    ship(env, make_entry())
    machine.wrong = True
    call(Dispatcher(machine, lambda: replace(env, self_test=False)), tensor(1, 2, 5, 64))
    assert (machine.tried, len(machine.launches)) == ([], 1)


def warm_up(dispatcher, q):
    return dispatcher.warm_up(q, q, q, None, *(getattr(Options(), name) for name in Options.__slots__))


def test_warming_up_loads_and_tries_and_launches_nothing(dispatcher, machine, env):
    ship(env, make_entry())
    q = tensor(1, 2, 5, 64)
    assert warm_up(dispatcher, q).answer == "kernel"
    assert (len(machine.loads), len(machine.tried), machine.launches) == (1, 1, [])
    machine.capturing = True  # loaded already, for this length and for others
    for length in (5, 6):
        call(dispatcher, tensor(1, 2, length, 64))
    assert (len(machine.loads), len(machine.tried), len(machine.launches)) == (1, 1, 2)


def test_warming_up_raises_what_the_call_would(dispatcher):
    with pytest.raises(ArgumentError, match="v: dtype"):
        dispatcher.warm_up(
            tensor(1, 2, 5, 64), tensor(1, 2, 5, 64), tensor(1, 2, 5, 64, dtype=torch.bfloat16), None,
            *(getattr(Options(), name) for name in Options.__slots__),
        )  # fmt: skip


# --- explaining


def explain(dispatcher, q):
    return dispatcher.explain(q, q, q, None, *(getattr(Options(), name) for name in Options.__slots__))


def test_explain_loads_and_runs_nothing(dispatcher, machine, env):
    ship(env, make_entry(figures=Timing(speed_vs_sdpa=1.5)))
    explanation = explain(dispatcher, tensor(1, 2, 5, 64))
    assert machine.loads == []
    assert explanation.kernel == f"d64_fp16_full_int8_{CONFIG.name}"
    text = str(explanation)
    for part in ("kernel: tuned entry of h200", "provenance: measured", "min_cosine: 0.9995", "speed vs SDPA: 1.5"):
        assert part in text
    assert dispatcher.last is None


def test_explain_foretells_the_fallback(dispatcher, machine, env):
    explanation = explain(dispatcher, tensor(1, 2, 5, 64))
    call(dispatcher, tensor(1, 2, 5, 64))
    assert explanation == dispatcher.last
    assert explanation.is_fallback
    assert explanation.reason.endswith("pip install 'sagegen[nvcc]'")


def test_explain_foretells_the_build(dispatcher, machine, env, compiler):
    explanation = explain(dispatcher, tensor(1, 2, 5, 64))
    assert explanation.kernel == f"d64_fp16_full_int8_{CONFIG.name}"
    assert "compiled at the first call, with nvcc V13.0" in explanation.notes[-1]
    assert compiler.calls == []


def test_log_level_comes_from_the_environment(machine, env, caplog):
    logger = logging.getLogger("sagegen")
    before = logger.level
    try:
        logger.setLevel(logging.NOTSET)
        quiet = Env(env.cache_dir, Path(env.tuned_dir), False, "error", None)
        call(Dispatcher(machine, lambda: quiet), tensor(1, 2, 5, 96))
        assert messages(caplog) == []
    finally:
        logger.setLevel(before)


# --- scratch


def options_of(**options) -> list[object]:
    values = Options(**options)
    return [getattr(values, name) for name in Options.__slots__]


def scratch_of(monkeypatch, run) -> list[int]:
    """Bytes of the scratch that `run` allocates, in order."""
    sizes, new_empty = [], torch.Tensor.new_empty

    def note(q, elements):
        sizes.append(elements * q.element_size())
        return new_empty(q, elements)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", note)
        run()
    return sizes


@pytest.mark.parametrize("limit", [1 << 30, 250_000, 1])
def test_scratch_is_told_before_it_is_allocated(machine, env, monkeypatch, limit):
    ship(env, make_entry())
    dispatcher = Dispatcher(machine, lambda: replace(env, workspace_limit=limit))
    q, k = tensor(3, 4, 200, 64), tensor(3, 2, 300, 64)
    told = dispatcher.workspace_bytes(q, k, k, None, *options_of(return_lse=True))
    assert machine.loads == []
    for _ in range(2):
        assert scratch_of(monkeypatch, lambda: call(dispatcher, q, k, return_lse=True)) == [told]
    # a KV head with its two query heads: Q, K and V in a byte per channel, padded to tiles, and their scales
    at_least = {1 << 30: 3 * (4 * 200 + 2 * 2 * 300) * 64, 250_000: 1, 1: (2 * 200 + 2 * 300) * 64}[limit]
    assert told >= at_least
    assert told <= max(limit, 4 * at_least)


def test_a_call_over_the_limit_is_launched_in_parts(machine, env):
    ship(env, make_entry())
    dispatcher = Dispatcher(machine, lambda: replace(env, workspace_limit=1))
    q, k, v = tensor(2, 4, 5, 64), tensor(2, 2, 7, 64), tensor(2, 2, 7, 64)
    for _ in range(2):
        machine.launches.clear()
        out, lse = call(dispatcher, q, k, v, return_lse=True)
        parts = [(item, head) for item in range(2) for head in range(2)]
        assert [addresses[:5] for _, addresses in machine.launches] == [
            (
                q[b, 2 * h].data_ptr(), k[b, h].data_ptr(), v[b, h].data_ptr(),
                out[b, 2 * h].data_ptr(), lse[b, 2 * h].data_ptr(),
            )
            for b, h in parts
        ]  # fmt: skip
        assert len({addresses[5] for _, addresses in machine.launches}) == 1
        assert machine.constants["heads_q"] == 2
        assert machine.constants["q_heads_total"] == 2
    assert len(machine.loads) == 1


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"backend": "sdpa"}, (1, 2, 5, 64)),
        ({"window": (1, 1)}, (1, 2, 5, 64)),
        ({}, (1, 2, 5, 80)),
        ({}, (1, 2, 0, 64)),
    ],
)
def test_who_gets_no_kernel_needs_no_scratch(dispatcher, env, options, shape):
    ship(env, make_entry())
    q = tensor(*shape)
    assert dispatcher.workspace_bytes(q, q, q, None, *options_of(**options)) == 0


def test_a_kernel_that_is_not_at_hand_needs_no_scratch(dispatcher, env):
    q = tensor(1, 2, 5, 64)
    assert dispatcher.workspace_bytes(q, q, q, None, *options_of()) == 0
