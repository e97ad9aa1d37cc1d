"""Single points of `meshbook.actor` on which programs for Monarch rely."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import Any, Generic, TypeVar, cast

import pytest
from actor_classes import Counter, SentBack, mark_process, mark_process_async

from meshbook import LocalLauncher, ProcMesh, start_hosts, this_host
from meshbook.actor import (
    Accumulator,
    Actor,
    ActorError,
    ActorMesh,
    concurrent_endpoint,
    endpoint,
)
from meshbook.errors import MeshStoppedError, SerializationError, SpawnError, UsageError

pytestmark = pytest.mark.monarch

T = TypeVar("T")


def test_a_concurrent_endpoint_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match=r"plain must be declared `async def`: .* can only wrap async endpoints"):

        class Plain(Actor):
            @concurrent_endpoint  # type: ignore[type-var]
            def plain(self) -> int:
                return 1

    with pytest.raises(ValueError, match=r"stacked has both decorators: .* does not wrap @endpoint"):

        class Stacked(Actor):
            @concurrent_endpoint
            @endpoint  # type: ignore[arg-type]
            async def stacked(self) -> int:
                return 1


def test_a_mesh_of_actors_is_generic(mesh4: ProcMesh) -> None:
    class Holder(Actor, Generic[T]):
        @endpoint
        def type_of(self, value: T) -> str:
            return type(value).__name__

    holders = mesh4.spawn("holders", Holder)
    assert holders.type_of.call(1).get(20).values() == ["int"] * 4
    cast(ActorMesh[Holder[int]], holders).stop().get(20)
    assert isinstance(holders, ActorMesh)


def test_bootstrap_is_the_second_argument_and_may_be_async() -> None:
    for bootstrap in (mark_process, mark_process_async):
        with this_host().spawn_procs({"gpus": 2}, bootstrap, name="set", group=False) as mesh:
            assert mesh.evaluate("__import__('os').environ['MARK']").get(20).values() == ["marked"] * 2


def test_a_bootstrap_that_cannot_be_or_fails_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"bootstrap.* is a _thread.lock, which cannot be sent"):
        this_host().spawn_procs({"gpus": 1}, lambda: lock.acquire())
    bad: Any = 7
    with pytest.raises(UsageError, match="bootstrap must be a function without arguments; got 7"):
        this_host().spawn_procs({"gpus": 1}, bad)

    def boot() -> None:
        raise OSError(f"no disk in {os.sep}")

    with pytest.raises(SpawnError, match="their bootstrap failed: rank 0 raised OSError: no disk in /"):
        this_host().spawn_procs({"gpus": 1}, boot, group=False)


def test_what_cannot_be_delivered_is_dropped_where_that_is_asked_for(mesh2: ProcMesh) -> None:
    port = mesh2.slice(gpus=0).spawn("opener", SentBack).open_port.call_one().get(20)
    assert port.return_undeliverable
    mesh2.stop()
    with pytest.raises(MeshStoppedError):
        port.send(1)
    port.return_undeliverable = False
    port.send(1)


def test_answers_are_accumulated_as_they_come(mesh4: ProcMesh) -> None:
    actors = mesh4.spawn("late", SentBack)
    came = Accumulator(actors.late_rank, "", lambda so_far, rank: so_far + rank).accumulate().get(20)
    assert sorted(came) == ["0", "1", "2", "3"] and came.endswith("0")
    with pytest.raises(ActorError, match="ValueError: bad"):
        Accumulator(actors.fail, 0, lambda so_far, rank: so_far).accumulate().get(20)
    actors.stop().get(20)


def test_futures_are_asyncios_where_that_is_asked_for(mesh4: ProcMesh) -> None:
    actors = mesh4.spawn("asyncio", SentBack)

    async def gather() -> list[int]:
        return await asyncio.gather(*(future.as_asyncio() for future in actors.ten.stream()))

    assert sorted(asyncio.run(gather())) == [0, 10, 20, 30]
    actors.stop().get(20)


def test_processes_know_their_hosts() -> None:
    async def program() -> None:
        async with start_hosts({"hosts": 2}, LocalLauncher()) as hosts:
            assert await hosts.initialized is True
            assert hosts.region.labels == ["hosts"]
            procs = hosts.spawn_procs({"gpus": 2}, group=False, device="cpu", torch=False)
            assert await procs.initialized is True
            assert procs.host_mesh.sizes == {"hosts": 2} and procs.slice(gpus=0).host_mesh.sizes == {"hosts": 2}
            assert procs.slice(hosts=1).host_mesh.sizes == {}
            lines = str(procs.to_table()).splitlines()
            assert len(lines) == 5 and lines[0].split()[:3] == ["rank", "point", "host"]
            await hosts.stop()
            assert not procs.alive
            beside = procs.slice(hosts=1).host_mesh.spawn_procs({"gpus": 1}, group=False, torch=False)
            assert len(beside.spawn("there", SentBack).ten.call().get(20)) == 1
        assert not await _is_usable(hosts)

    asyncio.run(program())


async def _is_usable(hosts: Any) -> bool:
    try:
        await hosts.initialized
    except SpawnError:
        return False
    return True


def test_the_host_of_a_rank_has_the_operations_of_a_mesh(mesh2: ProcMesh) -> None:
    told = mesh2.slice(gpus=0).spawn("asker", SentBack).shape_of_host.call_one().get(20)
    assert told == ({}, 1, {"hosts": 1}, True, {"hosts": 1, "more": 1})


class Logger(Actor):
    @endpoint
    def log(self, *args: object) -> tuple[str, str]:
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        logging.getLogger("of.a.test").warning("it is %s" if args else "it is 5%", *args)
        logging.getLogger().removeHandler(handler)
        return records[-1].getMessage(), getattr(records[-1], "actor_prefix", "")


def test_log_records_carry_the_name_of_their_actor(mesh4: ProcMesh) -> None:
    loggers = mesh4.slice(gpus=2).spawn("50% done", Logger)
    prefix = f"[actor=<root>.<{Logger.__module__}.Logger 50% done>] "
    assert loggers.log.call_one("me").get(20) == (f"{prefix}it is me", prefix)
    assert loggers.log.call_one().get(20) == (f"{prefix}it is 5%", prefix)
    several = mesh4.spawn("several", Logger).log.call().get(20)
    name = f"<root>.<{Logger.__module__}.Logger several"
    prefixes = [f"[actor={name}{{'gpus': {rank}/4}}>] " for rank in range(4)]
    assert several.values() == [(f"[actor={name}>] it is 5%", prefix) for prefix in prefixes]
    told = mesh4.execute(lambda: logging.getLogRecordFactory()("x", 30, "", 1, "no actor's", (), None).getMessage())
    assert told.get(20).values() == ["no actor's"] * 4


def test_processes_without_sizes_are_one_on_each_host() -> None:
    with start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True)).spawn_procs(
        torch=False, owns_hosts=True
    ) as procs:
        assert procs.sizes == {"hosts": 2}
        counters = procs.spawn("counters", Counter)
        assert counters.slice(hosts=1).add.call_one(2).get(20) == 2
        assert counters.get.call().get(20).item(hosts=0) == 0
    with this_host().spawn_procs(torch=False) as alone:
        assert alone.sizes == {} and len(alone) == 1
        assert alone.spawn("counter", Counter).add.call_one(1).get(20) == 1
