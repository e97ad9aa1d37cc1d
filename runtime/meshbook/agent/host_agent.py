"""The host agent: one process per host that starts, watches and reaps the workers there, and speaks for them.

Single-threaded but for its logs (`meshbook.agent.rank_log`), without torch. It dials in to the controller with the
ticket it reads from stdin, serves any number of meshes, and ends when told to, or when the controller has been gone for
the lease (`meshbook.agent.lease`). Its workers never outlive it.

Exit codes: 0 told goodbye; 75 controller lost; 77 refused by the controller.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq
from typing_extensions import assert_never

from meshbook.agent.cancels import dropped_replies, states_of, take_parked
from meshbook.agent.handover import PreviousControllers, report
from meshbook.agent.lease import Lease
from meshbook.agent.mail import HOLD_BYTES, AgentMail
from meshbook.agent.mesh import AgentMesh
from meshbook.agent.offline_quota import OfflineQuota
from meshbook.agent.peer_client import FULL_BULK_BYTES
from meshbook.agent.peers import AgentPeers
from meshbook.agent.rank_log import settle_logs
from meshbook.agent.segment_refs import SegmentRefCounts
from meshbook.agent.stack_dumps import OutsideStacks
from meshbook.agent.store import StoreAccess
from meshbook.agent.template import TemplateProcess
from meshbook.agent.unacked import unacked_messages
from meshbook.concurrency.own_faults import attempt, tell
from meshbook.errors import MeshError, PeerProtocolError
from meshbook.sessions.listing import remove_if_last
from meshbook.shape.generations import Moves
from meshbook.system.devices import count_cores, count_cuda_devices
from meshbook.system.event_loop import EventLoop
from meshbook.system.exits import OomWatch
from meshbook.system.os_errors import explain
from meshbook.system.processes import adopt_orphans, kill_strays, machine_id, reap_strangers
from meshbook.values.segments import SegmentPool, map_segment
from meshbook.wire import messages as wire
from meshbook.wire.batches import Batch, unbatch
from meshbook.wire.bulk import BulkReceiver, BulkSender, Spans
from meshbook.wire.frames import Buffer
from meshbook.wire.ticket import Ticket, decode_ticket
from meshbook.wire.transport import HEARTBEAT_S, LANES, AgentSocket, LaneName

EXIT_LOST, EXIT_REFUSED = 75, 77

MAX_UNSENT_BYTES = 64 << 20
"""With so much waiting for slow workers we stop reading calls, and the controller feels it."""

MAX_UNSENT_MAIL_BYTES = 256 << 20
"""The same for mail; that of workers is held back long before (`meshbook.agent.mail`)."""

PEERS_UNSENT_BYTES = 16 << 20
"""With so much mail waiting here we stop reading calls of other hosts' workers, and their agents feel it."""

GOODBYE_GRACE_S = 1.0
LOGS_GRACE_S = 1.0

FAULT_REST_S = 0.01

_LEFT = wire.DeathCause("", "the process that controls the mesh has ended, or has detached from it", "")


