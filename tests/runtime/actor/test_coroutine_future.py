"""Futures of coroutines that begin when they are wanted."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from meshbook.actor import returns_future
from meshbook.actor.errors import ArgumentsError

pytestmark = pytest.mark.monarch

begun: list[object] = []
name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")


@pytest.fixture(autouse=True)
def _nothing_has_begun() -> None:
    begun.clear()


@returns_future
async def work(value: int) -> int:
    begun.append(value)
    await asyncio.sleep(0)
    return value + 1


@returns_future
async def never() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        begun.append("cleaned up")


def test_it_begins_when_it_is_wanted_and_runs_once() -> None:
    future = work(1)
    assert begun == [] and not future.done()
    assert future.get() == future.result() == 2 and begun == [1] and future.exception() is None
    del future
    work(7)
    assert begun == [1]


def test_it_is_awaited_on_the_loop_that_runs() -> None:
    async def both() -> tuple[int, int, int]:
        future = work(5)
        return await future, await future, await work(6).as_asyncio()

    assert asyncio.run(both()) == (6, 6, 7) and begun == [5, 6]


def test_get_beside_a_running_loop() -> None:
    async def inside() -> int:
        return work(8).get(30)

    assert asyncio.run(inside()) == 9


def test_who_is_late_cancels_what_it_has_begun() -> None:
    future = never()
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"not done within 0.05 s"):
            future.get(0.05)
    assert begun == ["cleaned up"]


def test_errors_and_the_callers_context_come_through() -> None:
    @returns_future
    async def fail() -> None:
        raise KeyError(name.get())

    name.set("somebody")
    future = fail()
    with pytest.raises(KeyError, match="somebody"):
        future.get()
    assert isinstance(future.exception(), KeyError)


def test_several_threads_share_one_run() -> None:
    future, values = work(3), []
    threads = [threading.Thread(target=lambda: values.append(future.get(30))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [4] * 4 and begun == [3]


def test_only_async_functions_are_wrapped() -> None:
    with pytest.raises(ArgumentsError, match="wraps an `async def`"):
        returns_future(len)  # type: ignore[arg-type]
