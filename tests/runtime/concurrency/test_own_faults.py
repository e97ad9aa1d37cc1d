"""A fault of ours costs the action that met it, and is told to whoever waits for it; never the thread or a host."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from meshbook import ProcMesh
from meshbook.calls.call import CallRequest
from meshbook.concurrency import background
from meshbook.controller.dispatcher import Dispatcher
from meshbook.controller.mesh_state import MeshState
from meshbook.errors import LayoutError, LocalProtocolError, MeshError, SpawnError, UsageError
from meshbook.mesh.driven import this_host
from meshbook.shape.members import members_of
from meshbook.system.event_loop import EventLoop
from meshbook.values.pickling import Pickled
from meshbook.wire.link import HostLink


def _fault(*args: object, **options: object) -> Any:
    raise LocalProtocolError("a table has no such way")


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was told as a fault of ours."""
    found: list[str] = []
    monkeypatch.setattr(background, "_told", {})
    monkeypatch.setattr(background, "print", lambda text, file: found.append(text), raising=False)
    return found


def test_a_call_that_cannot_be_sent_fails_at_once(mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(HostLink, "send", _fault)
        with pytest.raises(LocalProtocolError, match="no such way"):
            mesh4.run("1").get(10)
        with pytest.raises(LocalProtocolError, match="no such way"):
            mesh4._controller.call(
                mesh4._mesh, CallRequest("invoke", members_of(mesh4), Pickled(b"", []), "mail", mailbox=999)
            ).get(10)
    assert mesh4.run("1").get(10).values() == [1] * 4


def test_workers_that_cannot_be_asked_for_fail_the_spawn(mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(MeshState, "ask_for", _fault)
        with pytest.raises(SpawnError, match="no such way"):
            this_host().spawn_procs({"gpus": 1}, name="never")
    assert mesh4.run("1").get(10).values() == [1] * 4


def test_a_message_that_meets_a_fault_of_ours_does_not_cost_its_host(
    mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Dispatcher, "_on_replies", _fault)
        future = mesh4.run("1")
        with pytest.raises(MeshError, match="no answer"):
            future.get(1)
    assert "no such way" in told[0] and told[0].startswith(background.WORDS)
    assert not mesh4.lost and mesh4.run("1").get(10).values() == [1] * 4


def test_a_timer_that_meets_a_fault_of_ours_does_not_stop_the_others(
    mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    controller = mesh4._controller
    recovery = controller.ask(lambda: controller._dispatcher.groups_of(mesh4._mesh))
    with monkeypatch.context() as patched:
        patched.setattr(recovery, "expire", _fault)
        patched.setattr(recovery, "due", 0.0)
        assert mesh4.run("1").get(10).values() == [1] * 4
        mesh4._controller.ask(lambda: None)
    assert len(told) == 1 and "the care for process groups" in told[0]


@pytest.mark.parametrize("name", ["", "a/b", "a\0b", "\udce9", 7, b"x", "x" * 61])
def test_a_name_that_no_folder_can_have_is_refused(mesh4: ProcMesh, name: Any) -> None:
    with pytest.raises(UsageError, match="a mesh is named by a text"):
        this_host().spawn_procs({"gpus": 1}, name=name)
    assert mesh4.run("1").get(10).values() == [1] * 4


@pytest.mark.parametrize("preload", ["json", (1,), ("a,b",), ("",)])
def test_modules_that_are_no_names_are_refused(preload: Any) -> None:
    with pytest.raises(UsageError, match="preload lists names of modules"):
        this_host().spawn_procs({"gpus": 1}, preload=preload)


@pytest.mark.parametrize("sizes", [{"gpus": "2"}, {"gpus": 1.0}, {1: 1}, [1]])
def test_sizes_that_are_none_are_refused(sizes: Any) -> None:
    with pytest.raises((LayoutError, UsageError)):
        this_host().spawn_procs(sizes)


def test_a_mesh_without_a_name_gets_one() -> None:
    with this_host().spawn_procs({"gpus": 1}, name=None, preload=["json"], group=False) as mesh:
        assert mesh.run("1").get(10).values() == [1]


def test_what_an_agent_cannot_read_fails_its_call_and_costs_nothing_else(mesh4: ProcMesh, told: list[str]) -> None:
    with pytest.raises(LocalProtocolError, match="cannot read 'call'"):
        mesh4._controller.call(mesh4._mesh, CallRequest(7, members_of(mesh4), Pickled(b"", []), "odd")).get(10)  # type: ignore[arg-type]
    controller, host = mesh4._controller, mesh4._mesh.hosts[0]
    strange = (b"", b"\xc1", b"\xff" * 40, b"\x91\xa3hb?", b"\x93\xa5spawn\x01\xc0", b"\x91\x07")
    for header in strange:
        controller.ask(lambda header=header: host.connection.send(header))  # type: ignore[misc]
    controller.ask(lambda: controller._socket.send(host.id, [b"no link made this"]))
    assert mesh4.run("1").get(10).values() == [1] * 4
    assert not host.lost and "cannot read" in told[0]


def test_a_callback_that_fails_is_told_and_served_again(told: list[str]) -> None:
    loop, (read, write) = EventLoop(), os.pipe()
    tries: list[int] = []

    def on_readable() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ValueError(len(tries))
        os.read(read, 1)

    watch = loop.watch(read, on_readable)
    loop.call_later(0.0, _fault)
    os.write(write, b"x")
    deadline = time.monotonic() + 10
    while len(tries) < 3 and time.monotonic() < deadline:
        loop.call_later(0.05, lambda: None)
        loop.run_once()
    loop.forget(watch)
    assert len(tries) == 3 and len(told) == 2
    os.close(read)
    os.close(write)
