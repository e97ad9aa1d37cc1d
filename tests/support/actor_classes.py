"""Actors of the tests."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

from meshbook.actor import (
    Actor,
    Port,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
)


class Counter(Actor):
    def __init__(self, value: int = 0) -> None:
        self.value = value

    @endpoint
    def add(self, by: int, times: int = 1) -> int:
        """Add, and return the sum."""
        self.value += by * times
        return self.value

    @endpoint
    def get(self) -> int:
        return self.value

    @endpoint
    def place(self) -> tuple[int, dict[str, int], dict[str, int], str]:
        point = current_rank()
        return point.rank, dict(point), current_size(), current_actor_name()

    @endpoint
    def spawned_at(self) -> dict[str, int]:
        return dict(context().actor_instance.rank)

    @endpoint
    def fail(self, *ranks: int) -> str:
        if not ranks or context().actor_instance.rank.rank in ranks:
            raise ValueError("bad shard")
        return "fine"

    @endpoint
    def give(self, kind: Any) -> Any:
        return threading.Lock() if isinstance(kind, str) and kind == "lock" else kind

    @endpoint
    def say(self, text: str) -> None:
        print(text)
        print(f"end of {text}", end="")

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def thread(self) -> int:
        return threading.get_ident()

    @endpoint(explicit_response_port=True)
    def answer_later(self, port: Port[int], value: int) -> None:
        threading.Timer(0.05, port.send, [value * 2]).start()

    @endpoint(explicit_response_port=True)
    def refuse_later(self, port: Port[int]) -> None:
        port.exception(KeyError("refused"))

    def reset(self, to: int = 0) -> int:
        self.value = to
        return self.value


class Sleeper(Actor):
    """Waits in the ways in which code waits."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.note = "new"

    @endpoint
    def sleep(self, seconds: float) -> str:
        self.note = "asleep"
        time.sleep(seconds)
        self.note = "awake"
        return self.note

    @endpoint
    def wait_for_event(self) -> None:
        self.note = "waiting"
        threading.Event().wait()

    @endpoint
    def spin(self) -> None:
        self.note = "spinning"
        while True:
            pass

    @endpoint
    def last(self) -> str:
        return self.note


class AsyncActor(Actor):
    def __init__(self) -> None:
        self.order: list[str] = []
        self.gate: asyncio.Event | None = None

    @endpoint
    async def slowly(self, name: str, seconds: float) -> str:
        self.order.append(f"{name} begins")
        await asyncio.sleep(seconds)
        self.order.append(f"{name} ends")
        return name

    @endpoint
    def plainly(self, name: str) -> str:
        self.order.append(name)
        return name

    @endpoint
    async def history(self) -> list[str]:
        return self.order

    @endpoint
    async def block(self, seconds: float) -> None:
        self.order.append("blocks")
        time.sleep(seconds)

    @endpoint
    async def leave(self) -> None:
        raise SystemExit(3)

    @concurrent_endpoint
    async def wait(self) -> str:
        self.gate = self.gate or asyncio.Event()
        await self.gate.wait()
        return f"let through at {current_rank().rank}"

    @concurrent_endpoint
    async def let_through(self) -> None:
        self.gate = self.gate or asyncio.Event()
        self.gate.set()


class Broken(Actor):
    def __init__(self, only: int = -1) -> None:
        if only in (-1, current_rank().rank):
            raise RuntimeError("no such file")

    @endpoint
    def get(self) -> str:
        return "there"


class Cleaner(Actor):
    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    async def ping(self) -> str:
        return "pong"

    async def __cleanup__(self, error: Exception | None) -> None:
        with open(self.path, "a") as file:
            file.write("cleaned\n")


class Reserved(Actor):
    @endpoint
    def slice(self) -> None: ...
