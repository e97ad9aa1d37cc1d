"""A mesh as the controller knows it: where its ranks live, and which are dead."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from meshbook import wire
from meshbook.crash_loops import CrashLoops
from meshbook.errors import (
    DeviceError,
    LayoutError,
    MeshDetachedError,
    MeshStoppedError,
    SpawnError,
    UsageError,
    WorkerLost,
)
from meshbook.future import Future
from meshbook.generations import Moves, step_of
from meshbook.known_host import KnownHost
from meshbook.lifecycle import MESH_NEXT, MeshEvent, MeshPhase, advance
from meshbook.recruits import Recruits, Worker
from meshbook.shape import Extent
from meshbook.stops import Stops
from meshbook.wording import utf8_text


class Recipe(NamedTuple):
    """How workers of a mesh are started, whenever one is."""

    device: str | None
    """``cpu``, ``cuda``, or None for CUDA where there is any."""
    preload: tuple[str, ...]
    cwd: bytes
    sys_path: tuple[bytes, ...]
    environment: Mapping[bytes, bytes]

    @classmethod
    def here(cls, device: str | None = None, preload: tuple[str, ...] = ()) -> Recipe:
        """With the folder, the path and the environment of this process as they are now."""
        return cls(device, preload, os.getcwdb(), _search_path(), dict(os.environb))


def _search_path() -> tuple[bytes, ...]:
    """``sys.path`` as the system has it, which need not be UTF-8; without what is no path, which imports ignore too."""
    entries: tuple[object, ...] = tuple(sys.path)
    return tuple(_path_bytes(os.fsdecode(entry)) for entry in entries if isinstance(entry, str | bytes | os.PathLike))


def _path_bytes(path: str) -> bytes:
    try:
        return os.fsencode(path)
    except UnicodeEncodeError:  # no system gave us that
        return utf8_text(path).encode()


class KnownMesh:
    """Written by the I/O thread; its plain fields may be read by any."""

    def __init__(self, id: int, name: str, extent: Extent, placement: Sequence[KnownHost], recipe: Recipe) -> None:
        """placement: the host of each rank."""
        self.id, self.name, self.extent, self.recipe = id, name, extent, recipe
        self.phase = MeshPhase.STARTING
        self._given: dict[KnownHost, set[int]] = {}
        self.store_hosts: set[KnownHost] = set()
        """Those that keep the store of the process groups, or did."""
        self.hosts: list[KnownHost] = []
        """Those of the placement, by host rank."""
        self.place(placement)
        self.set_moves(())
        self.changed = ""
        """How it went up last: ``grew to gpus=6``."""
        self.workers: dict[int, Worker] = {}
        self.lost: dict[int, WorkerLost] = {}
        self.stopped: Future[None] = Future()
        self.owns_hosts = False
        """Whether the hosts were started for this mesh alone, and end with it."""
        self.detached = ""
        """The session in which it lives on without us."""
        self.is_whole = True
        """False while a former controller's mesh is being taken over, and not all of its hosts have told of it."""
        self.host_axes: tuple[str, ...] = ()
        """The axes that count hosts, by the names that they had at first."""
        self.recruits: Recruits | None = None
        self.crash_loops = CrashLoops()
        self.grouped = True
        """Whether its ranks form a process group, rather than make their own."""
        self.joined = False
        """Whether all ranks have met since the last one came or went: form_group or prepare_group has ended well."""
        self.axes: dict[str, int] = dict(extent)
        """As `mesh` and `point` on the ranks have them: those of the extent, until they are split or renamed."""
        self.stops = Stops()
        self.sources: set[str] = set()
        """Names of the files of functions that were sent; those that only this process has were made known to ranks."""
        self._repairer: threading.Thread | None = None
        self._hosts_stopping: set[KnownHost] = set()

    def set_moves(self, moves: Moves) -> None:
        """moves: how ranks got other numbers, each time."""
        self.moves = moves
        self.generation = len(moves)
        """Goes up when ranks get other numbers: views made before name other processes, or none."""

    # ---- arrangement ------------------------------------------------------------------------------------------

    def place(self, placement: Sequence[KnownHost]) -> None:
        """The ranks live on these hosts from now on."""
        self.placement = tuple(placement)
        self.hosts = list(dict.fromkeys(placement))
        self.store_hosts.add(self.store_host)
        for rank, host in enumerate(placement):
            self._given.setdefault(host, set()).add(rank)

    def ever_gave(self, host: KnownHost, rank: int) -> bool:
        """Whether ``host`` may speak of ``rank``: what it says can be older than the ranks are now."""
        return rank in self._given.get(host, ())

    def host_of(self, rank: int) -> KnownHost:
        return self.placement[rank]

    def ranks_on(self, host: KnownHost) -> list[int]:
        """The ranks that live on ``host``, in order; a rank's place among them is its local rank."""
        return [rank for rank, here in enumerate(self.placement) if here is host]

    def arrangement_on(self, host: KnownHost) -> wire.Arrangement:
        """What ``host`` needs to know of all ranks."""
        return arrangement_of(self.extent, self.placement, host)

    @property
    def store_host(self) -> KnownHost:
        """The host whose agent keeps the store of the process groups."""
        return self.hosts[0]

    def advance(self, event: MeshEvent) -> None:
        """Go on to the next phase of the mesh's table."""
        self.phase = advance(MESH_NEXT, self.phase, event)

    def check_usable(self) -> None:
        """Raises: MeshStoppedError once the mesh was stopped, MeshDetachedError once it was detached."""
        if self.detached:
            raise MeshDetachedError(self.name, self.detached)
        if self.phase in (MeshPhase.STOPPING, MeshPhase.STOPPED):
            raise MeshStoppedError(self.name)

    # ---- repair -------------------------------------------------------------------------------------------------

    def begin_repair(self, who: threading.Thread) -> None:
        """Nobody but ``who`` repairs it until `end_repair`. Raises: UsageError, MeshStoppedError."""
        self.check_usable()
        other = self._repairer
        if other is not None and other is not who and other.is_alive():  # our own was interrupted before its end
            raise UsageError(f'mesh "{self.name}" is {self.phase.value} already; wait until that has ended.')
        self._repairer = who
        if self.phase is not MeshPhase.REPAIRING:
            self.advance(MeshEvent.REPAIR)

    def end_repair(self, who: threading.Thread) -> None:
        """Well or not."""
        if self._repairer is who:
            self._repairer = None
            self.advance(MeshEvent.REPAIRED)

    def replace_host(self, lost: KnownHost, host: KnownHost) -> None:
        """``host`` has taken the place of ``lost``, without any worker yet."""
        if host in self.hosts:
            return
        was_store_host = self.store_host is lost
        self.place([host if here is lost else here for here in self.placement])
        if was_store_host:  # an identical arrangement, for them to find the new one
            for other in self.hosts:
                if other is not host and not other.lost:
                    other.send(wire.Renumber(self.id, self.seats_on(other), self.arrangement_on(other), self.moves))

    def by_host(self, ranks: Iterable[int]) -> dict[KnownHost, list[int]]:
        """The ranks, put together by where they live."""
        here: dict[KnownHost, list[int]] = {}
        for rank in sorted(ranks):
            here.setdefault(self.placement[rank], []).append(rank)
        return here

    def seats_on(self, host: KnownHost) -> tuple[wire.Seat, ...]:
        """Who the ranks of ``host`` are."""
        return seats_on(self.placement, host, {})

    def renumber(
        self,
        extent: Extent,
        placement: Sequence[KnownHost],
        moved: Mapping[int, int],
        recruits: Recruits | None,
        why: str,
    ) -> None:
        """Ranks have other numbers, on the hosts too; who is not in ``moved`` has left. No call is open.

        recruits: get the ranks of their seats. why: as in ``it grew to gpus=6``, for views that are of no use any more.
        """
        known_as = {after: before for before, after in moved.items()}
        workers = {moved[rank]: worker for rank, worker in self.workers.items() if rank in moved}
        if recruits is not None:
            self.recruits, recruits.adopted = None, True
            for seat in (seat for here in recruits.seats.values() for seat in here):
                known_as[seat.rank] = seat.known_as
                workers[seat.rank] = recruits.workers[seat.known_as]
        self.set_moves((*self.moves, step_of(moved, self.extent.nelements)))
        self.extent, self.axes = extent, dict(extent)
        self.place(placement)
        self.workers = {rank: worker.become(rank) for rank, worker in workers.items()}
        self.lost = {moved[rank]: error for rank, error in self.lost.items() if rank in moved}
        self.crash_loops.renumber(moved)
        self.changed, self.joined = why, False
        for host in self.hosts:
            if not host.lost:
                seats = seats_on(self.placement, host, known_as)
                host.send(wire.Renumber(self.id, seats, self.arrangement_on(host), self.moves))

    # ---- workers come up ----------------------------------------------------------------------------------------

    def ask_for(self, recruits: Recruits, arrangements: Mapping[KnownHost, wire.Arrangement] | None = None) -> None:
        """Ask hosts for workers. arrangements: for those that are to be numbered anew; else as the ranks are now."""
        self.recruits = recruits
        device, preload, cwd, sys_path, environment = self.recipe
        for host, seats in recruits.seats.items():
            self._given.setdefault(host, set()).update(seat.known_as for seat in seats)
            here = host.shares_environment
            host.send(
                wire.Spawn(
                    request=recruits.id,
                    mesh=self.id,
                    name=self.name,
                    seats=seats,
                    arrangement=arrangements[host] if arrangements else self.arrangement_on(host),
                    device=device,
                    preload=preload,
                    cwd=cwd if here else None,
                    sys_path=sys_path if here else (),
                    environment=dict(environment) if here else {},
                    generation=self.generation,
                )
            )

    def seats_of(self, ranks: Iterable[int]) -> dict[KnownHost, list[wire.Seat]]:
        """Who ``ranks`` are, by host."""
        wanted = set(ranks)
        return {host: [seat for seat in self.seats_on(host) if seat.rank in wanted] for host in self.hosts}

    def on_ready(self, host: KnownHost, ready: wire.MeshReady) -> None:
        """Workers of one host answered."""
        recruits = self.recruits
        if recruits is None or recruits.id != ready.request:
            return  # those that were given up meanwhile
        for worker in ready.workers:
            recruits.come(host, worker)
        if not recruits.waiting:
            if not recruits.apart:
                self.adopt(recruits, recruits.workers)
            recruits.done.set_result(None)

    def adopt(self, recruits: Recruits, workers: Mapping[int, Worker]) -> None:
        """They are ``workers`` of these ranks from now on."""
        self.recruits, recruits.adopted = None, True
        self.workers.update(workers)
        for rank in workers:
            self.lost.pop(rank, None)
        if self.phase in (MeshPhase.STARTING, MeshPhase.STOPPING):
            self.advance(MeshEvent.STARTED)

    def on_spawn_failed(self, host: str, failed: wire.SpawnFailed) -> None:
        """A host could not start its workers."""
        if self.recruits is None or self.recruits.id != failed.request:
            return
        if failed.found_devices >= 0:
            self.fail_recruits(DeviceError(failed.wanted_devices, failed.found_devices, host))
        else:
            self.fail_recruits(SpawnError(f"no workers on {host}: {failed.reason}"))

    def fail_recruits(self, error: SpawnError) -> None:
        """Those that were asked for will not all come."""
        if self.recruits is not None:
            self.recruits.fail(error)

    def on_recruit_lost(self, request: int, error: WorkerLost, now: float) -> None:
        """One that was asked for ended before all had answered."""
        if self.recruits is None or self.recruits.id != request:
            return
        self.crash_loops.record(error.rank, now)
        if error.rank in self.lost:
            self.lost[error.rank] = error
        self.fail_recruits(SpawnError(f"a worker ended while it was starting: {error}"))

    # ---- workers end --------------------------------------------------------------------------------------------

    def rank_of(self, host: KnownHost, pid: int) -> int | None:
        """Whose process it is, or was."""
        return next((rank for rank, worker in self.workers.items() if worker.pid == pid and worker.host is host), None)

    def on_lost(self, error: WorkerLost) -> None:
        """A worker ended without being told to."""
        self.lost[error.rank] = error
        self.joined = False

    def detach(self, session: str) -> None:
        """It lives on without us; for us it is as good as stopped."""
        self.detached = session
        self.stop()
        self.advance(MeshEvent.ENDED)
        self.stopped.set_result(None)

    def stop(self) -> None:
        """Its hosts are being told to end it."""
        self.advance(MeshEvent.STOP)
        self._hosts_stopping = set(self.hosts)
        self.fail_recruits(SpawnError("the mesh was stopped meanwhile"))

    def on_stopped(self, host: KnownHost, forget: Callable[[], None]) -> None:
        """One host has no process of this mesh left."""
        self._hosts_stopping.discard(host)
        if not self._hosts_stopping and self.phase is MeshPhase.STOPPING:
            self.advance(MeshEvent.ENDED)
            forget()
            self.stopped.set_result(None)


def stale_view(mesh: KnownMesh) -> LayoutError:
    """For a view that was made before ranks got other numbers."""
    return LayoutError(
        f'mesh "{mesh.name}" {mesh.changed} since this view of it was made, and its ranks have other numbers now. '
        "Take the mesh as it is, by base() of any view of it, and slice that; or: %mesh use NAME --out VAR"
    )


def seats_on(placement: Sequence[KnownHost], host: KnownHost, known_as: Mapping[int, int]) -> tuple[wire.Seat, ...]:
    """Who the ranks of ``host`` are. known_as: what messages call some of them until they hear of it."""
    ranks = [rank for rank, here in enumerate(placement) if here is host]
    return tuple(wire.Seat(known_as.get(rank, rank), rank, index) for index, rank in enumerate(ranks))


def arrangement_of(extent: Extent, placement: Sequence[KnownHost], host: KnownHost) -> wire.Arrangement:
    """What ``host`` needs to know of ranks that are placed like this."""
    hosts = list(dict.fromkeys(placement))
    return wire.Arrangement(
        axes=extent.names,
        sizes=extent.shape,
        world_size=extent.nelements,
        host_rank=hosts.index(host),
        hosts=len(hosts),
        local_world_size=sum(here is host for here in placement),
    )
