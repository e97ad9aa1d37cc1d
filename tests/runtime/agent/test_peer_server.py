"""The port at which agents call each other: shut to strangers, and of little use to a host that lies."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mail_ranks
import msgspec
import psutil
import pytest
import strangers
from mail_ranks import There
from patience import wait_until

from meshbook import ProcMesh
from meshbook.shape.members import Region, members_of
from meshbook.system.event_loop import EventLoop
from meshbook.values.pickling import dumps
from meshbook.wire import messages as wire
from meshbook.wire.link import Uplink
from meshbook.wire.ticket import Ticket
from meshbook.wire.transport import Dialer, new_keys

pytestmark = pytest.mark.cluster

_numbers = itertools.count(1)


class Port:
    """The port of the second host's agent, and ranks that call through it."""

    def __init__(self, mesh: ProcMesh) -> None:
        self.mesh = mesh
        mesh.execute(mail_ranks.open_desk, 70).get(20)
        self.there = There(mesh.id, members_of(mesh), 70)
        self.call()
        self.caller, self.host = mesh._mesh.hosts
        self._dispatcher = mesh._controller._dispatcher
        self.endpoint = self._dispatcher.peer_directory.met[self.caller.id, self.host.id].endpoint
        self.number = int(self.endpoint.rpartition(":")[2])
        assert self.host.hello is not None
        self.agent = psutil.Process(self.host.hello.pid)
        self.key = mesh._controller._socket.key_of(self.host.id)

    def call(self) -> None:
        """Ranks of the first host call those of the second."""
        values = self.mesh.slice(hosts=0).execute(mail_ranks.ask, self.there.on(2, 3), "echo", 1).get(20).values()
        assert values == [{2: 1, 3: 1}] * 2

    def expect(self, keys: tuple[str, str]) -> str:
        """Have the agent expect one more host, so that its port is open; returns that host's name."""
        name = f"late-{next(_numbers)}"
        message = wire.OpenPeerPort(name, keys[0], 1, "127.0.0.1")
        self.mesh._controller.ask(lambda: self.host.send_urgent(message))
        deadline = time.monotonic() + 10
        while (sock := strangers.dial(self.number, 0.2)) is None:
            assert time.monotonic() < deadline
        sock.close()
        return name

    def forget(self, name: str) -> None:
        self.mesh._controller.ask(lambda: self.host.send_urgent(wire.PeerLost(name, "it was made up")))


@pytest.fixture(scope="module")
def port(mesh2x2: ProcMesh) -> Port:
    return Port(mesh2x2)


class Impostor(Uplink):
    """Dials the port with a key pair."""

    def __init__(self, port: Port, keys: tuple[str, str]) -> None:
        self.heard: list[wire.ToHost] = []
        ticket = Ticket("late", port.endpoint, port.key, keys[0], keys[1], "", 1, 0.0)
        self.dialer, loop = Dialer(), EventLoop()
        super().__init__(self.dialer, ticket, loop, lambda header, _: self.heard.append(wire.decode_to_host(header)))

    def close(self) -> None:
        super().close()
        assert self.dialer._context is not None
        self.dialer._context.term()

    def say(self, header: bytes) -> None:
        self.connection.send(header)
        self.flush()

    def is_answered(self) -> bool:
        """Whether a reply comes."""
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and not any(isinstance(each, wire.Replies) for each in self.heard):
            self.end.may_read = True
            self.serve()
            time.sleep(0.05)
        return time.monotonic() < deadline


@pytest.fixture
def impostor(port: Port) -> Iterator[Callable[[tuple[str, str]], Impostor]]:
    with contextlib.ExitStack() as stack:
        yield lambda keys: stack.enter_context(contextlib.closing(Impostor(port, keys)))


def test_the_port_is_shut_once_those_who_may_call_are_there(port: Port) -> None:
    deadline = time.monotonic() + 20
    while (sock := strangers.dial(port.number, 0.3)) is not None:
        sock.close()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    port.call()


def test_strangers_cost_the_agent_nothing(port: Port) -> None:
    name = port.expect(new_keys())
    before, files = port.agent.memory_info().rss, port.agent.num_fds()
    for attack in (strangers.send_garbage, strangers.scan, strangers.ask_by_http, strangers.claim_2_gb):
        for _ in range(20):
            attack(port.number)
        port.call()
    assert port.agent.memory_info().rss - before < 50 << 20
    port.forget(name)
    wait_until(lambda: port.agent.num_fds() <= files)


def _call(port: Port, endpoint: str, argument: object, mailbox: int) -> bytes:
    body = dumps(((argument,), {}), what="an attack")
    target = Region.of(port.mesh.sizes).slice(hosts=1).encoded
    origin = wire.Origin(port.mesh.id, 0, 1)
    call = wire.Call(1, port.mesh.id, endpoint, target, inline=body.head, mailbox=mailbox, origin=origin)
    return wire.encode(call)


@pytest.mark.parametrize("is_known", [False, True])
def test_nobody_reaches_the_main_threads_of_ranks_through_the_port(
    port: Port, impostor: Callable[[tuple[str, str]], Impostor], tmp_path: Path, is_known: bool
) -> None:
    keys = new_keys()
    name = port.expect(keys if is_known else new_keys())
    sock = impostor(keys)
    canary = tmp_path / "canary"
    sock.say(_call(port, "echo", 1, mailbox=70))
    assert sock.is_answered() == is_known
    sock.say(_call(port, "invoke", strangers.Canary(canary), mailbox=0))
    time.sleep(0.5)
    assert not canary.exists()
    sock.heard.clear()
    assert not sock.is_answered()
    port.call()
    port.forget(name)


def test_a_host_that_sends_nonsense_is_let_in_no_more(
    port: Port, impostor: Callable[[tuple[str, str]], Impostor]
) -> None:
    keys = new_keys()
    port.expect(keys)
    sock = impostor(keys)
    sock.say(b"\xc1nonsense")
    sock.say(msgspec.msgpack.encode(["goodbye"]))
    time.sleep(0.5)
    port.call()
    assert port.agent.is_running()