class HostAgent:
    """Sockets to the controller, the templates, and the meshes of this host."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._name = socket.gethostname()
        self._loop = EventLoop()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        dial = functools.partial(_dial, context)
        self._lanes = dial(ticket)
        self._outbox = Batch(self._lanes["calls"].send)
        self._shares_memory = False
        self._templates: dict[tuple[str, ...], TemplateProcess] = {}
        self._meshes: dict[int, AgentMesh] = {}
        self._waiting_spawns: list[wire.Spawn] = []
        """They wait for their template to be ready."""
        self._lease = Lease(self._loop, ticket.lease_s)
        self.keeping = OfflineQuota()
        self._welcome: wire.Welcome | None = None
        self._former = PreviousControllers()
        self._pool = SegmentPool()
        self.segment_refs = SegmentRefCounts(self._segment_unused)
        self.moves: dict[int, Moves] = {}
        """By mesh, of those whose ranks got other numbers."""
        self._peers = AgentPeers(self._loop, dial, ticket, self.segment_refs, self._pool, self.send_urgent)
        self._peers.is_there = lambda: self._lease.runs or self._lease.is_heard
        self.mail = AgentMail(self._name, self._meshes, self.segment_refs, self, self._pool, self._peers, self.moves)
        self.oom = OomWatch()
        bulk = self._lanes["bulk"]
        self._bulk_out = BulkSender(lambda: bulk.link, bulk.send)
        self.bulk_in = BulkReceiver(self._on_whole)
        self._parked: deque[tuple[wire.Call, list[bytes]]] = deque()
        self._freed: deque[tuple[int, int]] = deque()
        self._exit_code: int | None = None

    def run(self) -> int:
        """Serve until the end; returns the exit code."""
        self._templates[()] = TemplateProcess.start(self._loop)
        for socket_ in self._lanes.values():
            socket_.watch(self._loop)
            socket_.on_newer = self._succeed
        self._lease.watch_stdin()
        self._greet()
        self._beat()
        while self._exit_code is None:
            if not attempt(self._serve, "the loop of the host agent"):
                time.sleep(FAULT_REST_S)  # it may be met again at once
        self._outbox.flush()
        for template in self._templates.values():
            template.close()
        kill_strays(())
        settle_logs(LOGS_GRACE_S)
        return self._exit_code

    def _serve(self) -> None:
        self._serve_controller()  # ZeroMQ's descriptors tell edges only, so look before every sleep
        while self._outbox.flush() or self._bulk_out.pump():  # what has come by then may be told of no more
            self._serve_controller()
        if self._peers.active and self._peers.serve(choked=self._unsent_mail_bytes > PEERS_UNSENT_BYTES):
            self._loop.call_later(0.0, lambda: None)  # look once more before the next sleep
        self.mail.settle()
        self._loop.run_once()

    def _greet(self) -> None:
        self.send_urgent(
            wire.Hello(
                wire.PROTOCOL_VERSION,
                self._ticket.host_id,
                self._name,
                machine_id() if self._ticket.shares_memory else secrets.token_hex(8),
                os.getpid(),
                count_cuda_devices(),
                count_cores(),
            )
        )

    # ---- uplink (`meshbook.agent.mesh.Uplink`) -------------------------------------------------------------------

    def send(self, message: wire.FromHost, payload: Sequence[Buffer] = ()) -> None:
        """Send on the lane of calls, in order, at the latest when this turn of the loop ends."""
        self._outbox.add(wire.encode(message), payload)

    def send_urgent(self, message: wire.FromHost, payload: Sequence[Buffer] = ()) -> None:
        """Send on the lane that never waits behind payloads."""
        self._lanes["urgent"].send(wire.encode(message), payload)

    def export(self, segment: wire.SegmentRef) -> tuple[wire.SegmentRef | None, tuple[int, Spans] | None]:
        """Make a worker's payload reachable for the controller: as it is, or in pieces when that is elsewhere."""
        if self._shares_memory:
            return segment, None
        buffers = map_segment(segment, lambda id: self._freed.append((segment.pid, id)))
        return None, self._bulk_out.send([buffer.data for buffer in buffers])

    @property
    def unacked_bytes(self) -> int:
        """What is on its way to the controller, on the lane of calls."""
        return self._lanes["calls"].link.unacked_bytes

    @property
    def is_full(self) -> bool:
        """Whether so much is on its way to the controller that workers should send it no more."""
        return self._lanes["calls"].link.unacked_bytes > HOLD_BYTES or self._bulk_out.waiting_bytes > FULL_BULK_BYTES

    def _segment_unused(self, owner_pid: int, segment: int) -> None:
        """All workers have let go of a payload."""
        if owner_pid == os.getpid():
            self._pool.release(segment)
        elif not self._free_in_worker(owner_pid, segment):
            self.send_urgent(wire.SegmentFree(owner_pid, segment))

    # ---- controller ---------------------------------------------------------------------------------------------

    def _serve_controller(self) -> None:
        again = True
        while again:
            again = False
            for name, lane in self._lanes.items():
                if not lane.readable():
                    continue
                if name == "calls" and self._choked():
                    self._loop.call_later(0.01, lambda: None)
                    continue
                again = True
                try:
                    for header, payload in lane.receive():
                        self._hear()
                        for each in unbatch(header):
                            self._take(each, payload)
                except PeerProtocolError as error:
                    self._refuse("", 0, error)
        while self._freed:
            pid, segment = self._freed.popleft()
            self._free_in_worker(pid, segment)

    def _take(self, header: bytes, payload: list[bytes]) -> None:
        """Act on a message; whoever waits for an answer to one that cannot be read learns that there will be none."""
        try:
            self._dispatch(wire.decode_to_host(header), payload)
        except (*wire.MALFORMED, PeerProtocolError) as error:
            self._refuse(*wire.name_of(header), error)
        except Exception as error:
            tell(error, "a message of the controller")
            self._refuse(*wire.name_of(header), error)

    def _refuse(self, kind: str, id: int, error: Exception) -> None:
        self.send_urgent(wire.Unread(kind, id, f"{type(error).__name__}: {error}"))

    def _choked(self) -> bool:
        calls = mail = 0
        for mesh in self._meshes.values():
            for worker in mesh.workers.values():
                calls += worker.calls.unsent_bytes
                mail += worker.mail.unsent_bytes
        return calls > MAX_UNSENT_BYTES or mail > MAX_UNSENT_MAIL_BYTES

    @property
    def _unsent_mail_bytes(self) -> int:
        return sum(mesh.unsent_mail_bytes for mesh in self._meshes.values())

    def _dispatch(self, message: wire.ToHost, payload: list[bytes]) -> None:
        match message:
            case wire.Call():
                self._on_call(message, payload)
            case wire.Query():
                if (mesh := self._meshes.get(message.mesh)) is not None:
                    mesh.query(message)
            case wire.Cancel():
                if (mesh := self._meshes.get(message.mesh)) is not None and not self._drop_parked(mesh, message):
                    mesh.cancel(message)
            case wire.AbortGroups():
                if (mesh := self._meshes.get(message.mesh)) is not None:
                    mesh.abort_groups(message)
            case wire.AskProcesses(id, mesh_id, target):
                mesh = self._meshes.get(mesh_id)
                self.send_urgent(wire.Processes(id, states_of(mesh.workers.values(), target) if mesh else {}))
            case wire.AskStacks(mesh=mesh_id):
                mesh = self._meshes.get(mesh_id)
                OutsideStacks(self._loop, mesh.workers.values() if mesh else (), message, self.send_urgent).start()
            case wire.Bulk():
                self.bulk_in.receive(message, payload[0])
            case wire.OpenPeerPort():
                self._peers.on_open(message)
            case wire.Peers():
                self._peers.on_peers(message)
            case wire.PeerLost():
                self._peers.on_lost(message)
            case wire.Replies():
                self.mail.controller.on_replies(message, payload)
            case wire.SegmentFree(pid, segment):
                self._free_in_worker(pid, segment)
            case (
                wire.StoreRequest() | wire.StoreAnswer() | wire.DropClient() | wire.DropKeys() | wire.StoreLost()
                | wire.AskAgain()
            ):  # fmt: skip
                if (mesh := self._meshes.get(message.mesh)) is not None:
                    _serve_store(mesh.store, message)
            case wire.Spawn():
                self._on_spawn(message)
            case wire.Retire(id, mesh_id, ranks):
                self._give_up_spawns(mesh_id, ranks)
                if (mesh := self._meshes.get(mesh_id)) is not None:
                    mesh.retire(message)
                else:
                    self.send(wire.Retired(id))
            case wire.Renumber():
                if (mesh := self._meshes.get(message.mesh)) is not None:
                    mesh.renumber(message)
                self._note_moves(message.mesh, message.moves)
            case wire.Moved(mesh_id, moves):
                self._note_moves(mesh_id, moves)
            case wire.StopMesh(mesh_id, grace_s):
                self._on_stop(mesh_id, grace_s)
            case wire.ReadLogs(id, mesh_id):
                mesh = self._meshes.get(mesh_id)
                self.send_urgent(wire.Logs(id, mesh.logs(message) if mesh else {}))
            case wire.ReadOn(id, mesh_id):
                mesh = self._meshes.get(mesh_id)
                self.send_urgent(wire.LogPieces(id, mesh.read_on(message) if mesh else ()))
            case wire.Welcome():
                self._welcome, self._shares_memory = message, message.shares_memory
                if message.machine == machine_id():
                    self._lease.watch_process(message.pid, message.started)
            case wire.Leave(lease_s):
                self._lease.leave(lease_s)
                self.mail.controller.lose(_LEFT)
                self._beat_once()
            case wire.Refused(reason):
                print(reason, file=sys.stderr)
                self._exit_code = EXIT_REFUSED
            case wire.Goodbye():
                self._end(0)
            case wire.Heartbeat():
                pass
            case _:
                assert_never(message)

    def _note_moves(self, mesh_id: int, moves: Moves) -> None:
        """Ranks of a mesh have other numbers: the workers here that have references to them are told."""
        self.moves[mesh_id] = moves
        told = wire.encode(wire.Moved(mesh_id, moves))
        for mesh in self._meshes.values():
            for worker in mesh.workers.values():
                worker.urgent.send([told])

    def _on_call(self, call: wire.Call, payload: list[bytes]) -> None:
        if self._parked or (call.bulk is not None and not self.bulk_in.has(call.bulk[0])):
            self._parked.append((call, payload))
            return
        if (mesh := self._meshes.get(call.mesh)) is None:  # stopped meanwhile: the controller has failed its calls
            if call.bulk is not None:
                self.bulk_in.discard(call.bulk[0])
            elif call.segment is not None:
                self._segment_unused(call.segment.pid, call.segment.segment)
            return
        if call.bulk is not None:
            buffers = self.bulk_in.take(*call.bulk)
            try:
                segment = self._pool.write(buffers)
            except MeshError as error:
                mesh.refuse(call, error)
                return
            call = msgspec.structs.replace(call, segment=segment, bulk=None)
        mesh.call(call, payload)

    def _drop_parked(self, mesh: AgentMesh, cancel: wire.Cancel) -> bool:
        """Answer for a call that waits for its payload; the payload is thrown away. False if there is none."""
        found = take_parked(self._parked, cancel, mesh.workers)
        if found is None:
            return False
        call, members = found
        self.send(dropped_replies(call.id, members))
        if call.bulk is not None:
            self.bulk_in.discard(call.bulk[0])
        self._serve_parked()
        return True

    def _on_whole(self) -> None:
        """A payload is whole: pass on what waited for it, in its order."""
        self._serve_parked()
        self.mail.controller.serve_parked()

    def _serve_parked(self) -> None:
        parked, self._parked = self._parked, deque()
        for call, payload in parked:
            self._on_call(call, payload)

    def _on_spawn(self, spawn: wire.Spawn, again: bool = False) -> None:
        """again: the template that was asked first has ended; another one is made, once."""
        try:
            template = self._template_for(spawn)
        except OSError as error:
            self.send(_template_failed(spawn, f"the workers' template could not be started: {explain(error)}"))
            return
        mesh = self._meshes.get(spawn.mesh)
        if mesh is None:
            host_rank, log_dir = spawn.arrangement.host_rank, Path(self._ticket.log_dir)
            mesh = AgentMesh(spawn.mesh, spawn.name, host_rank, self._loop, self, self._name, log_dir)
            mesh.memory.moves = self.moves.get(spawn.mesh, ())
            self._meshes[spawn.mesh] = mesh
        mesh.memory.on_spawn(spawn)
        self._waiting_spawns.append(spawn)
        template.when_ready(lambda: self._start_workers(spawn, template, again))

    def _template_for(self, spawn: wire.Spawn) -> TemplateProcess:
        """What its workers are forked from: the standard one if that with its modules must not be forked.

        One that has ended is replaced. Raises: OSError if the system has no process or no descriptors for it.
        """
        template = self._templates.get(spawn.preload)
        if template is not None and not template.failure and not template.problem:
            return template
        standard = self._templates[()]
        if standard.failure:
            standard = self._templates[()] = TemplateProcess.start(self._loop)
        if not spawn.preload or (template is not None and not template.failure):
            return standard
        forked = self._templates[spawn.preload] = standard.fork_template(spawn.preload, spawn.sys_path)
        return forked

    def _start_workers(self, spawn: wire.Spawn, template: TemplateProcess, again: bool) -> None:
        if spawn not in self._waiting_spawns:
            return  # stopped before it began
        self._waiting_spawns.remove(spawn)
        mesh = self._meshes[spawn.mesh]
        if template.failure:
            self.send(_template_failed(spawn, f"the workers' template failed:\n{template.failure}"))
        elif template.problem and template is not self._templates[()]:
            self._on_spawn(spawn, again)  # from the standard one
        else:
            in_workers = bool(spawn.preload) and template is self._templates[()]
            retry = None if again else functools.partial(self._on_spawn, spawn, again=True)
            mesh.worker_pool.start(spawn, template, in_workers, retry)

    def _give_up_spawns(self, mesh: int, ranks: Sequence[int] | None = None) -> None:
        """Do not start what waits for a template still, for some workers of a mesh or for all."""
        for spawn in tuple(self._waiting_spawns):
            if spawn.mesh == mesh and (ranks is None or any(seat.known_as in ranks for seat in spawn.seats)):
                self._waiting_spawns.remove(spawn)

    def _on_stop(self, mesh_id: int, grace_s: float) -> None:
        self._give_up_spawns(mesh_id)
        mesh = self._meshes.get(mesh_id)

        def stopped() -> None:
            self._meshes.pop(mesh_id, None)
            self._end_strays()
            self.send(wire.MeshStopped(mesh_id))

        if mesh is None:
            stopped()
        else:
            mesh.stop(grace_s, stopped)

    def _end_strays(self) -> None:
        """What ranks have left in sessions of their own ends with the last mesh: nobody knows of which one it was."""
        templates = self._templates.values()
        if not self._meshes and all(template.pid or template.failure for template in templates):
            kill_strays({template.pid for template in templates})

    def _free_in_worker(self, pid: int, segment: int) -> bool:
        """Tell a worker that nobody looks at its segment any more; False if none is process ``pid``."""
        for mesh in self._meshes.values():
            for worker in mesh.workers.values():
                if worker.pid == pid:
                    worker.lent.discard(segment)
                    return mesh.to_worker(worker.rank, wire.SegmentFree(pid, segment))
        return False

    # ---- life ---------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._loop.call_later(HEARTBEAT_S, self._beat)
        self._lanes["urgent"].look()
        self._lease.beat(is_connected=self._lanes["urgent"].is_answered)
        if not self._lease.is_heard and self.keeping.listening:
            self._pause()
        if self.keeping.listening:
            self.send_urgent(wire.Heartbeat())
            self._beat_once()
        self._peers.beat()
        for pid, segment in self._former.take_freed():
            self._free_in_worker(pid, segment)
        workers = [worker.pid for mesh in self._meshes.values() for worker in mesh.workers.values()]
        self.oom.sample(workers)
        reap_strangers({*workers, *(template.pid for template in self._templates.values())})
        if self._lease.is_over(bool(self._meshes)):
            if self._meshes:
                print(f"no controller came within the lease of {self._lease.lease_s:g} s", file=sys.stderr, flush=True)
            self._end(EXIT_LOST)

    def _beat_once(self) -> None:
        for lane in self._lanes.values():
            lane.beat()

    # ---- controllers come and go --------------------------------------------------------------------------------

    def _hear(self) -> None:
        """The controller has spoken."""
        self._lease.hear()
        if not self.keeping.listening:
            self._resume()

    def _pause(self) -> None:
        """Nobody listens: keep what there is to say."""
        self._outbox.flush()
        if self._welcome is not None and self._welcome.machine == machine_id() and not self._lease.runs:
            self.mail.controller.lose(_LEFT)
        self.keeping.begin()
        for lane in self._lanes.values():
            lane.paused = True

    def _resume(self) -> None:
        self.keeping.end()
        for lane in self._lanes.values():
            lane.paused = False
        self._beat_once()  # the controller sees what it lacks, and asks for it
        for mesh in self._meshes.values():
            mesh.flush_output()

    def _succeed(self, epoch: int) -> None:
        """A new controller of our session has spoken: tell it everything, then go on as before."""
        for mesh in self._meshes.values():
            self._give_up_spawns(mesh.id)
            mesh.worker_pool.give_up_starting()
            mesh.flush_replies()
        self._outbox.flush()
        kept = {name: lane.restart(epoch) for name, lane in self._lanes.items()}
        found = unacked_messages(kept["calls"], [*kept["bulk"], *self._bulk_out.take_unsent()])
        self._lease.hear()
        self.keeping.end()
        self._parked.clear()
        self.bulk_in = BulkReceiver(self._on_whole)
        self.mail.controller.lose(_LEFT)
        self._greet()
        hosted, again, unneeded = report(self._meshes.values(), found)
        self.send(hosted)
        self._peers.on_succession()
        for message, payload in again:
            self.send(message, payload)
        self._bulk_out.send_again(found.pieces)
        for mesh in self._meshes.values():
            mesh.flush_output()
        if self._welcome is not None:
            self._former.add(self._welcome.pid, self._welcome.started, unneeded)

    def _end(self, code: int) -> None:
        meshes = dict(self._meshes)
        if not meshes:
            self._exit_code = code

        def stopped(mesh_id: int) -> None:
            meshes.pop(mesh_id, None)
            if not meshes:
                self._exit_code = code

        for mesh_id, mesh in tuple(meshes.items()):
            mesh.stop(GOODBYE_GRACE_S, functools.partial(stopped, mesh_id))


