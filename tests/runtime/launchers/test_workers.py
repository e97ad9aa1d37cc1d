"""Workers that were started by themselves: who may have them as hosts, how often, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import wait_until

import meshbook
from benchmarks.k8s.cluster import free_port
from meshbook.actor import HostMesh, attach_to_workers, start_worker_loop_forever
from meshbook.errors import SpawnError, UsageError, WorkerLost
from meshbook.launchers import workers
from meshbook.launchers.invitations.invitation import TurnedAway, encode
from meshbook.launchers.invitations.worker_loop import WorkerLoop
from meshbook.launchers.invitations.worker_ticket import Farewell, decode_answer, read_address, worker_secret
from meshbook.wire.gate import ask_gate, gate_keys

pytestmark = pytest.mark.cluster

TRUST = "trust_all_connections"
StartWorker = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(clean_end: None) -> Iterator[StartWorker]:
    """Start a worker in a process of its own; returns at once, as a program that attaches may do."""
    started = []

    def start(address: str, how: str = "run_worker_loop_forever", **env: str) -> subprocess.Popen[str]:
        code = f"from meshbook.actor import {how} as run; run(address={address!r}, ca={TRUST!r}); print('returned')"
        command = [sys.executable, "-c", code]
        started.append(subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    meshbook.shutdown()
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://worker of {tmp_path}"


def attach(*addresses: str) -> HostMesh:
    return attach_to_workers(ca=TRUST, workers=addresses)


def test_workers_are_hosts_and_end_when_these_are_shut_down(start: StartWorker, address: str) -> None:
    port = free_port()
    both = [f"tcp://localhost:{port}@tcp://127.0.0.1:{port}", f"service<2MuAHeDjLCEd>@{address}"]
    processes = [start(each) for each in both]
    hosts = attach(*both)
    assert hosts.sizes == {"hosts": 2}
    assert hosts.initialized.get(120) is True
    with hosts.spawn_procs({"gpus": 1}, torch=False) as procs:
        assert procs.run("rank").get(60).values() == [0, 1]
    hosts.shutdown().get()
    assert [process.wait(60) for process in processes] == [0, 0]


def test_a_worker_waits_for_the_next_program_when_one_has_ended(start: StartWorker, address: str) -> None:
    process = start(address, "run_worker_loop_until_shutdown")
    for _ in range(2):
        with attach(address).spawn_procs(torch=False) as procs:
            assert procs.run("rank").get(60).values() == [0]
        meshbook.shutdown()
        assert process.poll() is None
    attach(address).shutdown()
    assert process.communicate(timeout=60)[0] == "returned\n" and process.returncode == 0


def test_ranks_end_with_their_worker(start: StartWorker, address: str) -> None:
    process = start(address)
    with attach(address).spawn_procs(torch=False) as procs:
        procs.initialized.get(120)
        call = procs.run("import time; time.sleep(600)")
        process.send_signal(signal.SIGKILL)
        with pytest.raises(WorkerLost):
            call.get(120)


def test_a_worker_with_another_ticket_is_nobodys_host(start: StartWorker, address: str, tmp_path: Path) -> None:
    ticket = tmp_path / "ticket"
    ticket.write_text("another ticket of at least 32 characters")
    ticket.chmod(0o600)
    start(address, MESHBOOK_TICKET_FILE=str(ticket))
    with pytest.raises(SpawnError, match=r"has another ticket than this program, which has that in .*worker-ticket\."):
        attach(address).spawn_procs(torch=False).initialized.get(120)


@pytest.mark.parametrize(("text", "mode"), [(None, 0), ("x" * 40, 0o644), ("too short", 0o600)])
def test_a_file_that_is_no_ticket_is_refused(
    text: str | None, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = tmp_path / "ticket"
    if text is not None:
        ticket.write_text(text)
        ticket.chmod(mode)
    monkeypatch.setenv("MESHBOOK_TICKET_FILE", str(ticket))
    with pytest.raises(UsageError, match=r"the ticket of workers, .*/ticket, .*at least 32 characters\. Copy that of"):
        attach("ipc://nowhere")
    with pytest.raises(UsageError, match="the ticket of workers"):
        start_worker_loop_forever(address="ipc://nowhere", ca=TRUST)


def test_where_no_worker_listens(monkeypatch: pytest.MonkeyPatch, clean_end: None) -> None:
    monkeypatch.setattr(workers, "WITHIN_S", 0.3)
    port = free_port()
    hosts = attach(f"tcp://127.0.0.1:{port}")
    with pytest.raises(SpawnError, match=rf"no worker listens at tcp://127.0.0.1:{port} \(Connection refused\)"):
        hosts.initialized.get(60)
    meshbook.shutdown()


@pytest.mark.parametrize("address", ["nodeA:4444", "tcp://nodeA", "tcp://nodeA:port", "metatls://nodeA:1", "ipc://"])
def test_addresses_that_name_no_worker(address: str) -> None:
    with pytest.raises(UsageError, match="a worker is named as in"):
        attach_to_workers(ca=TRUST, workers=[address])


def test_addresses_are_read_as_monarch_writes_them() -> None:
    assert read_address("tcp://a:1")[:2] == ("tcp://a:1", "tcp://a:1")
    assert read_address("service<1>@tcp://a:1@tcp://0.0.0.0:1")[:2] == ("tcp://a:1", "tcp://0.0.0.0:1")
    assert read_address("ipc://x") != read_address("ipc://y")


def test_tls_is_refused_with_what_there_is_instead() -> None:
    for options in ({"ca": b"certificate"}, {"ca": TRUST, "private_key": b"key"}):
        with pytest.raises(UsageError, match="keys that are made of the ticket"):
            attach_to_workers(workers=["ipc://x"], **options)
        with pytest.raises(UsageError, match="keys that are made of the ticket"):
            start_worker_loop_forever(address="ipc://x", **options)


def test_who_does_not_know_the_token_is_turned_away_and_an_address_is_one_workers(address: str) -> None:
    loop = WorkerLoop(address)
    try:
        public, _ = gate_keys(worker_secret().key)
        asked = encode(Farewell("guessed", "host", True))
        answer = decode_answer(ask_gate(read_address(address).dial, public.decode(), asked, 10.0))
        assert answer == TurnedAway("the ticket is another one")
        assert not loop.ended.done()
        with pytest.raises(SpawnError, match=r"cannot listen at .*: address already in use"):
            WorkerLoop(address)
    finally:
        loop.close()


def test_a_future_of_an_address(start: StartWorker, address: str) -> None:
    start(address)
    later: meshbook.Future[str] = meshbook.Future()
    hosts = attach_to_workers(ca=TRUST, workers=[later])
    later.set_result(address)
    assert hosts.initialized.get(120) is True
    hosts.shutdown()
    wait_until(lambda: not Path(read_address(address).dial.removeprefix("ipc://")).exists())
