"""A mesh as the controller knows it: where its ranks live, which are dead, and the reports of its hosts.

A host has proved who it is, and it runs the user's code; it must still not speak for ranks of other hosts, break our
bookkeeping, or make us map memory that it does not share. `check_ranks` and `check_replies` look before a message is
acted upon, so a host that lies costs itself and no other.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from meshbook.actor.errors import ProcsStoppedError
from meshbook.calls.output import OutputTarget
from meshbook.calls.rank_state import StoppedRanks
from meshbook.concurrency.future import Future
from meshbook.controller.host_state import HostState
from meshbook.controller.startup import CrashLoops, MeshArrival, PendingWorkers, WorkerRecord, WorkerSpec, outside
from meshbook.curves.series import Metrics
from meshbook.errors import (
    DeviceError,
    LayoutError,
    MeshDetachedError,
    MeshStoppedError,
    PeerProtocolError,
    SpawnError,
    UsageError,
    WorkerLost,
)
from meshbook.errors.advice import advice
from meshbook.formatting import name_ranks
from meshbook.lifecycle import MESH_NEXT, MeshEvent, MeshPhase
from meshbook.sessions.folder import SavedMesh
from meshbook.shape.members import Extent, Moves, step_of
from meshbook.wire import messages as wire


class CallOutputSource(Protocol):
    target: OutputTarget | None
    """The target of prints of a call that is made now; None for the front end's own."""

    def set_levels_again(self) -> None:
        """Have ranks that were started again log at the level that was chosen."""


class Renumbering(NamedTuple):
    """A change of the ranks' numbers."""

    extent: Extent
    placement: Sequence[HostState]
    moved: Mapping[int, int]  # old number to new one; ranks that are not in it leave
    why: str  # text for views that are of no use any more, as in ``it grew to gpus=6``
    pending_workers: PendingWorkers | None = None  # new workers, which get the ranks of their seats


