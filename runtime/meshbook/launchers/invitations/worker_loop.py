"""A worker that was started by itself: it listens at an address until programs want its machine as a host.

    run_worker_loop_forever(address="tcp://*:4444", ca="trust_all_connections")

Each program that summons it gets an agent of its own, which ends with the program's session, or with the worker. The
worker waits on for others, until a program shuts its hosts down (`HostMesh.shutdown`). Monarch's names. Programs that
reach nothing but this address have it as their way to other workers (`meshbook.launchers.invitations.worker_front`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from meshbook.concurrency.background import run_in_background
from meshbook.concurrency.future import Future
from meshbook.errors import SpawnError
from meshbook.launchers.invitations.agent_process import end_agent, start_agent
from meshbook.launchers.invitations.invitation import TurnedAway, difference, encode
from meshbook.launchers.invitations.worker_front import BACKLOG, WorkerFront
from meshbook.launchers.invitations.worker_ticket import (
    Farewell,
    Serves,
    Summons,
    WorkerAnswer,
    decode_question,
    read_address,
    refuse_tls,
    worker_secret,
)
from meshbook.system.os_errors import explain
from meshbook.system.user_folders import runtime_base
from meshbook.wire.gate import Gate, knock

TOLD_S = 1.0
"""How long the gate stays open for the last program to hear that its agent has ended."""


class WorkerLoop:
    """The gate of one worker, and the agents that it runs."""

    def __init__(self, address: str) -> None:
        """Raises: UsageError, SpawnError where it cannot listen."""
        where, self._secret = read_address(address), worker_secret()
        self._lock, self._bound = threading.Lock(), where.bind
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._is_released = False
        self._told = threading.Event()
        """Set when a program knows that its agent has ended."""
        self.ended: Future[None] = Future()
        """Done when a program has shut its hosts down, and every agent has ended."""
        gate, listener = f"{runtime_base()}/gate-{secrets.token_hex(8)}", None
        try:
            listener = _listener(where.bind)
            self._gate = Gate(f"ipc://{gate}", self._answer, self._secret.key)
        except OSError as error:
            if listener is not None:
                listener.close()
            raise SpawnError(f"the worker cannot listen at {where.bind}: {explain(error)}.") from error
        self._front = WorkerFront(listener, gate, self._secret.proof)

    def close(self) -> None:
        """End the agents, and listen no more. Idempotent."""
        self._front.close()
        self._gate.close()
        if self._bound.startswith("ipc"):
            Path(self._bound.removeprefix("ipc://")).unlink(missing_ok=True)
        with self._lock:
            agents = list(self._agents.values())
        for agent in agents:
            end_agent(agent)
        self.ended.set_result(None)

    def _answer(self, question: bytes) -> bytes:
        """On the gate's thread."""
        try:
            asked = decode_question(question)
        except msgspec.MsgspecError:
            return encode(TurnedAway("that was no question of this version of meshbook; install the same on both"))
        if not self._secret.accepts(asked.token):
            return encode(TurnedAway("the ticket is another one"))
        return encode(self._serve(asked) if isinstance(asked, Summons) else self._dismiss(asked))

    def _serve(self, summons: Summons) -> WorkerAnswer:
        if self._is_released:
            return TurnedAway("its hosts were shut down, and it ends")
        if differs := difference(summons.protocol, summons.python, "the program", "the worker"):
            return TurnedAway(f"{differs}; install the same on both")
        try:
            agent = start_agent(msgspec.structs.replace(summons.ticket, ends_with_launcher=True))
        except OSError as error:
            return TurnedAway(f"no agent could be started: {explain(error)}")
        with self._lock:
            self._agents[summons.ticket.host_id] = agent
        run_in_background(lambda: self._attend(summons.ticket.host_id, agent))
        return Serves(summons.ticket.name or socket.gethostname(), True)

    def _attend(self, host_id: str, agent: subprocess.Popen[bytes]) -> None:
        """Show what an agent says before it has a log, and reap it."""
        assert agent.stdout is not None
        with agent.stdout:
            while said := os.read(agent.stdout.fileno(), 1 << 12):
                os.write(2, said)
        agent.wait()
        with self._lock:
            self._agents.pop(host_id, None)
            is_over = self._is_released and not self._agents
        if is_over:
            self._told.wait(TOLD_S)
            self.close()

    def _dismiss(self, farewell: Farewell) -> WorkerAnswer:
        with self._lock:
            agent = self._agents.get(farewell.host_id)
            ends_now = farewell.for_good and not self._is_released
            self._is_released |= farewell.for_good
            others = [each for id, each in self._agents.items() if id != farewell.host_id] if ends_now else []
        for each in others:
            each.terminate()
        if ends_now and agent is None and not others:
            run_in_background(self.close)  # not on the gate's own thread, which has to answer
        if agent is None:
            self._told.set()
        return Serves(socket.gethostname(), agent is not None)


def start_worker_loop_forever(*, private_key: object = None, ca: object, address: str) -> Future[None]:
    """Listen at ``address`` from now on; the future is done when a program has shut its hosts down.

    address: ``tcp://HOST:PORT``, with ``*`` for every address of this machine, or ``ipc://NAME``; ``DIAL@BIND`` listens
    at the second. ca: "trust_all_connections": who is trusted is who has the ticket (`invitations.worker_ticket`).
    Raises: UsageError, SpawnError.
    """
    return _start(private_key, ca, address).ended


def run_worker_loop_until_shutdown(*, private_key: object = None, ca: object, address: str) -> None:
    """As `start_worker_loop_forever`, and wait for that program; an interrupt ends the agents."""
    loop = _start(private_key, ca, address)
    try:
        loop.ended.get()
    finally:
        loop.close()


def run_worker_loop_forever(*, private_key: object = None, ca: object, address: str) -> None:
    """As `run_worker_loop_until_shutdown`, after which this process ends, as after ``sys.exit()``."""
    run_worker_loop_until_shutdown(private_key=private_key, ca=ca, address=address)
    sys.exit()


def _start(private_key: object, ca: object, address: str) -> WorkerLoop:
    refuse_tls(ca, private_key)
    return WorkerLoop(address)


def _listener(address: str) -> socket.socket:
    """A socket that listens there; names are looked up. Raises: OSError."""
    if address.startswith("ipc"):
        path = address.removeprefix("ipc://")
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):  # what one left that was killed
            knock(address)
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        Path(path).unlink(missing_ok=True)
        return socket.create_server(path, family=socket.AF_UNIX, backlog=BACKLOG)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if host == "*":
        return socket.create_server(("", int(port)), backlog=BACKLOG)
    family, _, _, _, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    return socket.create_server(found[:2], family=family, backlog=BACKLOG)
