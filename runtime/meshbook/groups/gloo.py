"""gloo's own threads and sockets in this process: its devices, where they listen, which connections are still read.

A gloo group has a thread that reads its connections. When more comes than the operation has room for (ranks disagree
on a size), that thread throws, nobody catches, and C++'s runtime ends the process: the rank would die of a wrong shape.
So the runtime's terminate handler is ours: the thread of a group never comes back, its group is of no use any more, and
the rest of the process goes on. Any other such exception ends the process as ever, by the handler that was there
before. (Not SIGABRT is answered, which also comes from outside: a handler in Python waits for the interpreter, and the
thread that it interrupts may be the one that is just handing that on.)

The thread may hold locks of its group, so a group that is lost in this way is never destroyed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import torch.distributed as dist

from meshbook.system.descriptors import FIRST, above_standard
from meshbook.system.interfaces import connect_to, own_address

_HANDLER = ctypes.CFUNCTYPE(None)
_RUNTIMES = ("libstdc++.so.6", "libc++.1.dylib")
"""The C++ runtimes of Linux and macOS; torch has loaded the one that it uses."""

_on_lost: dict[int, weakref.WeakMethod[Callable[[], object]]] = {}
"""The callbacks of groups that lose their thread, by the kernel's number of the thread."""


def gloo_threads() -> set[int]:
    """Return the kernel's numbers of all threads of the process that are not Python's."""
    known = {thread.native_id for thread in threading.enumerate()}
    with above_standard():
        return {int(entry) for entry in os.listdir("/proc/self/task")} - known


def park_threads(gloos: Iterable[int], on_lost: Callable[[], object]) -> None:
    """Keep these threads from ending the process when gloo gives them up.

    on_lost: a method of their group, called on such a thread, which does not come back.
    """
    for number in [number for number, method in _on_lost.items() if method() is None]:
        del _on_lost[number]  # they have ended with their group, and the number may be another's
    _on_lost.update(dict.fromkeys(gloos, weakref.WeakMethod(on_lost)))
    _handler_before()


def _on_terminate() -> None:
    """Park the calling thread, whose exception nothing catches, if it is gloo's; the process ends when this returns."""
    method = _on_lost.get(threading.get_native_id())
    on_lost = method() if method is not None else None
    if on_lost is None:
        if before := _handler_before():
            ctypes.cast(before, _HANDLER)()
        return
    on_lost()
    del on_lost, method
    while True:
        time.sleep(3600)


_handler = _HANDLER(_on_terminate)


@lru_cache(maxsize=1)
def _handler_before() -> int | None:
    """Install our handler, once; return the one that was there before."""
    set_terminate = _load_set_terminate()
    return set_terminate(_handler) if set_terminate is not None else None


def _load_set_terminate() -> Callable[[object], int | None] | None:
    """C++'s ``std::set_terminate``; None where its runtime has another name, so that threads cannot be parked."""
    for name in _RUNTIMES:
        with contextlib.suppress(OSError, AttributeError):
            found = ctypes.CDLL(name)._ZSt13set_terminatePFvvE
            found.argtypes, found.restype = (_HANDLER,), ctypes.c_void_p
            return found
    return None


_GREETING = struct.Struct("=q")
_WATCHED = re.compile(r"^tfd: +(?P<fd>\d+) events: +(?P<events>[0-9a-f]+) .* ino:(?P<inode>[0-9a-f]+) ", re.MULTILINE)
_EVENTS = 0x0FFF_FFFF
"""The bits of epoll's events that are events; the other bits say how they are told."""


def connects_at_once() -> bool:
    """Whether making a gloo group waits for all its ranks, as the user may ask by a variable of torch."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() not in ("1", "true", "yes", "y")


def gloo_devices() -> list[dist.ProcessGroupGloo.Device]:
    """A device per interface that the user names; else the one by which the hosts reach each other."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:  # torch's default is what this host calls itself, which is often 127.0.1.1
        return [dist.ProcessGroupGloo.create_device(hostname=own_address())]
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
    """Return a second descriptor for ``fd``, if that is an internet socket."""
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
    """Connect as the group's rank ``peer`` would, and end the connection: the waits for that peer fail."""
    try:
        with connect_to(address, 1.0) as sock:
            sock.sendall(_GREETING.pack(peer))
    except OSError:
        return  # the group is gone already
