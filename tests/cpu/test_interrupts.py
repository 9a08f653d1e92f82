"""Interrupts that are held back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from sagegen.interrupts import deferred_interrupts


def test_an_interrupt_is_raised_after_the_block_and_not_in_it() -> None:
    done = []

    def work() -> None:
        with deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("the whole block")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the whole block"]


def test_the_handler_before_is_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_change_nothing() -> None:
    seen = []

    def work() -> None:
        with deferred_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
