"""Hosts that were started elsewhere: workers, which listen at addresses of their own (`invitations.worker_loop`)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence

import msgspec

from meshbook.concurrency.background import run_in_background
from meshbook.concurrency.future import Future
from meshbook.errors import MeshError, ProtocolError, SpawnError
from meshbook.launchers.base import LaunchedHost
from meshbook.launchers.invitations.invitation import TurnedAway, encode
from meshbook.launchers.invitations.server_way import ServerWay, attached_way
from meshbook.launchers.invitations.worker_ticket import (
    WITHIN_S,
    Farewell,
    Serves,
    Summons,
    WorkerAddress,
    WorkerAnswer,
    WorkerQuestion,
    WorkerSecret,
    decode_answer,
    is_loopback,
    other_ticket,
    read_address,
    worker_secret,
)
from meshbook.sessions.folder import SavedLauncher
from meshbook.system.processes import address_towards, in_endpoint, python_version
from meshbook.wire.gate import ask_gate, gate_keys
from meshbook.wire.messages import PROTOCOL_VERSION
from meshbook.wire.ticket import Ticket, elsewhere

ANSWER_S = 10.0
ANYWHERE = "192.0.2.1"
"""In the place of machines that are not known yet: some other one."""
_AGAIN_S = 0.1


class WorkersLauncher:
    """Agents that workers start, one for each address."""

    name = "workers"
    shares_environment = False
    place_is_gone = False
    fixed = "its workers were named"

    def __init__(self, workers: Sequence[str | Future[str]], way: ServerWay | None = None) -> None:
        """workers: their addresses. way: through a server; by default as this program is attached.

        Raises: UsageError.
        """
        self._workers, self._way = tuple(workers), way or attached_way()
        for worker in self._workers:
            if not isinstance(worker, Future):
                read_address(worker)
        self._secret = worker_secret()
        self._found: tuple[str, ...] = ()
        """The server, where the program listens, and where that is found over there (`server_way.resume_way`)."""

    @property
    def transport(self) -> str:
        far = next((host for host in self._machines() if not is_loopback(host)), "")
        if not far or self._way is not None:
            return "tcp"
        try:
            return f"tcp://{in_endpoint(address_towards(far))}"
        except OSError as error:
            raise SpawnError(f"no way to {far or 'other machines'}: {error}.") from error

    def _machines(self) -> tuple[str, ...]:
        """Where the workers are that are not on one machine with who names them."""
        known = [ANYWHERE if isinstance(worker, Future) else read_address(worker).host for worker in self._workers]
        return tuple(sorted({host for host in known if host}))

    def for_host(self, index: int) -> WorkersLauncher:
        """That of the worker of this number."""
        one = WorkersLauncher(self._workers[index : index + 1], self._way)
        one._found = self._found
        return one

    def for_more(self, beside: Sequence[LaunchedHost]) -> WorkersLauncher:
        return self

    @property
    def saved(self) -> SavedLauncher:
        worker = self._workers[0]
        return SavedLauncher(self.name, host=worker if not isinstance(worker, Future) else "", options=self._found)

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        """Summon the workers; does not wait until they listen. Raises: OSError, SpawnError where a server has gone."""
        if self._way is not None and tickets:
            here = tickets[0].endpoint
            there = self._way.way_back(here, self._machines())
            self._found = (self._way.server, here, there)
            tickets = [msgspec.structs.replace(ticket, endpoint=there) for ticket in tickets]
        return [WorkerHost(self._secret, self._way, *each) for each in zip(self._workers, tickets, strict=True)]

    def retire(self, host: LaunchedHost) -> None:
        """Have the worker end, too."""
        assert isinstance(host, WorkerHost)
        host.is_retired = True


class WorkerHost:
    """The agent of a worker, summoned on a thread aside."""

    pid = started = 0
    job = ""

    def __init__(self, secret: WorkerSecret, way: ServerWay | None, worker: str | Future[str], ticket: Ticket) -> None:
        self._secret, self._way, self._worker, self._ticket = secret, way, worker, elsewhere(ticket)
        self._address = None if isinstance(worker, Future) else read_address(worker)
        self._failure = ""
        self._is_closed = threading.Event()
        self.is_retired = False
        run_in_background(self._summon)

    def failure(self) -> str | None:
        return self._failure or None

    def waits_for(self) -> str:
        return ""

    def close(self, timeout_s: float) -> None:
        """Tell the worker, and wait until its agent has ended, at most ``timeout_s``."""
        self._is_closed.set()
        deadline = time.monotonic() + timeout_s
        while self._address is not None:
            question = Farewell(self._secret.token, self._ticket.host_id, self.is_retired)
            try:
                answer = self._ask(self._address, question, max(0.1, min(ANSWER_S, deadline - time.monotonic())))
            except (OSError, MeshError):  # the worker has ended, and its agents with it
                return
            if not answer.is_there or time.monotonic() > deadline:
                return
            time.sleep(_AGAIN_S)

    def release(self) -> None:
        """Let it live on."""
        self._is_closed.set()

    def _summon(self) -> None:
        summons = Summons(self._secret.token, self._ticket, PROTOCOL_VERSION, python_version())
        deadline = time.monotonic() + WITHIN_S
        try:
            if isinstance(self._worker, Future):
                self._address = read_address(self._worker.get(WITHIN_S))
            assert self._address is not None
            while not self._is_closed.is_set():
                try:
                    self._ask(self._address, summons, ANSWER_S)
                    return
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise SpawnError(
                            f"no worker listens at {self._address.dial} ({error.strerror or error}); it is started "
                            f'there by run_worker_loop_forever(address=..., ca="trust_all_connections")'
                        ) from None
                self._is_closed.wait(_AGAIN_S)
        except Exception as error:  # whatever a future of an address raises, too
            self._failure = str(error) or type(error).__name__

    def _ask(self, address: WorkerAddress, question: WorkerQuestion, timeout_s: float) -> Serves:
        """Raises: OSError where nobody listens; SpawnError where another does, or refuses."""
        public, _ = gate_keys(self._secret.key)
        try:
            with self._end_of(address) as endpoint:
                said = ask_gate(endpoint, public.decode(), encode(question), timeout_s)
            answer: WorkerAnswer = decode_answer(said)
        except (ProtocolError, msgspec.MsgspecError):
            raise other_ticket(address.dial, self._secret.origin) from None
        if isinstance(answer, TurnedAway):
            raise SpawnError(f"the worker at {address.dial} refuses: {answer.reason}")
        return answer

    def _end_of(self, address: WorkerAddress) -> contextlib.AbstractContextManager[str]:
        """Where the worker is dialled from here. Raises: OSError."""
        if self._way is None:
            return contextlib.nullcontext(_dialled(address))
        return self._way.end_of(address.named)


def _dialled(address: WorkerAddress) -> str:
    """Its endpoint with an address in the place of a name. Raises: OSError."""
    if not address.host:
        return address.dial
    port = address.dial.rpartition(":")[2]
    host = "127.0.0.1" if address.host == "*" else address.host
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4][0]
    return f"tcp://{in_endpoint(str(found))}:{port}"
