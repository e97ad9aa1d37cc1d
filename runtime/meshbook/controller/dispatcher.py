"""The handling of the hosts' messages, and the state that they change: hosts, meshes, open calls.

Nothing here waits or locks: all of it runs under the turn of `meshbook.controller.io_turns`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec
from typing_extensions import assert_never

from meshbook.calls.call import OpenCall
from meshbook.calls.interrupt import CallControl
from meshbook.calls.output import NewScalars, OutputTarget, StreamText
from meshbook.calls.table import CallTable, OpenQuestion
from meshbook.concurrency.background import attempt, tell
from meshbook.concurrency.future import Future
from meshbook.controller.direct_links import DirectLinks
from meshbook.controller.host_state import MAX_SILENCE_S, HostState, LateHosts
from meshbook.controller.mail import ControllerMail, PeerDirectory
from meshbook.controller.mesh_state import MeshState, Renumbering, check_ranks, check_replies, stale_view
from meshbook.controller.payloads import Payloads
from meshbook.controller.queries import HeldDeadlines, Submit, put
from meshbook.controller.reattach import Reattach
from meshbook.controller.recovery_driver import RecoveryDriver
from meshbook.controller.startup import PendingWorkers
from meshbook.curves.series import LoggedPoints, Points
from meshbook.errors import (
    HostLost,
    LocalProtocolError,
    MeshDetachedError,
    MeshStoppedError,
    PeerProtocolError,
    SpawnError,
    WorkerLost,
)
from meshbook.lifecycle import MeshPhase
from meshbook.sessions.folder import SavedMesh
from meshbook.system.processes import machine_id, python_version, start_time
from meshbook.values import lent_memory
from meshbook.wire import messages as wire
from meshbook.wire.frames import only_frame
from meshbook.wire.replies import dropped_replies

MAX_BACKLOG = 50_000  # messages that may wait for slow hosts before new calls wait too
FAULT_REST_S = 0.1

MeshMessage: TypeAlias = (
    wire.Prompted | wire.Logged | wire.StoreRequest | wire.StoreAnswer | wire.MeshReady | wire.SpawnProgress
    | wire.SpawnFailed | wire.WorkerExited | wire.MeshStopped
)  # fmt: skip
"""The messages of hosts about one of our meshes."""


class Dispatcher:
    """The hosts, meshes and calls of a controller; the socket feeds `on_frames`, the clock `tick`."""

    def __init__(
        self,
        submit: Submit,
        wake: Callable[[], None],
        next_id: Callable[[], int],
        key_of: Callable[[str], str],
        peer_ip: Callable[[], str],
        watch: Callable[[int, Callable[[], object]], object] = lambda fd, look: None,
        forget: Callable[[int], object] = lambda fd: None,
        lease_s: float = 0.0,
        on_late_settled: Callable[[str], object] = lambda id: None,
    ) -> None:
        """See `PeerDirectory` for key_of and peer_ip, `CallerLinks` for watch and forget, `LateHosts` for the rest."""
        self._next_id = next_id
        self.machine = machine_id()
        self._started = start_time(os.getpid()) or 0
        self.hosts: dict[str, HostState] = {}
        self.late_hosts = LateHosts(lease_s, on_late_settled)
        self.meshes: dict[int, MeshState] = {}
        self.recoveries: dict[int, RecoveryDriver] = {}
        self.calls = CallTable(self.recoveries)
        self.held_deadlines = HeldDeadlines(self.calls, next_id)
        self.direct = DirectLinks(self.meshes, self.calls, next_id, watch, forget)
        self.payloads = Payloads(wake)
        self.mail = ControllerMail(self.payloads, submit)
        self.peer_directory = PeerDirectory(self.hosts, self.meshes, key_of, peer_ip)
        # called for every worker that ends without being told to
        self.on_worker_lost: list[Callable[[MeshState, WorkerLost], None]] = []
        self.is_full = False  # whether so many messages wait for slow hosts that new calls wait too, for ``room``
        self.room = threading.Event()
        self.due_at = 0.0  # when `expire` has something to do, as far as `plan` knew
        self._rests_until = 0.0  # timers wait until then, after one of them has met a fault of ours
        self._reattach: Reattach | None = None  # reports of hosts on a former controller's meshes, until all have come
        self.impossible = 0  # messages that no host of ours sends; each cost its host

    def adopt(self, hosts: Mapping[str, HostState], saved: Mapping[int, SavedMesh], control: CallControl) -> Reattach:
        """Expect the reports of ``hosts`` on the meshes and calls of a former controller."""
        reattach = Reattach(self.meshes, self.calls, self.give_up, hosts, saved, control)
        self._reattach = reattach
        reattach.done.add_done_callback(lambda _: self._forget_reattach())
        return reattach

    def _forget_reattach(self) -> None:
        self._reattach = None  # it holds the calls, which hold their results

    def flush(self) -> None:
        """Send the messages to hosts that this turn has collected, and note when too many wait for one of them."""
        if self.peer_directory.told:
            self.peer_directory.settle()
        for host in self.hosts.values():
            if host.connection.must_send:
                try:
                    host.flush()
                except Exception as error:
                    tell(error, f"what was to be sent to host {host.name}")
            if host.backlog > MAX_BACKLOG:
                self.is_full = True
                self.room.clear()

    def acknowledge(self, hosts: Iterable[str]) -> None:
        """Acknowledge messages of hosts, and of ranks that have sent past them."""
        self.direct.acknowledge()
        for id in hosts:
            if (host := self.hosts.get(id)) is not None and not host.lost:
                host.connection.acknowledge()
                host.flush()

    def tick(self) -> None:
        """Send heartbeats, and look for hosts that are gone; once per heartbeat."""
        for host in self.hosts.values():
            host.silence.look()
            if not host.lost:
                attempt(functools.partial(self._tick_host, host), f"the heartbeat of host {host.name}")
        self.late_hosts.tick()
        self.payloads.settle_lost()
        lent_memory.settle()

    def _tick_host(self, host: HostState) -> None:
        if reason := host.launched.failure():  # it says more than silence does
            self.give_up(host, reason)
        elif host.hello is not None:
            host.beat()
            host.look()
            if host.is_overdue:
                self.give_up(
                    host, f"no sign of life for {MAX_SILENCE_S:g} s, and no connection by which its machine answers"
                )

    def groups_of(self, mesh: MeshState) -> RecoveryDriver:
        """Return the recovery of a mesh, which looks after ranks that wait in vain, and after its process groups."""
        if mesh.id not in self.recoveries:
            self.recoveries[mesh.id] = RecoveryDriver(mesh, self.calls, self._next_id)
        return self.recoveries[mesh.id]

    def plan(self) -> float:
        """Return when `expire` has something to do, on the monotonic clock; infinity if never."""
        due = self.calls.next_deadline()
        for recovery in self.recoveries.values():
            due = min(due, recovery.due)
        self.due_at = max(due, self._rests_until)
        return self.due_at

    def expire(self, now: float) -> None:
        """Do work that is due by now, as far as it was planned: changes since then are for the next turn."""
        well = attempt(self.calls.expire, "questions")
        for recovery in list(self.recoveries.values()):
            if recovery.due <= now:
                well = attempt(functools.partial(recovery.expire, now), "the care for process groups") and well
        if not well:  # it may be due still
            self._rests_until = now + FAULT_REST_S

    # ---- messages -----------------------------------------------------------------------------------

    def on_frames(self, host_id: str, frames: list[bytes]) -> None:
        host = self.hosts.get(host_id)
        if host is None or host.lost:
            self.late_hosts.on_frames(host_id, frames)
            return
        try:
            for header, payload in host.receive(frames):
                self._on_message(host, wire.decode_from_host(header), payload)
            if host.connection.must_answer:
                host.flush()
            if host.connection.newer_epoch:
                self.lose(host, "another controller has taken over its meshes; what runs there is that one's now")
        except (*wire.MALFORMED, PeerProtocolError) as error:
            self.impossible += 1
            self.give_up(host, f"it sent something impossible: {error}")
        except Exception as error:
            tell(error, f"what host {host.name} has acknowledged")
        if self.is_full:
            self._make_room()

    def _make_room(self) -> None:
        """Let new calls come again, unless too many messages wait for a slow host still."""
        if all(host.backlog < MAX_BACKLOG // 2 for host in self.hosts.values()):
            self.is_full = False
            self.room.set()

    def _on_message(self, host: HostState, message: wire.FromHost, payload: list[bytes]) -> None:
        if host.hello is None and not isinstance(message, wire.Hello):
            raise PeerProtocolError(f"{type(message).__name__} came before its hello")
        try:
            if isinstance(message, wire.Replies):
                self._on_replies(host, message, payload)
            else:
                self._dispatch(host, message, payload)
        except (*wire.MALFORMED, PeerProtocolError):
            raise
        except Exception as error:
            tell(error, f"a message of host {host.name}")  # it costs this message, not the meshes, nor the host

    def _dispatch(self, host: HostState, message: wire.FromHost, payload: list[bytes]) -> None:
        assert not isinstance(message, wire.Replies)
        match message:
            case wire.Call(origin=origin, mesh=to) | wire.Cancel(origin=origin, mesh=to):
                if origin is None or to != 0:
                    raise PeerProtocolError("it sent a call that is not for this process, or nobody's")
                if (mesh := self.meshes.get(origin.mesh)) is not None:
                    check_ranks(host, mesh, [origin.rank])
                if isinstance(message, wire.Cancel):
                    self.mail.on_cancel(message)
                else:
                    self.mail.on_call(host, message, payload)
            case wire.AskPeers():
                self.peer_directory.on_ask(host, message)
            case wire.PeerAddress():
                self.peer_directory.on_port(host, message)
            case wire.StreamTexts(texts):
                for ranks, stream, text, output, place in map(msgspec.structs.astuple, texts):
                    for rank in ranks:
                        self.calls.tell(output, StreamText(rank, stream, text, output, place))
            case wire.OutputDropped():
                self.calls.tell(message.output, message)
            case wire.DisplayData():
                self._on_display(message, only_frame(payload))
            case wire.SegmentFree(pid, segment):
                if host.shares_memory and pid == os.getpid():  # else it was a former controller's
                    self.payloads.release(segment, host)
            case wire.Hosted():
                if self._reattach is not None:
                    self._reattach.on_hosted(host, message)
                    for mesh in self.meshes.values():
                        self.groups_of(mesh).adopt()
            case wire.Hello():
                self._on_hello(host, message)
            case wire.Unread():
                self._on_unread(host, message)
            case _:
                if (mesh := self.meshes.get(message.mesh)) is not None:  # else it has ended
                    self._on_mesh_message(host, mesh, message, payload)

    def _on_mesh_message(self, host: HostState, mesh: MeshState, message: MeshMessage, payload: list[bytes]) -> None:
        """Act on a message about a mesh. Raises: PeerProtocolError if the host speaks for ranks of others."""
        match message:
            case wire.Prompted():
                check_ranks(host, mesh, [message.rank])
                self.held_deadlines.on_prompted(mesh, message)
            case wire.Logged():
                check_ranks(host, mesh, [message.rank])
                self._on_logged(mesh, message, only_frame(payload))
            case wire.StoreRequest():
                check_ranks(host, mesh, [message.rank])
                if mesh.is_whole:
                    mesh.store_host.send_urgent(message)
            case wire.StoreAnswer():
                if host not in mesh.store_hosts:
                    raise PeerProtocolError(f'it answered for the store of mesh "{mesh.name}", which it does not keep')
                if mesh.is_whole:
                    mesh.host_of(message.rank).send_urgent(message)
            case wire.MeshReady():
                check_ranks(host, mesh, [worker.rank for worker in message.workers])
                mesh.on_ready(host, message)
                self.held_deadlines.on_ready(mesh)
            case wire.SpawnProgress():
                if mesh.pending_workers is not None and mesh.pending_workers.id == message.request:
                    mesh.pending_workers.move(host, message)
            case wire.SpawnFailed():
                mesh.on_spawn_failed(host.name, message)
            case wire.WorkerExited():
                check_ranks(host, mesh, [message.rank])
                self._on_exited(host, mesh, message)
            case wire.MeshStopped():
                mesh.on_stopped(host, lambda: self.forget(mesh))
            case _:
                assert_never(message)

    def _on_unread(self, host: HostState, unread: wire.Unread) -> None:
        """Fail the call or the request that a host could not read: the message was our fault."""
        error = LocalProtocolError(f"host {host.name} cannot read {unread.kind or 'a message'!r}: {unread.reason}")
        call = self.calls.find(unread.id) if unread.kind == "call" else None
        pending_workers = [mesh.pending_workers for mesh in self.meshes.values() if mesh.pending_workers is not None]
        asked = [each for each in pending_workers if unread.kind == "spawn" and each.id == unread.id]
        if call is not None:
            self.calls.disown(call)
            call.give_up(error)
        for each in asked:
            each.give_up(error)
        if call is None and not asked:
            tell(error, f"what was sent to host {host.name}")

    def _on_display(self, message: wire.DisplayData, frame: bytes) -> None:
        try:
            content = wire.decode_bundle(frame)
        except wire.MALFORMED as error:  # the rank's own doing, which is no lie of its host
            text = f"rank {message.rank} has shown something that cannot be read here: {error}\n"
            self.calls.tell(message.output, StreamText(message.rank, "stderr", text, message.output))
            return
        self.calls.tell(message.output, msgspec.structs.replace(message, **msgspec.structs.asdict(content)))

    def _on_logged(self, mesh: MeshState, message: wire.Logged, frame: bytes) -> None:
        try:
            batches = [
                LoggedPoints(each.name, each.count, Points.of_bytes(each.steps, each.times, each.values))
                for each in wire.decode_scalars(frame)
            ]
        except (*wire.MALFORMED, ValueError):
            return  # the rank's own doing, as above
        mesh.metrics.add(message.output, message.rank, batches)
        self.calls.tell(message.output, NewScalars(tuple(batch.name for batch in batches)))

    def _on_hello(self, host: HostState, hello: wire.Hello) -> None:
        reason = ""
        if hello.version != wire.PROTOCOL_VERSION:
            reason = f"it speaks protocol {hello.version}, this side {wire.PROTOCOL_VERSION}; install one version"
        elif hello.python not in ("", python_version()) and not host.is_found:  # what runs there already goes on
            reason = (
                f"its Python is {hello.python}, ours {python_version()}; code that is sent needs the same on both sides"
            )
        if reason:
            if not host.is_found:  # a controller of its own version may come for what it holds
                host.send_urgent(wire.Refused(reason))
            self.lose(host, reason)
            return
        host.hello, host.name = hello, hello.name
        host.shares_memory = hello.machine == self.machine
        welcome = wire.Welcome(wire.PROTOCOL_VERSION, host.shares_memory, self.machine, os.getpid(), self._started)
        host.send_urgent(welcome)
        for mesh in self.meshes.values():
            self._tell_moves(host, mesh)
        host.ready.set_result(host)

    def renumber(
        self, mesh: MeshState, check: Callable[[Collection[int]], object], renumbering: Renumbering, grace_s: float
    ) -> Future[None]:
        """Renumber ranks, and end those without a new number within ``grace_s``: then the future is done.

        check: raises if it cannot be done; takes the ranks that have a call to answer. Hosts are told whose workers may
        have references to ranks of the mesh.
        """
        mesh.check_usable()
        check(self.calls.busy_on(mesh.id))
        ranks = range(mesh.extent.nelements)
        leaving = [rank for rank in ranks if rank not in renumbering.moved and rank not in mesh.lost]
        gone = self.retire(mesh, mesh.by_host(leaving), grace_s)
        self.direct.forget(mesh.id)
        mesh.renumber(renumbering)
        for host in self.hosts.values():
            self._tell_moves(host, mesh)
        return gone

    def _tell_moves(self, host: HostState, mesh: MeshState) -> None:
        if mesh.moves and host.is_up and host not in mesh.hosts:  # those learn it with their new numbers
            host.send(wire.Moved(mesh.id, mesh.moves))

    def _on_replies(self, host: HostState, message: wire.Replies, frames: list[bytes]) -> None:
        check_replies(host, message, frames)
        call = self.calls.find(message.id)
        if call is not None and (mesh := self.meshes.get(call.mesh)) is not None and len(mesh.hosts) > 1:
            check_ranks(host, mesh, [reply.rank for reply in message.replies])
        buffers: list[Sequence[object]] = []
        for reply in message.replies:  # also where nobody waits for them: that gives them back
            buffers.append(self.payloads.receive(host, reply) if reply.bulk or reply.segment else ())
        if call is not None:
            self.direct.hear(call, message.replies)
            self.calls.answer(call, message, frames, buffers)
        else:
            self.calls.answer_question(host.id, message, frames)

    # ---- calls and payloads -------------------------------------------------------------------------

    def open(self, mesh: MeshState, call: OpenCall, output: OutputTarget | None) -> list[HostState] | None:
        """Expect the answers to a call; return the hosts to send it to, or None when it was answered already."""
        if mesh.phase in (MeshPhase.STOPPING, MeshPhase.STOPPED):
            call.give_up(MeshStoppedError(mesh.name))
            return None
        if call.waiting and (min(call.waiting) < 0 or max(call.waiting) >= mesh.extent.nelements):
            call.give_up(stale_view(mesh))
            return None
        lost = sorted(call.waiting & mesh.lost.keys())  # ended between the caller's check and now
        if lost and not call.mailbox:  # the others would wait for them
            call.give_up(WorkerLost.of(mesh.lost[rank] for rank in lost))
            return None
        self.calls.open(call, output)
        for rank in lost:  # actors do not wait for each other, so the others get it
            call.lose(mesh.lost[rank])
        if lost or not call.waiting:
            self.calls.settle_if_done(call)
            if lost and not call.waiting:
                return None
        return mesh.hosts if len(mesh.hosts) == 1 else list(mesh.by_host(call.waiting))

    def withdraw(self, mesh: MeshState, call: OpenCall, cancelled: Collection[int]) -> None:
        """Answer a call whose payload is on its way still, for hosts all of whose ranks it is cancelled on."""
        for host, ranks in mesh.by_host(call.waiting).items():
            if not set(ranks).difference(cancelled) and host.withdraw(call.id):
                self.calls.answer(call, dropped_replies(call.id, ranks), (), [()] * len(ranks))

    # ---- loss and end -------------------------------------------------------------------------------

    def retire(self, mesh: MeshState, leaving: Mapping[HostState, Sequence[int]], grace_s: float) -> Future[None]:
        """End processes by their numbers in messages. The future is done when none is left; no report follows."""
        self.held_deadlines.on_ended(mesh, itertools.chain.from_iterable(leaving.values()))
        gone: Future[None] = Future()
        question = OpenQuestion(self._next_id(), mesh.id, object, math.inf, lambda _: gone.set_result(None))
        put(self.calls, question, mesh, leaving, lambda ranks: wire.Retire(tuple(ranks), grace_s), in_order=True)
        return gone

    def kill(self, mesh: MeshState, ranks: Iterable[int], why: str) -> Future[None]:
        """End ranks that live by force; their open calls fail with ``why``. Return a future as `retire`."""
        alive = [rank for rank in ranks if rank not in mesh.lost]
        gone = self.retire(mesh, mesh.by_host(alive), 0.0)
        for rank in alive:
            self.lose_worker(mesh, WorkerLost(rank, mesh.host_of(rank).name, why))
        return gone

    def give_up_recruits(self, mesh: MeshState, pending_workers: PendingWorkers) -> None:
        """End workers that were asked for, unless they are ranks of the mesh by now."""
        if not pending_workers.adopted:
            if mesh.pending_workers is pending_workers:
                mesh.pending_workers = None
            self.retire(mesh, pending_workers.by_host(), 0.0)

    def _on_exited(self, host: HostState, mesh: MeshState, exited: wire.WorkerExited) -> None:
        rank = mesh.rank_of(host, exited.pid)
        if rank is not None and rank not in mesh.lost:
            self.direct.serve(mesh, rank)  # what it has answered before it ended
            mesh.crash_loops.record(rank, time.monotonic())
            self.lose_worker(mesh, WorkerLost(rank, host.name, exited.cause, exited.log_tail), alone=exited.alone)
        elif rank is None:
            lost = WorkerLost(exited.rank, host.name, exited.cause, exited.log_tail)
            mesh.on_recruit_lost(exited.request, lost, time.monotonic())

    def lose_worker(self, mesh: MeshState, error: WorkerLost, *, alone: bool = False) -> None:
        mesh.on_lost(error)
        self.direct.lose(mesh, error.rank)
        error.is_last = len(mesh.lost) == mesh.extent.nelements
        self.held_deadlines.on_ended(mesh, (error.rank,))
        if mesh.host_of(error.rank) is not mesh.store_host:
            mesh.store_host.send_urgent(wire.DropClient(mesh.id, error.rank))
        if mesh.phase in (MeshPhase.READY, MeshPhase.REPAIRING):
            self.groups_of(mesh).on_lost()
        self.calls.lose(mesh.id, error, alone=alone)
        for listener in self.on_worker_lost:
            listener(mesh, error)

    def lose(self, host: HostState, reason: str) -> None:
        """Count a host as lost, with its ranks: no message of it is expected any more."""
        if host.lost:
            return
        host.lose(reason)
        self._make_room()
        self.calls.lose_host(host.id)
        host.ready.set_exception(HostLost(host.name, reason))
        self.peer_directory.lose(host)
        for mesh in list(self.meshes.values()):
            is_its_host, pending_workers = host in mesh.hosts, mesh.pending_workers
            for rank in mesh.ranks_on(host):
                if rank not in mesh.lost and mesh.phase is not MeshPhase.STARTING:
                    self.lose_worker(mesh, WorkerLost(rank, host.name, f"its host is lost: {reason}"))
            if host is mesh.store_host:
                mesh.tell(wire.StoreLost(mesh.id, f"host {host.name} is lost"))
            if is_its_host or (pending_workers is not None and host in pending_workers.seats):  # it may be to be one
                mesh.fail_recruits(SpawnError(f"host {host.name} was lost meanwhile: {reason}"))
            if is_its_host and mesh.phase is MeshPhase.STOPPING:
                mesh.on_stopped(host, functools.partial(self.forget, mesh))

    def forget(self, mesh: MeshState) -> None:
        mesh.stopped_ranks.clear()
        self.direct.forget(mesh.id)
        self.meshes.pop(mesh.id, None)
        self.recoveries.pop(mesh.id, None)

    def dismiss(self, host: HostState) -> None:
        """Tell a host to end, and forget it: calls that are still open on it count as lost."""
        host.is_dismissed = True
        if host.suspicion:
            self.give_up(host, "it was stopped")
        elif not host.lost:
            host.send_urgent(wire.Goodbye())
            self.lose(host, "it was stopped")
        self.hosts.pop(host.id, None)

    def give_up(self, host: HostState, reason: str) -> None:
        """Count a host as lost though its agent may live; if the agent comes back it is told to end."""
        if not host.lost:
            host.send_urgent(wire.Goodbye())
            self.lose(host, reason)
            if not host.is_watched:
                self.late_hosts.keep(host)

    def leave(self, session: str) -> None:
        """Detach all meshes, which live on without us."""
        for mesh in self.meshes.values():
            self.groups_of(mesh).stop()
            mesh.detach(session)
            self.calls.give_up(mesh.id, MeshDetachedError(mesh.name, session))
        self.meshes.clear()

    def say_goodbye(self) -> None:
        for mesh in list(self.meshes.values()):
            mesh.stop()
            self.groups_of(mesh).stop()
            self.calls.give_up(mesh.id, MeshStoppedError(mesh.name))
        for host in self.hosts.values():
            host.send_urgent(wire.Goodbye())
