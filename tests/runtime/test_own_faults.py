"""A fault of ours costs the action that met it, and is told to whoever waits for it; never the thread or a host."""

from __future__ import annotations

from typing import Any

import pytest

from meshbook import ProcMesh, own_faults
from meshbook.errors import LocalProtocolError, MeshError, SpawnError
from meshbook.known_mesh import KnownMesh
from meshbook.mesh import this_host
from meshbook.switchboard import Switchboard


def _fault(*args: object, **options: object) -> Any:
    raise LocalProtocolError("a table has no such way")


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was told as a fault of ours."""
    found: list[str] = []
    monkeypatch.setattr(own_faults, "_told", {})
    monkeypatch.setattr(own_faults, "print", lambda text, file: found.append(text), raising=False)
    return found


def test_a_call_that_cannot_be_sent_fails_at_once(mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Switchboard, "send_payload", _fault)
        with pytest.raises(LocalProtocolError, match="no such way"):
            mesh4.run("1").get(10)
        with pytest.raises(LocalProtocolError, match="no such way"):
            mesh4._controller.call(mesh4._mesh, "invoke", mesh4.members, (b"", []), what="mail", mailbox=999).get(10)
    assert mesh4.run("1").get(10).values() == [1] * 4


def test_workers_that_cannot_be_asked_for_fail_the_spawn(mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(KnownMesh, "ask_for", _fault)
        with pytest.raises(SpawnError, match="no such way"):
            this_host().spawn_procs({"gpus": 1}, name="never")
    assert mesh4.run("1").get(10).values() == [1] * 4


def test_a_message_that_meets_a_fault_of_ours_does_not_cost_its_host(
    mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Switchboard, "_on_replies", _fault)
        future = mesh4.run("1")
        with pytest.raises(MeshError, match="no answer"):
            future.get(1)
    assert "no such way" in told[0] and told[0].startswith(own_faults.WORDS)
    assert not mesh4.lost and mesh4.run("1").get(10).values() == [1] * 4


def test_a_timer_that_meets_a_fault_of_ours_does_not_stop_the_others(
    mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    controller = mesh4._controller
    rescue = controller.ask_board(lambda board: board.groups_of(mesh4._mesh))
    with monkeypatch.context() as patched:
        patched.setattr(rescue, "expire", _fault)
        patched.setattr(type(rescue), "due", property(lambda self: 0.0))
        assert mesh4.run("1").get(10).values() == [1] * 4
        mesh4._controller.ask(lambda: None)
    assert len(told) == 1 and "the care for process groups" in told[0]
