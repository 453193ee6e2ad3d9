"""What real signals do to this process."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from runner.interrupts import SIGNALS, Interrupted, interruptible, stoppable

BOTH = pytest.mark.parametrize("number", SIGNALS)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.001)  # the handler runs between two instructions of the interpreter


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


@BOTH
def test_while_interruptible_a_signal_ends_the_work_at_once(number: signal.Signals) -> None:
    before = handlers()
    with pytest.raises(Interrupted), interruptible():
        send(number)
    assert handlers() == before


@BOTH
def test_the_first_signal_is_a_request_and_the_work_goes_on(number: signal.Signals) -> None:
    with stoppable() as stop:
        assert not stop
        send(number)
        assert stop
        assert stop, "asking does not take the request back"


@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
def test_the_second_signal_ends_the_work_whichever_it_is(first: signal.Signals, second: signal.Signals) -> None:
    before = handlers()
    with stoppable() as stop:
        send(first)
        assert stop
        with pytest.raises(Interrupted):
            send(second)
    assert handlers() == before


def test_after_the_stoppable_part_a_signal_interrupts_again() -> None:
    with interruptible():
        with stoppable() as stop:
            pass
        with pytest.raises(Interrupted):
            send(signal.SIGTERM)
        assert not stop


def test_an_error_inside_gives_the_signals_back() -> None:
    before = handlers()
    for context in (interruptible, stoppable):
        with pytest.raises(ValueError, match="a fault"), context():
            raise ValueError("a fault")
        assert handlers() == before


def test_an_interruption_is_no_error_that_code_which_handles_errors_would_take() -> None:
    with pytest.raises(Interrupted), interruptible(), contextlib.suppress(Exception):
        send(signal.SIGINT)