class MeshState:
    """The state of one mesh. The I/O thread writes it; any thread may read its plain fields."""

    def __init__(self, id: int, name: str, extent: Extent, placement: Sequence[HostState], recipe: WorkerSpec) -> None:
        """placement: the host of each rank."""
        self.id, self.name, self.extent, self.recipe = id, name, extent, recipe
        self.phase = MeshPhase.STARTING
        self.arrival: MeshArrival | None = None  # set for a mesh whose handle exists before its processes
        self.is_asked_for = False  # whether hosts know of it
        # the ranks of which each host may speak, now or by a message that is older than the present placement
        self.given: dict[HostState, set[int]] = {}
        self.store_hosts: set[HostState] = set()  # hosts that keep the store of the process groups, or did
        self.hosts: list[HostState] = []  # hosts of the placement, by host rank
        self.place(placement)
        self.set_moves(())
        self.changed = ""  # how the generation went up last: ``grew to gpus=6``
        self.workers: dict[int, WorkerRecord] = {}
        self.lost: dict[int, WorkerLost] = {}
        self.stopped: Future[None] = Future()
        self.owns_hosts = False  # whether the hosts were started for this mesh alone, and end with it
        self.detached = ""  # the session in which the mesh lives on without us
        # false while a former controller's mesh is being taken over, and not all of its hosts have told of it
        self.is_whole = True
        self.host_axes: tuple[str, ...] = ()  # the axes that count hosts, by the names that they had at first
        self.pending_workers: PendingWorkers | None = None
        self.crash_loops = CrashLoops()
        self.told = 0  # number of urgent messages to all hosts
        self.grouped = True  # whether its ranks form a process group, rather than make their own
        self.began = time.time()
        self.called_at = time.monotonic()  # the time of the last call
        # called before each call, on the caller's thread: others may have something to send that goes first
        self.before_calls: list[weakref.WeakMethod[Callable[[], object]]] = []
        # called when ranks were started again, on the caller's thread: others may restore their state there
        self.after_repairs: list[weakref.WeakMethod[Callable[[], object]]] = []
        # whether all ranks have met since the last one came or went: form_group or prepare_group has succeeded
        self.joined = False
        # the axes of `mesh` and `point` on the ranks: those of the extent, until they are split or renamed
        self.axes: dict[str, int] = dict(extent)
        self.stopped_ranks = StoppedRanks()
        self.metrics = Metrics()  # the scalars that ranks have logged
        # by the files of functions that only this process has, the ranks that were sent their text
        self.sources: dict[str, set[int]] = {}
        # ids of the meshes spawned by the same handle of hosts, which can end them together
        self.siblings: set[int] = {id}
        self.shown_by: CallOutputSource | None = None  # target of the calls' prints, if not the front end's own
        self.last_repair: Repaired | None = None  # result of the last repair by this controller
        self._repairer: threading.Thread | None = None
        self._hosts_stopping: set[HostState] = set()

    def set_moves(self, moves: Moves) -> None:
        """Set the moves of the ranks to other numbers, oldest first."""
        self.moves = moves
        # goes up when ranks get other numbers: views made before name other processes, or none
        self.generation = len(moves)

    # ---- arrangement ------------------------------------------------------------------------------------------

    def place(self, placement: Sequence[HostState]) -> None:
        """Put the ranks on these hosts."""
        self.placement = tuple(placement)
        self.hosts = list(dict.fromkeys(placement))
        self.store_hosts.add(self.store_host)
        for rank, host in enumerate(placement):
            self.given.setdefault(host, set()).add(rank)

    def host_of(self, rank: int) -> HostState:
        return self.placement[rank]

    def ranks_on(self, host: HostState) -> list[int]:
        """Return the ranks on ``host``, in order; a rank's place among them is its local rank."""
        return [rank for rank, here in enumerate(self.placement) if here is host]

    def arrangement_on(self, host: HostState) -> wire.Arrangement:
        """Return the arrangement of all ranks for ``host``."""
        return arrangement_of(self.extent, self.placement, host)

    @property
    def store_host(self) -> HostState:
        """Return the host whose agent keeps the store of the process groups."""
        return self.hosts[0]

    def tell(self, message: wire.ToHost) -> None:
        """Send an urgent message to all hosts of the mesh; a lost one gets nothing."""
        self.told += 1
        for host in self.hosts:
            host.send_urgent(message)

    def tell_up(self) -> None:
        """Tell the hosts that all ranks have met."""
        self.tell(wire.MeshUp(self.id))

    @property
    def not_started(self) -> BaseException | None:
        """Return the error that kept the processes from coming, if the handle existed before them."""
        return self.arrival.done.exception(0) if self.arrival is not None and self.arrival.is_over else None

    def await_arrival(self) -> None:
        """Wait until all processes are there. Raises: ProcsNotStartedError."""
        if (arrival := self.arrival) is not None and not arrival.is_own:
            arrival.is_asked = True
            arrival.done.get()

    def advance(self, event: MeshEvent) -> None:
        """Go on to the next phase of the mesh's table."""
        self.phase = MESH_NEXT[self.phase, event]

    def check_usable(self) -> None:
        """Raise MeshStoppedError once the mesh was stopped, MeshDetachedError once it was detached."""
        if self.detached:
            raise MeshDetachedError(self.name, self.detached)
        if self.arrival is not None and (error := self.not_started) is not None:
            raise error
        if self.phase in (MeshPhase.STOPPING, MeshPhase.STOPPED):
            raise MeshStoppedError(self.name)

    @property
    def saved(self) -> SavedMesh:
        """Return the description of the mesh for the next controller of the session."""
        hosts = [host.id for host in self.hosts]
        return SavedMesh(
            self.name, dict(self.extent), hosts, self.owns_hosts, self.grouped, list(self.host_axes),
            self.recipe.asked_cwd, dict(self.recipe.asked_environment), self.began,
            sorted({host.launched.job for host in self.hosts} - {""}), list(self.recipe.commands),
            list(self.recipe.bindings),
        )  # fmt: skip

    # ---- repair -------------------------------------------------------------------------------------------------

    def begin_repair(self, who: threading.Thread) -> None:
        """Let only ``who`` repair the mesh until `end_repair`. Raises: UsageError, MeshStoppedError."""
        self.check_usable()
        other = self._repairer
        if other is not None and other is not who and other.is_alive():  # our own was interrupted before its end
            raise UsageError(f'mesh "{self.name}" is {self.phase.value} already; wait until that has ended.')
        self._repairer = who
        if self.phase is not MeshPhase.REPAIRING:
            self.advance(MeshEvent.REPAIR)

    def end_repair(self, who: threading.Thread) -> None:
        """End a repair, whether it went well or not."""
        if self._repairer is who:
            self._repairer = None
            self.sources.clear()  # some ranks are other processes now
            self.advance(MeshEvent.REPAIRED)

    def replace_host(self, lost: HostState, host: HostState) -> None:
        """Put ``host``, which has no worker yet, in the place of ``lost``."""
        if host in self.hosts:
            return
        was_store_host = self.store_host is lost
        self.place([host if here is lost else here for here in self.placement])
        if was_store_host:  # an identical arrangement, for them to find the new one
            for other in self.hosts:
                if other is not host:
                    other.send(wire.Renumber(self.id, self.seats_on(other), self.arrangement_on(other), self.moves))

    def by_host(self, ranks: Iterable[int]) -> dict[HostState, list[int]]:
        """Return the ranks by host."""
        here: dict[HostState, list[int]] = {}
        for rank in sorted(ranks):
            if rank < len(self.placement):  # else there were more ranks when somebody chose these
                here.setdefault(self.placement[rank], []).append(rank)
        return here

    def seats_on(self, host: HostState) -> tuple[wire.Seat, ...]:
        """Return the seats of the ranks on ``host``."""
        return seats_on(self.placement, host, {})

    def renumber(self, renumbering: Renumbering) -> None:
        """Give the ranks other numbers, on the hosts too. No call is open."""
        extent, placement, moved, why, pending_workers = renumbering
        known_as = {after: before for before, after in moved.items()}
        workers = {moved[rank]: worker for rank, worker in self.workers.items() if rank in moved}
        if pending_workers is not None:
            self.pending_workers, pending_workers.adopted = None, True
            for seat in (seat for here in pending_workers.seats.values() for seat in here):
                known_as[seat.rank] = seat.known_as
                workers[seat.rank] = pending_workers.workers[seat.known_as]
        self.set_moves((*self.moves, step_of(moved, self.extent.nelements)))
        self.extent, self.axes = extent, dict(extent)
        self.place(placement)
        self.workers = {rank: worker.become(rank) for rank, worker in workers.items()}
        self.lost = {moved[rank]: error for rank, error in self.lost.items() if rank in moved}
        self.crash_loops.renumber(moved)
        self.changed, self.joined = why, False
        for host in self.hosts:
            seats = seats_on(self.placement, host, known_as)
            host.send(wire.Renumber(self.id, seats, self.arrangement_on(host), self.moves))

    # ---- workers come up ----------------------------------------------------------------------------------------

    def ask_for(
        self, pending_workers: PendingWorkers, arrangements: Mapping[HostState, wire.Arrangement] | None = None
    ) -> None:
        """Ask hosts for workers. arrangements: for workers that join at a renumbering; else as the ranks are now."""
        self.pending_workers, self.is_asked_for = pending_workers, True
        for host, seats in pending_workers.seats.items():
            self.given.setdefault(host, set()).update(seat.known_as for seat in seats)
            arrangement = arrangements[host] if arrangements else self.arrangement_on(host)
            for command, alike in self._by_command(seats):
                host.send(self._spawn(pending_workers.id, host, alike, arrangement, command))

    def _by_command(self, seats: Iterable[wire.Seat]) -> list[tuple[wire.StartCommand, list[wire.Seat]]]:
        """Return the seats of one host by the command that starts them."""
        found: list[tuple[wire.StartCommand, list[wire.Seat]]] = []
        for seat in seats:
            command = self.recipe.command_of(seat.rank)
            alike = next((alike for known, alike in found if known == command), None)
            if alike is None:
                found.append((command, alike := []))
            alike.append(seat)
        return found

    def _spawn(
        self,
        request: int,
        host: HostState,
        seats: Sequence[wire.Seat],
        arrangement: wire.Arrangement,
        command: wire.StartCommand,
    ) -> wire.Spawn:
        """Return the request to a host for workers that begin alike."""
        recipe = self.recipe
        here, folder = host.shares_environment, os.fsencode(recipe.asked_cwd)
        more = {**recipe.asked_environment, **command.environment}
        asked = {os.fsencode(name): os.fsencode(value) for name, value in more.items() if value is not None}
        search_path = outside(sys.prefix, sys.base_prefix, recipe.sys_path) if command.python else recipe.sys_path
        return wire.Spawn(
            request=request,
            mesh=self.id,
            name=self.name,
            seats=tuple(seats),
            arrangement=arrangement,
            device=recipe.device,
            preload=recipe.preload,
            cwd=folder or (recipe.cwd if here else None),
            sys_path=(*([folder] if folder else []), *(search_path if here else ())),
            environment={**(recipe.environment if here and command.inherits else {}), **asked},
            torch=recipe.torch,
            must_enter=bool(folder),
            generation=self.generation,
            advice=advice(),
            shares_files=here,
            command=command,
            bindings=recipe.bindings,
        )

    def seats_of(self, ranks: Iterable[int]) -> dict[HostState, list[wire.Seat]]:
        """Return the seats of ``ranks``, by host."""
        wanted = set(ranks)
        return {host: [seat for seat in self.seats_on(host) if seat.rank in wanted] for host in self.hosts}

    def on_ready(self, host: HostState, ready: wire.MeshReady) -> None:
        """Note that workers of one host have answered."""
        pending_workers = self.pending_workers
        if pending_workers is None or pending_workers.id != ready.request:
            return  # those that were given up meanwhile
        for worker in ready.workers:
            pending_workers.come(host, worker)
        if not pending_workers.waiting:
            if not pending_workers.apart:
                self.adopt(pending_workers, pending_workers.workers)
            pending_workers.done.set_result(None)

    def adopt(self, pending_workers: PendingWorkers, workers: Mapping[int, WorkerRecord]) -> None:
        """Make ``workers`` those of their ranks."""
        self.pending_workers, pending_workers.adopted = None, True
        self.workers.update(workers)
        for rank in workers:
            self.lost.pop(rank, None)
        if self.phase in (MeshPhase.STARTING, MeshPhase.STOPPING):
            self.advance(MeshEvent.STARTED)

    def on_spawn_failed(self, host: str, failed: wire.SpawnFailed) -> None:
        """Give up the pending workers, since a host could not start its own."""
        if self.pending_workers is None or self.pending_workers.id != failed.request:
            return
        if failed.found_devices >= 0:
            self.fail_recruits(DeviceError(failed.wanted_devices, failed.found_devices, host))
        else:
            self.fail_recruits(SpawnError(f"no workers on {host}: {failed.reason}"))

    def fail_recruits(self, error: SpawnError) -> None:
        """Fail the pending workers, if there are any."""
        if self.pending_workers is not None:
            self.pending_workers.fail(error)

    def on_recruit_lost(self, request: int, error: WorkerLost, now: float) -> None:
        """Give up the pending workers if one of this request ended before all had answered."""
        if self.pending_workers is None or self.pending_workers.id != request:
            return
        self.crash_loops.record(error.rank, now)
        if error.rank in self.lost:
            self.lost[error.rank] = error
        self.fail_recruits(SpawnError(f"a worker ended while it was starting: {error}"))

    # ---- workers end --------------------------------------------------------------------------------------------

    def rank_of(self, host: HostState, pid: int) -> int | None:
        """Return the rank that the process has, or had."""
        return next((rank for rank, worker in self.workers.items() if worker.pid == pid and worker.host is host), None)

    def on_lost(self, error: WorkerLost) -> None:
        """Note that a worker ended without being told to."""
        self.lost[error.rank] = error
        self.joined = False

    def detach(self, session: str) -> None:
        """Leave the mesh to live on without us; for us it is as good as stopped."""
        self.detached = session
        self.stop()
        self.advance(MeshEvent.ENDED)
        self.stopped.set_result(None)

    def stop(self) -> None:
        """Note that the hosts are being told to end the mesh."""
        self.advance(MeshEvent.STOP)
        if self.arrival is not None:
            self.arrival.end(ProcsStoppedError(self.name))
        self._hosts_stopping = set(self.hosts)
        self.fail_recruits(SpawnError("the mesh was stopped meanwhile"))

    def on_stopped(self, host: HostState, forget: Callable[[], None]) -> None:
        """Note that a host has no process of this mesh left."""
        self._hosts_stopping.discard(host)
        if not self._hosts_stopping and self.phase is MeshPhase.STOPPING:
            self.advance(MeshEvent.ENDED)
            forget()
            self.stopped.set_result(None)


