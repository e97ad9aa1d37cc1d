"""Where this host is reached, also where it has no IPv4."""

from __future__ import annotations

import socket

_FAR_AWAY = ((socket.AF_INET, "10.255.255.255"), (socket.AF_INET6, "2001:db8::1"))


def own_address() -> str:
    """The address of this host on its default route; no packet is sent. Without a route: what its name means here."""
    for family, address in _FAR_AWAY:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 1))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    try:
        named = [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        named = []
    return next((address for address in named if _is_ours(address)), loopback_address())


def loopback_address() -> str:
    """Where processes of this host find each other."""
    return "127.0.0.1" if _is_ours("127.0.0.1") else "::1"


def family_of(address: str) -> socket.AddressFamily:
    """The kind of sockets that an address, not a name, is for."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def in_endpoint(address: str) -> str:
    """The address as endpoints have it: ``[::1]``."""
    return f"[{address}]" if ":" in address else address


def _is_ours(address: str) -> bool:
    try:
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
        return True
    except OSError:
        return False
