"""Ranks under a debugger that attaches through the controller, as an editor does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from debug_client import DebugClient

from meshbook.debug_door import TOKEN, DebugDoor
from meshbook.debug_tunnel import DebugTunnel
from meshbook.proc_mesh import ProcMesh

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
    return mesh.start_cell(code, on_output=lambda event: None, cell_number=7, line_offset=1, debug_name=NAME)


def test_an_editor_stops_in_a_rank_looks_steps_and_goes_on(mesh2: ProcMesh, attach) -> None:
    client, _ = attach(mesh2, 1)
    stop_at(client, 4)
    cell = start(mesh2)
    thread = client.event("stopped")["body"]["threadId"]
    frame = client.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]
    assert (frame["line"], frame["source"]["path"]) == (4, NAME)
    assert client.ask("evaluate", expression="(rank, x)", frameId=frame["id"])["body"]["result"] == "(1, 1)"
    client.ask("next", threadId=thread)
    client.event("stopped")
    client.ask("setBreakpoints", source={"path": NAME}, breakpoints=[])
    client.ask("continue", threadId=thread)
    assert cell.future.get(60).values() == [4, 104]
