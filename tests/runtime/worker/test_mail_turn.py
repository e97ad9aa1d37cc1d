"""An idle actor that is alone in its process reads the mail, and keeps nobody from theirs when it is busy."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import mail_ranks
import pytest
from patience import wait_until

from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, ActorError, endpoint
from meshbook.errors import CallTimeout

pytestmark = pytest.mark.slow


class Clerk(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def ask(self, other: Any, times: int) -> int:
        return sum(other.echo.call_one(1).get() for _ in range(times))

    @endpoint
    def stream(self, other: Any, times: int) -> int:
        return sum(part.get() for _ in range(times) for part in other.echo.stream(1))

    @endpoint
    def wait_for(self, other: Any, seconds: float, timeout: float | None) -> None:
        other.sleep.call_one(seconds).get(timeout)


class Waiter(Actor):
    """One with an event loop."""

    @endpoint
    async def echo(self, value: int) -> int:
        return value

    @endpoint
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @endpoint
    async def block(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    async def ask(self, other: Any, times: int) -> int:
        return sum([await other.echo.call_one(1) for _ in range(times)])

    @endpoint
    async def wait_for(self, other: Any, seconds: float) -> None:
        await other.sleep.call_one(seconds)

    @endpoint
    async def told_by_a_thread(self) -> int:
        loop = asyncio.get_running_loop()
        told = loop.create_future()
        threading.Timer(0.1, loop.call_soon_threadsafe, (told.set_result, 7)).start()
        return int(await told)


class Runner(Actor):
    """One without, whose endpoint makes a loop of its own."""

    @endpoint
    def ask(self, other: Any) -> float:
        async def calls() -> None:
            for _ in range(20):
                await other.echo.call_one(1)

        started = time.monotonic()
        asyncio.run(calls())
        return time.monotonic() - started

    @endpoint
    def ask_without_loop(self, other: Any) -> float:
        started = time.monotonic()
        for _ in range(20):
            other.echo.call_one(1).get(20)
        return time.monotonic() - started


def reader() -> str:
    """Who reads the mail of this rank."""
    ident = mail_ranks.worker().mail.turn.reader
    return next((thread.name for thread in threading.enumerate() if thread.ident == ident), "")


def keep_private() -> None:
    mail_ranks.worker().mail.turn.keep_private()


def ask(other: Any) -> float:
    """On a rank's main thread: how long an answer takes."""
    started = time.monotonic()
    other.echo.call_one(1).get(20)
    return time.monotonic() - started


@pytest.fixture
def procs() -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 2}, group=False) as mesh:
        yield mesh


@pytest.fixture
def clerks(procs: ProcMesh) -> Any:
    clerks: Any = procs.spawn("clerk", Clerk)
    clerks.echo.call(0).get(20)
    wait_until(lambda: readers(procs) == ["actor clerk"] * 2)
    return clerks


@pytest.fixture
def waiters(procs: ProcMesh) -> Any:
    waiters: Any = procs.spawn("waiter", Waiter)
    waiters.echo.call(0).get(20)
    wait_until(lambda: readers(procs) == ["actor waiter"] * 2)
    return waiters


def readers(procs: ProcMesh) -> list[str]:
    return procs.execute(reader).get(20).values()


def test_mail_of_others_does_not_wait_for_a_busy_actor(procs: ProcMesh, clerks: Any) -> None:
    busy = clerks.sleep.call(60)
    wait_until(lambda: readers(procs) == ["meshbook.mail"] * 2)
    others: Any = procs.spawn("other", Clerk)
    assert others.echo.call(1).get(5).values() == [1, 1]
    assert procs.slice(gpus=0).execute(ask, others.slice(gpus=1)).get(20).values()[0] < 2
    busy.cancel()
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        busy.get(5)
    assert clerks.echo.call(2).get(5).values() == [2, 2]
    others.stop().get(20)
    clerks.echo.call(3).get(5)
    wait_until(lambda: readers(procs) == ["actor clerk"] * 2)


def test_who_waits_for_an_answer_gets_it_while_the_actor_of_the_process_is_busy(procs: ProcMesh, clerks: Any) -> None:
    first, second = clerks.slice(gpus=0), clerks.slice(gpus=1)
    for _ in range(4):
        busy = first.sleep.call_one(0.5)
        assert procs.slice(gpus=0).execute(ask, second).get(20).values()[0] < 0.3
        busy.get(20)