def _dial(context: zmq.Context[zmq.Socket[bytes]], ticket: Ticket) -> dict[LaneName, AgentSocket]:
    """Raises: OSError where an address cannot be used, or no descriptor is left."""
    lanes: dict[LaneName, AgentSocket] = {}
    try:
        for lane in LANES:
            lanes[lane] = AgentSocket(context, ticket, lane)
    except zmq.ZMQError as error:
        for made in lanes.values():
            made.close()
        raise OSError(error.errno, str(error)) from error
    return lanes


def _template_failed(spawn: wire.Spawn, reason: str) -> wire.SpawnFailed:
    return wire.SpawnFailed(spawn.mesh, reason, request=spawn.request)


def _serve_store(
    store: StoreAccess,
    message: wire.StoreRequest | wire.StoreAnswer | wire.DropClient | wire.DropKeys | wire.StoreLost | wire.AskAgain,
) -> None:
    match message:
        case wire.StoreRequest(_, rank, request, op):
            store.ask_from_afar(rank, request, op)
        case wire.StoreAnswer(_, rank, request, result):
            store.answer(rank, request, result)
        case wire.DropClient(_, rank):
            store.drop_client(rank)
        case wire.DropKeys(_, prefix):
            store.drop_keys(prefix)
        case wire.StoreLost(_, reason):
            store.lose(reason)
        case wire.AskAgain():
            store.resend()


def main() -> None:
    """Entry point of ``python -m meshbook.agent.host_agent``; the ticket is one line on stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(all_threads=False)
    ticket = decode_ticket(_read_line(0))
    adopt_orphans()
    agent = HostAgent(ticket)
    signal.signal(signal.SIGTERM, lambda *_: agent._end(143))
    code = agent.run()
    if ticket.session:
        remove_if_last(Path(ticket.session), os.getpid())
    sys.stdout.flush()
    os._exit(code)


def _read_line(fd: int) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (data := os.read(fd, 1 << 16)):
        line += data
    return line


if __name__ == "__main__":
    main()
