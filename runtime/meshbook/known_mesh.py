"""A mesh as the controller knows it: where its ranks live, and which are dead."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from meshbook import wire
from meshbook.errors import DeviceError, MeshDetachedError, MeshStoppedError, SpawnError, WorkerLost
from meshbook.future import Future
from meshbook.known_host import KnownHost
from meshbook.lifecycle import MESH_NEXT, MeshEvent, MeshPhase, advance
from meshbook.shape import Extent


class Worker(NamedTuple):
    rank: int
    host: KnownHost
    pid: int
    device: str
    log_path: str


class Recipe(NamedTuple):
    """How workers of a mesh are started, whenever one is."""

    device: str | None
    """``cpu``, ``cuda``, or None for CUDA where there is any."""
    preload: tuple[str, ...]
    cwd: str
    sys_path: tuple[str, ...]
    environment: Mapping[str, str]

    @classmethod
    def here(cls, device: str | None = None, preload: tuple[str, ...] = ()) -> Recipe:
        """With the folder, the path and the environment of this process as they are now."""
        return cls(device, preload, str(Path.cwd()), tuple(sys.path), dict(os.environ))


class Recruits:
    """Workers that were asked for, until all of them have answered."""

    def __init__(self, known_as: Iterable[int], on_complete: Callable[[Recruits], None], done: Future[None]) -> None:
        self.waiting = set(known_as)
        self.workers: dict[int, Worker] = {}
        """By what messages call them."""
        self.done = done
        self._on_complete = on_complete

    def come(self, worker: Worker) -> None:
        """One has answered."""
        if worker.rank in self.waiting:
            self.waiting.discard(worker.rank)
            self.workers[worker.rank] = worker
            if not self.waiting:
                self._on_complete(self)
                self.done.set_result(None)


class KnownMesh:
    """Written by the I/O thread; its plain fields may be read by any."""

    def __init__(self, id: int, name: str, extent: Extent, placement: Sequence[KnownHost], recipe: Recipe) -> None:
        """placement: the host of each rank."""
        self.id, self.name, self.extent, self.recipe = id, name, extent, recipe
        self.phase = MeshPhase.STARTING
        self.placement = tuple(placement)
        self.hosts = list(dict.fromkeys(placement))
        """Those of the placement, by host rank."""
        self.generation = 0
        """Goes up when ranks get other numbers: views made before name other processes, or none."""
        self.workers: dict[int, Worker] = {}
        self.lost: dict[int, WorkerLost] = {}
        self.stopped: Future[None] = Future()
        self.owns_hosts = False
        """Whether the hosts were started for this mesh alone, and end with it."""
        self.detached = ""
        """The session in which it lives on without us."""
        self.is_whole = True
        """False while a former controller's mesh is being taken over, and not all of its hosts have told of it."""
        self.recruits: Recruits | None = None
        self._hosts_stopping: set[KnownHost] = set()

    # ---- arrangement ------------------------------------------------------------------------------------------

    def host_of(self, rank: int) -> KnownHost:
        return self.placement[rank]

    def ranks_on(self, host: KnownHost) -> list[int]:
        """The ranks that live on ``host``, in order; a rank's place among them is its local rank."""
        return [rank for rank, here in enumerate(self.placement) if here is host]

    def arrangement_on(self, host: KnownHost) -> wire.Arrangement:
        """What ``host`` needs to know of all ranks."""
        return wire.Arrangement(
            axes=self.extent.labels,
            sizes=self.extent.shape,
            world_size=len(self.extent),
            host_rank=self.hosts.index(host),
            hosts=len(self.hosts),
            local_world_size=len(self.ranks_on(host)),
        )

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

    # ---- workers come up ----------------------------------------------------------------------------------------

    def recruit(self, ranks: Iterable[int], done: Future[None]) -> None:
        """Ask the hosts of ``ranks`` for their workers; ``done`` when all have answered."""
        recruits = self.recruits = Recruits(ranks, self._adopt, done)
        for host in self.hosts:
            here = self.ranks_on(host)
            seats = tuple(wire.Seat(rank, rank, here.index(rank)) for rank in here if rank in recruits.waiting)
            if seats:
                host.send(self.spawn_message(host, seats, self.arrangement_on(host)))

    def spawn_message(self, host: KnownHost, seats: tuple[wire.Seat, ...], arrangement: wire.Arrangement) -> wire.Spawn:
        """The request for workers on ``host``."""
        device, preload, cwd, sys_path, environment = self.recipe
        here = host.shares_environment
        return wire.Spawn(
            mesh=self.id,
            name=self.name,
            seats=seats,
            arrangement=arrangement,
            device=device,
            preload=preload,
            cwd=cwd if here else None,
            sys_path=sys_path if here else (),
            environment=dict(environment) if here else {},
        )

    def on_ready(self, host: KnownHost, ready: wire.MeshReady) -> None:
        """Workers of one host answered."""
        for worker in ready.workers:
            if self.recruits is not None:
                self.recruits.come(Worker(worker.rank, host, worker.pid, worker.device, worker.log_path))

    def _adopt(self, recruits: Recruits) -> None:
        """All recruits are there: they are the workers of their ranks now."""
        self.recruits = None
        self.workers.update(recruits.workers)
        for rank in recruits.workers:
            self.lost.pop(rank, None)
        if self.phase in (MeshPhase.STARTING, MeshPhase.STOPPING):
            self.advance(MeshEvent.STARTED)

    def on_spawn_failed(self, host: str, failed: wire.SpawnFailed) -> None:
        """A host could not start its workers."""
        if failed.found_devices >= 0:
            self.fail_recruits(DeviceError(failed.wanted_devices, failed.found_devices, host))
        else:
            self.fail_recruits(SpawnError(f"no workers on {host}: {failed.reason}"))

    def fail_recruits(self, error: SpawnError) -> None:
        """Those that were asked for will not all come."""
        if self.recruits is not None:
            recruits, self.recruits = self.recruits, None
            recruits.done.set_exception(error)

    # ---- workers end --------------------------------------------------------------------------------------------

    def rank_of(self, host: KnownHost, pid: int) -> int | None:
        """Whose process it is, or was."""
        return next((rank for rank, worker in self.workers.items() if worker.pid == pid and worker.host is host), None)

    def on_lost(self, error: WorkerLost) -> None:
        """A worker ended without being told to."""
        self.lost[error.rank] = error

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
