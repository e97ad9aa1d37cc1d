"""A worker as the way to others: what goes through it, who may, and what becomes of hosts when it goes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import wait_until

import meshbook
from benchmarks.k8s.cluster import free_port
from meshbook.actor import Actor, HostMesh, attach, attach_to_workers, endpoint, this_host
from meshbook.errors import AttachError, SpawnError, UsageError
from meshbook.launchers.invitations import server_way
from meshbook.launchers.invitations.server_messages import OtherTicket, Reaches, ask_server
from meshbook.launchers.invitations.worker_front import STRANGERS_MAX

pytestmark = pytest.mark.cluster

TRUST = "trust_all_connections"
StartWorker = Callable[..., "subprocess.Popen[bytes]"]


class Echo(Actor):
    @endpoint
    def echo(self, value: object) -> object:
        return value

    @endpoint
    def pass_on(self, other: Echo, value: object) -> object:
        return other.echo.call_one(value).get()


@pytest.fixture
def start(clean_end: None) -> Iterator[StartWorker]:
    """Start a worker on what acts as another machine: names of sockets mean other ones there."""
    started = []
    other = tempfile.mkdtemp(prefix="over there ")  # short, as paths of sockets are

    def start(address: str, **env: str) -> subprocess.Popen[bytes]:
        code = f"from meshbook.actor import run_worker_loop_forever as run; run(address={address!r}, ca={TRUST!r})"
        environment = {**os.environ, "XDG_RUNTIME_DIR": other, **env}
        started.append(subprocess.Popen([sys.executable, "-c", code], env=environment))
        return started[-1]

    yield start
    meshbook.shutdown()
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(60)
    shutil.rmtree(other)


@pytest.fixture
def server() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def workers(*addresses: str) -> HostMesh:
    return attach_to_workers(ca=TRUST, workers=addresses)


def test_workers_are_hosts_through_one_that_is_reached(start: StartWorker, server: str) -> None:
    way, _, _ = start(server), start("ipc://a"), start("ipc://b")
    attach(server)
    attach(server)
    hosts = workers("ipc://a", "ipc://b")
    with hosts.spawn_procs({"gpus": 1}, torch=False) as procs:
        echoes = procs.spawn("echoes", Echo)
        large = os.urandom(8 << 20)
        assert echoes.echo.call(large).get(120).values() == [large] * 2
        assert echoes.slice(hosts=0).pass_on.call_one(echoes.slice(hosts=1), "between").get(60) == "between"
        way.send_signal(signal.SIGSTOP)
        answer = echoes.echo.call(1)
        with pytest.raises(TimeoutError):
            answer.get(1.0)
        way.send_signal(signal.SIGCONT)
        assert answer.get(60).values() == [1, 1]
    hosts.shutdown().get()


def test_this_host_stays_the_machine_of_the_program(start: StartWorker, server: str) -> None:
    start(server, MARK="over there")
    attach(server)
    hosts = workers(server)
    with hosts.spawn_procs(torch=False) as far, this_host().spawn_procs(torch=False) as near:
        told = [procs.evaluate("__import__('os').environ.get('MARK')").get(120).values() for procs in (far, near)]
        assert told == [["over there"], [None]]
        echo = near.spawn("echo", Echo)
        assert far.spawn("far", Echo).pass_on.call_one(echo, "back").get(60) == "back"
    hosts.shutdown().get()


def test_hosts_are_back_when_their_server_is(start: StartWorker, server: str) -> None:
    way, _ = start(server), start("ipc://a")
    attach(server)
    with workers("ipc://a").spawn_procs(torch=False) as procs:
        echo = procs.spawn("echo", Echo)
        assert echo.echo.call_one(1).get(120) == 1
        way.kill()
        way.wait(60)
        answer = echo.echo.call_one(2)
        start(server)
        assert answer.get(120) == 2


def test_the_next_program_finds_hosts_by_the_same_server(start: StartWorker, server: str) -> None:
    start(server)
    start("ipc://a")
    attach(server)
    procs = workers("ipc://a").spawn_procs(torch=False, name="kept through a server")
    procs.initialized.get(120)
    procs.run("x = 5").get(60)
    (session,) = meshbook.detach()
    again = meshbook.attach(session, timeout_s=60).mesh("kept through a server")
    assert again.pull("x").get(60).values() == [5]


def test_a_server_with_another_ticket_is_nobodys_way(start: StartWorker, server: str, tmp_path: Path) -> None:
    ticket = tmp_path / "ticket"
    ticket.write_text("another ticket of at least 32 characters")
    ticket.chmod(0o600)
    start(server, MESHBOOK_TICKET_FILE=str(ticket))
    with pytest.raises(SpawnError, match=r"has another ticket than this program, which has that in .*worker-ticket\."):
        attach(server)


def test_a_server_that_is_not_there(server: str, monkeypatch: pytest.MonkeyPatch, clean_end: None) -> None:
    monkeypatch.setattr(server_way, "WITHIN_S", 0.3)
    with pytest.raises(SpawnError, match=rf"no worker listens at {server} \(.*\), which was to be the way to others"):
        attach(server)


def test_a_worker_that_the_server_does_not_find(
    start: StartWorker, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(server)
    attach(server)
    monkeypatch.setattr("meshbook.launchers.workers.WITHIN_S", 0.3)
    with pytest.raises(SpawnError, match=r"no worker listens at ipc://.*; it is started there by run_worker_loop"):
        workers("ipc://nowhere").initialized.get(60)
    with pytest.raises(UsageError, match=rf"is already attached through {server}, not ipc://other; a program has one"):
        attach("ipc://other")


@pytest.mark.parametrize("address", ["a-session", "", None, 4444])
def test_what_is_no_address(address: object) -> None:
    with pytest.raises(UsageError, match=r"attach takes the address of a worker, .*meshbook\.attach\(session\)"):
        attach(address)  # type: ignore[arg-type]


def test_addresses_that_name_no_server() -> None:
    with pytest.raises(UsageError, match="a worker is named as in"):
        attach("metatls://gateway:1")
    with pytest.raises(AttachError, match=r"is an address, no session: meshbook\.actor\.attach reaches workers"):
        meshbook.attach("tcp://gateway:4444")


def test_strangers_learn_nothing_and_keep_nobody_out(start: StartWorker, server: str) -> None:
    start(server)
    start("ipc://a")
    attach(server)
    address = ("127.0.0.1", int(server.rpartition(":")[2]))
    with socket.create_connection(address, 60) as sock, pytest.raises(OtherTicket):
        ask_server(sock, b"a key that is made of another ticket", Reaches("ipc://a"))
    with socket.create_connection(address, 60) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        assert _read_to_end(sock) == b""
    silent = [socket.create_connection(address, 60) for _ in range(STRANGERS_MAX + 1)]
    wait_until(lambda: _read_to_end(silent[-1]) == b"")  # no more than that at a time; each has so long to say a word
    for sock in silent:
        sock.close()
    with workers("ipc://a").spawn_procs(torch=False) as procs:
        assert procs.run("rank").get(120).values() == [0]


def _read_to_end(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 10)
    except ConnectionResetError:
        return b""
