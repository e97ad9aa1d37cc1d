from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from meshbook.concurrency.future import Future, MappedFuture


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.fixture
def later() -> Iterator[Callable[..., None]]:
    """Call something from another thread after 20 ms."""
    timers: list[threading.Timer] = []

    def start(function: Callable[..., Any], *args: Any) -> None:
        timers.append(threading.Timer(0.02, function, args))
        timers[-1].start()

    yield start
    for timer in timers:
        timer.join()


def test_get_waits_for_the_result_of_another_thread(later: Callable[..., None]) -> None:
    future: Future[int] = Future()
    assert not future.done()
    later(future.set_result, 3)
    assert future.get() == future.get(0) == future.result() == 3
    assert future.done()
    assert future.exception() is None


def test_get_raises_the_error_with_a_traceback_that_does_not_grow(later: Callable[..., None]) -> None:
    future: Future[int] = Future()
    later(future.set_exception, ValueError("bad shard"))
    lengths = set()
    for _ in range(3):
        with pytest.raises(ValueError, match="bad shard") as caught:
            future.get(timeout=5)
        lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(lengths) == 1
    assert isinstance(future.exception(), ValueError)


def test_the_first_outcome_wins() -> None:
    future: Future[int] = Future()
    assert future.set_result(1)
    assert not future.set_result(2)
    assert not future.set_exception(ValueError())
    assert future.get() == 1


