"""Ranks of one host that often call each other do so directly, with the promises of a call that goes by their agent."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import mail_ranks
import numpy as np
import pytest
from patience import wait_until

from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, ActorError, endpoint
from meshbook.mesh.rank_calls import start_cell
from meshbook.worker.direct_calls import DIAL_AFTER, RankLinks

pytestmark = pytest.mark.slow

LARGE = np.zeros(1 << 17, np.uint8)  # it travels in shared memory, and so by the agent


class Clerk(Actor):
    def __init__(self) -> None:
        self.notes: list[int] = []

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def note(self, number: int, more: object = None) -> None:
        self.notes.append(number)

    @endpoint
    def read(self) -> list[int]:
        notes, self.notes = self.notes, []
        return notes

    @endpoint
    def say(self, text: str) -> None:
        print(text)

    @endpoint
    def fail(self) -> None:
        raise ValueError("bad shard")

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def warm(self, other: Any) -> int:
        for number in range(2 * DIAL_AFTER[False]):
            assert other.echo.call_one(number).get(20) == number
        return len(links().links.all())

    @endpoint
    def many_sizes(self, other: Any) -> list[int]:
        return [len(other.echo.call_one(bytes(size)).get(20)) for size in (1, 1000, 60_000, 190_000, 1, 1 << 20, 1)]

    @endpoint
    def mixed(self, other: Any, others: Any, count: int) -> None:
        for number in range(count):
            if number % 37 == 5:
                other.note.broadcast(number, LARGE)
            elif number % 53 == 7:
                others.note.broadcast(number)
            elif number % 5:
                other.note.broadcast(number)
            else:
                other.note.call_one(number)

    @endpoint
    def flood(self, other: Any, count: int) -> None:
        for number in range(count):
            other.note.broadcast(number, b"x" * 1000)

    @endpoint
    def wait_for(self, other: Any, how: str, *args: Any) -> Any:
        return getattr(other, how).call_one(*args).get()

    @endpoint
    def fork(self, other: Any) -> int:
        if not (pid := os.fork()):
            try:
                other.echo.call_one(1).get(5)
            except BaseException as error:
                os._exit(7 if "was forked from process" in str(error) else 1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert other.echo.call_one(2).get(20) == 2
        return os.waitstatus_to_exitcode(status)


class AsyncClerk(Actor):
    @endpoint
    async def warm(self, other: Any) -> int:
        for number in range(2 * DIAL_AFTER[False]):
            assert await other.echo.call_one(number) == number
        return len(links().links.all())


def links() -> RankLinks:
    return mail_ranks.worker().mail._links


def callers() -> int:
    """How many ranks have a link to this one."""
    return sum(link.caller is not None for link in mail_ranks.worker().mail.direct._links.values())


def links_left() -> list[int]:
    """Links of this rank to others, and calls by them that are open."""
    return [len(links().links.all()), len(links().links.open)]


def break_links() -> None:
    """As user code does that closes what it has not opened."""
    for link in list(mail_ranks.worker().mail.direct._links.values()):
        if link.caller is not None:
            socket.socket(fileno=os.dup(link.fd)).shutdown(socket.SHUT_RDWR)


@pytest.fixture
def procs() -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 3}, group=False, torch=False) as mesh:
        yield mesh


@pytest.fixture
def clerks(procs: ProcMesh) -> Any:
    clerks: Any = procs.spawn("clerk", Clerk)
    assert clerks.slice(gpus=0).warm.call_one(clerks.slice(gpus=1)).get(30) == 1
    return clerks


def test_ranks_that_call_each_other_often_have_a_link(procs: ProcMesh, clerks: Any) -> None:
    first, second = clerks.slice(gpus=0), clerks.slice(gpus=1)
    assert procs.execute(callers).get(20).values() == [0, 1, 0]
    assert first.many_sizes.call_one(second).get(30) == [1, 1000, 60_000, 190_000, 1, 1 << 20, 1]
    assert second.warm.call_one(first).get(30) == 1
    with pytest.raises(ActorError, match="bad shard"):
        first.wait_for.call_one(second, "fail").get(20)
    others: Any = procs.slice(gpus=2).spawn("async clerk", AsyncClerk)
    assert others.warm.call_one(second).get(30) == 1
    assert procs.execute(callers).get(20).values() == [1, 2, 0]


def test_messages_keep_their_order_whichever_way_each_goes(procs: ProcMesh, clerks: Any) -> None:
    first, second = clerks.slice(gpus=0), clerks.slice(gpus=1)
    for count in (100, 1500):
        first.mixed.call_one(second, clerks.slice(gpus=slice(1, 3)), count).get(60)
        assert first.wait_for.call_one(second, "read").get(30) == list(range(count))
    first.wait_for.call_one(second, "echo", 1).get(20)
    assert first.warm.call_one(second).get(30) == 1
    wait_until(lambda: procs.slice(gpus=0).execute(links_left).get(20).values() == [[1, 0]])
    wait_until(lambda: procs.slice(gpus=1).execute(callers).get(20).values() == [1])


def test_who_sends_more_than_is_read_waits_and_can_be_interrupted(clerks: Any) -> None:
    first, second = clerks.slice(gpus=0), clerks.slice(gpus=1)
    second.sleep.call_one(0.5)
    first.flood.call_one(second, 4000).get(60)
    assert second.read.call_one().get(60) == list(range(4000))


def test_who_waits_for_a_rank_that_dies_is_told_at_once(procs: ProcMesh, clerks: Any) -> None:
    first, second = clerks.slice(gpus=0), clerks.slice(gpus=1)
    waiting = first.wait_for.call_one(second, "sleep", 60)
    time.sleep(0.2)
    started = time.monotonic()
    os.kill(procs.status()[1].pid, signal.SIGKILL)
    with pytest.raises(ActorError, match="killed by SIGKILL"):
        waiting.get(20)
    assert time.monotonic() - started < 2
    with pytest.raises(ActorError, match="killed by SIGKILL"):
        first.wait_for.call_one(second, "echo", 1).get(20)
    procs.heal()
    again: Any = procs.slice(gpus=1).spawn("again", Clerk)
    assert first.warm.call_one(again).get(30) == 1
    assert procs.slice(gpus=0).execute(links_left).get(20).values() == [[1, 0]]


def test_an_actor_that_was_stopped_says_so(clerks: Any, procs: ProcMesh) -> None:
    first, second = clerks.slice(gpus=0), clerks.slice(gpus=1)
    other: Any = procs.slice(gpus=1).spawn("other", Clerk)
    first.wait_for.call_one(other, "echo", 1).get(20)
    other.stop().get(20)
    with pytest.raises(ActorError, match="were stopped"):
        first.wait_for.call_one(other, "echo", 1).get(20)
    assert first.wait_for.call_one(second, "echo", 1).get(20) == 1


def test_an_interrupt_reaches_what_was_called_directly(clerks: Any) -> None:
    first, second = clerks.slice(gpus=0), clerks.slice(gpus=1)
    for _ in range(5):
        waiting = first.wait_for.call_one(second, "sleep", 60)
        time.sleep(0.1)
        waiting.cancel()
        with pytest.raises(ActorError, match="KeyboardInterrupt"):
            waiting.get(2)
        assert clerks.echo.call(1).get(5).values() == [1, 1, 1]


def test_the_end_of_a_mesh_ends_calls_to_it(procs: ProcMesh, clerks: Any) -> None:
    with this_host().spawn_procs({"gpus": 1}, group=False, torch=False) as mesh:
        other: Any = mesh.spawn("other", Clerk)
        assert clerks.slice(gpus=0).warm.call_one(other).get(30) == 2
        waiting = clerks.slice(gpus=0).wait_for.call_one(other, "sleep", 60)
        time.sleep(0.2)
    with pytest.raises(ActorError, match="stopped"):
        waiting.get(20)
    assert procs.slice(gpus=0).execute(links_left).get(20).values() == [[1, 0]]


def test_a_link_that_user_code_breaks_costs_nothing(procs: ProcMesh, clerks: Any) -> None:
    first, second = clerks.slice(gpus=0), clerks.slice(gpus=1)
    waiting = [first.wait_for.call_one(second, "sleep", 2), first.wait_for.call_one(second, "echo", 7)]
    time.sleep(0.2)
    procs.slice(gpus=1).execute(break_links).get(20)
    assert [future.get(20) for future in waiting] == [None, 7]
    assert first.warm.call_one(second).get(30) == 1


def test_a_rank_that_dies_behind_a_broken_link_is_told(procs: ProcMesh, clerks: Any) -> None:
    first, second = clerks.slice(gpus=0), clerks.slice(gpus=1)
    waiting = first.wait_for.call_one(second, "sleep", 60)
    time.sleep(0.2)
    procs.slice(gpus=1).execute(break_links).get(20)
    clerks.slice(gpus=2).wait_for.call_one(second, "echo", 1)
    time.sleep(0.2)
    os.kill(procs.status()[1].pid, signal.SIGKILL)
    with pytest.raises(ActorError, match="killed by SIGKILL"):
        waiting.get(20)


def test_a_forked_child_has_no_links(clerks: Any) -> None:
    assert clerks.slice(gpus=0).fork.call_one(clerks.slice(gpus=1)).get(30) == 7


def test_what_was_printed_comes_before_the_answer(procs: ProcMesh, clerks: Any) -> None:
    first = procs.slice(gpus=0)
    first.push({"clerk": clerks.slice(gpus=1)}).get(20)
    before = first.execute(links_left).get(20).values()
    for number in range(20):
        told: list[object] = []
        start_cell(first, f"clerk.say.call_one('line {number}').get()", on_output=told.append).future.get(20)
        assert f"line {number}" in str(told)
    assert first.execute(links_left).get(20).values() == before


def test_ranks_that_get_other_numbers_get_other_links(procs: ProcMesh, clerks: Any) -> None:
    first, third = clerks.slice(gpus=0), clerks.slice(gpus=2)
    assert first.warm.call_one(third).get(30) == 2
    os.kill(procs.status()[1].pid, signal.SIGKILL)
    wait_until(lambda: procs.lost == (1,))
    fewer = procs.shrink()
    assert first.warm.call_one(third).get(30) == 1
    assert first.wait_for.call_one(third, "echo", 1).get(20) == 1
    wait_until(lambda: fewer.slice(gpus=0).execute(links_left).get(20).values() == [[1, 0]])