def stale_view(mesh: MeshState) -> LayoutError:
    """Return the error for a view that was made before ranks got other numbers."""
    return LayoutError(
        f'mesh "{mesh.name}" {mesh.changed} since this view of it was made, and its ranks have other numbers now. '
        f"Take the mesh as it is, by base() of any view of it, and {advice().fresh_view}"
    )


def seats_on(placement: Sequence[HostState], host: HostState, known_as: Mapping[int, int]) -> tuple[wire.Seat, ...]:
    """Return the seats of the ranks on ``host``. known_as: old numbers of ranks, which messages use so far."""
    ranks = [rank for rank, here in enumerate(placement) if here is host]
    return tuple(wire.Seat(known_as.get(rank, rank), rank, index) for index, rank in enumerate(ranks))


def arrangement_of(extent: Extent, placement: Sequence[HostState], host: HostState) -> wire.Arrangement:
    """Return the arrangement for ``host`` of ranks that are placed like this."""
    hosts = list(dict.fromkeys(placement))
    return wire.Arrangement(
        axes=extent.names,
        sizes=extent.shape,
        world_size=extent.nelements,
        host_rank=hosts.index(host),
        hosts=len(hosts),
        local_world_size=sum(here is host for here in placement),
    )


def check_ranks(host: HostState, mesh: MeshState, ranks: Sequence[int]) -> None:
    """Raise PeerProtocolError unless all ``ranks`` of ``mesh`` live on ``host``."""
    for rank in ranks:
        if rank not in mesh.given.get(host, ()):
            raise PeerProtocolError(f'it spoke for rank {rank} of mesh "{mesh.name}", which is not its own')