def test_many_threads_complete_wait_and_call_back_exactly_once() -> None:
    for _ in range(30):
        future: Future[int] = Future()
        winners: list[int] = []
        called: list[int] = []
        got: list[int] = []

        def work(number: int, future: Future[int] = future, *lists: list[int]) -> None:
            winners, called, got = lists
            future.add_done_callback(lambda _: called.append(number))
            if number % 2 and future.set_result(number):
                winners.append(number)
            got.append(future.get(timeout=5))

        threads = [threading.Thread(target=work, args=(n, future, winners, called, got)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert got == winners * 6
        assert sorted(called) == list(range(6))


def test_a_timeout_leaves_the_future_open() -> None:
    future: Future[int] = Future()
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no result within 0\.02 s"):
        future.get(timeout=0.02)
    assert 0.015 < time.monotonic() - started < 1
    for timeout in (0, -1):
        with pytest.raises(TimeoutError):
            future.get(timeout=timeout)
    assert not any(future._listeners.values())
    future.set_result(1)
    assert future.get(timeout=0) == 1


def test_a_timeout_can_say_who_is_silent() -> None:
    future: Future[int] = Future(on_timeout=lambda timeout_s: LookupError(f"rank 3 was silent for {timeout_s} s"))
    with pytest.raises(LookupError, match=r"rank 3 was silent for 0\.01 s"):
        future.get(timeout=0.01)
    with pytest.raises(LookupError):
        future.then(str).get(timeout=0.01)


def test_an_interrupt_ends_the_wait_at_once(later: Callable[..., None]) -> None:
    future: Future[int] = Future()
    later(os.kill, os.getpid(), signal.SIGINT)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        future.get()
    later(os.kill, os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        future.get(timeout=20)
    assert time.monotonic() - started < 1
    assert not any(future._listeners.values())


def test_a_signal_handler_may_complete_what_the_main_thread_waits_for(later: Callable[..., None]) -> None:
    future: Future[str] = Future()
    previous = signal.signal(signal.SIGUSR1, lambda *_: future.set_result("by signal"))
    try:
        later(os.kill, os.getpid(), signal.SIGUSR1)
        assert future.get(timeout=5) == "by signal"
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_get_works_within_a_running_loop(later: Callable[..., None]) -> None:
    async def cell() -> int:
        future: Future[int] = Future()
        later(future.set_result, 4)
        return future.get(timeout=5)

    assert asyncio.run(cell()) == 4


def test_await_waits_without_blocking_the_loop(later: Callable[..., None]) -> None:
    async def cell() -> tuple[int, int, list[int]]:
        future: Future[int] = Future()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.002)

        task = asyncio.create_task(tick())
        waiting = asyncio.ensure_future(_value_of(future))
        while ticks <= 2:  # others run while it waits
            await asyncio.sleep(0.001)
        assert not waiting.done()
        later(future.set_result, 5)
        value = await waiting
        task.cancel()
        return value, ticks, await asyncio.gather(future, future.then(lambda value: value + 1))

    value, ticks, both = asyncio.run(asyncio.wait_for(cell(), 30))
    assert (value, both) == (5, [5, 6])
    assert ticks > 2


async def _value_of(future: Future[int]) -> int:
    return await future


def test_await_raises_the_error(later: Callable[..., None]) -> None:
    async def cell() -> None:
        future: Future[int] = Future()
        later(future.set_exception, ValueError("bad shard"))
        await asyncio.wait_for(future, 5)

    with pytest.raises(ValueError, match="bad shard"):
        asyncio.run(cell())


def test_giving_up_an_await_ends_the_wait_and_not_the_work() -> None:
    future: Future[int] = Future(on_cancel=lambda: pytest.fail("the work was cancelled"))

    async def cell() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)

    asyncio.run(cell())
    assert not any(future._listeners.values())
    assert future.set_result(1)


def test_completing_after_the_loop_was_closed_makes_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[int] = Future()
    loop = asyncio.new_event_loop()

    async def wait() -> int:
        return await future

    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    assert future.set_result(1)
    assert not caplog.records
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # the test's own task, left behind on purpose
    task.get_coro().close()  # type: ignore[union-attr]


def test_callbacks_run_once_in_order_on_the_completing_thread_or_at_once(later: Callable[..., None]) -> None:
    future: Future[int] = Future()
    seen: list[tuple[str, Future[int], int]] = []
    done = threading.Event()
    for name in "ab":
        future.add_done_callback(lambda future, name=name: seen.append((name, future, threading.get_ident())))
    future.add_done_callback(lambda _: done.set())
    later(future.set_result, 1)
    assert done.wait(5)
    future.add_done_callback(lambda future: seen.append(("c", future, threading.get_ident())))
    assert [(name, which) for name, which, _ in seen] == [("a", future), ("b", future), ("c", future)]
    assert seen[0][2] == seen[1][2] != seen[2][2] == threading.get_ident()


def test_a_failing_callback_is_logged_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[int] = Future()
    seen: list[int] = []
    future.add_done_callback(lambda future: 1 / 0)
    future.add_done_callback(lambda future: seen.append(future.get()))
    with caplog.at_level(logging.ERROR):
        assert future.set_result(1)
    assert seen == [1]
    assert [record.getMessage() for record in caplog.records] == ["a callback of a future failed"]


def test_then_applies_a_function_or_passes_the_error_on() -> None:
    future: Future[int] = Future()
    text, broken = future.then(str), future.then(lambda value: value / 0)
    future.set_result(3)
    assert text.get() == "3"
    assert isinstance(broken.exception(), ZeroDivisionError)
    failed: Future[int] = Future()
    after = failed.then(str)
    error = ValueError("bad shard")
    failed.set_exception(error)
    assert after.exception() is error


def test_a_mapped_future_is_that_of_its_source() -> None:
    asked: list[str] = []
    source: Future[int] = Future(on_cancel=lambda: asked.append("cancel"))
    mapped = MappedFuture(source, lambda value: value + 1)
    assert (mapped.done(), mapped.wait(0.01), repr(mapped)) == (False, False, repr(source))
    assert mapped.cancel()
    told: list[object] = []
    mapped.add_done_callback(told.append)
    following = mapped.then(str)
    source.set_result(3)
    assert asked == ["cancel"]
    assert told == [mapped]
    assert (mapped.done(), mapped.get(), following.get()) == (True, 4, "4")
    assert asyncio.run(_awaited(mapped)) == 4


async def _awaited(future: Future[int]) -> int:
    return await future


def test_cancel_asks_and_the_work_ends_the_future() -> None:
    asked: list[str] = []
    future: Future[int] = Future(on_cancel=lambda: asked.append("cancel"))
    after = future.then(str)
    assert future.cancel()
    assert after.cancel()
    assert asked == ["cancel", "cancel"]
    assert not future.done()
    future.set_exception(KeyboardInterrupt("obeyed"))
    assert not future.cancel()
    with pytest.raises(KeyboardInterrupt):
        after.get()
    assert asked == ["cancel", "cancel"]


def test_cancel_without_work_to_end_completes_at_once() -> None:
    future: Future[int] = Future()
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.get()


def test_a_forgotten_failure_makes_no_noise_and_no_cycle(caplog: pytest.LogCaptureFixture) -> None:
    def failed() -> Future[int]:
        future: Future[int] = Future(on_cancel=lambda: future)  # its hook holds it until it is complete
        future.set_exception(ValueError("bad shard"))
        return future

    gc.collect()
    gc.disable()
    try:
        future = failed()
        with pytest.raises(ValueError, match="bad shard"):
            future.get()
        gone = weakref.ref(future)
        del future
        assert gone() is None
    finally:
        gc.enable()
    assert not caplog.records


def test_the_repr_says_how_it_stands() -> None:
    future: Future[int] = Future()
    assert repr(future) == "<Future: waiting; .get() gives the result>"
    future.set_exception(ValueError())
    assert repr(future) == "<Future: failed with ValueError>"
