"""The addresses by which the hosts of a mesh reach each other, and the watch on the roads between them.

Addresses are tried out as process groups are formed:

    first rank of each host     opens a door, and greets with its host's addresses
    all                         meet; where all are on one machine there is nothing to try
    first rank of each host     knocks at the doors of others, at all of their addresses, and says which were opened
    all                         take, for their host, of its addresses that by which most of these came in, or the first

So a host may have addresses that lead nowhere: of a bridge for containers, or of a network that each machine has for
itself. The machine that answers at such an address has no door, or another host's, and does not know the door's word.

A wait in a collective ends where a road has gone since (`Roads`). A network that drops packets reports nothing.
The kernel repeats for a quarter of an hour, gloo waits for it, and the controller, which may reach all hosts by another
network, sees ranks at work. But the kernel knows which bytes are unacknowledged (`meshbook.wire.tcp`),
and a process may ask it of its own sockets. A process at the other end that is stopped or busy acknowledges all the
same, so it is never taken for a road that has gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from meshbook.errors import SpawnError
from meshbook.errors.advice import advice
from meshbook.groups.store_client import LinkStore
from meshbook.system.descriptors import open_above
from meshbook.system.interfaces import (
    WANTED,
    Interface,
    family_of,
    loopback_address,
    own_interfaces,
    use_address,
    wanted_interfaces,
)
from meshbook.system.processes import network_id
from meshbook.wire.tcp import borrow, last_answer

KNOCK_S, GRACE_S = 6.0, 0.1
"""The time that a door may take to be opened, where packets are lost; and the others once each host has opened one."""
NEIGHBOURS = 16
"""The number of hosts that each knocks at."""
_WORD_BYTES = 16
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class Doorway(msgspec.Struct, frozen=True):
    """The place where the first rank of a host waits for others."""

    host: int
    """Its number among those of the mesh."""
    name: str
    interfaces: tuple[tuple[str, str], ...] = ()
    """The host's, by name and address, the one that is preferred first."""
    port: int = 0
    word: str = ""
    network: str = ""
    """Equal for hosts that have one loopback interface; empty where the environment says which interface is meant."""
    problem: str = ""
    """The reason why there is none."""


