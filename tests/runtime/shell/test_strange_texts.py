"""Text that is not UTF-8 crosses every border: as it is where values travel, with backslashes where UTF-8 must be."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, ActorError, endpoint
from meshbook.calls.output import DisplayData, OutputEvent, StreamText
from meshbook.errors import CallFailed, MeshError
from meshbook.mesh.rank_calls import start_cell

BAD = "caf\udce9 \ud83d"
SHOWN = "caf\\udce9 \\ud83d"


def test_ranks_get_the_bytes_of_environment_folder_and_path(tmp_path: Path, monkeypatch: Any) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    monkeypatch.chdir(os.fsdecode(folder))
    monkeypatch.setenv("MESHBOOK_BAD", "caf\udce9")
    monkeypatch.setattr(sys, "path", [*sys.path, os.fsdecode(folder), "\ud83d", 7])  # 7: as careless programs do
    with this_host().spawn_procs({"gpus": 1}, name="bytes", group=False, preload=("json",)) as mesh:
        found = mesh.run("import os, sys; os.getcwdb(), os.environb[b'MESHBOOK_BAD'], sys.path").get(20).values()[0]
    assert found[:2] == (folder, b"caf\xe9")
    assert os.fsdecode(folder) in found[2] and "\\ud83d" in found[2]


def test_labels_values_and_errors(mesh4: ProcMesh) -> None:
    assert mesh4.evaluate(f"len({BAD!r})").get(10).values() == [6] * 4
    with pytest.raises(CallFailed):
        mesh4.evaluate(f"len('{BAD}')").get(10)
    assert mesh4.run(repr(BAD)).get(10).values() == [BAD] * 4
    with pytest.raises(CallFailed) as failed:
        mesh4.run(f"raise ValueError({BAD!r})").get(10)
    assert failed.value.failures[0].evalue == SHOWN


@pytest.mark.quick("def _render_traceback_(self): return [3, None]")
@pytest.mark.parametrize(
    "body",
    [
        "def __str__(self): return type('Text', (str,), {})('text')",
        "def __str__(self): raise KeyboardInterrupt",
        "def __reduce__(self): raise SystemExit",
        "def _render_traceback_(self): return [3, None]",
        "__traceback__ = property(lambda self: 1 / 0, lambda self, value: 1 / 0)",
    ],
)
def test_an_exception_whose_own_code_misbehaves_is_an_answer(mesh4: ProcMesh, body: str) -> None:
    with pytest.raises(CallFailed):
        mesh4.run(f"class Odd(Exception):\n    {body}\nraise Odd").get(10)
    with pytest.raises(CallFailed):
        mesh4.execute(_raise_odd, body).get(10)
    assert mesh4.evaluate("rank").get(10).values() == [0, 1, 2, 3]


def _raise_odd(body: str) -> None:
    names: dict[str, Any] = {}
    exec(f"class Odd(Exception):\n    {body}", names)
    raise names["Odd"]


def _events(mesh: ProcMesh, code: str) -> list[OutputEvent]:
    events: list[OutputEvent] = []
    start_cell(mesh, code, on_output=events.append).future.get(10)
    return events


def test_prints_of_cells_and_threads(mesh4: ProcMesh) -> None:
    code = f"import threading\nprint({BAD!r})\nt = threading.Thread(target=print, args=({BAD!r},))\nt.start(); t.join()"
    texts = [event for event in _events(mesh4, code) if isinstance(event, StreamText) and event.rank == 0]
    assert "".join(event.text for event in texts) == f"{SHOWN}\n{SHOWN}\n"


def test_what_is_shown_may_have_any_kind_of_content(mesh4: ProcMesh) -> None:
    code = f"display({{'text/plain': {BAD!r}, 7: 'seven'}}, raw=True, metadata={{None: {{{BAD!r}: 1}}}})"
    shown = [event for event in _events(mesh4, code) if isinstance(event, DisplayData) and event.rank == 0]
    assert shown[0].data == {"text/plain": SHOWN, "7": "seven"} and shown[0].metadata == {"None": {SHOWN: 1}}


def test_a_rank_that_shows_garbage_costs_nobody_anything(mesh4: ProcMesh) -> None:
    events: list[OutputEvent] = []
    code = (
        "from meshbook.wire import messages as wire\nfrom meshbook.actor.router import current_router\n"
        "worker = current_router().worker\n"
        "worker.calls.send(wire.DisplayData(wire.OWN_RANK, worker.output.current, False, False), [b'\\xc1'])"
    )
    start_cell(mesh4, code, on_output=events.append).future.get(10)
    said = [event.text for event in events if isinstance(event, StreamText)]
    assert sorted(text.split(" has shown")[0] for text in said) == [f"rank {rank}" for rank in range(4)]
    assert mesh4.evaluate("rank").get(10).values() == [0, 1, 2, 3]


class Odd(Actor):
    @endpoint
    def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def echo(self, text: str) -> str:
        return text


def test_actors(mesh4: ProcMesh) -> None:
    odd = mesh4.spawn(BAD, Odd)
    with pytest.raises(ActorError, match=re.escape(SHOWN)):
        odd.fail.call(BAD).get(10)
    assert odd.echo.call(BAD).get(10).values() == [BAD] * 4
    assert {state.name for state in mesh4.actors()} == {SHOWN}
    odd.stop().get(10)


def _break_actors() -> None:
    from meshbook.worker.actor_runner import ActorRunner

    def fault(*args: object) -> None:
        raise RuntimeError("a fault of ours")

    ActorRunner._finish = fault  # type: ignore[assignment, method-assign]


@pytest.mark.slow
def test_an_actor_whose_thread_ends_by_a_fault_of_ours_leaves_nobody_waiting(mesh2: ProcMesh) -> None:
    odd = mesh2.spawn("odd", Odd)
    odd.echo.call("before").get(20)
    mesh2.execute(_break_actors).get(20)
    held = [odd.echo.call("held") for _ in range(5)]
    new = mesh2.spawn("new", Odd)
    with pytest.raises(ActorError, match="by a fault of meshbook: RuntimeError"):
        held[0].get(20)
    for future in (*held, odd.echo.call("later"), new.echo.call("made by a broken thread")):
        with pytest.raises(MeshError):
            future.get(20)
    assert mesh2.run("1").get(20).values() == [1, 1]
