"""Actors of the tests."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import signal
import threading
import time
from typing import Any

from meshbook import this_host, this_proc
from meshbook.actor import (
    Actor,
    Channel,
    Port,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
)
from meshbook.monarch import get_or_spawn_controller


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

    @endpoint
    def answer_on(self, port: Port[int], value: int) -> None:
        port.send(value * 2)

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


class Reader(Actor):
    @endpoint
    def read(self) -> None:
        """Raise what another exception has led to."""
        try:
            {}["shard"]
        except KeyError as error:
            raise ValueError("cannot read") from error


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


# ---- actors that call actors ---------------------------------------------------------------------------------------


class PingPong(Actor):
    """Two of them throw a ball at each other until it was thrown ``n`` times."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    async def start(self, other: Any, n: int, done: Port[list[int]]) -> None:
        self.other, self.done = other, done
        other.catch.broadcast(n)

    @endpoint
    async def join(self, other: Any, done: Port[list[int]]) -> None:
        self.other, self.done = other, done

    @endpoint
    async def catch(self, n: int) -> None:
        self.seen.append(n)
        if n == 0:
            self.done.send(self.seen)
        else:
            self.other.catch.broadcast(n - 1)

    @endpoint
    async def thrown(self) -> list[int]:
        return self.seen


class Relay(Actor):
    """Uses other actors on behalf of its caller."""

    def __init__(self, counters: Any = None) -> None:
        self.counters = counters

    @endpoint
    def add_everywhere(self, by: int) -> list[int]:
        values: list[int] = self.counters.add.call(by).get(20).values()
        return values

    @endpoint
    async def add_async(self, by: int) -> int:
        return sum([await future for future in self.counters.add.stream(by)])

    @endpoint
    async def add_one(self, counter: Any, by: int, times: int) -> list[int]:
        return [await counter.add.call_one(by) for _ in range(times)]

    @endpoint
    def fail_there(self) -> None:
        self.counters.fail.call().get(20)

    @endpoint
    def say_there(self, text: str) -> None:
        self.counters.say.call(text).get(20)

    @endpoint
    def part(self) -> Any:
        return self.counters.slice(gpus=slice(0, 2))

    @endpoint
    def send_many(self, port: Port[tuple[int, int]], n: int) -> None:
        for index in range(n):
            port.send((context().actor_instance.rank.rank, index))

    @endpoint
    def wrong(self) -> None:
        self.counters.add.call(1, 2, 3, 4)

    @endpoint
    async def wait_there(self, sleepers: Any) -> None:
        await sleepers.sleep.call(60)

    @endpoint
    def wait_there_plainly(self, sleepers: Any) -> None:
        sleepers.sleep.call(60).get()


class Parent(Actor):
    """Spawns actors and is their owner."""

    def __init__(self, handles: bool = True) -> None:
        self.handles = handles
        self.told: list[str] = []

    @endpoint
    def spawn_beside(self, value: int) -> list[int]:
        self.child = this_proc().spawn("child", Counter, value)
        return self.child.add.call(1).get(20).values()  # type: ignore[no-any-return]

    @endpoint
    def spawn_on(self, procs: Any) -> Any:
        self.children = procs.spawn("children", Counter, 5)
        return self.children

    @endpoint
    def register(self, name: str) -> int:
        return get_or_spawn_controller(name, Counter).get(20).add.call_one(1).get(20)

    @endpoint
    def start_processes(self, count: int) -> Any:
        procs = this_host().spawn_procs({"more": count}, name="more", group=False)
        workers = procs.spawn("workers", Counter, 100)
        return workers, workers.pid.call().get(20).values()

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def break_child(self) -> None:
        self.child.fail.broadcast()

    @endpoint
    def reports(self) -> list[str]:
        return self.told

    def __supervise__(self, failure: Any) -> bool:
        self.told.append(f"{failure.mesh_name} {failure.ranks} {failure.what}")
        return self.handles


class Delegate(Actor):
    """Has another actor answer its callers."""

    def __init__(self, to: Any) -> None:
        self.to = to

    @endpoint(explicit_response_port=True)
    def ask(self, port: Port[int], value: int) -> None:
        self.to.answer_on.broadcast(port, value)


