"""Programs in the manner of Monarch's examples; with ``from monarch.actor import`` they run there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from meshbook.monarch import (
    Accumulator,
    Actor,
    ActorError,
    Channel,
    Port,
    ProcMesh,
    ValueMesh,
    concurrent_endpoint,
    context,
    current_rank,
    current_size,
    endpoint,
    this_host,
)

Program: TypeAlias = Callable[[], Awaitable[str]]


class ToyActor(Actor):
    def __init__(self) -> None:
        self.rank = current_rank().rank

    @endpoint
    async def hello_world(self, message: str) -> str:
        print(f"Identity: {self.rank}, msg: {message}")
        return f"{self.rank}: {message}"


async def hello() -> str:
    procs: ProcMesh = this_host().spawn_procs(per_host={"gpus": 4})
    toys = procs.spawn("toy_actor", ToyActor)
    values: ValueMesh[str] = await toys.hello_world.call("hello")
    assert [(point["gpus"], text) for point, text in values] == [(rank, f"{rank}: hello") for rank in range(4)]
    assert values.item(gpus=2) == "2: hello"
    assert await toys.slice(gpus=1).hello_world.call_one("one") == "1: one"
    assert toys.sizes == {"gpus": 4} and toys.size() == 4 and len(toys.slice(gpus=slice(1, 3))) == 2
    await procs.stop()
    return "done"


class Player(Actor):
    def __init__(self, name: str) -> None:
        self.name = name
        self.other: Player | None = None
        self.seen: list[str] = []

    @endpoint
    async def init(self, other: Player) -> None:
        self.other = other
        self.pair = current_rank()

    @endpoint
    async def send(self, text: str) -> None:
        assert self.other is not None
        await self.other.slice(**self.pair).recv.call(f"{self.name} to {self.pair['gpus']}: {text}")

    @endpoint
    async def recv(self, text: str) -> None:
        self.seen.append(text)

    @endpoint
    async def heard(self) -> list[str]:
        return self.seen


async def ping_pong() -> str:
    local_mesh_0 = this_host().spawn_procs(per_host={"gpus": 2})
    local_mesh_1 = this_host().spawn_procs(per_host={"gpus": 2})
    first = local_mesh_0.spawn("player_0", Player, "first")
    second = local_mesh_1.spawn("player_1", Player, "second")
    await asyncio.gather(_wait(first.init.call(second)), _wait(second.init.call(first)))
    for text in ("ping", "again"):
        await first.send.call(text)
        await second.send.call(text)
    heard = await second.heard.call()
    assert heard.item(gpus=1) == ["first to 1: ping", "first to 1: again"]
    assert (await first.heard.call()).item(gpus=0) == ["second to 0: ping", "second to 0: again"]
    await local_mesh_0.stop()
    await local_mesh_1.stop()
    return "done"


async def _wait(future: Awaitable[object]) -> object:
    return await future


class Buffer(Actor):
    """Hands out what was put, to whoever waits for it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()

    @concurrent_endpoint
    async def take(self) -> int:
        return await self.queue.get()

    @concurrent_endpoint
    async def put(self, value: int) -> None:
        await self.queue.put(value)


class Producer(Actor):
    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    @endpoint
    async def run(self, n: int) -> None:
        for index in range(n):
            await self.buffer.put.call_one(current_rank().rank * n + index)


class Consumer(Actor):
    def __init__(self, buffer: Buffer, done: Port[int]) -> None:
        self.buffer, self.done = buffer, done

    @endpoint
    async def run(self, n: int) -> None:
        for _ in range(n):
            self.done.send(await self.buffer.take.call_one())


async def pipeline() -> str:
    procs = this_host().spawn_procs(per_host={"procs": 3})
    port, receiver = Channel[int].open()
    buffer = procs.slice(procs=0).spawn("buffer", Buffer)
    consumer = procs.slice(procs=1).spawn("consumer", Consumer, buffer, port)
    producers = procs.spawn("producers", Producer, buffer)
    consumer.run.broadcast(30)
    await producers.run.call(10)
    assert sorted([await receiver.recv() for _ in range(30)]) == list(range(30))
    await procs.stop()
    return "done"


class Counter(Actor):
    def __init__(self, value: int) -> None:
        self.value = value

    @endpoint
    def incr(self, by: int = 1) -> None:
        self.value += by

    @endpoint
    def get(self) -> int:
        return self.value

    @endpoint
    def place(self) -> tuple[dict[str, int], dict[str, int]]:
        assert context().actor_instance.name == "counters"
        return dict(current_rank()), current_size()

    @endpoint(explicit_response_port=True)
    def soon(self, port: Port[int], by: int) -> None:
        port.send(self.value + by)

    @endpoint
    def fail(self) -> None:
        raise ValueError("broken")


def counters() -> str:
    procs = this_host().spawn_procs(per_host={"replicas": 2, "gpus": 2})
    actors = procs.spawn("counters", Counter, 1)
    actors.incr.broadcast()
    actors.slice(replicas=1).incr.broadcast(3)
    assert actors.get.call().get().values() == [2, 2, 5, 5]
    assert Accumulator(actors.get, 0, lambda total, value: total + value).accumulate().get() == 14
    assert sorted(future.get() for future in actors.get.stream()) == [2, 2, 5, 5]
    assert actors.get.choose().get() in (2, 5)
    assert actors.soon.call(1).get().values() == [3, 3, 6, 6]
    assert actors.slice(replicas=1, gpus=0).place.call_one().get() == ({}, {})
    assert actors.slice(replicas=1).place.call().get().values() == [
        ({"gpus": 0}, {"gpus": 2}),
        ({"gpus": 1}, {"gpus": 2}),
    ]
    try:
        actors.fail.call().get()
    except ActorError as error:
        assert isinstance(error.exception, ValueError)
    else:
        raise AssertionError("it did not fail")
    actors.stop().get()
    procs.stop().get()
    return "done"
