"""Actors of the tests of order: some send as a program says, the others write down what comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from meshbook.actor import Actor, ActorMesh, concurrent_endpoint, endpoint
from meshbook.errors import MeshError


class Step(NamedTuple):
    """One message: to which actors, and how it is sent."""

    how: str  # ``broadcast``, ``call``, ``await`` (call, and wait for it), ``cancel`` (call, and cancel it at once)
    book: int  # to which of the meshes of actors
    ranks: tuple[int, ...]


class Sent(NamedTuple):
    """What became of a step."""

    outcome: str
    """``sent``, ``answered``, ``cancelled``, ``failed`` or ``refused``, which is an error of the call itself."""
    answered: dict[int, int]  # rank to what its actor gave


class Book(Actor):
    """Writes down what comes, in plain endpoints."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, int]] = []

    @endpoint
    def write(self, sender: int, number: int) -> int:
        self.lines.append((sender, number))
        return number

    @endpoint
    def read(self) -> list[tuple[int, int]]:
        return self.lines


class AsyncBook(Book):
    """The same on an event loop, with steps between taking a message and writing it down."""

    @endpoint
    async def write(self, sender: int, number: int) -> int:
        for _ in range(number % 3):
            await asyncio.sleep(0)
        self.lines.append((sender, number))
        return number

    @concurrent_endpoint
    async def beside(self) -> None:
        await asyncio.sleep(0)


class Sender(Actor):
    """Runs a program; its messages have the number of their step."""

    @endpoint
    def run(self, me: int, books: Sequence[ActorMesh], program: Sequence[Step]) -> list[Sent]:
        return run_program(me, books, program)


class AsyncSender(Actor):
    @endpoint
    async def run(self, me: int, books: Sequence[ActorMesh], program: Sequence[Step]) -> list[Sent]:
        return run_program(me, books, program)


def run_program(me: int, books: Sequence[ActorMesh], program: Sequence[Step]) -> list[Sent]:
    """Send as ``program`` says, on this thread, and wait for all answers in the end."""
    under_way: list[Any] = []
    for number, step in enumerate(program):
        write = books[step.book].select(step.ranks).write
        future = None
        outcome = "sent"
        try:
            if step.how == "broadcast":
                write.broadcast(me, number)
            else:
                future = write.call(me, number)
                if step.how == "cancel":
                    outcome = "cancelled"
                    future.cancel()
                elif step.how == "await":
                    with contextlib.suppress(MeshError):
                        future.get(20)
        except MeshError:
            outcome = "refused"
        under_way.append((outcome, future))
    return [_outcome(outcome, future) for outcome, future in under_way]


def _outcome(outcome: str, future: Any) -> Sent:
    if future is None:
        return Sent(outcome, {})
    error = future.exception(20)
    if error is None:
        values = future.get(0)
        return Sent("answered", dict(zip(values.ranks, values.values(), strict=True)))
    failed = outcome if outcome == "cancelled" else "failed"
    return Sent(failed, dict(getattr(error, "partial", {})))
