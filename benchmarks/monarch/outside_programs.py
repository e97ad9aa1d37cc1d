"""Programs for what comes to a program from outside: servers, debuggers, folders. Run by `programs`."""

from __future__ import annotations

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
