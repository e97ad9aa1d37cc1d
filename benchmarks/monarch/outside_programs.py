"""Programs for what comes to a program from outside: servers, debuggers, folders. Run by `programs`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshbook.actor import Actor, current_rank, debug_controller, endpoint, this_host
from meshbook.tools.config import Workspace
from meshbook.tools.config.workspace import Workspace as SameWorkspace

PROGRAMS: list[Callable[[Any], Any]] = []


def program(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Have it run with a mesh of four processes, gpus=4."""
    PROGRAMS.append(function)
    return function


ATTACHING = """
import socket, subprocess, sys
from meshbook.actor import Actor, attach, attach_to_workers, endpoint, this_host

class Echo(Actor):
    @endpoint
    def echo(self, value):
        return value

    @endpoint
    def pass_on(self, other, value):
        return other.echo.call_one(value).get()

def main():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
    code = "import sys; from meshbook.actor import run_worker_loop_forever as run; run(address=sys.argv[1], ca='%s')"
    worker = subprocess.Popen([sys.executable, "-c", code % "trust_all_connections", address])
    try:
        attach(address)
        attach(address)
        hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
        far = hosts.spawn_procs({"gpus": 2}).spawn("far", Echo)
        near = this_host().spawn_procs({"more": 1}).spawn("near", Echo)
        print(far.echo.call("there").get().values(), near.echo.call_one("here").get())
        print(far.slice(gpus=1).pass_on.call_one(near, "and back").get(), hosts.sizes)
        try:
            attach("tcp://127.0.0.1:1")
        except Exception as error:
            print("already attached through" in str(error))
        hosts.shutdown().get()
    finally:
        worker.kill()

if __name__ == "__main__":
    main()
"""


@program
def a_program_that_is_attached_through_a_worker(procs: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "attaching.py"
        path.write_text(ATTACHING)
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=240)
    return done.stdout.splitlines()


class Debugged(Actor):
    @endpoint
    def stop_here(self) -> int:
        if current_rank()["rows"] == 1:
            breakpoint()
        return 1

    @endpoint
    def rank(self) -> int:
        return current_rank().rank


@program
def what_waits_at_breakpoints(procs: Any) -> Any:
    debugger = debug_controller()
    told: list[Any] = [debugger.list.call_one(print_output=False).get()]
    own = this_host().spawn_procs({"rows": 2, "columns": 2})
    debugged = own.spawn("debugged", Debugged)
    debugged.rank.call().get()
    debugged.stop_here.broadcast()
    debugger.wait_pending_session.call_one().get()
    for _ in range(600):
        if len(waiting := debugger.list.call_one(print_output=False).get()) == 2:
            break
        time.sleep(0.1)
    told.append([(info.rank, dict(info.coords), info.function) for info in waiting])
    told.append(debug_controller().list.call_one(print_output=False).get()[0].lineno == waiting[1].lineno)
    return told


@program
def folders_of_a_workspace(procs: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "project"
        source.mkdir()
        (source / "module.py").write_text("value = 1")
        workspace = Workspace(dirs={source: "github/project"})
        workspace.merge(Path(folder) / "merged")
        named = Workspace(dirs=[source]).dirs
        return (
            named == {source: "project"},
            workspace.dirs == {source: "github/project"},
            (Path(folder) / "merged" / "github" / "project" / "module.py").read_text(),
            Workspace.null().dirs,
            SameWorkspace is Workspace,
            Workspace(dirs=[source], env=None) == Workspace(dirs={str(source): "project"}, env=None),
        )
