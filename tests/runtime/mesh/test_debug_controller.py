"""The debugger with a command line: who waits at a breakpoint, and what a person at another terminal does with it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import wait_until

import meshbook
from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, ActorError, current_rank, debug_controller, endpoint
from meshbook.errors import UsageError
from meshbook.mesh.debug_commands import parsed_ranks, table
from meshbook.mesh.debug_controller import SOCKET
from meshbook.mesh.driven import own_sessions

pytestmark = pytest.mark.monarch

COMMAND = [sys.executable, "-m", "meshbook.debugger"]


class Stopper(Actor):
    @endpoint
    def stop_here(self) -> int:
        found = current_rank().rank * 10
        breakpoint()
        return found

    @endpoint
    def listed(self) -> list[int]:
        return [info.rank for info in debug_controller().list.call_one(print_output=False).get()]


@pytest.fixture
def procs(clean_end: None) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"hosts": 2, "gpus": 2}, name="debugged", group=False, torch=False) as procs:
        yield procs
    meshbook.shutdown()


def command() -> list[str]:
    """For the debugger of this program: other tests may have theirs now."""
    return [*COMMAND, own_sessions()[0].id]


def typed(*lines: str) -> str:
    """What a person sees who types these lines."""
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(command(), input=text, capture_output=True, text=True, timeout=120)
    return done.stdout.replace("debugger> ", "\n")  # a terminal shows what is typed, and so an end of line, here


def await_stops(count: int) -> None:
    debugger = debug_controller()
    debugger.wait_pending_session.call_one().get(120)
    wait_until(lambda: len(debugger.list.call_one(print_output=False).get(60)) == count)


def test_a_person_lists_attaches_casts_and_continues(procs: ProcMesh, capfd: pytest.CaptureFixture[str]) -> None:
    stoppers = procs.spawn("stoppers", Stopper)
    debug_controller()
    call = stoppers.stop_here.call()
    await_stops(4)
    infos = debug_controller().list.call_one().get(60)
    assert [(info.actor_name, info.rank, info.coords) for info in infos] == [
        ("stoppers", rank, {"hosts": rank // 2, "gpus": rank % 2}) for rank in range(4)
    ]
    assert {info.function for info in infos} == {f"{__name__}.stop_here"} and infos[0].lineno
    assert "stoppers" in capfd.readouterr().out

    seen = typed("list", "attach stoppers 3", "p found", "!found = 7", "detach", "p found", "quit")
    assert "stop_here" in seen and "[3] 30" in seen and "there is no command 'p found'" in seen
    seen = typed("cast stoppers ranks(hosts=1,gpus=0:2) p found", "cast stoppers ranks(0,1) p found + 0.5")
    assert {"[2] 20", "[3] 7", "[0] 0.5", "[1] 10.5"} <= set(seen.splitlines())
    assert len(debug_controller().list.call_one(print_output=False).get(60)) == 4
    typed("attach stoppers 0", "c", "quit")
    await_stops(3)
    typed("continue", "quit")
    assert call.get(120).values() == [0, 10, 20, 7]


def test_a_script_without_a_terminal_waits_for_the_debugger(procs: ProcMesh, capfd: pytest.CaptureFixture[str]) -> None:
    stopper = procs.slice(hosts=0, gpus=1).spawn("stopper", Stopper)
    with pytest.raises(ActorError, match=r"breakpoint\(\) is not available on ranks here"):
        stopper.stop_here.call_one().get(120)
    debug_controller()

    def person() -> None:
        await_stops(1)
        typed("cast stopper ranks(1) !found = 5", "continue")

    thread = threading.Thread(target=person)
    thread.start()
    assert stopper.stop_here.call_one().get(240) == 5
    thread.join()
    assert "stopped at" in (told := capfd.readouterr().err) and "look: python3 -m meshbook.debugger" in told


def test_cells_are_debugged_by_the_name_of_their_mesh_and_ranks_ask_too(procs: ProcMesh) -> None:
    stoppers = procs.spawn("stoppers", Stopper)
    assert stoppers.slice(hosts=0, gpus=0).listed.call_one().get(120) == []
    cell = procs.slice(hosts=1, gpus=0).run("x = 3\nbreakpoint()\nx")
    await_stops(1)
    assert stoppers.slice(hosts=0, gpus=0).listed.call_one().get(120) == [2]
    assert "[2] 3" in typed("attach debugged 2", "p x", "c")
    assert cell.get(120).values() == [3]


def test_who_comes_last_has_the_command_line(procs: ProcMesh) -> None:
    debug_controller()
    pipe = subprocess.PIPE
    with subprocess.Popen(command(), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline().startswith("Debugger of this program's meshes")
        assert "nothing waits at a breakpoint" in typed("list", "quit")
        assert "another debugger has come" in first.stdout.read()
        assert first.wait(60) == 0


def test_commands_that_cannot_be(procs: ProcMesh) -> None:
    stoppers = procs.spawn("stoppers", Stopper)
    debug_controller()
    call = stoppers.slice(hosts=0, gpus=0).stop_here.call_one()
    await_stops(1)
    seen = typed(
        "", "help", "jump", "attach", "attach stoppers", "attach others 0", "attach stoppers 3", "cast stoppers p x",
        "cast stoppers ranks(x) p x", "cast stoppers ranks(9) p x", "c",
    )  # fmt: skip
    for words in (
        "cast NAME ranks(WHICH) CMD", "there is no command 'jump'", "attach to what?",
        '"others" does not wait at a breakpoint; stoppers does', 'of "stoppers" only rank 0 waits',
        "cast what to whom?", "ranks(x) names no ranks",
    ):  # fmt: skip
        assert words in seen
    assert call.get(120) == 0


def test_without_a_debugger_or_with_several_the_command_says_so() -> None:
    folder = tempfile.mkdtemp(prefix="debuggers")  # short, as paths of sockets are

    def ask(*arguments: str) -> tuple[int, str]:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, env=environment)
        return done.returncode, done.stderr + done.stdout

    assert ask() == (69, "no program here has called debug_controller()\n")
    assert ask("gone") == (69, "no program here drives session gone, which has called debug_controller()\n")
    assert ask("a", "b")[0] == 2 and "usage:" in ask("--help")[1]
    doors = []
    for session in ("first", "other"):
        path = Path(folder, f"meshbook-{os.getuid()}", session, SOCKET)
        path.parent.mkdir(mode=0o700)
        doors.append(socket.create_server(str(path), family=socket.AF_UNIX))
    assert ask() == (2, "several programs wait: first, other. Name one of them.\n")
    for door in doors:
        door.close()
    assert ask()[0] == 69
    shutil.rmtree(folder)


def test_ranks_are_named_as_monarchs_debugger_names_them() -> None:
    assert parsed_ranks("1") == {1} and parsed_ranks("1, 4,6") == {1, 4, 6}
    assert parsed_ranks("2:8:3") == range(2, 8, 3) and 99 in parsed_ranks(":") and 0 not in parsed_ranks("1:")
    assert parsed_ranks("gpus=1:5:2,hosts=3, dim=(3,6)") == {"gpus": range(1, 5, 2), "hosts": {3}, "dim": {3, 6}}
    for text in ("", "x", "1,", "1;2", "gpus=", "gpus=(1", "gpus=1,,", "1:2:0", "a=1 b=2"):
        with pytest.raises(UsageError, match="names no ranks"):
            parsed_ranks(text)
    assert table([]) == "nothing waits at a breakpoint"
