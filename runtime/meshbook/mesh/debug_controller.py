"""`debug_controller()`: Monarch's debugger, an actor of the program and a command line at another terminal.

    program          debug_controller().list.call_one().get()
    other terminal   python3 -m meshbook.debugger ── a socket in the session's folder ──> `debug_commands.serve`

That folder is the user's alone, which is who may debug. Who comes last has the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, cast

from meshbook.actor import Actor, ActorMesh, concurrent_endpoint, endpoint
from meshbook.actor.proc_ref import ask_controller
from meshbook.actor.router import is_rank
from meshbook.concurrency.background import hidden_thread
from meshbook.mesh import driven
from meshbook.mesh.console import ConsoleTerminal
from meshbook.mesh.debug_commands import DebugSessionInfo, serve, stopped_sessions, table
from meshbook.system.connections import end_connection

SOCKET = "debugger"
COMMAND = "python3 -m meshbook.debugger"
LOOK_S = 0.1


Sessions: TypeAlias = "list[DebugSessionInfo]"


class DebugController(Actor):
    """What waits at breakpoints, for programs; the command line is for people."""

    def __init__(self, folder: str) -> None:
        self._door = _Door(Path(folder) / SOCKET)
        driven.have_debugger(COMMAND)

    @endpoint
    def list(self, print_output: bool = True) -> Sessions:
        """What waits at breakpoints, by name and rank. print_output: as a table, too, where the program prints."""
        sessions = stopped_sessions()
        if print_output:
            print(table(sessions), flush=True)
        return sessions

    @concurrent_endpoint
    async def wait_pending_session(self) -> None:
        """Return when something waits at a breakpoint."""
        while not any(procs.stopped_ranks for procs in driven.own_meshes()):
            await asyncio.sleep(LOOK_S)

    def __cleanup__(self, error: Exception | None) -> None:
        driven.have_debugger("")
        self._door.close()


_own: dict[str, DebugController] = {}
"""The one of the session that this process drives first."""
_lock = threading.Lock()


def debug_controller() -> DebugController:
    """The debugger of this program, one for all: from now on ranks may stop at ``breakpoint()`` in any call.

    A script is not asked at its own terminal any more; somebody attaches by ``python3 -m meshbook.debugger``. A
    notebook's cells open prompts as before. On ranks it is that of the program.
    """
    if is_rank():
        return cast(DebugController, ask_controller("debug_controller", (), {}, "debugger").get())
    return own_debugger()


def own_debugger() -> DebugController:
    """That of this program, made when there is none. It belongs to no actor that asks for it."""
    with _lock:
        proc = driven.client_proc()
        found = _own.get(proc.session)
        if found is None or cast("ActorMesh[DebugController]", found).is_stopped:
            folder = next(each.path for each in driven.own_sessions() if each.id == proc.session)
            spawn = functools.partial(proc.spawn, "debug_controller", DebugController, str(folder))
            found = contextvars.Context().run(spawn)
            cast("ActorMesh[DebugController]", found).initialized.get()
            _own.clear()
            _own[proc.session] = found
        return found


class SocketTerminal(ConsoleTerminal):
    """A person at the other end of a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._lines = sock, sock.makefile("r", encoding="utf-8", errors="replace")

    def say(self, text: str) -> None:
        self._write(f"{text}\n")

    def read(self, prompt: str, is_open: Callable[[], bool]) -> str | None:
        self._write(prompt)
        if not (line := self._lines.readline()):
            raise EOFError
        return line.rstrip("\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # they have gone, which the next line that is read says
            self._sock.sendall(text.encode())


class _Door:
    """Where people come in."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock, self._owner = path, threading.Lock(), os.getpid()
        self._inside: socket.socket | None = None
        path.unlink(missing_ok=True)
        self._listener = socket.create_server(str(path), family=socket.AF_UNIX)
        hidden_thread(self._accept, "meshbook.debugger").start()

    def close(self) -> None:
        if self._owner == os.getpid():
            self._path.unlink(missing_ok=True)
            end_connection(self._listener)
            self._let_in(None)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                sock, _ = self._listener.accept()
                self._let_in(sock)
                hidden_thread(self._attend, "meshbook.debugger", sock).start()

    def _let_in(self, sock: socket.socket | None) -> None:
        with self._lock:
            before, self._inside = self._inside, sock
        if before is not None:
            with contextlib.suppress(OSError):
                before.sendall(b"another debugger has come\n")
            end_connection(before)

    def _attend(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            serve(SocketTerminal(sock))
        with self._lock:
            if self._inside is sock:
                self._inside = None
        end_connection(sock)
