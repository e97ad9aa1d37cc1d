"""gloo's own sockets in this process: its devices, where they listen, which connections its thread still reads."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from meshbook.system.descriptors import FIRST, above_standard
from meshbook.system.processes import connect_to, own_address

_GREETING = struct.Struct("=q")


_WATCHED = re.compile(r"^tfd: +(?P<fd>\d+) events: +(?P<events>[0-9a-f]+) .* ino:(?P<inode>[0-9a-f]+) ", re.MULTILINE)


_EVENTS = 0x0FFF_FFFF
"""Of what epoll calls events; the other bits say how they are told."""


def connects_at_once() -> bool:
    """Whether making a gloo group waits for all its ranks, as the user may ask by a variable of torch."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() not in ("1", "true", "yes", "y")


def gloo_devices() -> list[dist.ProcessGroupGloo.Device]:
    """A device per interface, as torch chooses them."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names and ":" in (own := own_address()):  # torch's default would fall back to 127.0.0.1
        return [dist.ProcessGroupGloo.create_device(hostname=own)]
    if not names:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]


def descriptors() -> set[int]:
    with above_standard():
        return {int(entry) for entry in os.listdir("/proc/self/fd")}


def listening_at(fd: int) -> tuple[str, int] | None:
    """The address that ``fd`` listens at, if it is a socket that does."""
    with internet_socket(fd) as sock:
        listens = sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return sock.getsockname()[:2] if sock is not None and listens else None


def is_poll(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventpoll]"
    except OSError:  # closed by now
        return False


def connections(poll: int) -> Iterator[tuple[socket.socket, bool]]:
    """The connections of an epoll descriptor, each open until the next one is asked for, and whether it is read.

    One that a peer has made and no operation has needed yet is not.
    """
    try:
        with above_standard():
            watched = Path(f"/proc/self/fdinfo/{poll}").read_text()
    except OSError:  # closed by now
        return
    for found in _WATCHED.finditer(watched):
        with internet_socket(int(found["fd"])) as sock:
            if (
                sock is not None
                and os.fstat(sock.fileno()).st_ino == int(found["inode"], 16)  # else another file has got the number
                and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            ):
                yield sock, bool(int(found["events"], 16) & _EVENTS)


@contextlib.contextmanager
def internet_socket(fd: int) -> Iterator[socket.socket | None]:
    """A second descriptor for ``fd``, if that is an internet socket."""
    try:
        copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST) if stat.S_ISSOCK(os.fstat(fd).st_mode) else -1
    except OSError:  # closed by now
        copy = -1
    if copy < 0:
        yield None
        return
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # another file has got the number meanwhile
        os.close(copy)
        yield None
        return
    with sock:
        yield sock if sock.family in (socket.AF_INET, socket.AF_INET6) else None


def greet_and_leave(address: tuple[str, int], peer: int) -> None:
    """Connect as the group's rank ``peer`` would, and end the connection: whoever waits for that peer fails."""
    try:
        with connect_to(address, 1.0) as sock:
            sock.sendall(_GREETING.pack(peer))
    except OSError:
        return  # the group is gone already
