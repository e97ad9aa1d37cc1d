"""The command line of a program's `debug_controller`, at another terminal: ``python3 -m meshbook.debugger``.

A module of its own because people run it by this name.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from pathlib import Path

from meshbook.mesh.debug_controller import SOCKET
from meshbook.system.connections import unix_connection
from meshbook.system.user_folders import runtime_base

EXIT_USAGE, EXIT_UNREACHABLE = 2, 69

_HELP = """usage: python3 -m meshbook.debugger [SESSION]

Attaches to the debugger of a program of this user on this machine, which has called debug_controller(). SESSION is
needed where there are several such programs. Its commands: help."""


def main() -> int:
    """Be the terminal until either side ends; returns the exit code."""
    arguments = sys.argv[1:]
    if len(arguments) > 1 or arguments[:1] in (["-h"], ["--help"]):
        is_help = len(arguments) == 1
        print(_HELP, file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else EXIT_USAGE
    there = {path.parent.name: path for path in runtime_base().glob(f"*/{SOCKET}")}
    if arguments:
        there = {session: path for session, path in there.items() if session == arguments[0]}
    found = {session: sock for session, path in there.items() if (sock := _connected(path)) is not None}
    if len(found) > 1:
        for sock in found.values():
            sock.close()
        print(f"several programs wait: {', '.join(sorted(found))}. Name one of them.", file=sys.stderr)
        return EXIT_USAGE
    if not found:
        what = "no program here" if not arguments else f"no program here drives session {arguments[0]}, which"
        print(f"{what} has called debug_controller()", file=sys.stderr)
        return EXIT_UNREACHABLE
    (sock,) = found.values()
    with sock:
        _talk(sock)
    return 0


def _connected(path: Path) -> socket.socket | None:
    with contextlib.suppress(OSError):  # what one left that was killed
        return unix_connection(str(path), None)
    return None


def _talk(sock: socket.socket) -> None:
    """Show what comes, and send what is typed."""

    def show() -> None:
        with contextlib.suppress(OSError):  # it has broken off, or nobody reads what we write
            while piece := sock.recv(1 << 16):
                os.write(1, piece)
        os._exit(0)  # who types is in a read that nothing else ends

    threading.Thread(target=show, daemon=True).start()
    with contextlib.suppress(OSError, KeyboardInterrupt):
        for line in sys.stdin:
            sock.sendall(line.encode())
        sock.shutdown(socket.SHUT_WR)
        threading.Event().wait()  # until `show` has seen the end


if __name__ == "__main__":
    sys.exit(main())
