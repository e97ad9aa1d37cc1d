"""One scope for SIGINT: who takes the handler's place gives it back, and takes it from nobody who came later."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

import pytest

from meshbook.calls.interrupt import noticed
from meshbook.concurrency import forks
from meshbook.concurrency.interrupts import SigintScope, held_back


def test_a_press_goes_to_the_open_scope_and_the_handler_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    pressed: list[int] = []
    scope = SigintScope(lambda signum, frame: pressed.append(signum))
    assert scope.open() and scope.is_in_place
    signal.raise_signal(signal.SIGINT)
    scope.close()
    assert pressed == [signal.SIGINT]
    assert scope.before is before is signal.getsignal(signal.SIGINT)
    assert not scope.is_in_place
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_that_was_set_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)

    def another(signum: int, frame: FrameType | None) -> None:
        """Somebody else's."""

    scope = SigintScope(another.__call__)
    try:
        assert scope.open()
        signal.signal(signal.SIGINT, another)
        scope.close()
        assert signal.getsignal(signal.SIGINT) is another
    finally:
        signal.signal(signal.SIGINT, before)


def test_only_the_main_thread_and_only_where_python_handles_it() -> None:
    opened: list[bool] = []
    thread = threading.Thread(target=lambda: opened.append(SigintScope(print).open()))
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        opened.append(SigintScope(print).open())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert opened == [False, False]


def test_what_is_made_has_an_owner_before_an_interrupt_is_raised() -> None:
    made: list[int] = []
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        for number in range(1000):
            made.append(number)
    assert len(made) == 1000
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_of_a_rank_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "INTERRUPTS", {signal.SIGINT, signal.SIGUSR1})
    made: list[int] = []
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        made.append(1)
    assert made == []


def test_presses_that_are_noticed_are_counted_and_end_a_wait() -> None:
    with noticed() as counter:
        signal.raise_signal(signal.SIGINT)
        began = time.monotonic()
        counter.wait(began + 60)
        assert time.monotonic() - began < 30
        assert counter.take() and not counter.take()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
