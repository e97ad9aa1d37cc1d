"""Meshes and calls of a former controller, put together from the reports of hosts. I/O thread only.

Each host reports its part (`wire.Hosted`), then sends the messages that the former controller did not acknowledge. A
mesh takes calls when all its hosts have reported or are given up.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping

from meshbook.calls.call_future import BufferedListener, ResumedCall
from meshbook.calls.interrupt import CallControl
from meshbook.calls.table import CallTable
from meshbook.concurrency.future import Future
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.startup import WorkerRecord, WorkerSpec
from meshbook.errors import PeerProtocolError, WorkerLost
from meshbook.lifecycle import MeshEvent
from meshbook.sessions.folder import SavedMesh
from meshbook.shape.members import Extent, Members, Region
from meshbook.wire import messages as wire

NOT_KEPT = "its answer went to the controller that ended, or the call never reached it"


class _Call:
    """A call in the hosts' reports."""

    def __init__(self, resumed: ResumedCall) -> None:
        self.resumed, self.call = resumed, resumed.future.call
        self.told: set[int] = set()  # ranks that are at it, or whose answers are on their way
        self.is_due = False


class Reattach:
    """The reattachment of a session's meshes. ``done`` completes when every host has reported or is given up."""

    def __init__(
        self,
        meshes: dict[int, MeshState],
        calls: CallTable,
        give_up: Callable[[HostState, str], None],
        hosts: Mapping[str, HostState],
        saved: Mapping[int, SavedMesh],
        control: CallControl,
    ) -> None:
        """meshes, calls: all that the new controller knows. give_up: counts a host as lost, and has it end."""
        self.meshes: dict[int, MeshState] = {}
        self.calls: list[ResumedCall] = []
        self.done: Future[None] = Future()
        self._known_meshes, self._open_calls, self._give_up = meshes, calls, give_up
        self._hosts, self._saved, self._control = hosts, saved, control
        self._expected = set(hosts.values())
        self._host_ranks: dict[int, dict[HostState, int]] = defaultdict(dict)
        self._found: dict[int, _Call] = {}

    @property
    def silent(self) -> list[HostState]:
        """Return the hosts that have not reported; some may be lost."""
        return list(self._expected)

    def give_up(self, host: HostState, reason: str) -> None:
        """Give up a host that will not report."""
        self._give_up(host, reason)
        self._settle(host)

    # ---- reports ------------------------------------------------------------------------------------------------

    def on_hosted(self, host: HostState, message: wire.Hosted) -> None:
        """Take in the report of a host. Raises: PeerProtocolError."""
        if host not in self._expected:
            raise PeerProtocolError("it reported its meshes twice")
        for state in message.meshes:
            saved = self._saved.get(state.mesh)
            if saved is None:  # its controller ended before it was ready, or while it was being stopped
                host.send(wire.StopMesh(state.mesh, 0.0))
            else:
                self._take_part(host, state, saved)
        self._settle(host)

    def _take_part(self, host: HostState, state: wire.HostedState, saved: SavedMesh) -> None:
        mesh = self.meshes.get(state.mesh)
        if mesh is None:
            mesh = self._make_mesh(host, state, saved)
        placement = list(mesh.placement)
        for rank in state.ranks:
            if not 0 <= rank < len(placement):
                raise PeerProtocolError(f"it reported rank {rank} of {len(placement)}")
            placement[rank] = host
        mesh.place(placement)
        self._host_ranks[mesh.id][host] = state.arrangement.host_rank
        for worker in state.workers:
            mesh.workers[worker.rank] = WorkerRecord(worker.rank, host, worker.pid, worker.device, worker.log_path)
        for lost in state.lost:
            mesh.lost[lost.rank] = WorkerLost(lost.rank, host.name, lost.cause, lost.log_tail)
        for rank in state.ranks:
            if rank not in mesh.workers and rank not in mesh.lost:
                mesh.lost[rank] = WorkerLost(rank, host.name, "it was starting when its controller ended")
        for call in state.calls:
            self._take_call(mesh, call)

    def _make_mesh(self, host: HostState, state: wire.HostedState, saved: SavedMesh) -> MeshState:
        extent = Extent(state.arrangement.axes, state.arrangement.sizes)
        cwd = os.getcwdb() if saved.cwd or not state.cwd else state.cwd
        recipe = WorkerSpec(state.device, state.preload, cwd, state.sys_path, dict(os.environb), state.torch)
        recipe = recipe._replace(asked_cwd=saved.cwd, asked_environment=saved.environment)
        recipe = recipe._replace(commands=tuple(saved.commands), bindings=tuple(saved.bindings))
        mesh = MeshState(state.mesh, state.name, extent, [host] * extent.nelements, recipe)
        mesh.owns_hosts, mesh.grouped = saved.owns_hosts, saved.grouped
        mesh.host_axes, mesh.began = tuple(saved.host_axes), saved.began
        mesh.set_moves(state.moves)
        mesh.is_whole = False
        self.meshes[mesh.id] = self._known_meshes[mesh.id] = mesh
        return mesh

    def _take_call(self, mesh: MeshState, state: wire.CallState) -> None:
        found = self._found.get(state.id)
        if found is None:
            events = self._open_calls.listener_of(state.output) if state.output else None
            if not isinstance(events, BufferedListener):
                events = BufferedListener()
            resumed = ResumedCall(self._control, state, mesh.id, _members(mesh, state.target), events)
            self._open_calls.adopt(resumed.future.call, events if state.output else None)
            found = self._found[state.id] = _Call(resumed)
        found.told.update(state.waiting, state.answered)
        found.resumed.had_ended = found.resumed.had_ended and not state.waiting
        found.is_due = found.is_due or state.is_due

    # ---- when all have reported -----------------------------------------------------------------------------------

    def _settle(self, host: HostState) -> None:
        self._expected.discard(host)
        if self._expected or self.done.done():
            return
        for mesh in self.meshes.values():
            self._complete(mesh)
        for found in self._found.values():
            self._conclude(found)
        self.calls.sort(key=lambda resumed: resumed.future.call.id)
        self._found.clear()
        self.done.set_result(None)

    def _complete(self, mesh: MeshState) -> None:
        reported = self._host_ranks[mesh.id]
        gone = [self._hosts[id] for id in self._saved[mesh.id].hosts if id in self._hosts]
        gone = [host for host in gone if host not in reported]
        told = mesh.workers.keys() | mesh.lost.keys()
        missing = [rank for rank in range(mesh.extent.nelements) if rank not in told]
        placement = list(mesh.placement)
        for index, rank in enumerate(missing):
            host = gone[index * len(gone) // len(missing)] if gone else placement[rank]
            placement[rank] = host
            mesh.lost[rank] = WorkerLost(rank, host.name, f"its host is lost: {host.lost or 'it knows nothing of it'}")
        mesh.place(placement)
        mesh.joined = not mesh.lost
        order = {host: rank for rank, host in enumerate(dict.fromkeys(placement))} | reported
        mesh.hosts = sorted(dict.fromkeys(placement), key=lambda host: order[host])
        mesh.is_whole = True
        mesh.advance(MeshEvent.STARTED)
        for host in mesh.hosts[1:]:
            if mesh.store_host.lost:
                host.send_urgent(wire.StoreLost(mesh.id, f"host {mesh.store_host.name} is lost"))
            else:
                host.send_urgent(wire.AskAgain(mesh.id))

    def _conclude(self, found: _Call) -> None:
        call, calls = found.call, self._open_calls
        if not found.is_due:
            calls.disown(call)
            return
        mesh = self.meshes[call.mesh]
        for rank in sorted(call.waiting - found.told):
            if rank in mesh.lost:
                call.lose(mesh.lost[rank])
            else:
                call.answer(wire.RankReply(rank, wire.GONE, 0, 0.0, None, inline=NOT_KEPT.encode()), (), ())
        if calls.find(call.id) is not None:
            calls.settle_if_done(call)
        self.calls.append(found.resumed)


def _members(mesh: MeshState, target: wire.Target) -> Members:
    """Return the ranks of a call. The caller's arrangement of a part of the mesh is not known any more."""
    ranks = [rank for part in target for rank in part.ranks()]
    whole = Region.of(mesh.extent)
    return whole if ranks == list(whole.ranks()) else whole.select(ranks)
