"""A mesh as the controller knows it: where its ranks live, and which are dead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meshbook import wire
from meshbook.errors import DeviceError, MeshStoppedError, SpawnError, WorkerLost
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


class KnownMesh:
    """Written by the I/O thread; its plain fields may be read by any."""

    def __init__(self, id: int, name: str, extent: Extent, hosts: list[KnownHost]) -> None:
        self.id, self.name, self.extent, self.hosts = id, name, extent, hosts
        self.phase = MeshPhase.STARTING
        self.per_host = len(extent) // len(hosts)
        self.workers: dict[int, Worker] = {}
        self.lost: dict[int, WorkerLost] = {}
        self.started: Future[None] = Future()
        self.stopped: Future[None] = Future()
        self.owns_hosts = False
        """Whether the hosts were started for this mesh alone, and end with it."""
        self._hosts_starting = set(hosts)
        self._hosts_stopping = set(hosts)

    def host_of(self, rank: int) -> KnownHost:
        return self.hosts[rank // self.per_host]

    @property
    def store_host(self) -> KnownHost:
        """The host whose agent keeps the store of the process groups."""
        return self.hosts[0]

    def advance(self, event: MeshEvent) -> None:
        """Go on to the next phase of the mesh's table."""
        self.phase = advance(MESH_NEXT, self.phase, event)

    def check_usable(self) -> None:
        """Raises: MeshStoppedError once the mesh was stopped."""
        if self.phase in (MeshPhase.STOPPING, MeshPhase.STOPPED):
            raise MeshStoppedError(self.name)

    def on_ready(self, host: KnownHost, ready: wire.MeshReady) -> None:
        """All workers of one host answered."""
        for worker in ready.workers:
            self.workers[worker.rank] = Worker(worker.rank, host, worker.pid, worker.device, worker.log_path)
        self._hosts_starting.discard(host)
        if not self._hosts_starting:
            self.advance(MeshEvent.STARTED)
            self.started.set_result(None)

    def on_spawn_failed(self, host: str, reason: str, found_devices: int) -> None:
        """A host could not start its workers."""
        if found_devices >= 0:
            self.started.set_exception(DeviceError(self.per_host, found_devices, host))
        else:
            self.started.set_exception(SpawnError(f"no workers on {host}: {reason}"))

    def on_lost(self, error: WorkerLost) -> None:
        """A worker ended without being told to."""
        self.lost[error.rank] = error
        if self.phase is MeshPhase.STARTING:
            self.started.set_exception(SpawnError(f"a worker ended while the mesh was starting: {error}"))

    def on_stopped(self, host: KnownHost, forget: Callable[[], None]) -> None:
        """One host has no process of this mesh left."""
        self._hosts_stopping.discard(host)
        if not self._hosts_stopping and self.phase is MeshPhase.STOPPING:
            self.advance(MeshEvent.ENDED)
            forget()
            self.stopped.set_result(None)
