"""Single points of `meshbook.actor` on which programs for Monarch rely."""

from __future__ import annotations

import os
import threading
from typing import Any, Generic, TypeVar, cast

import pytest
from actor_classes import Counter, mark_process, mark_process_async

from meshbook import ProcMesh, this_host
from meshbook.actor import (
    Actor,
    ActorMesh,
    RDMABuffer,
    SupervisionError,
    concurrent_endpoint,
    endpoint,
)
from meshbook.errors import MeshStoppedError, SerializationError, SpawnError, UsageError

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


def test_the_size_of_a_buffer_is_a_method(mesh4: ProcMesh) -> None:
    buffer = RDMABuffer(bytearray(12))
    assert buffer.size() == 12
    buffer.drop().get(20)


def test_calls_to_what_was_stopped_are_supervision_errors(mesh2: ProcMesh) -> None:
    counters, others = mesh2.spawn("counters", Counter), mesh2.spawn("others", Counter)
    counters.stop().get(20)
    with pytest.raises(SupervisionError, match='"counters" were stopped') as stopped:
        counters.get.call()
    assert (stopped.value.ranks, stopped.value.cause) == ((), "stopped")
    others.initialized.get(20)
    waiting = mesh2.spawn("waiting", Counter).give.call("nothing")
    mesh2.stop()
    with pytest.raises(SupervisionError, match='mesh "two" was stopped') as gone:
        others.get.call()
    assert isinstance(gone.value, MeshStoppedError)
    try:
        waiting.get(20)
    except SupervisionError:
        pass  # it had not been answered when the mesh was stopped


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