def check_replies(host: HostState, message: wire.Replies, frames: Sequence[bytes]) -> None:
    """Raise PeerProtocolError unless the replies share out ``frames``, in a way that the host can send."""
    total = 0
    for reply in message.replies:
        if reply.frames < 0 or (reply.segment is not None and not host.shares_memory):
            raise PeerProtocolError("a reply whose payload cannot be")
        total += reply.frames
    if total != len(frames):
        raise PeerProtocolError(f"replies with {total} payload frames came with {len(frames)}")


FORMED_AGAIN = "its process groups were broken and are formed again"


class Repaired(NamedTuple):
    """The result of a repair."""

    mesh: str
    ranks: tuple[int, ...]  # ranks that were started again, without their former state
    hosts: tuple[str, ...]  # hosts whose agents were started again
    joined: bool  # whether the groups were formed again, with all ranks
    world_size: int
    proof: str  # state of the process groups of a mesh that was whole; empty where they are sound
    setup_cells: int  # cells that the new ranks have run
    seconds: float
    notes: tuple[str, ...] = ()  # other things that were restored, such as the tensors of a `meshbook.distributed.Mesh`

    def __str__(self) -> str:
        if not self.ranks and not self.joined:
            whole = f'mesh "{self.mesh}" is whole'
            if self.proof == FORMED_AGAIN:
                return f"{whole}; {self.proof} in {self.seconds:.2f} s"
            return f"{whole}: nothing to heal{f'; {self.proof}' if self.proof else ''}"
        did = []
        if self.hosts:
            did.append(f"host {', '.join(self.hosts)} started again")
        if self.ranks:
            did.append(f"{name_ranks(self.ranks)} started again")
        if self.joined:
            did.append(f"all {self.world_size} ranks joined")
        lines = [f'mesh "{self.mesh}": {", ".join(did)} in {self.seconds:.2f} s', *self.notes]
        return "\n  ".join(lines)

    def __repr__(self) -> str:
        return str(self)  # a cell that ends with a repair shows it
