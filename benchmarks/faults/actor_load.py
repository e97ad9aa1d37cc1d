"""The actors that faults meet: they write down what comes, call each other, and wait for each other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from typing import Any, NamedTuple

from benchmarks.faults.load import Watched, numbers
from meshbook import ProcMesh, errors
from meshbook.actor import Actor, ActorMesh, concurrent_endpoint, context, endpoint

HOLD_S = 60.0
EXIT_CODE = 3
TALK = 20  # so many messages each actor sends to all others


class Told(NamedTuple):
    """What an actor that waited for another has learned."""

    ranks: tuple[int, ...]  # that ended, if any
    text: str
    at: float  # on the machine's monotonic clock


class Member(Actor):
    """Keeps a ledger: the sender and the number of each message."""

    def __init__(self) -> None:
        self.ledger: list[tuple[int, int]] = []

    @endpoint
    def note(self, sender: int, number: int) -> int:
        self.ledger.append((sender, number))
        return number

    @endpoint
    def read(self) -> list[tuple[int, int]]:
        return self.ledger

    @endpoint
    def fail(self, rank: int, number: int) -> int:
        if context().actor_instance.rank.rank == rank:
            raise ValueError(number)
        return number

    @endpoint
    def exit(self) -> None:
        os._exit(EXIT_CODE)


class AsyncMember(Member):
    """The same on an event loop."""

    @endpoint
    async def note(self, sender: int, number: int) -> int:
        await asyncio.sleep(0)
        self.ledger.append((sender, number))
        return number


class Holder(Actor):
    """Holds calls until it is let go."""

    def __init__(self) -> None:
        self.free: asyncio.Event | None = None

    @concurrent_endpoint
    async def hold(self) -> None:
        self.free = self.free or asyncio.Event()
        await self.free.wait()

    @concurrent_endpoint
    async def let_go(self) -> None:
        if self.free is not None:
            self.free.set()


class Talker(Actor):
    """Calls other actors."""

    @endpoint
    def talk(self, members: ActorMesh[Any], me: int) -> list[bool]:
        """Of each message, whether all have answered it."""
        under_way = []
        for number in range(TALK):
            with contextlib.suppress(errors.MeshError):
                under_way.append(members.note.call(me, number))
        return [future.exception(HOLD_S) is None for future in under_way]

    @endpoint
    async def wait_for(self, holders: ActorMesh[Any]) -> Told:
        """Call actors that hold the call, and tell how it ended."""
        try:
            await holders.hold.call()
        except errors.MeshError as error:
            return Told(getattr(error, "ranks", ()), str(error), time.monotonic())
        return Told((), "", time.monotonic())


class ActorLoad:
    """Actors on a mesh, and the calls between them and from here."""

    def __init__(self, mesh: ProcMesh, number: int) -> None:
        self.mesh = mesh
        self.members: Any = mesh.spawn("members", AsyncMember if number % 2 else Member)
        self.talkers: Any = mesh.spawn("talkers", Talker)
        self.waiters: Any = mesh.spawn("waiters", Talker)
        self.holders: Any = mesh.spawn("holders", Holder)
        self.watched: list[Watched] = []
        self.posted: set[int] = set()
        self.talks: dict[int, Watched] = {}
        self.waits: dict[int, Watched] = {}
        for actors in self.actors:
            actors.initialized.get(HOLD_S)

    @property
    def actors(self) -> tuple[ActorMesh[Any], ...]:
        return self.members, self.talkers, self.waiters, self.holders

    def send(self, each: int) -> None:
        """Have all talk to all, and ``each`` calls and messages from here."""
        for rank in self.mesh.ranks:
            talk = self.talkers.select([rank]).talk.call(self.members, rank)
            self.talks[rank] = self._watch(talk, rank, "talk", None)
        for number in itertools.islice(numbers, each):
            self._watch(self.members.note.call(-1, number), number, "call to actors", number)
        for number in itertools.islice(numbers, each):
            self.members.note.broadcast(-1, number)
            self.posted.add(number)

    def hold(self, rank: int) -> Watched:
        """Have actors of all ranks wait for that of ``rank``; returns a call from here to all that hold."""
        held = self._watch(self.holders.hold.call(), 0, "held call", None)
        victim = self.holders.select([rank])
        for other in self.mesh.ranks:
            if other != rank:
                wait = self.waiters.select([other]).wait_for.call(victim)
                self.waits[other] = self._watch(wait, other, "wait of an actor", None)
        return held

    def wrong_ledgers(self, living: list[int]) -> list[str]:
        """A line for each message that was lost, doubled or out of order at an actor of ``living``."""
        wrong: list[str] = []
        part = self.members.select(living)
        for rank, ledger in zip(living, part.read.call().get(HOLD_S).values(), strict=True):
            for sender in {sender for sender, _ in ledger}:
                got = [number for other, number in ledger if other == sender]
                if got != sorted(set(got)):
                    wrong.append(f"rank {rank} has of sender {sender} twice or out of order: {got}")
            answered = {w.number for w in self.watched if w.expected is not None and rank in w.results()}
            due = {(-1, number) for number in answered | self.posted}
            due |= {(sender, number) for sender in living for number in range(TALK) if self._all_answered(sender)}
            if lost := due - set(ledger):
                wrong.append(f"rank {rank} lacks {sorted(lost)}")
        return wrong

    def stop(self) -> None:
        """End the actors that live."""
        living = [rank for rank in self.mesh.ranks if rank not in self.mesh.lost]
        if living:
            self.holders.select(living).let_go.call().get(HOLD_S)
        for done in [actors.stop() for actors in self.actors]:
            with contextlib.suppress(errors.WorkerLost):
                done.get(HOLD_S)

    def _all_answered(self, sender: int) -> bool:
        talk = self.talks[sender]
        return talk.error is None and all(talk.results()[sender])

    def _watch(self, future: Any, number: int, sort: str, expected: object) -> Watched:
        self.watched.append(Watched(future, number, sort, expected))
        return self.watched[-1]
