"""The host agent: one process per host that starts, watches and reaps the workers there, and speaks for them.

Single-threaded but for its logs (`meshbook.agent.rank_log`), without torch. It dials in to the controller with the
ticket it reads from stdin, serves any number of meshes, and ends when told to, or when the controller has been gone for
the lease (`meshbook.agent.lease`). Its workers never outlive it.

Exit codes: 0 told goodbye; 75 controller lost; 77 refused by the controller.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec
from typing_extensions import assert_never

from meshbook.agent import tunnel
from meshbook.agent.handover import PreviousControllers, hear_out, report, unacked_messages
from meshbook.agent.lease import Lease
from meshbook.agent.mail import AgentMail
from meshbook.agent.mesh import AgentMesh
from meshbook.agent.rank_log import settle_logs
from meshbook.agent.resources import HostResources, SegmentRefCounts
from meshbook.agent.spawns import Spawns
from meshbook.agent.worker import AgentWorker
from meshbook.concurrency.background import attempt, tell
from meshbook.errors import MeshError, PeerProtocolError, SpawnError
from meshbook.errors.advice import set_advice
from meshbook.launchers.templates import StartedTemplate
from meshbook.sessions.listing import remove_if_last
from meshbook.shape.members import Moves
from meshbook.system.devices import count_cores, count_cuda_devices
from meshbook.system.event_loop import EventLoop
from meshbook.system.os_errors import raise_file_limit
from meshbook.system.processes import (
    adopt_orphans,
    begin_as_host,
    machine_id,
    python_version,
    reap_strangers,
    set_title,
)
from meshbook.values.segments import SegmentPool
from meshbook.wire import messages as wire
from meshbook.wire.link import HEARTBEAT_S, Uplink
from meshbook.wire.replies import agents_answer
from meshbook.wire.ticket import Ticket, decode_ticket
from meshbook.wire.transport import Dialer

EXIT_LOST, EXIT_REFUSED = 75, 77
MAX_UNSENT_BYTES = 64 << 20  # we stop reading calls when so much waits for slow workers, and the controller feels it
MAX_UNSENT_MAIL_BYTES = 256 << 20  # the same for mail; that of workers is held back long before (`meshbook.agent.mail`)
# we stop reading calls of other hosts' workers when so much mail waits here, and their agents feel it
PEERS_UNSENT_BYTES = 16 << 20
GOODBYE_GRACE_S = 1.0
LOGS_GRACE_S = 1.0
FAULT_REST_S = 0.01
# torch that a controller expects to need is imported so long after: at once it would slow a kernel's first cell
EXPECT_TORCH_S = 0.5
_LEFT = wire.DeathCause("", "the process that controls the mesh has ended, or has detached from it", "")


class HostAgent:
    """The meshes of this host, and the uplink to their controller."""

    def __init__(self, ticket: Ticket, template: StartedTemplate | None) -> None:
        self._ticket = ticket
        self._name = ticket.name or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._loop = EventLoop()
        dialer = Dialer()
        self._uplink = Uplink(dialer, ticket, self._loop, self._on_message, self._succeed)
        self._lease = Lease(self._loop, ticket.lease_s, self._uplink.silence, self._on_gone, ticket.arrive_s)
        self._meshes: dict[int, AgentMesh] = {}
        self._welcome: wire.Welcome | None = None
        self._former = PreviousControllers()
        self._pool = SegmentPool()
        self._segment_refs = SegmentRefCounts(self._segment_unused)
        self._moves: dict[int, Moves] = {}  # moves of meshes whose ranks got other numbers
        self._resources = HostResources(
            self._name, ticket, self._loop, dialer, self._uplink, self._segment_refs, self._pool, self._moves
        )
        self._quota = self._resources.quota
        self._mail = AgentMail(self._resources, self._meshes, lambda: self._lease.runs or self._lease.is_heard)
        self._spawns = Spawns(self._loop, self._mesh_of, self._uplink.send, template)
        self._ending: int | None = None  # the exit code of the agent when its last mesh has ended
        self._exit_code: int | None = None
        self.last_words = ""  # why it ends, for a starter that could not be told otherwise

    def end_with(self, connection: int) -> None:
        """End, workers and all, when the connection ends that has started us."""
        tunnel.watch(self._loop, connection, self._on_cut)

    def _on_cut(self) -> None:
        print("the connection to the controller has ended", file=sys.stderr, flush=True)
        self._end(EXIT_LOST)

    def run(self) -> int:
        """Serve until the end; return the exit code."""
        self._lease.watch_stdin()
        self._greet()
        self._beat()
        while self._exit_code is None:
            if not attempt(self._serve, "the loop of the host agent"):
                time.sleep(FAULT_REST_S)  # it may be met again at once
        self._uplink.flush()
        self._spawns.close()
        settle_logs(LOGS_GRACE_S)
        return self._exit_code

    def _serve(self) -> None:
        uplink, loop, mail, segment_refs = self._uplink, self._loop, self._mail, self._segment_refs
        while self._exit_code is None:  # on the path of every call, so who has nothing to do is not called
            try:
                uplink.serve(self._choked)
            except PeerProtocolError as error:
                self._refuse("", 0, error)
                loop.call_later(0.0, lambda: None)
            if mail.peers.active and mail.peers.serve(
                choked=bool(loop.unwritten)
                and sum(worker.mail.unsent_bytes for worker in self._workers) > PEERS_UNSENT_BYTES
            ):
                loop.call_later(0.0, lambda: None)  # look once more before the next sleep
            if segment_refs.sent:
                segment_refs.settle()
            if mail.held:
                mail.settle()
            loop.run_once()

    def _greet(self) -> None:
        self._uplink.send_urgent(
            wire.Hello(
                wire.PROTOCOL_VERSION,
                self._ticket.host_id,
                self._name,
                machine_id() if self._ticket.shares_memory else os.urandom(8).hex(),
                os.getpid(),
                count_cuda_devices(),
                count_cores(),
                python_version(),
            )
        )

    def _segment_unused(self, owner_pid: int, segment: int) -> None:
        """Release a payload that all workers have let go of."""
        if owner_pid == os.getpid():
            self._pool.release(segment)
        elif not self._free_in_worker(owner_pid, segment):
            self._uplink.send_urgent(wire.SegmentFree(owner_pid, segment))

    # ---- controller ---------------------------------------------------------------------------------------------

    def _on_message(self, header: bytes, payload: list[bytes]) -> None:
        """Act on a message. If it cannot be read, the sender is told that there will be no answer."""
        try:
            self._dispatch(wire.decode_to_host(header), payload)
        except (*wire.MALFORMED, PeerProtocolError) as error:
            self._refuse(*wire.name_of(header), error)
        except Exception as error:
            tell(error, "a message of the controller")
            self._refuse(*wire.name_of(header), error)

    def _refuse(self, kind: str, id: int, error: Exception) -> None:
        self._uplink.send_urgent(wire.Unread(kind, id, f"{type(error).__name__}: {error}"))

    def _choked(self) -> bool:
        """Whether so much waits for slow workers that no more calls should come now."""
        calls = mail = 0
        for worker in self._workers:
            calls += worker.calls.unsent_bytes
            mail += worker.mail.unsent_bytes
        if calls <= MAX_UNSENT_BYTES and mail <= MAX_UNSENT_MAIL_BYTES:
            return False
        self._loop.call_later(0.01, lambda: None)
        return True

    @property
    def _workers(self) -> list[AgentWorker]:
        return [worker for mesh in self._meshes.values() for worker in mesh.workers.values()]

    def _dispatch(self, message: wire.ToHost, payload: list[bytes]) -> None:
        match message:
            case wire.Call():
                self._on_call(message, payload)
            case wire.Replies():
                self._mail.controller.on_replies(message, payload)
            case wire.Query():
                self._answer(message)
            case wire.Cancel():
                if (mesh := self._meshes.get(message.mesh)) is not None:
                    mesh.calls.cancel(message)
            case wire.AbortGroups():
                if (mesh := self._meshes.get(message.mesh)) is not None:
                    mesh.abort_groups(message)
            case wire.OpenPeerPort():
                self._mail.peers.on_open(message)
            case wire.Peers():
                self._mail.peers.on_peers(message)
            case wire.PeerLost():
                self._mail.peers.on_lost(message)
            case wire.SegmentFree(pid, segment):
                self._free_in_worker(pid, segment)
            case (
                wire.StoreRequest() | wire.StoreAnswer() | wire.DropClient() | wire.DropKeys() | wire.StoreLost()
                | wire.AskAgain()
            ):  # fmt: skip
                if (mesh := self._meshes.get(message.mesh)) is not None:
                    mesh.store.on_message(message)
            case wire.Spawn():
                set_advice(message.advice)
                self._spawns.start(message)
            case wire.Renumber():
                if (mesh := self._meshes.get(message.mesh)) is not None:
                    mesh.renumber(message)
                self._note_moves(message.mesh, message.moves)
            case wire.Moved(mesh_id, moves):
                self._note_moves(mesh_id, moves)
            case wire.MeshUp(mesh_id):
                if (mesh := self._meshes.get(mesh_id)) is not None:
                    mesh.is_up = True
            case wire.StopMesh(mesh_id, grace_s):
                self._on_stop(mesh_id, grace_s)
            case wire.Welcome():
                self._welcome, self._uplink.shares_memory = message, message.shares_memory
                if message.machine == machine_id():
                    self._lease.watch_process(message.pid, message.started)
            case wire.ExpectTorch():
                self._loop.call_later(EXPECT_TORCH_S, self._spawns.expect_torch)
            case wire.Leave(lease_s):
                self._lease.leave(lease_s)
                self._mail.controller.lose(_LEFT)
                self._uplink.beat()
            case wire.Refused(reason):
                print(reason, file=sys.stderr)
                self._exit_code = EXIT_REFUSED
            case wire.Goodbye():
                self._uplink.beat()  # it may be the last that is heard of us: the goodbye has come
                self._end(0)
            case _:
                assert_never(message)

    def _answer(self, query: wire.Query) -> None:
        """Answer a question, or pass it on to the ranks that it is for."""
        if isinstance(query.asked, wire.Retire):
            self._spawns.give_up(query.mesh, query.asked.ranks)
        if (mesh := self._meshes.get(query.mesh)) is not None:
            mesh.answer(query)
        elif not isinstance(query.asked, wire.AskRank):
            self._uplink.send_urgent(agents_answer(query.id, {}))

    def _note_moves(self, mesh_id: int, moves: Moves) -> None:
        """Tell the workers here that have references to ranks of a mesh about the new numbers of these."""
        self._moves[mesh_id] = moves
        told = wire.encode(wire.Moved(mesh_id, moves))
        for worker in self._workers:
            worker.urgent.send([told])

    def _on_call(self, call: wire.Call, payload: list[bytes]) -> None:
        if (mesh := self._meshes.get(call.mesh)) is None:  # stopped meanwhile: the controller has failed its calls
            if call.bulk is not None:
                self._uplink.take_payload(*call.bulk)
            elif call.segment is not None:
                self._segment_unused(call.segment.pid, call.segment.segment)
            return
        if call.bulk is not None:
            try:
                segment = self._pool.write(self._uplink.take_payload(*call.bulk))
            except MeshError as error:
                mesh.refuse(call, error)
                return
            call = msgspec.structs.replace(call, segment=segment, bulk=None)
        mesh.call(call, payload)

    def _mesh_of(self, spawn: wire.Spawn) -> AgentMesh:
        mesh = self._meshes.get(spawn.mesh)
        if mesh is None:
            mesh = AgentMesh(spawn, self._resources, self._mail, self._on_stopped)
            mesh.memory.moves = self._moves.get(spawn.mesh, ())
            self._meshes[spawn.mesh] = mesh
        return mesh

    def _on_stop(self, mesh_id: int, grace_s: float) -> None:
        self._spawns.give_up(mesh_id)
        if (mesh := self._meshes.get(mesh_id)) is not None:
            mesh.stop(grace_s)
        else:
            self._on_stopped(mesh_id)

    def _on_stopped(self, mesh_id: int) -> None:
        """Note that a mesh has no process left here."""
        self._meshes.pop(mesh_id, None)
        self._spawns.forget(mesh_id)
        if not self._meshes:
            self._spawns.end_strays()  # nobody knows of which mesh they were
            if self._ending is not None:
                self._exit_code = self._ending
        self._uplink.send(wire.MeshStopped(mesh_id))

    def _free_in_worker(self, pid: int, segment: int) -> bool:
        """Tell a worker that its segment is free; return False if no worker is process ``pid``."""
        worker = next((each for each in self._workers if each.pid == pid), None)
        if worker is not None:
            worker.lent.discard(segment)
            worker.urgent.send([wire.encode(wire.SegmentFree(pid, segment))])
        return worker is not None

    # ---- life ---------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._loop.call_later(HEARTBEAT_S, self._beat)
        self._uplink.look()
        end = self._uplink.end
        self._lease.beat(is_connected=end.is_answered, has_arrived=end.has_arrived)
        if not self._lease.is_heard and self._quota.listening:
            self._pause()
        if self._quota.listening:
            self._uplink.beat()
        self._mail.peers.beat()
        for pid, segment in self._former.take_freed():
            self._free_in_worker(pid, segment)
        workers = [worker.pid for worker in self._workers]
        self._resources.oom.sample(workers)
        reap_strangers({*workers, *self._spawns.template_pids})
        has_meshes = any(mesh.is_up for mesh in self._meshes.values())
        if self._lease.is_over(has_meshes):
            if has_meshes:
                print(f"no controller came within the lease of {self._lease.lease_s:g} s", file=sys.stderr, flush=True)
            elif not self._lease.has_arrived:
                self.last_words = (
                    f"{self._name} reached nobody at {self._ticket.endpoint} within "
                    f"{self._uplink.silence.length_s:.0f} s: the notebook's machine must be reachable there"
                )
            self._end(EXIT_LOST)

    # ---- controllers come and go --------------------------------------------------------------------------------

    def _on_gone(self) -> None:
        """Have workers report the calls that came past us, since the controller has ended, or leaves."""
        for worker in self._workers:
            worker.ask_what_came_past()

    def _pause(self) -> None:
        """Keep messages, since no controller listens."""
        self._uplink.pause(self._resume)
        if self._welcome is not None and self._welcome.machine == machine_id() and not self._lease.runs:
            self._mail.controller.lose(_LEFT)
        self._quota.begin()

    def _resume(self) -> None:
        self._quota.end()
        self._uplink.resume()
        for mesh in self._meshes.values():
            mesh.output.flush()

    def _succeed(self, epoch: int) -> None:
        """Report everything to a new controller of our session, then go on as before."""
        self._on_gone()
        hear_out(self._meshes.values())
        for mesh in self._meshes.values():
            self._spawns.give_up(mesh.id)
            mesh.worker_pool.give_up_starting()
            mesh.calls.flush()
        found = unacked_messages(*self._uplink.restart(epoch))
        self._quota.end()
        self._mail.controller.lose(_LEFT)
        self._greet()
        hosted, again, unneeded = report(self._meshes.values(), found)
        self._uplink.send(hosted)
        self._mail.peers.on_succession()
        self._uplink.connection.send_again(found.pieces)
        for message, payload in again:
            self._uplink.send(message, payload)
        for mesh in self._meshes.values():
            mesh.output.flush()
        if self._welcome is not None:
            self._former.add(self._welcome.pid, self._welcome.started, unneeded)

    def _end(self, code: int) -> None:
        """Exit with ``code`` as soon as no mesh is left."""
        self._ending = code
        if not self._meshes:
            self._exit_code = code
        for mesh in tuple(self._meshes.values()):
            mesh.stop(GOODBYE_GRACE_S)


def main(template: StartedTemplate | None = None) -> None:
    """Run an agent: the entry point of ``python -m meshbook.agent.host_agent``; the ticket is one line on stdin.
    template: the one from which we were forked ourselves (`meshbook.worker.host_template`), or a copy of it."""
    begin_as_host()
    raise_file_limit()
    faulthandler.enable(all_threads=False)
    task = os.environ.get("MESHBOOK_TASK") or os.environ.get("SLURM_PROCID") or 0
    ticket, connection = decode_ticket(_read_line(0), int(task)), -1
    if not ticket.session:
        try:
            ticket, connection = tunnel.settle_in(ticket)
        except (OSError, SpawnError) as error:
            sys.exit(str(error))
    adopt_orphans()
    set_title("agent")
    agent = HostAgent(ticket, template)
    if ticket.by_tunnel or ticket.ends_with_launcher:
        agent.end_with(connection)
    signal.signal(signal.SIGTERM, lambda *_: agent._end(143))
    code = agent.run()
    if agent.last_words:
        print(agent.last_words, file=sys.stderr)
        with contextlib.suppress(OSError):  # our stderr is a log of this machine
            os.write(connection, f"{agent.last_words}\n".encode())
    if ticket.by_tunnel:
        tunnel.tunnel_of(ticket).unlink(missing_ok=True)  # sshd leaves it
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
