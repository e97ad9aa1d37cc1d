"""Ranks under a debugger that attaches through the controller, as an editor does."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from debug_client import DebugClient

from meshbook.errors import WorkerLost
from meshbook.mesh import dap
from meshbook.mesh.dap import TOKEN, DebugDoor, DebugTunnel, pack
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.rank_calls import start_cell

CELL = "%%mesh\nx = 1\nfor i in range(3):\n    x += i\nrank * 100 + x"
CODE = CELL.partition("\n")[2]
NAME = "<cell @1>"


@pytest.fixture
def attach() -> Iterator[Callable[..., tuple[DebugClient, DebugDoor]]]:
    """Open a door to a rank and come in: ``attach(mesh, 1)``."""
    doors: list[DebugDoor] = []
    clients: list[DebugClient] = []

    def attach(mesh: ProcMesh, rank: int) -> tuple[DebugClient, DebugDoor]:
        door = DebugDoor(functools.partial(DebugTunnel, mesh.select([rank])))
        doors.append(door)
        clients.append(DebugClient(door.port))
        clients[-1].attach(**{TOKEN: door.token})
        return clients[-1], door

    yield attach
    for client in clients:
        client.close()
    for door in doors:
        door.close()


def stop_at(client: DebugClient, line: int) -> None:
    answer = client.ask("setBreakpoints", source={"path": NAME}, breakpoints=[{"line": line}])
    assert answer["body"]["breakpoints"][0]["verified"]
    client.ask("configurationDone")


def start(mesh: ProcMesh, code: str = CODE) -> Any:
    return start_cell(mesh, code, on_output=lambda event: None, cell_number=7, line_offset=1, debug_name=NAME)


def test_an_editor_stops_in_a_rank_looks_steps_and_goes_on(mesh4: ProcMesh, attach) -> None:
    client, _ = attach(mesh4, 1)
    stop_at(client, 4)
    cell = start(mesh4)
    thread = client.event("stopped")["body"]["threadId"]
    frame = client.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]
    assert (frame["line"], frame["source"]["path"]) == (4, NAME)
    assert client.ask("evaluate", expression="(rank, x)", frameId=frame["id"])["body"]["result"] == "(1, 1)"
    client.ask("next", threadId=thread)
    client.event("stopped")
    client.ask("setBreakpoints", source={"path": NAME}, breakpoints=[])
    client.ask("continue", threadId=thread)
    assert cell.future.get(60).values() == [4, 104, 204, 304]


def test_an_interrupt_at_a_breakpoint_ends_the_cell_and_the_debugger_goes_on(mesh4: ProcMesh, attach) -> None:
    client, _ = attach(mesh4, 1)
    stop_at(client, 4)
    cell = start(mesh4)
    client.event("stopped")
    assert mesh4.status()[1].state == "pdb"
    assert mesh4.status()[1].where == "cell 7, line 4"
    report = cell.interrupt()
    assert not report.stuck, str(report)
    client.event("continued")
    assert mesh4.status()[1].state == "idle"
    again = start(mesh4)
    client.event("stopped")
    again.interrupt()


@pytest.mark.slow
def test_a_rank_is_as_fast_as_before_when_the_debugger_has_gone(mesh4: ProcMesh, attach) -> None:
    client, _ = attach(mesh4, 1)
    stop_at(client, 4)
    cell = start(mesh4)
    client.event("stopped")
    client.close()
    assert cell.future.get(60).values() == [4, 104, 204, 304]
    assert traced(mesh4) == [False] * 4
    client, _ = attach(mesh4, 1)  # and it can come back
    stop_at(client, 4)
    cell = start(mesh4)
    client.event("stopped")
    client.ask("disconnect")
    assert cell.future.get(60).values() == [4, 104, 204, 304]


def traced(mesh: ProcMesh) -> list[bool]:
    """Whether the ranks' main threads are traced, once what ends has ended."""
    for _ in range(100):
        found = mesh.execute(_is_traced).get(60).values()
        if not any(found):
            break
        time.sleep(0.05)
    return found


def _is_traced() -> bool:
    import sys

    return sys.gettrace() is not None


def test_a_step_goes_from_one_statement_of_a_cell_to_the_next(mesh4: ProcMesh, attach) -> None:
    client, _ = attach(mesh4, 1)
    stop_at(client, 2)
    cell = start(mesh4, "x = 1\ny = x + 1\ndef f():\n    return y\nf()")
    thread = client.event("stopped")["body"]["threadId"]
    lines = []
    for step in ("next", "next", "next", "stepIn"):
        client.ask(step, threadId=thread)
        client.event("stopped")
        frame = client.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]
        assert frame["source"]["path"] == NAME
        lines.append(frame["line"])
    assert lines == [3, 4, 6, 5]
    client.ask("continue", threadId=thread)
    assert cell.future.get(60).values() == [2] * 4


def test_who_attaches_last_has_the_rank(mesh4: ProcMesh, attach) -> None:
    first, _ = attach(mesh4, 1)
    stop_at(first, 4)
    cell = start(mesh4)
    first.event("stopped")
    second, _ = attach(mesh4, 1)
    assert cell.future.get(60).values() == [4, 104, 204, 304]
    assert first.closes()
    stop_at(second, 4)
    start(mesh4)
    second.event("stopped")


