"""Whether the machine at the other end of a TCP connection is there, whatever the process at that end does.

A process that is stopped, swaps or waits for a disk says nothing for as long as that takes, while its machine goes on
to acknowledge what it is sent. A machine that has died, or was cut off, acknowledges nothing. The kernel tells the two
apart (TCP_INFO), provided that something is under way: heartbeats see to that.

    nothing under way, or no room at the other end     nothing is asked, so nothing is wrong
    acknowledged, however late                         the machine is there
    under way, and not acknowledged                    since the last acknowledgement nobody knows

Nothing else does. TCP_USER_TIMEOUT (ZMQ_TCP_MAXRT) ends the connection of a stopped process too, as soon as that has
room for no more; ZMTP's heartbeats are answered by the process. Keepalives are sent only while nothing is under way,
which is where they are needed: on the connections of an agent that keeps what it has to say
(`meshbook.wire.transport`).
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time

_INFO = struct.Struct("8B13I")  # linux/tcp.h, the first 60 bytes of struct tcp_info
_STATE, _PROBES, _SND_MSS, _UNACKED, _LAST_ACK_MS = 0, 3, 10, 12, 20
_ESTABLISHED = 1


def last_answer(connection: socket.socket, before: float) -> float:
    """When the machine at the other end was last known to be there, on the monotonic clock; at least ``before``.

    Ask about once a second, with the answer before: while something is under way only what was known then counts.
    """
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
    """A copy of a descriptor of libzmq's, if it is a TCP connection: it may be closed, and its number used again."""
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
