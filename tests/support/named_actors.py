"""Actors that know who they were when they were made, and ask each other."""

from __future__ import annotations

import asyncio
from typing import Any

from meshbook.actor import Actor, Channel, current_rank, endpoint
from meshbook.actor.ports import Port, PortReceiver


class Named(Actor):
    def __init__(self) -> None:
        self.born = current_rank().rank
        self.receiver: PortReceiver[Any] | None = None
        self.told: list[object] = []

    @endpoint
    def who(self) -> int:
        return self.born

    @endpoint
    def place(self) -> tuple[int, int]:
        """Who it was, and its place among those that are called now."""
        return self.born, current_rank().rank

    @endpoint
    def open(self) -> Port[Any]:
        port, self.receiver = Channel[Any].open()
        return port

    @endpoint
    def received(self) -> object:
        assert self.receiver is not None
        return self.receiver.recv().get(20)


class Asker(Actor):
    """Holds references to others."""

    def __init__(self, named: Named, ports: list[Port[Any]]) -> None:
        self.named, self.ports = named, ports
        self.faults: list[str] = []

    @endpoint
    def ask(self, index: int) -> int:
        return self.named.slice(gpus=index).who.call_one().get(20)

    @endpoint
    def ask_all(self) -> list[int]:
        return self.named.who.call().get(20).values()

    @endpoint
    def send(self, index: int, value: object) -> None:
        self.ports[index].send(value)

    @endpoint
    async def spawn(self, procs: Any) -> list[int]:
        """Own actors, of which deaths are told."""
        self.mine = procs.spawn("mine", Named)
        return (await self.mine.who.call()).values()

    @endpoint
    def ask_mine(self) -> list[int]:
        return self.mine.who.call().get(20).values()

    @endpoint
    async def told(self) -> list[str]:
        await asyncio.sleep(0)
        return self.faults

    def __supervise__(self, failure: object) -> bool:
        self.faults.append(repr(failure))
        return True