def test_a_rank_that_dies_at_a_breakpoint_ends_the_session(mesh2: ProcMesh, attach) -> None:
    client, door = attach(mesh2, 1)
    stop_at(client, 4)
    cell = start(mesh2)
    client.event("stopped")
    os.kill(mesh2.status()[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        cell.future.get(60)
    assert client.closes()
    mesh2.heal()
    again = DebugClient(door.port)
    again.attach(**{TOKEN: door.token})
    stop_at(again, 4)
    start(mesh2)
    again.event("stopped")
    again.close()


def test_breakpoint_stops_in_the_debugger_while_one_is_attached(mesh4: ProcMesh, attach) -> None:
    client, _ = attach(mesh4, 1)
    client.ask("configurationDone")
    cell = start(mesh4, "if rank == 1:\n    breakpoint()\nrank")
    thread = client.event("stopped")["body"]["threadId"]
    frames = client.ask("stackTrace", threadId=thread)["body"]["stackFrames"]
    assert [(frame["source"]["path"], frame["line"]) for frame in frames] == [(NAME, 3)]
    client.ask("continue", threadId=thread)
    assert cell.future.get(60).values() == [0, 1, 2, 3]


def test_ranks_that_wait_for_a_stopped_one_do_not_time_out(mesh4: ProcMesh, attach) -> None:
    client, _ = attach(mesh4, 1)
    stop_at(client, 4)
    code = (
        "import datetime\nx = torch.ones(1)\n"
        "0 if rank else 0\nwork = dist.all_reduce(x, async_op=True)\n"
        "_ = work.wait(datetime.timedelta(seconds=2))\nfloat(x)"
    )
    cell = start(mesh4, code)
    thread = client.event("stopped")["body"]["threadId"]
    time.sleep(3.5)
    assert mesh4.status()[0].state == "busy"
    client.ask("continue", threadId=thread)
    assert cell.future.get(60).values() == [4.0] * 4


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 5000,
        pack({"type": "request", "seq": 1, "command": "threads"}),
        pack({"type": "request", "seq": 1, "command": "attach", "arguments": {}}),
        pack({"type": "request", "seq": 1, "command": "attach", "arguments": {TOKEN: 7}}),
        b"Content-Length: 99999999999\r\n\r\n",
        b"Content-Length: 3\r\n\r\n\xff\xfe{",
        b"Content-Length: 2\r\n\r\n[]",
    ],
)
def test_a_stranger_at_the_door_gets_no_byte(said: bytes, door: DebugDoor) -> None:
    with socket.create_connection(("127.0.0.1", door.port), timeout=30) as stranger:
        stranger.sendall(said)
        assert stranger.recv(100) == b""


def test_no_attach_without_the_token_reaches_a_rank(door: DebugDoor) -> None:
    for arguments in ({}, {TOKEN: ""}, {TOKEN: door.token[:-1]}, {TOKEN: None}, {TOKEN: door.token + "x"}):
        client = DebugClient(door.port)
        client.ask("initialize")
        client.send("attach", **arguments)
        assert client.closes()
        assert client.messages == []
        client.close()


def test_strangers_are_few_and_do_not_stay(door: DebugDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dap, "STRANGER_S", 0.5)
    silent = [socket.create_connection(("127.0.0.1", door.port), timeout=30) for _ in range(dap.STRANGERS_MAX + 5)]
    for stranger in silent:
        assert stranger.recv(1) == b""
        stranger.close()


@pytest.fixture
def door() -> Iterator[DebugDoor]:
    """A door behind which no rank may be asked for."""

    def refuse(*_: Any) -> DebugTunnel:
        raise AssertionError("a stranger came through")

    door = DebugDoor(refuse)
    yield door
    door.close()


def test_the_token_stands_in_no_command_line_and_no_environment(mesh4: ProcMesh, attach) -> None:
    _, door = attach(mesh4, 1)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            assert door.token not in " ".join(process.cmdline()) + str(process.environ())


def test_a_rank_on_another_host_is_reached_through_the_controller(mesh2x2: ProcMesh, attach) -> None:
    client, _ = attach(mesh2x2, 3)
    stop_at(client, 4)
    cell = start(mesh2x2)
    thread = client.event("stopped")["body"]["threadId"]
    frame = client.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]["id"]
    large = client.ask("evaluate", expression="'é' * 300_000", frameId=frame, context="clipboard")["body"]["result"]
    assert len(large) >= 300_000
    long = "'" + "x" * 200_000 + "'"
    assert client.ask("evaluate", expression=f"len({long})", frameId=frame)["body"]["result"] == "200000"
    client.ask("disconnect")
    assert cell.future.get(60).values() == [4, 104, 204, 304]


def test_a_process_that_the_rank_forks_has_no_debugger(mesh4: ProcMesh, attach) -> None:
    client, _ = attach(mesh4, 1)
    stop_at(client, 3)
    code = (
        "def work():\n    return rank\n"
        "import os\n"
        "if (pid := os.fork()) == 0:\n"
        "    os._exit(40 + work())\n"
        "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    )
    assert start(mesh4, code).future.get(60).values() == [40, 41, 42, 43]
    start(mesh4, "def work():\n    return rank\nwork()")
    client.event("stopped")
