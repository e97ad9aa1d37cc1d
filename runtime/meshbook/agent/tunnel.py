"""An agent that dials its controller through the connection that has started it, as by ssh.

It ends with that connection: nobody can reach it any more. Its stdin tells that its launcher has ended, which is no
reason to end (`meshbook.agent.lease`); that nobody reads its stdout tells that the connection has. From then on its
output goes to its log.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import select
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from meshbook.errors import SpawnError
from meshbook.sessions.folder import trim_logs
from meshbook.system.event_loop import EventLoop
from meshbook.system.user_folders import log_base, private_folder
from meshbook.wire.ticket import TUNNEL_ENDS, Ticket

LOG = "agent.log"
_ENDS = TUNNEL_ENDS + "[0-9a-f]" * 24
NEW_S = 60.0  # an end is young for so long: sshd makes it before it listens there


def settle_in(ticket: Ticket) -> tuple[Ticket, int]:
    """Write to a log of this machine; return the ticket to use, and the connection. Raises: OSError, SpawnError."""
    if ticket.by_tunnel and not tunnel_of(ticket).is_socket():
        raise SpawnError(f"meshbook: no tunnel at {tunnel_of(ticket)}; remote port forwarding failed")
    base = log_base()
    trim_logs(base)
    sweep()
    session, _, host = ticket.log_dir.partition("/")
    folder = private_folder(private_folder(base / session) / host)
    connection = os.dup(1)  # which no child of ours inherits
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    return msgspec.structs.replace(ticket, log_dir=str(folder)), connection


def sweep() -> None:
    """Remove ends of our tunnels that have no listener: sshd leaves them, and so does an agent that was killed."""
    for name in glob.glob(_ENDS):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:  # another agent does the same
            told = os.lstat(name)
            if told.st_uid != os.getuid() or not stat.S_ISSOCK(told.st_mode) or time.time() - told.st_mtime < NEW_S:
                continue
            sock.setblocking(False)
            if sock.connect_ex(name) == errno.ECONNREFUSED:
                os.unlink(name)


def tunnel_of(ticket: Ticket) -> Path:
    """Return the agent's end of the tunnel."""
    return Path(ticket.endpoint.removeprefix("ipc://"))


def watch(loop: EventLoop, connection: int, on_end: Callable[[], None]) -> None:
    """Call ``on_end``, once, when ``connection`` has no reader any more."""
    poll = select.poll()
    poll.register(connection, 0)

    def look() -> None:
        if poll.poll(0):
            loop.forget(registered)
            on_end()

    registered = loop.watch(
        connection, look, edges=True
    )  # edges: it may be our stdin too, whose end can be read for ever
