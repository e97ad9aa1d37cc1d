"""The controller: the one thread that owns the sockets to the hosts, the open calls and the state of the meshes.

User threads never touch that state. They hand closures to the I/O thread (`submit`) and wait on futures that it
completes; payloads are pickled before and unpickled after by the thread of the user.

    user thread ── submit(closure), eventfd ──> I/O thread ──> ROUTER ──> agents
    user thread <── Future ────────────────────      │    <── ROUTER <── agents
    listeners   <── output events ─────────────────--┘
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from typing_extensions import assert_never

from meshbook import wire
from meshbook.call_table import CallTable
from meshbook.calls import CallFuture, OpenCall
from meshbook.errors import Failure, HostLost, MeshStoppedError, ProtocolError, WorkerLost
from meshbook.future import Future
from meshbook.known_host import MAX_SILENCE_S, KnownHost
from meshbook.known_mesh import KnownMesh
from meshbook.launcher import LaunchedHost, Ticket
from meshbook.lifecycle import MeshEvent, MeshPhase
from meshbook.output_events import DisplayData, OutputCut, OutputListener, StreamText
from meshbook.payloads import Payloads
from meshbook.pickling import Pickled
from meshbook.processes import machine_id
from meshbook.session_folder import SessionFolder
from meshbook.shape import Members, Region
from meshbook.store import StoreOp
from meshbook.transport import HEARTBEAT_S, ControllerSocket, LaneName
from meshbook.turns import Turns

T = TypeVar("T")

MAX_BACKLOG = 50_000
"""With so many messages waiting for slow hosts, new calls wait too."""

_decode_display = msgspec.msgpack.Decoder(dict[str, dict[str, Any]]).decode


class Controller:
    """One per process; `meshbook.mesh` holds it."""

    def __init__(self) -> None:
        self.folder = SessionFolder()
        self.machine = machine_id()
        self.hosts: dict[str, KnownHost] = {}
        self.meshes: dict[int, KnownMesh] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asleep = False
        self._closing = False
        self.calls = CallTable()
        self._payloads = Payloads(self._wake)
        self._ids = itertools.count(1)
        self._tick_at = 0.0
        self._room = threading.Event()
        self._room.set()
        self._turns = Turns(self._serve, self._wake)
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="meshbook.io", daemon=True)
        self._thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
        self._thread.start()
        started.get()
        self.public_key = self._socket.public_key
        self._endpoints: dict[str, str] = {}

    # ---- any thread ---------------------------------------------------------------------------------------------

    def submit(self, action: Callable[[], None]) -> None:
        """Have the I/O thread run ``action``; actions run in the order of submission."""
        self._inbox.append(action)
        self._wake()

    def _wake(self) -> None:
        if self._asleep and not self._closing:
            os.eventfd_write(self._wake_fd, 1)

    def expect_host(self, ticket: Ticket, launched: LaunchedHost, shares_environment: bool) -> KnownHost:
        """Know a host that was launched with ``ticket``; `KnownHost.ready` completes when it has dialled in."""
        host = KnownHost(ticket.host_id, ticket.epoch, launched, self._socket)
        host.shares_environment = shares_environment
        self.hosts[host.id] = host
        return host

    def endpoint(self, address: str) -> str:
        """Listen at ``address`` as well, once; return what to dial."""
        if address not in self._endpoints:
            self._endpoints[address] = self.ask(lambda: self._socket.bind(address))
        return self._endpoints[address]

    def accept(self, host_id: str) -> tuple[str, str]:
        """A key pair (public, secret) for one host."""
        return self.ask(lambda: self._socket.accept(host_id))

    def ask(self, action: Callable[[], T]) -> T:
        """Have the I/O thread run ``action`` and return its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

        self.submit(run)
        return future.get(10.0)

    def next_id(self) -> int:
        """A number that this controller never uses twice."""
        return next(self._ids)

    def call(
        self,
        mesh: KnownMesh,
        endpoint: str,
        members: Members,
        pickled: Pickled,
        *,
        what: str,
        listener: OutputListener | None = None,
        on_reply: Callable[[int, bool, float, Failure | None], None] | None = None,
        fail_fast: bool = True,
    ) -> CallFuture[Any]:
        """Start a call on ``members``; the future's value is a ValueMesh over them.

        listener: gets what the call prints; the output's id is the call's. fail_fast: complete at the first failure
        rather than when every rank has ended. Raises: MeshStoppedError, WorkerLost if a member has ended.
        """
        mesh.check_usable()
        self._wait_for_room()
        future: CallFuture[Any] = CallFuture(self.cancel, self.where, self._turns.drive)
        call = OpenCall(self.next_id(), mesh.id, what, members, future, fail_fast=fail_fast, on_reply=on_reply)
        future.call = call
        for rank in call.waiting & mesh.lost.keys():
            raise mesh.lost[rank]
        head, buffers = pickled
        message = wire.Call(call.id, mesh.id, endpoint, members.encode(), call.id if listener else 0)
        segment = self._payloads.write(buffers)

        def send() -> None:
            if (hosts := self._open(mesh, call, listener)) is not None:
                self._payloads.send(hosts, message, head, segment, buffers)
                if any(host.backlog > MAX_BACKLOG for host in hosts):
                    self._room.clear()

        self.submit(send)
        return future

    def cancel(self, id: int) -> None:
        """Interrupt a call where it runs, drop it where it waits."""

        def send() -> None:
            if (call := self.calls.find(id)) is not None and (mesh := self.meshes.get(call.mesh)) is not None:
                message = wire.Cancel(mesh.id, id, call.members.encode())
                for host in mesh.hosts:
                    host.send_urgent(message)

        self.submit(send)

    def query(self, mesh_id: int, endpoint: str, members: Members, timeout_s: float) -> dict[int, Any]:
        """Ask the control threads of ``members``; returns what came in time."""
        answers: dict[int, Any] = {}
        wanted = len(members)
        done: Future[None] = Future()
        id = self.next_id()

        def on_answer(rank: int, value: Any) -> None:
            answers[rank] = value
            if len(answers) >= wanted:
                done.set_result(None)

        def send() -> None:
            if (mesh := self.meshes.get(mesh_id)) is None:
                done.set_result(None)
                return
            self.calls.ask(id, on_answer)
            for host in mesh.hosts:
                host.send_urgent(wire.Query(id, mesh_id, endpoint, members.encode()))

        self.submit(send)
        try:
            done.get(timeout_s)
        except TimeoutError:
            pass
        finally:
            self.submit(lambda: self.calls.end_query(id))
        return dict(answers)

    def where(self, mesh_id: int, ranks: Iterable[int]) -> dict[int, str]:
        """What the main threads of ``ranks`` are doing; those that do not answer are said to hold the GIL."""
        ranks = sorted(ranks)
        mesh = self.meshes.get(mesh_id)
        if mesh is None:
            return dict.fromkeys(ranks, "its mesh was stopped")
        answers = self.query(mesh_id, "where", Region.of(mesh.extent.sizes).select(ranks), timeout_s=0.5)
        return {rank: answers.get(rank, "no answer within 0.5 s: native code holds the GIL") for rank in ranks}

    def send_to_hosts(self, mesh: KnownMesh, message: wire.ToHost) -> None:
        """Send one message to every host of a mesh, in order with its calls."""

        def send() -> None:
            for host in mesh.hosts:
                host.send(message)

        self.submit(send)

    def read_logs(self, mesh: KnownMesh, members: Members, lines: int, timeout_s: float) -> dict[int, str]:
        """The last ``lines`` lines of each member's log."""
        texts: dict[int, str] = {}
        waiting = set(mesh.hosts)
        done: Future[None] = Future()
        id = self.next_id()

        def on_answer(host: int, answer: Any) -> None:
            texts.update(answer)
            waiting.pop()
            if not waiting:
                done.set_result(None)

        def send() -> None:
            self.calls.ask(id, on_answer)
            for host in mesh.hosts:
                host.send_urgent(wire.ReadLogs(id, mesh.id, members.encode(), lines))

        self.submit(send)
        try:
            done.get(timeout_s)
        finally:
            self.submit(lambda: self.calls.end_query(id))
        return texts

    def stop_mesh(self, mesh: KnownMesh, grace_s: float) -> None:
        """Begin to end a mesh: its open calls fail at once; `KnownMesh.stopped` completes when no process is left."""

        def stop() -> None:
            if mesh.phase is MeshPhase.STOPPED:
                return
            mesh.advance(MeshEvent.STOP)
            self.calls.give_up(mesh.id, mesh.name)
            for host in mesh.hosts:
                if host.lost:
                    mesh.on_stopped(host, lambda: self._forget(mesh))
                else:
                    host.send(wire.StopMesh(mesh.id, grace_s))

        self.submit(stop)

    def close(self, timeout_s: float) -> None:
        """End all hosts and the I/O thread. Idempotent."""
        if self._closing:
            return
        deadline = time.monotonic() + timeout_s
        self.submit(self._say_goodbye)
        for host in list(self.hosts.values()):
            host.launched.close(max(0.1, deadline - time.monotonic()))
        self._closing = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout=5)
        os.close(self._wake_fd)
        self._payloads.close()
        self.folder.close()

    # ---- I/O thread: the loop -----------------------------------------------------------------------------------

    def _run(self, started: Future[None]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C must wake the thread that waits
        sock = ControllerSocket()
        self._socket = sock
        started.set_result(None)
        try:
            self._turns.serve_until(lambda: self._closing)
        finally:
            sock.close()

    def _serve(self, timeout_s: float | None) -> None:
        """Wait for something to do, at most ``timeout_s``, and do it. Only whoever has the turn."""
        self._sleep(timeout_s)
        for host_id, lane, frames in self._socket.receive():
            self._on_frames(host_id, lane, frames)
        self._serve_inbox()
        if time.monotonic() >= self._tick_at:
            self._tick()

    def _sleep(self, timeout_s: float | None) -> None:
        self._asleep = True  # from here on `submit` wakes us
        left = max(0.0, self._tick_at - time.monotonic())
        self._socket.poll(self._wake_fd, 0 if self._inbox else left if timeout_s is None else min(left, timeout_s))
        self._asleep = False
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass

    def _serve_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        self._payloads.tell_freed()

    def _tick(self) -> None:
        now = time.monotonic()
        self._tick_at = now + HEARTBEAT_S
        for host in self.hosts.values():
            if host.lost:
                continue
            if host.hello is not None:
                host.beat()
                if now - host.heard > MAX_SILENCE_S:
                    self._lose(host, f"no sign of life for {MAX_SILENCE_S:g} s")
            if not host.lost and (reason := host.launched.failure()):
                self._lose(host, reason)

    # ---- I/O thread: messages -----------------------------------------------------------------------------------

    def _on_frames(self, host_id: str, lane: LaneName, frames: list[bytes]) -> None:
        host = self.hosts.get(host_id)
        if host is None or host.lost:
            return
        if (message := host.receive(lane, frames)) is not None:
            header, payload = message
            try:
                self._dispatch(host, wire.decode_from_host(header), payload)
            except (msgspec.DecodeError, ProtocolError) as error:
                self._lose(host, f"it sent something impossible: {error}")
            except Exception:
                traceback.print_exc()  # a fault of ours: it costs this message, not the meshes
        host.acknowledge(lane)
        if not self._room.is_set() and host.backlog < MAX_BACKLOG // 2:
            self._room.set()

    def _dispatch(self, host: KnownHost, message: wire.FromHost, payload: list[bytes]) -> None:
        match message:
            case wire.Replies():
                if not host.park(message, payload):
                    self._on_replies(host, message, payload)
            case wire.Outputs(mesh_id, chunks):
                for chunk in chunks:
                    self.calls.tell(chunk.output, StreamText(chunk.rank, chunk.stream, chunk.text, chunk.output))
            case wire.OutputCut(mesh_id, rank, output, size_bytes):
                self.calls.tell(output, OutputCut(rank, size_bytes, self._log_path(mesh_id, rank), output))
            case wire.Display():
                content = _decode_display(payload[0])
                event = DisplayData(
                    message.rank, content["data"], content["metadata"], content["transient"],
                    message.update, message.is_result, message.output,
                )  # fmt: skip
                self.calls.tell(message.output, event)
            case wire.StoreRequest(mesh_id, rank, request, op):
                self._on_store(mesh_id, rank, request, op)
            case wire.SegmentFree(_, segment):
                self._payloads.on_free(segment)
            case wire.Bulk():
                host.bulk_in.receive(message, payload[0])
            case wire.Hello():
                self._on_hello(host, message)
            case wire.MeshReady(mesh_id):
                if (mesh := self.meshes.get(mesh_id)) is not None:
                    mesh.on_ready(host, message)
            case wire.SpawnFailed(mesh_id, reason, found_devices):
                if (mesh := self.meshes.get(mesh_id)) is not None:
                    mesh.on_spawn_failed(host.name, reason, found_devices)
            case wire.WorkerExited(mesh_id, rank, cause, log_tail):
                if (mesh := self.meshes.get(mesh_id)) is not None:
                    self._lose_worker(mesh, WorkerLost(rank, host.name, cause, log_tail))
            case wire.MeshStopped(mesh_id):
                if (mesh := self.meshes.get(mesh_id)) is not None:
                    mesh.on_stopped(host, lambda: self._forget(mesh))
            case wire.Logs(id, texts):
                self.calls.answer_query(id, 0, texts)
            case wire.Heartbeat():
                pass
            case _:
                assert_never(message)

    def _on_hello(self, host: KnownHost, hello: wire.Hello) -> None:
        if hello.version != wire.PROTOCOL_VERSION:
            reason = f"it speaks protocol {hello.version}, this side {wire.PROTOCOL_VERSION}; install one version"
            host.send_urgent(wire.Refused(reason))
            self._lose(host, reason)
            return
        host.hello, host.name = hello, hello.name
        host.shares_memory = hello.machine == self.machine
        host.on_whole = lambda replies, frames: self._on_replies(host, replies, frames)
        host.send_urgent(wire.Welcome(wire.PROTOCOL_VERSION, host.shares_memory))
        host.ready.set_result(host)

    def _on_replies(self, host: KnownHost, message: wire.Replies, frames: list[bytes]) -> None:
        self.calls.answer(message, frames, [self._payloads.receive(host, reply) for reply in message.replies])

    def _on_store(self, mesh_id: int, rank: int, request: int, op: StoreOp) -> None:
        if (mesh := self.meshes.get(mesh_id)) is None:
            return
        for client, id, result in mesh.store.request(rank, request, op):
            assert isinstance(client, int)
            mesh.host_of(client).send_urgent(wire.StoreAnswer(mesh_id, client, id, result))

    # ---- I/O thread: calls and payloads -------------------------------------------------------------------------

    def _open(self, mesh: KnownMesh, call: OpenCall, listener: OutputListener | None) -> list[KnownHost] | None:
        """Expect the answers to a call; returns the hosts to send it to, or None when it was answered already."""
        if mesh.phase in (MeshPhase.STOPPING, MeshPhase.STOPPED):
            call.give_up(MeshStoppedError(mesh.name))
            return None
        self.calls.open(call, listener)
        addressed = {mesh.host_of(rank).id for rank in call.waiting} if len(mesh.hosts) > 1 else None
        for rank in call.waiting & mesh.lost.keys():  # ended between the caller's check and now
            call.lose(mesh.lost[rank])
        self.calls.settle_if_done(call)
        return [host for host in mesh.hosts if not host.lost and (addressed is None or host.id in addressed)]

    def _wait_for_room(self) -> None:
        while not self._room.wait(timeout=1.0):
            pass

    def _log_path(self, mesh_id: int, rank: int) -> str:
        mesh = self.meshes.get(mesh_id)
        worker = mesh.workers.get(rank) if mesh else None
        return worker.log_path if worker else ""

    # ---- I/O thread: loss and end -------------------------------------------------------------------------------

    def _lose_worker(self, mesh: KnownMesh, error: WorkerLost) -> None:
        mesh.on_lost(error)
        self.calls.lose(mesh.id, error)

    def _lose(self, host: KnownHost, reason: str) -> None:
        host.lost = reason
        host.ready.set_exception(HostLost(host.name, reason))
        for mesh in [mesh for mesh in self.meshes.values() if host in mesh.hosts]:
            first = mesh.hosts.index(host) * mesh.per_host
            for rank in range(first, first + mesh.per_host):
                if rank not in mesh.lost:
                    self._lose_worker(mesh, WorkerLost(rank, host.name, f"its host is lost: {reason}"))
            if mesh.phase is MeshPhase.STOPPING:
                mesh.on_stopped(host, functools.partial(self._forget, mesh))

    def _forget(self, mesh: KnownMesh) -> None:
        self.meshes.pop(mesh.id, None)

    def _say_goodbye(self) -> None:
        for mesh in list(self.meshes.values()):
            mesh.advance(MeshEvent.STOP)
            self.calls.give_up(mesh.id, mesh.name)
        for host in self.hosts.values():
            if not host.lost:
                host.send_urgent(wire.Goodbye())
