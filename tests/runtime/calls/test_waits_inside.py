"""Waits that cannot end are refused, and what ends a wait from outside ends it: time limits, handlers, callbacks."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from meshbook import ProcMesh, this_host
from meshbook.concurrency.background import WORDS
from meshbook.errors import UsageError


class LimitError(Exception):
    """Libraries for time limits define one like it."""


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 1}, torch=False) as made:
        made.run("import time").get(60)
        yield made


@pytest.fixture
def still_served(procs: ProcMesh, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Afterwards a call is answered, and no fault of ours was told."""
    yield
    assert procs.run("6 * 7").get(20).values() == [42]
    assert WORDS not in capfd.readouterr().err


@contextlib.contextmanager
def on_signal(handler: Callable[..., object], after_s: float = 0.3) -> Iterator[threading.Timer]:
    """Have SIGUSR1 come, and be handled so, while the block waits."""
    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        yield timer
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def expire(error: type[Exception], *_: object) -> None:
    raise error("the limit")


class Expiring:
    def expire(self, *_: object) -> None:
        raise TimeoutError("the limit")

    __call__ = expire


@pytest.mark.parametrize(
    "handler",
    [lambda *_: expire(LimitError), functools.partial(expire, TimeoutError), Expiring().expire, Expiring()],
    ids=["function", "partial", "method", "object"],
)
def test_a_handler_that_raises_ends_the_wait_and_the_call(procs: ProcMesh, still_served: None, handler: object) -> None:
    with pytest.raises((LimitError, TimeoutError), match=r"^the limit$"), on_signal(handler):  # type: ignore[arg-type]
        procs.run("time.sleep(600)").get()


def test_what_a_thread_raises_in_the_one_that_waits_ends_the_wait(procs: ProcMesh, still_served: None) -> None:
    me = ctypes.c_ulong(threading.get_ident())
    timer = threading.Timer(0.3, ctypes.pythonapi.PyThreadState_SetAsyncExc, (me, ctypes.py_object(LimitError)))
    timer.start()
    with pytest.raises(LimitError):
        procs.run("time.sleep(600)").get()
    timer.join()


def test_what_comes_in_the_midst_of_what_is_served_ends_the_wait(procs: ProcMesh, still_served: None) -> None:
    """A handler may run at any line of ours, such as that of a heartbeat: it is none of our faults."""
    controller = procs._controller
    with pytest.raises(LimitError), on_signal(functools.partial(expire, LimitError), after_s=60) as sent:
        timer = threading.Timer(0.3, controller.submit, [lambda: signal.raise_signal(signal.SIGUSR1)])
        timer.start()
        sent.cancel()
        procs.run("time.sleep(600)").get()


def test_handlers_that_wait_are_refused(procs: ProcMesh, still_served: None) -> None:
    with pytest.raises(UsageError, match="in the handler of a signal"), on_signal(lambda *_: procs.run("1").get()):
        procs.run("time.sleep(600)").get()


def test_callbacks_that_wait_are_refused(procs: ProcMesh, still_served: None) -> None:
    refused, asked = list[str](), threading.Event()

    def ask(_: object) -> None:
        try:
            procs.run("1").get()
        except UsageError as error:
            refused.append(str(error))
        asked.set()

    future = procs.run("time.sleep(0.3)")
    future.add_done_callback(ask)
    assert asked.wait(60)
    assert "in a callback of a future" in refused[0]
    following = procs.run("time.sleep(0.3)").then(lambda _: procs.run("1").get())
    with pytest.raises(UsageError, match="in a callback of a future"):
        following.get(60)


def test_finalizers_that_wait_are_refused_where_answers_come_in(procs: ProcMesh, still_served: None) -> None:
    outcomes = list[object]()

    class Holder:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            try:
                outcomes.append(procs.run("1").get(60).values())
            except UsageError as error:
                outcomes.append(type(error))

    before = gc.get_threshold()
    gc.set_threshold(50)
    try:
        for _ in range(100):
            Holder()
            procs.run("1").get(60)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert len(outcomes) == 100
    assert all(outcome in ([1], UsageError) for outcome in outcomes)


def test_a_callback_may_ask_for_what_is_there(procs: ProcMesh) -> None:
    done = procs.run("1")
    assert done.get(60).values() == [1]
    assert procs.run("2").then(lambda two: [*two.values(), *done.get().values()]).get(60) == [2, 1]
