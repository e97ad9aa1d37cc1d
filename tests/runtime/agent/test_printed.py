"""All that ranks have printed until one asks for it has come before the answer."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from patience import wait_until

from meshbook.calls.output import OutputEvent, StreamText
from meshbook.mesh import states
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.rank_calls import start_cell

CELL = """
import pathlib, threading, time
folder = pathlib.Path({folder!r})
def print_at(gate, text):
    (folder / f"{{text}} {{rank}} waits").touch()
    while not (folder / gate).exists():
        time.sleep(0.01)
    print(text, rank)
    (folder / f"{{text}} {{rank}}").touch()
"""


def agents_of(mesh: ProcMesh) -> list[int]:
    return [host.hello.pid for host in mesh._mesh.hosts if host.hello is not None]


def test_what_ranks_have_printed_comes_before_the_answer_though_agents_stood_still(
    mesh2x2: ProcMesh, tmp_path: Path
) -> None:
    texts: list[str] = []

    def receive(event: OutputEvent) -> None:
        if isinstance(event, StreamText):
            texts.append(event.text)

    def come() -> None:
        at_answer.extend("".join(texts).splitlines())
        answered.set()

    at_answer: list[str] = []
    answered = threading.Event()
    code = CELL.format(folder=str(tmp_path))
    code += "threading.Thread(target=print_at, args=('late', 'late')).start()"
    start_cell(mesh2x2, code, cell_number=1, on_output=receive).future.get(30)
    run = start_cell(mesh2x2, "print_at('now', 'now')", cell_number=2, on_output=receive)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 8)
    agents = agents_of(mesh2x2)
    try:
        for agent in agents:
            os.kill(agent, signal.SIGSTOP)
        (tmp_path / "now").touch()
        (tmp_path / "late").touch()
        wait_until(lambda: len(list(tmp_path.iterdir())) == 18)
        states.await_printed(mesh2x2, come, 20.0)
        assert not answered.wait(0.2) and not texts
    finally:
        for agent in agents:
            os.kill(agent, signal.SIGCONT)
    assert answered.wait(20)
    assert sorted(at_answer) == sorted(f"{text} {rank}" for text in ("now", "late") for rank in range(4))
    run.future.get(30)


def test_a_host_that_does_not_answer_is_waited_for_as_long_as_was_said(mesh2: ProcMesh) -> None:
    (agent,) = agents_of(mesh2)
    come = threading.Event()
    os.kill(agent, signal.SIGSTOP)
    try:
        began = time.monotonic()
        states.await_printed(mesh2, come.set, 0.3)
        assert come.wait(20) and time.monotonic() - began >= 0.3
    finally:
        os.kill(agent, signal.SIGCONT)
