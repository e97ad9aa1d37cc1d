"""The controller: the requests to hosts that any thread may make.

The state (`meshbook.controller.dispatcher`) belongs to the thread that has the turn (`meshbook.controller.io_turns`).
User threads hand closures over (`submit`) and wait on futures; they pickle payloads before and unpickle results after.

    user thread ── submit(closure), eventfd ──> I/O thread ──> ROUTER ──> agents
    user thread <── Future ────────────────────      │    <── ROUTER <── agents
    listeners   <── output events ─────────────────--┘
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from meshbook.calls.call import CallRequest, OpenCall
from meshbook.calls.call_future import CallFuture
from meshbook.calls.direct_calls import UNANSWERED
from meshbook.calls.output import OutputTarget
from meshbook.calls.rank_state import Reaction, Reactions, SilenceCause, Unresponsive
from meshbook.concurrency import forks
from meshbook.concurrency.background import hidden_thread
from meshbook.concurrency.future import Future
from meshbook.controller.dispatcher import Dispatcher
from meshbook.controller.host_state import HostState
from meshbook.controller.io_turns import IoThread, TurnQueue
from meshbook.controller.mesh_state import MeshState, Renumbering, stale_view
from meshbook.controller.queries import Questions, StackQuestion, collect_stacks, look
from meshbook.controller.reattach import Reattach
from meshbook.controller.recovery import forming_call
from meshbook.controller.startup import MeshArrival, PendingWorkers
from meshbook.errors import MeshStoppedError, SpawnError, WorkerLost
from meshbook.launchers.base import LaunchedHost
from meshbook.lifecycle import MeshPhase
from meshbook.sessions.folder import SessionFolder
from meshbook.shape.members import Members, Region
from meshbook.stacks.mesh_stacks import MeshStacks
from meshbook.wire import messages as wire
from meshbook.wire.direct import direct_folder, direct_path
from meshbook.wire.link import HostLink
from meshbook.wire.replies import place_head
from meshbook.wire.transport import ControllerSocket
from meshbook.wire.unix_transport import control_endpoint

T = TypeVar("T")
WHAT_MAX_CHARS = 200  # of the text that a person calls a call, which may be an expression of any length

# takes the ProcMesh that is called, on the thread of the caller
OutputSource: TypeAlias = Callable[[Any], OutputTarget | None]


class FrontEnd(Protocol):
    """The front end that a person uses: a notebook, or the terminal of a script."""

    output_source: OutputSource | None  # asked, for each call without a listener, for the target of its prints

    # asked at each call, on its caller's thread, why a breakpoint on a rank could not be answered
    refusal: Callable[[], str]

    # shows how far a start has come, in the place of the text before; an empty text removes it
    show_progress: Callable[[str], object]

    def attend(self, controller: Controller, mesh: MeshState, call: OpenCall) -> None:
        """Open the prompt of ranks that have stopped in a call that the main thread waits for."""


class OutgoingCall(msgspec.Struct, eq=False):
    """A call that is being sent: `send` does so under the turn, `fail` tells its caller why it cannot."""

    dispatcher: Dispatcher
    mesh: MeshState
    generation: int  # of the mesh; the members' ranks are meant in it
    request: CallRequest
    call: OpenCall
    output: OutputTarget | None
    message: wire.Call
    payload: Sequence[bytes]
    segment: wire.SegmentRef | None  # buffers that are too large for the payload
    waits: bool = False  # whether the mesh has to come up first (`meshbook.controller.startup`)
    _hosts: Sequence[HostState] = ()

    def send(self) -> None:
        """Expect the answers, and send the call, or have it queue."""
        mesh, request = self.mesh, self.request
        if self.waits and mesh.arrival is not None and not mesh.arrival.is_over:
            mesh.arrival.held.append(self)
            return
        if mesh.generation != self.generation:
            self.call.give_up(stale_view(mesh))
            return
        recovery = self.dispatcher.recoveries.get(mesh.id) or self.dispatcher.groups_of(mesh)
        if not request.reply:
            recovery.send(request.mailbox, request.members, self._transmit)
        elif (hosts := self.dispatcher.open(mesh, self.call, self.output)) is not None:
            self._hosts = hosts
            recovery.send(request.mailbox, request.members, self._transmit, self.call)

    def fail(self, error: Exception) -> None:
        """Give up the call with ``error``."""
        self.dispatcher.calls.disown(self.call)
        self.call.give_up(error)

    def _transmit(self) -> None:
        """Send the call; if it has queued, this runs in the midst of other work, so it must not raise."""
        mesh, hosts = self.mesh, self._hosts
        try:
            if mesh.generation != self.generation:  # it queued while ranks got other numbers
                self.fail(stale_view(mesh))
                return
            direct, members, mailbox = self.dispatcher.direct, self.request.members, self.request.mailbox
            if not self.request.reply:
                direct.relay(mesh, mailbox, members.rank_set, UNANSWERED)
                if mesh.phase not in (MeshPhase.STOPPING, MeshPhase.STOPPED):
                    hosts = list(mesh.by_host(members.ranks()))
            if self.segment is not None:
                direct.relay(mesh, mailbox, members.rank_set, self.call.id)
                self.dispatcher.payloads.send(hosts, self.message, self.payload, self.segment)
                return
            message = self.message
            if self.request.reply:
                if len(hosts) == 1 and not hosts[0].lost:
                    left = direct.send(hosts[0], mesh, self.call, message, self.payload)
                    if left is None:
                        return
                    message = left
                direct.relay(mesh, mailbox, members.rank_set, self.call.id)
            for host in hosts:
                if not host.lost:
                    host.send(message, self.payload)
        except Exception as error:
            self.fail(error)


class Controller:
    """The controller of a session: the methods that any thread may call. `meshbook.mesh` holds it."""

    def __init__(self, folder: SessionFolder, front_end: FrontEnd) -> None:
        """folder: the folder of the session; ours, and for others to close if this raises. Raises: OSError."""
        self.folder, self.epoch, self.front_end = folder, folder.state.epoch, front_end
        self._generation = forks.generation
        # meshes that do not end with this process, but wait for another controller, and for how long
        self.waits_again: tuple[frozenset[int], float] = frozenset(), 0.0
        # returns a number that this controller never uses twice
        self.next_id: Callable[[], int] = itertools.count(((self.epoch - 1) << 32) + 1).__next__
        self._socket = ControllerSocket((folder.state.public_key, folder.state.secret_key))
        try:
            self._inbox = TurnQueue()
        except BaseException:
            self._socket.close()
            raise
        # have the I/O thread do something, and return the result (`meshbook.controller.io_turns.TurnQueue`)
        self.submit, self.ask = self._inbox.submit, self._inbox.ask
        self._dispatcher = Dispatcher(
            self.submit, self._inbox.wake, self.next_id, self._socket.key_of, folder.peer_ip,
            self._socket.watch, self._socket.forget, folder.state.lease_s, folder.settle_late,
        )  # fmt: skip
        # returns the mesh with this number, unless it has ended; any thread may call it
        self.find_mesh: Callable[[int], MeshState | None] = self._dispatcher.meshes.get
        # the mailboxes of this process, which workers call as rank 0 of mesh 0 (`meshbook.controller.mail`)
        self.mailboxes = self._dispatcher.mail.boxes
        # answers calls of ranks to these mailboxes that will get no other answer
        self.give_up_mail = self._dispatcher.mail.give_up
        self.questions = Questions(self.submit, self._dispatcher.calls, self.next_id)
        self._io = IoThread(self._inbox, self._socket, self._dispatcher)
        # serves the sockets while the main thread waits (`meshbook.controller.io_turns.SocketTurn.drive`)
        self.drive = self._io.turn.drive

    # ---- any thread ---------------------------------------------------------------------------------------------

    def expect_host(
        self, id: str, launched: LaunchedHost, shares_environment: bool, name: str = "", *, is_found: bool = False
    ) -> HostState:
        """Register a host; `HostState.ready` completes when it has dialled in. name: its name for people; empty where
        only its machine knows it. is_found: it was started by a former controller."""
        host = HostState(
            id, self.epoch, launched, self._socket, shares_environment=shares_environment, is_found=is_found
        )
        host.name = name or id
        self._dispatcher.hosts[id] = host
        if launched.pid:
            self.submit(lambda: self._socket.watch_end(launched.pid))
        return host

    @property
    def hosts(self) -> list[HostState]:
        """Return the hosts, lost ones included."""
        return list(self._dispatcher.hosts.values())

    def endpoint(self, address: str) -> str:
        """Listen at ``address`` as well, once; return the address to dial."""
        endpoints = self.folder.state.endpoints
        if address not in endpoints:
            endpoints[address] = self.ask(lambda: self._listen(address))
        return endpoints[address]

    def _listen(self, address: str) -> str:
        endpoint = self._socket.bind(address)
        if folder := direct_folder(endpoint):
            with contextlib.suppress(OSError):  # no descriptor is left: all calls go by the agents
                self._dispatcher.direct.listen(direct_path(folder))
        return endpoint

    def readmit(self) -> None:
        """Let the former controller's hosts in, and those that it had given up, which end then. Call it before
        `bind_again`: ZeroMQ dials no more once it was turned away."""
        state = self.folder.state

        def readmit() -> None:
            for id, saved in state.hosts.items():
                self._socket.readmit(id, saved.key)
            for id, key in state.late_hosts.items():
                self._socket.readmit(id, key)
                self._dispatcher.late_hosts.expect(HostLink(id, self.epoch, self._socket))

        self.ask(readmit)

    def bind_again(self, address: str, endpoint: str) -> None:
        """Listen where the former controller did. Raises: OSError."""
        self.ask(lambda: self._listen(endpoint))
        self.folder.state.endpoints[address] = endpoint

    def adopt(self, hosts: Mapping[str, HostState]) -> Reattach:
        """Expect the reports of ``hosts``."""
        return self.ask(lambda: self._dispatcher.adopt(hosts, self.folder.state.meshes, self))

    def receive_visits(self, handle: Callable[[bytes, Callable[[bytes], None]], object]) -> None:
        """Have ``handle`` take the question of each visit (`meshbook.wire.visits`), and a function that sends the
        answer; it runs on a thread of its own, so that it may ask the hosts."""

        def on_visit(asked: bytes, answer: Callable[[bytes], None]) -> None:
            def send(data: bytes) -> None:
                self.submit(lambda: answer(data))

            hidden_thread(handle, "meshbook.visit", asked, send).start()

        self.ask(functools.partial(setattr, self._socket, "on_visit", on_visit))
        self.endpoint(control_endpoint(self.folder.path))  # sessions whose hosts are all elsewhere listen there, too

    def leave(self, lease_s: float, timeout_s: float) -> None:
        """Detach: let everything live on; agents wait ``lease_s`` for the next controller. timeout_s: time for the
        hosts to acknowledge their messages. Open calls end with MeshDetachedError."""
        if self._inbox.is_closed:
            return
        deadline = time.monotonic() + timeout_s

        def is_settled() -> bool:
            return all(host.connection.has_all for host in self.hosts if not host.lost and host.hello is not None)

        def say() -> None:
            self._dispatcher.direct.acknowledge()
            self._dispatcher.direct.close()  # before agents tell ranks that we have gone
            for host in self.hosts:
                host.send(wire.Leave(lease_s))

        def go() -> None:
            for host in self.hosts:
                if not host.lost:
                    host.beat()  # what has come has come; what comes now is for the next controller
            self._inbox.is_closed = True  # the I/O thread serves no more after this turn

        if timeout_s > 0:
            self.ask(say)
            while not self.ask(is_settled) and time.monotonic() < deadline:
                time.sleep(0.01)
        self.ask(go)
        self._io.close()
        for host in self.hosts:
            host.launched.release()
        self._dispatcher.leave(self.folder.id)
        self._dispatcher.payloads.close()
        self.folder.state.lease_s = lease_s
        self.folder.leave()

    # ---- hosts and calls ----------------------------------------------------------------------------------------

    def accept(self, host_id: str) -> tuple[str, str]:
        """Return a new key pair (public, secret) for one host."""
        return self.ask(lambda: self._socket.accept(host_id))

    def revoke(self, host_ids: Iterable[str]) -> None:
        """Let hosts in no more that did not start."""
        for id in host_ids:
            self.submit(functools.partial(self._socket.revoke, id))

    def when_worker_lost(self, listener: Callable[[MeshState, WorkerLost], None]) -> None:
        """Call ``listener`` under the turn for every worker that ends without being told to."""
        self.submit(lambda: self._dispatcher.on_worker_lost.append(listener))

    def known_meshes(self) -> list[MeshState]:
        """Return the meshes that have not ended, oldest first."""
        return sorted(self._dispatcher.meshes.copy().values(), key=lambda mesh: mesh.id)

    def expect_mesh(self, mesh: MeshState) -> None:
        """Register a mesh whose workers are to be asked for."""
        self.ask(lambda: self._dispatcher.meshes.update({mesh.id: mesh}))

    def end_arrival(self, arrival: MeshArrival, error: Exception | None = None) -> None:
        """End the arrival of a mesh: send the calls that waited for it, or fail them with ``error``."""
        self.submit(lambda: arrival.end(error), arrival.done.set_exception)

    def recruit(self, mesh: MeshState) -> PendingWorkers:
        """Have the hosts of a new mesh start its workers."""
        pending_workers = PendingWorkers(self.next_id(), mesh.seats_of(range(mesh.extent.nelements)))

        def ask() -> None:
            if mesh.phase is not MeshPhase.STARTING:
                pending_workers.fail(SpawnError("the mesh was stopped meanwhile"))
                return
            self._dispatcher.meshes[mesh.id] = mesh
            self._dispatcher.groups_of(mesh)  # looks after its calls
            mesh.ask_for(pending_workers)

        self.submit(ask, pending_workers.give_up)
        return pending_workers

    def call(self, mesh: MeshState, request: CallRequest, output: OutputTarget | None = None) -> CallFuture[Any]:
        """Start a call on members of ``mesh``; the future's value is a ValueMesh over them. output: the target of the
        call's prints; our own stdout by default. Raises: MeshStoppedError, WorkerLost if a member has ended."""
        if self._generation != forks.generation:
            forks.refuse_inherited(self._generation)
        mesh.check_usable()
        mesh.called_at = time.monotonic()
        what, members = str(request.what)[:WHAT_MAX_CHARS], request.members
        if self._dispatcher.is_full:
            self.wait_for_room()
        future: CallFuture[Any] = CallFuture(self, functools.partial(
            OpenCall, self.next_id(), mesh.id, what, members, fail_fast=request.fail_fast, on_reply=request.on_reply,
            mailbox=request.mailbox, beside=request.beside, output=output.id if output else 0,
        ))  # fmt: skip
        call = future.call
        if lost := call.waiting & mesh.lost.keys():
            raise WorkerLost.of(mesh.lost[rank] for rank in lost)
        inline, payload = place_head(request.pickled.head)
        message = wire.Call(
            call.id, mesh.id, request.endpoint, members.encoded, call.output,
            inline=inline, label=what if request.reply else "", mailbox=request.mailbox,
            reply=request.reply, no_prompt=self.front_end.refusal(),
        )  # fmt: skip
        buffers = request.pickled.buffers
        segment = self._dispatcher.payloads.write(buffers) if buffers else None
        if segment is not None:
            call.when_ended(functools.partial(self._dispatcher.payloads.drop, segment))  # unless it was sent
        outgoing = OutgoingCall(
            self._dispatcher, mesh, mesh.generation, request, call, output, message, payload, segment
        )
        if (arrival := mesh.arrival) is not None and not arrival.is_over and not arrival.is_own:
            outgoing.waits, arrival.is_asked = True, arrival.is_asked or request.reply
        self.submit(outgoing.send, outgoing.fail if request.reply else None)
        if not request.reply:
            future.set_result(None)
        return future

    def cancel(self, id: int, *, insist: bool = False, ranks: Collection[int] | None = None) -> None:
        """Interrupt a call where it runs, drop it where it waits; on all of its members, or on ``ranks`` of them."""

        def send() -> None:
            call = self._dispatcher.calls.find(id)
            if call is None:
                any(mesh.arrival.cancel(id) for mesh in self._dispatcher.meshes.values() if mesh.arrival is not None)
                return
            if (mesh := self._dispatcher.meshes.get(call.mesh)) is None:
                return
            if self._dispatcher.groups_of(mesh).cancel(call):
                return
            meant = call.members
            if ranks is not None:
                meant = Region.of(mesh.extent).select(sorted(call.waiting.intersection(ranks)))
            self._dispatcher.withdraw(mesh, call, call.waiting if ranks is None else ranks)
            is_direct = self._dispatcher.direct.has(id)
            mesh.tell(wire.Cancel(mesh.id, id, meant.encoded, insist, is_mail=call.mailbox != 0, direct=is_direct))

        self.submit(send)

    def wants_person(self, call: OpenCall) -> bool:
        """Whether a rank of the call is stopped at a prompt that this thread, the main one, could open."""
        mesh = self._dispatcher.meshes.get(call.mesh)
        if mesh is None or not mesh.stopped_ranks.stops:  # on the path of every call
            return False
        stopped = mesh.stopped_ranks.of(call.waiting).keys() - mesh.stopped_ranks.left
        return bool(stopped) and threading.current_thread() is threading.main_thread()

    def attend(self, call: OpenCall) -> None:
        """Open that prompt. Raises: KeyboardInterrupt, LeftStopped."""
        self.front_end.attend(self, self._dispatcher.meshes[call.mesh], call)

    def open_calls(self, mesh_id: int) -> list[OpenCall]:
        """Return the calls that some rank has not answered, oldest first."""
        return [call for call in self._dispatcher.calls.all() if call.mesh == mesh_id]

    def free_groups(self, mesh_id: int, ranks: Iterable[int]) -> None:
        """Abort the process groups that ``ranks`` wait in; ranks that are busy otherwise keep theirs for now."""
        wanted = set(ranks)

        def abort() -> None:
            if (mesh := self._dispatcher.meshes.get(mesh_id)) is not None:
                self._dispatcher.groups_of(mesh).abort("the person insisted on an interrupt", wanted)

        self.submit(abort)

    def where(self, mesh_id: int, ranks: Iterable[int]) -> dict[int, str]:
        """Return the activity of the ranks' main threads; for ranks that cannot answer, the reason."""
        mesh = self._dispatcher.meshes.get(mesh_id)
        if mesh is None:
            return dict.fromkeys(ranks, SilenceCause.MESH_STOPPED.value)
        return {rank: str(answer) for rank, answer in look(self.questions, mesh, ranks, "where", str, 0.5).items()}

    def reactions(self, mesh_id: int, ranks: Iterable[int], timeout_s: float) -> Reactions:
        """Return the same with how each rank takes the interrupt that was sent to it."""
        mesh = self._dispatcher.meshes.get(mesh_id)
        if mesh is None:
            return dict.fromkeys(ranks, Unresponsive(SilenceCause.MESH_STOPPED))
        return look(self.questions, mesh, ranks, "reaction", Reaction, timeout_s)

    def stacks(self, mesh: MeshState, members: Members, ask: StackQuestion) -> MeshStacks:
        """Return the stacks of ``members``, and the ranks of the mesh that hold others up."""
        return collect_stacks(self.questions, mesh, members, ask)

    def form_groups(self, mesh: MeshState) -> CallFuture[Any]:
        """Form the process groups of a mesh; groups that exist are formed again in place."""
        mesh.check_usable()
        future: CallFuture[Any] = CallFuture(self, functools.partial(forming_call, self.next_id(), mesh))
        call = future.call
        self.submit(lambda: self._dispatcher.groups_of(mesh).form(call), call.give_up)
        return future

    def abort_groups(self, mesh: MeshState, reason: str) -> None:
        """Abort the mesh's process groups, which frees all ranks that wait in them; they are formed again after."""
        mesh.check_usable()
        self.submit(lambda: self._dispatcher.groups_of(mesh).abort(reason))

    # ---- repair and resize --------------------------------------------------------------------------------------

    def busy_on(self, mesh: MeshState) -> set[int]:
        """Return the ranks of a mesh that have a call to answer."""
        return self._dispatcher.calls.busy_on(mesh.id)

    def kill(self, mesh: MeshState, ranks: Sequence[int], why: str) -> Future[None]:
        """End ranks that live; their open calls fail with ``why``. The future is done when the processes are gone."""
        return self.ask(lambda: self._dispatcher.kill(mesh, ranks, why))

    def give_up_suspects(self, hosts: Iterable[HostState]) -> None:
        """Count silent hosts as lost, since a person says so."""

        def give_up() -> None:
            for host in hosts:
                if suspicion := host.suspicion:
                    self._dispatcher.give_up(host, f"given up: it was {suspicion}")

        self.ask(give_up)

    def give_up_recruits(self, mesh: MeshState, pending_workers: PendingWorkers) -> None:
        """End workers that were asked for, unless they are ranks of the mesh by now. Does not wait."""
        self.submit(lambda: self._dispatcher.give_up_recruits(mesh, pending_workers))

    def renumber(
        self,
        mesh: MeshState,
        check: Callable[[Collection[int]], object],
        renumbering: Renumbering,
        grace_s: float = 0.0,
    ) -> Future[None]:
        """Give ranks other numbers at once, see `Dispatcher.renumber`."""
        return self.ask(lambda: self._dispatcher.renumber(mesh, check, renumbering, grace_s))

    def merge_prompts(self, mesh: MeshState, prompts: Mapping[int, wire.AtPrompt]) -> None:
        """Take in the prompts at which ranks say that they wait."""
        self.ask(lambda: self._dispatcher.held_deadlines.merge(mesh, prompts))

    def stop_mesh(self, mesh: MeshState, grace_s: float) -> None:
        """Begin to end a mesh: its open calls fail at once; `MeshState.stopped` completes when no process is left."""
        if mesh.detached:
            return
        self.folder.forget(meshes=[mesh.id])

        def stop() -> None:
            if mesh.phase is MeshPhase.STOPPED:
                return
            mesh.stop()
            self._dispatcher.groups_of(mesh).stop()
            self._dispatcher.calls.give_up(mesh.id, MeshStoppedError(mesh.name))
            for host in mesh.hosts:
                if host.lost or not mesh.is_asked_for:
                    mesh.on_stopped(host, lambda: self._dispatcher.forget(mesh))
                else:
                    host.send(wire.StopMesh(mesh.id, grace_s))

        self.submit(stop, mesh.stopped.set_exception)

    def stop_hosts(self, hosts: Sequence[HostState], timeout_s: float) -> None:
        """End host agents, and with them all processes on their hosts; return when they have ended."""

        def say_goodbye() -> None:
            for host in hosts:
                self._dispatcher.dismiss(host)
                if host.id in self._dispatcher.late_hosts:
                    self.folder.forget(late_hosts={host.id: self._socket.key_of(host.id)})
                else:
                    host.shut_out()

        deadline = time.monotonic() + timeout_s
        self.submit(say_goodbye)
        for host in hosts:
            is_told = host.hello is not None or host.is_found  # else it hears no goodbye, and has nothing to lose
            host.launched.close(max(0.1, deadline - time.monotonic()) if is_told else 0.0)
        self.folder.forget(hosts=[host.id for host in hosts])

    def close(self, timeout_s: float) -> None:
        """End all hosts and the I/O thread. Idempotent."""
        if self._inbox.is_closed:
            return
        deadline = time.monotonic() + timeout_s
        self.submit(self._dispatcher.say_goodbye)
        for host in list(self._dispatcher.hosts.values()):
            host.launched.close(max(0.1, deadline - time.monotonic()))
        self._io.close()
        self._dispatcher.payloads.close()
        self.folder.close()

    def wait_for_room(self) -> None:
        """Wait while too many messages wait for slow hosts."""
        while self._dispatcher.is_full and not self._inbox.is_closed:
            self._dispatcher.room.wait(timeout=1.0)
