"""TCP connections: whether the machine at the other end is there, and who may connect to a port of ours.

**Whether the machine is there**, even if the process at that end is silent. A process that is stopped, swaps or waits
for a disk says nothing for as long as that takes, while its machine goes on to acknowledge bytes that it is sent. A
machine that has died, or was cut off, acknowledges nothing. The kernel tells the two apart (TCP_INFO), provided that
something is under way: heartbeats see to that.

    nothing under way, or no room at the other end     nothing is asked, so nothing is wrong
    acknowledged, however late                         the machine is there
    under way, and not acknowledged                    unknown since the last acknowledgement

Nothing else does. TCP_USER_TIMEOUT (ZMQ_TCP_MAXRT) ends the connection of a stopped process too, as soon as that has
room for no more; ZMTP's heartbeats are answered by the process. Keepalives are sent only while nothing is under way, as
on the connections of an agent that keeps its messages while its controller is silent.

**Who may connect**: a bounded number of strangers, and none at all while no host is expected. libzmq accepts every
connection, gives each 5 s for its handshake, and knows no limit: a stranger could use up our file descriptors, and keep
its I/O thread busy with handshakes that lead nowhere. It accepts without Python's lock, so no count in Python could be
in time while a cell holds it. Therefore:

- While each expected host is connected and was heard of lately, the port is shut: a socket filter on the
  listener drops packets that arrive (Linux, SO_ATTACH_FILTER; connections made before are not concerned). It opens
  again as soon as one of them is missing. Where a kernel lets only root set filters it stays open, and the next holds
  always.
- While it is open, strangers are connections of which no valid message has come. Beyond `MAX_PER_ADDRESS` from one
  address the newest is turned away, beyond `MAX_STRANGERS` in all the oldest: an honest handshake takes milliseconds.

No ZeroMQ here: the transport passes on the events of its monitor, and names the descriptor that a message came from.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

_INFO = struct.Struct("8B13I")  # linux/tcp.h, the first 60 bytes of struct tcp_info
_STATE, _PROBES, _SND_MSS, _UNACKED, _LAST_ACK_MS = 0, 3, 10, 12, 20
_ESTABLISHED = 1


def last_answer(connection: socket.socket, before: float) -> float:
    """Return when the machine at the other end was last known to be there, on the monotonic clock; at least ``before``.
    Ask about once a second, with the answer before: while bytes are under way only earlier knowledge counts."""
    if not sys.platform.startswith("linux"):
        return before
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return before
    if len(told) < _INFO.size:
        return before
    info = _INFO.unpack(told)
    if info[_STATE] != _ESTABLISHED or not info[_SND_MSS]:  # gVisor fills in little more than the state
        return before
    now = time.monotonic()
    if not info[_UNACKED] and not info[_PROBES]:
        return now
    return max(before, now - int(info[_LAST_ACK_MS]) / 1000)


def borrow(fd: int) -> socket.socket | None:
    """Return a copy of a descriptor of libzmq's, which may close it, if it is a TCP connection."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        connection = socket.socket(fileno=copy)
    except OSError:  # it is no socket by now
        os.close(copy)
        return None
    if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
        return connection
    connection.close()
    return None


MAX_STRANGERS = 64
MAX_PER_ADDRESS = 16
# a host that was silent for so long may have lost its connection without our noticing: the port opens for it
SILENT_S = 2.5
BACKLOG = 128
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0 bytes of the packet


class _Heard(NamedTuple):
    fd: int
    heard: float


class ConnectionFilter:
    """The filter of one listening socket. It belongs to the thread that owns the ZeroMQ socket."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._port = listener.getsockname()[1]
        self._strangers: dict[int, str] = {}  # their addresses by descriptor, in the order of arrival
        self._by_address: Counter[str] = Counter()
        self._hosts: dict[str, _Heard] = {}
        self._buffer = ctypes.create_string_buffer(_DROP_ALL)
        self._missing = 0  # how many expected hosts are not there
        self.is_open = True
        self.can_shut = sys.platform.startswith("linux")
        # connections that ended without a valid message: wrong keys, other protocols, garbage, too slow
        self.unproven = 0
        self.turned_away = 0  # connections that were shut because there were too many strangers

    @property
    def strangers(self) -> int:
        """Return how many connections have not proved anything yet."""
        return len(self._strangers)

    def accepted(self, fd: int) -> None:
        """Note a connection that libzmq has let in, whose handshake begins."""
        address = self._address_of(fd)
        self._forget_stranger(fd)
        self._strangers[fd] = address
        self._by_address[address] += 1
        if self._by_address[address] > MAX_PER_ADDRESS + self._missing:
            self._turn_away(fd)
        elif len(self._strangers) > MAX_STRANGERS + self._missing:
            self._turn_away(next(iter(self._strangers)))

    def closed(self, fd: int) -> None:
        """Note that a connection has ended."""
        if self._forget_stranger(fd):
            self.unproven += 1
        for name in [name for name, known in self._hosts.items() if known.fd == fd]:
            del self._hosts[name]

    def heard(self, host: str, fd: int) -> None:
        """Note that a valid message of a host came over the connection ``fd``."""
        self._forget_stranger(fd)
        self._hosts[host] = _Heard(fd, time.monotonic())

    def answered(self, host: str, before: float) -> float:
        """Return when the machine of a host was last known to be there, at least ``before``."""
        known = self._hosts.get(host)
        if known is None or (connection := self._borrow(known.fd)) is None:
            return before
        with connection:
            return last_answer(connection, before)

    def settle(self, expected: Collection[str]) -> None:
        """Open or shut the port; call it about once a second. ``expected``: the hosts that may dial in."""
        earliest = time.monotonic() - SILENT_S
        self._hosts = {name: known for name, known in self._hosts.items() if name in expected}
        self._missing = len(expected) - sum(known.heard > earliest for known in self._hosts.values())
        if self.can_shut and self.is_open != bool(self._missing):
            self._set_open(bool(self._missing))

    def close(self) -> None:
        self._listener.close()

    def _set_open(self, wanted: bool) -> None:
        if wanted:
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        else:
            program = struct.pack("HxxxxxxP", 1, ctypes.addressof(self._buffer))
            try:
                self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            except OSError:  # it is one protection of two, and no reason to be without a mesh
                self.can_shut = False
                return
        self.is_open = wanted

    def _address_of(self, fd: int) -> str:
        """Return the address from which a connection comes; empty if it has ended already."""
        if (connection := self._borrow(fd)) is not None:
            with connection, contextlib.suppress(OSError):
                return str(connection.getpeername()[0])
        return ""

    def _forget_stranger(self, fd: int) -> bool:
        """Forget a stranger; return whether it was one."""
        if (address := self._strangers.pop(fd, None)) is None:
            return False
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
        return True

    def _turn_away(self, fd: int) -> None:
        """Reset a connection; libzmq then closes its descriptor."""
        self._forget_stranger(fd)
        if (connection := self._borrow(fd)) is not None:
            with connection, contextlib.suppress(OSError):  # it may have ended just now
                connection.shutdown(socket.SHUT_RDWR)
            self.turned_away += 1

    def _borrow(self, fd: int) -> socket.socket | None:
        """Return a copy of libzmq's descriptor, if it is a living connection to our port: the number may be reused."""
        if (connection := borrow(fd)) is None:
            return None
        with contextlib.suppress(OSError):
            if connection.getsockname()[1] == self._port:
                return connection
        connection.close()
        return None