def mark_process() -> None:
    os.environ["MARK"] = "marked"


async def mark_process_async() -> None:
    await asyncio.sleep(0)
    mark_process()


class Caller(Actor):
    """Calls whom it is told to call, and waits."""

    @endpoint
    def plainly(self, path: list[Any]) -> str:
        if not path:
            return "end"
        value: str = path[0].plainly.call_one(path[1:]).get()
        return value

    @endpoint
    async def waiting(self, path: list[Any]) -> str:
        return await path[0].waiting.call_one(path[1:]) if path else "end"

    @concurrent_endpoint
    async def beside(self, path: list[Any]) -> str:
        return await path[0].beside.call_one(path[1:]) if path else "end"

    @concurrent_endpoint
    async def endlessly(self, me: Any, other: Any) -> None:
        await other.endlessly.call_one(other, me)

    @endpoint
    def late(self, path: list[Any]) -> str:
        future = path[0].waiting.call_one(path[1:])
        time.sleep(0.3)
        value: str = future.get()
        return value


class Endless(Actor):
    """Does not end by itself; ``deaf`` does not heed interrupts either."""

    def __init__(self, in_init: bool = False) -> None:
        if in_init:
            threading.Event().wait()

    @endpoint
    def wait(self) -> None:
        threading.Event().wait()

    @endpoint
    def get(self) -> int:
        return 1

    @endpoint(explicit_response_port=True)
    def promise(self, port: Port[int]) -> None:
        self.port = port

    @endpoint
    def deaf(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(BaseException):
                time.sleep(seconds)


class EndlessAsync(Actor):
    """As `Endless`, in an event loop."""

    @endpoint
    async def wait(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def get(self) -> int:
        return 1


class Owner(Actor):
    """Owns actors elsewhere, and processes."""

    @endpoint
    def own(self, procs: Any, path: str) -> Any:
        self.words = procs.spawn("words", LastWords, path)
        self.more = this_host().spawn_procs({"more": 2}, name="more", group=False)
        self.cleaners = self.more.spawn("cleaners", Cleaner, path)
        self.cleaners.ping.call().get(20)
        pids = self.more.spawn("counters", Counter).pid.call().get(20).values()
        return self.words, pids


class Writer(Actor):
    """Leaves files open."""

    @endpoint
    def write(self, path: str) -> None:
        self.itself = self  # only the collector sees that nobody holds it
        self.text = open(f"{path}.txt", "w")  # noqa: SIM115  # it stays open
        self.text.write("text")
        self.packed = gzip.open(f"{path}.gz", "wb")  # noqa: SIM115
        self.packed.write(b"packed")


class LastWords(Actor):
    """Writes into a file what it does in the end."""

    def __init__(self, path: str, how: str = "") -> None:
        self.path, self.how = path, how

    @endpoint
    def sleep(self, seconds: float) -> None:
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            self._write("interrupted")
            raise

    def __cleanup__(self, error: Exception | None) -> None:
        if self.how == "raises":
            raise ValueError("cannot clean up")
        if self.how == "hangs":
            time.sleep(60)
        self._write("cleaned")

    def _write(self, word: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{word}\n")


class SentBack(Actor):
    """Answers with what tells ranks apart."""

    @endpoint
    def ten(self) -> int:
        return current_rank().rank * 10

    @endpoint
    def give(self, port: Any) -> None:
        port.send("mine")

    @endpoint
    def late_rank(self) -> str:
        time.sleep(0.5 if current_rank().rank == 0 else 0)
        return str(current_rank().rank)

    @endpoint
    def fail(self) -> None:
        raise ValueError("bad")

    @endpoint
    def open_port(self) -> Port[int]:
        port, self.receiver = Channel[int].open()
        return port

    @endpoint
    def shape_of_host(self) -> tuple[object, ...]:
        host = this_host()
        split = host.flatten("hosts")
        procs = split.spawn_procs({"more": 1}, group=False, torch=False)
        return host.sizes, len(host), split.sizes, host.initialized.get(20), procs.sizes