def test_an_actor_that_waits_for_another_reads_the_answer_itself(procs: ProcMesh, clerks: Any) -> None:
    first, second = clerks.slice(gpus=0), clerks.slice(gpus=1)
    waiting = first.wait_for.call_one(second, 1.0, None)
    time.sleep(0.3)
    assert readers(procs)[0] == "actor clerk"
    waiting.get(20)
    assert first.ask.call_one(second, 300).get(20) == 300
    assert first.stream.call_one(second, 20).get(20) == 20
    with pytest.raises(ActorError, match=CallTimeout.__name__):
        first.wait_for.call_one(second, 1.0, 0.2).get(20)


def test_an_interrupt_reaches_an_actor_that_reads_it_itself(clerks: Any) -> None:
    first, second = clerks.slice(gpus=0), clerks.slice(gpus=1)
    for _ in range(5):
        waiting = first.wait_for.call_one(second, 60, None)
        time.sleep(0.1)
        waiting.cancel()
        with pytest.raises(ActorError, match="KeyboardInterrupt"):
            waiting.get(2)
        assert clerks.echo.call(1).get(5).values() == [1, 1]  # the other was interrupted as well


def test_messages_that_come_together_keep_their_order(clerks: Any) -> None:
    for wait_s in (0.0, 0.001, 0.004, 0.1):
        futures = [clerks.echo.call(number) for number in range(200)]
        time.sleep(wait_s)
        assert [future.get(20).values() for future in futures] == [[number] * 2 for number in range(200)]


def test_where_a_debugger_may_stop_actors_their_mail_has_its_own_thread(procs: ProcMesh, clerks: Any) -> None:
    procs.execute(keep_private).get(20)
    wait_until(lambda: readers(procs) == ["meshbook.mail"] * 2)
    assert clerks.echo.call(1).get(5).values() == [1, 1]
    assert clerks.slice(gpus=0).ask.call_one(clerks.slice(gpus=1), 20).get(20) == 20
    assert readers(procs) == ["meshbook.mail"] * 2


def test_an_actor_that_reads_the_mail_ends_when_it_is_told_to(procs: ProcMesh, clerks: Any) -> None:
    clerks.stop().get(5)
    again: Any = procs.spawn("clerk", Clerk)
    assert again.echo.call(4).get(5).values() == [4, 4]
    procs.stop().get(5)


def test_an_event_loop_that_has_nothing_to_do_reads_the_mail(procs: ProcMesh, waiters: Any) -> None:
    first, second = waiters.slice(gpus=0), waiters.slice(gpus=1)
    assert first.ask.call_one(second, 100).get(20) == 100
    assert waiters.told_by_a_thread.call().get(20).values() == [7, 7]
    futures = [waiters.echo.call(number) for number in range(200)]
    assert [future.get(20).values() for future in futures] == [[number] * 2 for number in range(200)]
    for _ in range(3):
        waiting = first.wait_for.call_one(second, 60)
        time.sleep(0.1)
        assert readers(procs) == ["actor waiter"] * 2
        waiting.cancel()
        with pytest.raises(ActorError, match="KeyboardInterrupt"):
            waiting.get(2)
        assert waiters.echo.call(1).get(5).values() == [1, 1]
    waiters.stop().get(5)
    again: Any = procs.spawn("waiter", Waiter)
    assert again.echo.call(4).get(5).values() == [4, 4]


def test_a_loop_that_blocks_keeps_nobody_from_their_mail(procs: ProcMesh, waiters: Any) -> None:
    for _ in range(3):
        busy = waiters.slice(gpus=0).block.call_one(1.0)
        assert procs.slice(gpus=0).execute(ask, waiters.slice(gpus=1)).get(20).values()[0] < 0.5
        busy.get(20)
    busy = waiters.block.call(60)
    wait_until(lambda: readers(procs) == ["meshbook.mail"] * 2)
    busy.cancel()
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        busy.get(5)


def test_a_loop_that_an_endpoint_runs_gets_its_answers_at_once(procs: ProcMesh) -> None:
    runner: Any = procs.slice(gpus=0).spawn("runner", Runner)
    other: Any = procs.slice(gpus=1).spawn("waiter", Waiter)
    runner.ask.call_one(other).get(20)  # it may import asyncio
    took_s, without_loop_s = zip(
        *[(runner.ask.call_one(other).get(20), runner.ask_without_loop.call_one(other).get(20)) for _ in range(5)],
        strict=True,
    )
    assert min(took_s) < 0.1 or min(took_s) < 3 * min(without_loop_s)  # on a busy machine both take long
