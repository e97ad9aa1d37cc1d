"""Connections between processes: made, hurried and ended, whatever goes over them."""

from __future__ import annotations

import contextlib
import socket


def unix_connection(path: str, timeout_s: float | None) -> socket.socket:
    """To who listens there. timeout_s: of this and of all that is done with it. Raises: OSError."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def send_at_once(sock: socket.socket) -> None:
    """Have each piece go at once, not when the one before was acknowledged: what carries for others adds no wait."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def shut(sock: socket.socket) -> None:
    """Have whoever reads or writes there, on either side, come to the end; it stays to be closed."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def end_connection(sock: socket.socket) -> None:
    """Close it, also where a fork of this process has it still."""
    shut(sock)
    sock.close()
