"""The network interfaces and addresses of this machine, and the address by which others are to know it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from meshbook.system.descriptors import open_above

WANTED = "MESHBOOK_INTERFACE"
"""The variable for the interface, or the network as ``10.0.0.0/8``, by which hosts reach each other."""

_GET_FLAGS, _GET_ADDRESS = 0x8913, 0x8915
_UP, _LOOPBACK = 0x1, 0x8
_IPV6, _GLOBAL = Path("/proc/net/if_inet6"), "00"
_FAR_AWAY = ((socket.AF_INET, "10.255.255.255"), (socket.AF_INET6, "2001:db8::1"))

_chosen = ""


class Interface(NamedTuple):
    """An address and the interface that has it."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.address} ({self.name})"


def use_address(address: str) -> None:
    """Make this process known by this address from now on; empty: by that of the default route."""
    global _chosen
    _chosen = address


def routed_address() -> str:
    """Return the address of the default route; no packet is sent. Empty without a route."""
    for family, address in _FAR_AWAY:
        with contextlib.suppress(OSError), _probe(family) as probe:
            probe.connect((address, 1))
            return str(probe.getsockname()[0])
    return ""


def _probe(family: socket.AddressFamily) -> socket.socket:
    return open_above(lambda: socket.socket(family, socket.SOCK_DGRAM))


def chosen_interface() -> str:
    """Return the chosen address and the interface that has it; empty where none was chosen."""
    return next((str(each) for each in own_interfaces() if each.address == _chosen), _chosen)


def own_interfaces() -> list[Interface]:
    """Return the interfaces that are up, that of the default route first; loopback only if it has that route."""
    routed = routed_address()
    found = sorted(_all(), key=lambda each: each.address != routed)
    return [each for each in found if each.address == routed or not _flags(each.name) & _LOOPBACK]


def wanted_interfaces(wanted: str) -> list[Interface]:
    """Return those of `own_interfaces` that a person means. wanted: names or networks, with commas between them."""
    return [each for each in own_interfaces() if any(_is_meant(each, part) for part in wanted.split(","))]


def _is_meant(interface: Interface, part: str) -> bool:
    try:
        return ipaddress.ip_address(interface.address) in ipaddress.ip_network(part.strip(), strict=False)
    except ValueError:
        return interface.name == part.strip()


def _all() -> Iterator[Interface]:
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # it has none of IPv4
            if _flags(name) & _UP:
                yield Interface(name, socket.inet_ntoa(_ask(_GET_ADDRESS, name)[20:24]))
    with contextlib.suppress(OSError):
        for line in _IPV6.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == _GLOBAL and _flags(name) & _UP:
                yield Interface(name, str(ipaddress.IPv6Address(bytes.fromhex(digits))))


def _flags(name: str) -> int:
    try:
        return int(struct.unpack_from("H", _ask(_GET_FLAGS, name), 16)[0])
    except OSError:
        return 0


def _ask(what: int, name: str) -> bytes:
    """Raises: OSError."""
    with _probe(socket.AF_INET) as sock:
        return fcntl.ioctl(sock.fileno(), what, struct.pack("256s", os.fsencode(name)[:15]))


def own_address() -> str:
    """The address of this host by which others know it: one that was chosen, else that of the default route.

    Without a route: of an interface that is up, or the address of our own name.
    """
    if known := _chosen or routed_address():
        return known
    named = [each.address for each in own_interfaces()]
    with contextlib.suppress(OSError):
        named += [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)]
    return next((address for address in named if _is_ours(address)), loopback_address())


def address_towards(host: str) -> str:
    """The address of this machine from which ``host`` is reached; no packet is sent. Raises: OSError."""
    for family, _, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
        with _probe(family) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    raise OSError(f"{host} has no address")


def loopback_address() -> str:
    """Return the address at which processes of this host find each other."""
    return "127.0.0.1" if _is_ours("127.0.0.1") else "::1"


def family_of(address: str) -> socket.AddressFamily:
    """The kind of sockets that an address, not a name, is for."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def connect_to(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """A connection to an address, not a name, whose waits end after ``timeout_s``. Raises: OSError."""
    sock = open_above(lambda: socket.socket(family_of(address[0]), socket.SOCK_STREAM))
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def in_endpoint(address: str) -> str:
    """The address as endpoints have it: ``[::1]``."""
    return f"[{address}]" if ":" in address else address


def _is_ours(address: str) -> bool:
    try:
        with _probe(family_of(address)) as probe:
            probe.bind((address, 0))
        return True
    except OSError:
        return False