@contextlib.contextmanager
def open_door(host: int, name: str) -> Iterator[Doorway]:
    """Open a door while the block runs: a port at which other hosts knock."""
    try:
        found = allowed_interfaces(name)
    except SpawnError as error:  # all ranks are to know
        yield Doorway(host, name, problem=str(error))
        return
    word = secrets.token_hex(_WORD_BYTES // 2)
    family = socket.AF_INET6 if any(":" in each.address for each in found) else socket.AF_INET
    with open_above(lambda: socket.socket(family, socket.SOCK_STREAM)) as listening:
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(("", 0))
        listening.listen(NEIGHBOURS * 4)
        answering = threading.Thread(target=_answer, args=(listening, word.encode()), daemon=True)
        answering.start()
        try:
            network = "" if _named_by_user() else network_id()
            yield Doorway(host, name, tuple(found), listening.getsockname()[1], word, network)
        finally:
            listening.shutdown(socket.SHUT_RDWR)  # ends the wait in accept
            answering.join()


def _named_by_user() -> bool:
    return os.environ.get(_GLOO, "") not in ("", LOOPBACK) or bool(os.environ.get(WANTED, ""))


def allowed_interfaces(host: str) -> list[Interface]:
    """Return the interfaces that the environment allows; all where it says nothing.

    host: the name of this one, for words. Raises: SpawnError.
    """
    if (named := os.environ.get(_GLOO, "")) not in ("", LOOPBACK):  # of one that is not there torch tells
        return wanted_interfaces(named)
    if not (wanted := os.environ.get(WANTED, "")):
        return own_interfaces()
    if not (found := wanted_interfaces(wanted)):
        there = ", ".join(map(str, own_interfaces())) or "none"
        raise SpawnError(f"host {host} has no interface {wanted}, which was asked for; it has {there}")
    return found


def find_ways(link: LinkStore, scope: str, doors: Sequence[Doorway], own: Doorway | None) -> dict[int, Interface]:
    """The interface of each host, by its number: on all ranks alike. own: the door that this rank has opened.

    Raises: SpawnError that names who is not reached, and at which addresses.
    """
    for door in doors:
        if door.problem:
            raise SpawnError(door.problem)
    if doors and doors[0].network and len({door.network for door in doors}) == 1:
        return {door.host: Interface(LOOPBACK, loopback_address()) for door in doors}  # no port is open to a network
    if len(doors) < 2:  # nobody is to reach it; where each has one address that may lead nowhere all the same
        return {door.host: Interface(*door.interfaces[0]) for door in doors if door.interfaces}
    if own is not None:
        at = doors.index(own)
        others = [doors[(at + step) % len(doors)] for step in range(1, min(NEIGHBOURS, len(doors) - 1) + 1)]
        link.set(f"{scope}/reached/{own.host}", msgspec.json.encode(knock(others)))
    told = link.multi_get([f"{scope}/reached/{door.host}" for door in doors])
    reached = [msgspec.json.decode(text, type=dict[int, list[str]]) for text in told]
    for family in dict.fromkeys(family_of(address) for door in doors for _, address in door.interfaces):
        ways = {
            door.host: _way_to(door, reached, family) for door in doors
        }  # gloo has no connections from one to another
        if None not in ways.values():
            return {host: way for host, way in ways.items() if way is not None}
    words = f"{advice().shared_network}, or {advice().no_groups}"
    raise SpawnError(f"{_describe_unreached(reached, doors)}, which collectives need: {words}")


def other_hosts(doors: Sequence[Doorway], ways: Mapping[int, Interface], own: int) -> dict[str, str]:
    """The names of the hosts that have other addresses than the one of this number, by these."""
    here = {way.address for host, way in ways.items() if host == own}
    return {
        ways[door.host].address: door.name
        for door in doors
        if door.host in ways and ways[door.host].address not in here
    }


def _way_to(
    door: Doorway, reached: Sequence[Mapping[int, list[str]]], family: socket.AddressFamily
) -> Interface | None:
    """The address of a family at which most came in: packets may have been lost, so not each has tried all."""
    found = [Interface(*each) for each in door.interfaces if family_of(each[1]) == family]
    by_host = [{each for each in told[door.host] if family_of(each) == family} for told in reached if door.host in told]
    if not found or not all(by_host):
        return None
    return max(found, key=lambda interface: sum(interface.address in answers for answers in by_host))


def _describe_unreached(reached: Sequence[Mapping[int, list[str]]], doors: Sequence[Doorway]) -> str:
    for door in doors:
        fails = [other.name for other, told in zip(doors, reached, strict=True) if told.get(door.host) == []]
        if fails:
            at = ", ".join(str(Interface(*each)) for each in door.interfaces) or "any address, since it has none"
            return f"{', '.join(fails)} cannot reach host {door.name} at {at}"
    return "the hosts reach each other neither all by IPv4 nor all by IPv6"


def knock(doors: Sequence[Doorway]) -> dict[int, list[str]]:
    """The addresses at which each was opened, by the doors' hosts."""
    opened: dict[int, list[str]] = {door.host: [] for door in doors}
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as sockets:
        for door in doors:
            for _, address in door.interfaces:
                sock = sockets.enter_context(
                    open_above(lambda: socket.socket(family_of(address), socket.SOCK_STREAM))  # noqa: B023
                )
                sock.setblocking(False)
                with contextlib.suppress(OSError):  # there is no way at all
                    with contextlib.suppress(BlockingIOError):
                        sock.connect((address, door.port))
                    waiting.register(sock, selectors.EVENT_READ, (door, address))
        began, deadline = time.monotonic(), time.monotonic() + KNOCK_S
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                waiting.unregister(key.fileobj)
                door, address = key.data
                if _is_answered(key.fileobj, door):
                    opened[door.host].append(address)
            if all(opened.values()):
                deadline = min(deadline, time.monotonic() + max(GRACE_S, 2 * (time.monotonic() - began)))
    return opened


def _is_answered(sock: object, door: Doorway) -> bool:
    assert isinstance(sock, socket.socket)
    try:
        return sock.recv(_WORD_BYTES, socket.MSG_WAITALL) == door.word.encode()
    except OSError:
        return False


def _answer(listening: socket.socket, word: bytes) -> None:
    while True:
        try:
            knocking, _ = listening.accept()
        except OSError:  # the door is closed
            return
        with knocking, contextlib.suppress(OSError):
            knocking.sendall(word)


_set_by_us: dict[str, str] = {}


def use_way(interface: Interface | None) -> None:
    """Have this process, and the groups that it forms, known by an interface (None: by any). Users' settings stay."""
    use_address(interface.address if interface is not None else "")
    chosen = f"={interface.name}" if interface is not None else ""
    if os.environ.get(_NCCL, "") == _set_by_us.get(_NCCL, ""):
        _set_by_us[_NCCL] = chosen
        os.environ.pop(_NCCL, None)
        if chosen:
            os.environ[_NCCL] = chosen


UNANSWERED_S = 15.0
"""The time that anything may be under way; as an agent's connection to its controller."""
LOOK_S = 1.0

_Ends = tuple[object, object]


class Roads:
    """The roads of one rank, looked at while it waits. Two threads that look at once do no harm."""

    def __init__(self) -> None:
        self.hosts: dict[str, str] = {}
        """The other hosts of the groups, by the addresses at which they are known; none on one machine."""
        self._next = 0.0
        self._answered: dict[_Ends, float] = {}

    def check(self, operation: str) -> None:
        """Look, at most once a second. Raises: RuntimeError that says which host is out of reach."""
        now = time.monotonic()
        if not self.hosts or now < self._next:
            return
        if now - self._next > UNANSWERED_S / 3:  # nobody has waited meanwhile
            self._answered.clear()
        self._next = now + LOOK_S
        self._answered, unanswered = self._look(now)
        for address, since in unanswered.items():
            if now - since > UNANSWERED_S:
                raise RuntimeError(
                    f"{operation}: host {self.hosts[address]} cannot be reached at {address}: nothing that was sent "
                    f"there was acknowledged for {now - since:.0f} s. Another road: {advice().shared_network}"
                )

    def _look(self, now: float) -> tuple[dict[_Ends, float], dict[str, float]]:
        """Return when each connection was last answered, and when each address to which there is one."""
        connections, addresses = dict[_Ends, float](), dict[str, float]()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, or not connected
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                if (connection := borrow(int(name))) is None:
                    continue
                with connection:
                    here, there = connection.getsockname(), connection.getpeername()
                    if there[0] in self.hosts:
                        told = last_answer(connection, -math.inf)
                        known = told > -math.inf  # some sandboxes' kernels do not tell, nor is a closed one silent
                        at = max(told, self._answered.get((here, there), now)) if known else now
                        connections[here, there] = at
                        addresses[there[0]] = min(addresses.get(there[0], at), at)
        return connections, addresses
