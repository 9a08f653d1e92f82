"""What a prepared call asks of the driver, seen by a stand-in of it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sagegen import launch
from sagegen.abi import POINTER_STRUCT
from sagegen.errors import DriverError
from sagegen.launch import PreparedCall, Program
from sagegen.plan import Launch, Plan

SMS = 132
LAUNCHES = (
    Launch("stats", 3, 128, 0),
    Launch("quantize", 5, 128, 0, starts_early=True),
    Launch("attention", 700, 384, 200_000, is_persistent=True, starts_early=True),
)
ROLES = [own.role for own in LAUNCHES]
ADDRESSES = (11, 12, 13, 14, 0, 15)
STREAM = 77


@dataclass
class FakeDriver:
    """The part of cuda.bindings.driver that launches need, and what it was asked.

    Attributes:
        interrupted_at: number of the config whose making a signal ends, from 1; 0 for none.
        status: what a launch answers.
    """

    configs: int = 0
    interrupted_at: int = 0
    status: Any = 0
    launched: list[tuple[str, Any, bytes]] = field(default_factory=list)
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)

    def CUlaunchConfig(self) -> SimpleNamespace:  # noqa: N802  the driver's name
        self.configs += 1
        if self.configs == self.interrupted_at:
            raise KeyboardInterrupt
        return SimpleNamespace(attrs=[], numAttrs=0)

    def CUlaunchAttribute(self) -> SimpleNamespace:  # noqa: N802  the driver's name
        return SimpleNamespace(id=0, value=SimpleNamespace(programmaticStreamSerializationAllowed=0))

    def CUstream(self, handle: int) -> int:  # noqa: N802  the driver's name
        return handle

    def launch(self, config: Any, function: str, params: int, extra: int) -> tuple[Any]:
        (buffer,) = (ctypes.c_void_p * 1).from_address(params)
        assert extra == 0
        self.launched.append((function, config, ctypes.string_at(buffer, POINTER_STRUCT.size)))
        return (self.status,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(launch, "_driver", lambda: fake)
    return fake


@pytest.fixture
def call(driver: FakeDriver) -> PreparedCall:
    functions = {role: f"{role} function" for role in ROLES}
    program = Program("fake", None, None, 0, functions, {}, driver.launch, None, SMS)  # type: ignore[arg-type]
    return program.prepare(Plan(LAUNCHES, 1000, bytes(64)))


def test_all_kernels_are_launched_in_order_as_the_plan_has_them(driver: FakeDriver, call: PreparedCall) -> None:
    call.launch(*ADDRESSES, STREAM)
    assert [function for function, _, _ in driver.launched] == [f"{role} function" for role in ROLES]
    seen = [
        (c.gridDimX, c.gridDimY, c.gridDimZ, c.blockDimX, c.blockDimY, c.blockDimZ, c.sharedMemBytes, c.hStream)
        for _, c, _ in driver.launched
    ]
    assert seen == [
        (3, 1, 1, 128, 1, 1, 0, STREAM),
        (5, 1, 1, 128, 1, 1, 0, STREAM),
        (SMS, 1, 1, 384, 1, 1, 200_000, STREAM),  # persistent: a block per SM fetches its works
    ]
    assert {POINTER_STRUCT.unpack(params) for _, _, params in driver.launched} == {ADDRESSES}


def test_only_launches_that_may_start_early_say_so(driver: FakeDriver, call: PreparedCall) -> None:
    call.launch(*ADDRESSES, STREAM)
    early = [[(a.id, a.value.programmaticStreamSerializationAllowed) for a in c.attrs] for _, c, _ in driver.launched]
    assert early == [[], [(6, 1)], [(6, 1)]]
    assert [config.numAttrs for _, config, _ in driver.launched] == [0, 1, 1]


def test_configs_are_made_once_for_each_stream(driver: FakeDriver, call: PreparedCall) -> None:
    for stream in (STREAM, 0, STREAM, 0):
        call.launch(*ADDRESSES, stream)
    assert driver.configs == 2 * len(ROLES)
    assert [c.hStream for _, c, _ in driver.launched] == [s for s in (STREAM, 0, STREAM, 0) for _ in ROLES]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_call_whose_preparation_a_signal_ended_is_whole_the_next_time(
    driver: FakeDriver, call: PreparedCall, at: int
) -> None:
    driver.interrupted_at = at
    with pytest.raises(KeyboardInterrupt):
        call.launch(*ADDRESSES, STREAM)
    driver.launched.clear()
    call.launch(*ADDRESSES, STREAM)
    assert [function for function, _, _ in driver.launched] == [f"{role} function" for role in ROLES]


def test_one_kernel_is_launched_alone(driver: FakeDriver, call: PreparedCall) -> None:
    call.launch_role("attention", *ADDRESSES, STREAM)
    ((function, config, params),) = driver.launched
    assert (function, config.gridDimX, POINTER_STRUCT.unpack(params)) == ("attention function", SMS, ADDRESSES)


def test_a_refused_launch_is_named_and_ends_the_call(driver: FakeDriver, call: PreparedCall) -> None:
    driver.status = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE while launching stats of fake"):
        call.launch(*ADDRESSES, STREAM)
    assert len(driver.launched) == 1
