"""Workers that were asked for, until all of them have answered. Owned by the I/O thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from meshbook.concurrency.future import Future
from meshbook.controller.host_state import HostState
from meshbook.errors import SpawnError
from meshbook.wire import messages as wire


class WorkerRecord(NamedTuple):
    rank: int
    host: HostState
    pid: int
    device: str
    log_path: str

    def become(self, rank: int) -> WorkerRecord:
        """The same process under another rank; its log is renamed."""
        return self._replace(rank=rank, log_path=str(PurePath(self.log_path).with_name(f"rank-{rank}.log")))


class PendingWorkers:
    """They come together or not at all."""

    def __init__(self, id: int, seats: Mapping[HostState, Sequence[wire.Seat]], *, apart: bool = False) -> None:
        """id: of the request for them. apart: they have no rank yet, and become the mesh's when it is numbered anew."""
        self.id = id
        self.seats = {host: tuple(here) for host, here in seats.items() if here}
        self.apart = apart
        self.waiting = {seat.known_as for here in self.seats.values() for seat in here}
        self.workers: dict[int, WorkerRecord] = {}
        """By what messages call them."""
        self.done: Future[None] = Future()
        self.adopted = False
        """Whether they are workers of the mesh by now."""
        self.failure: SpawnError | None = None
        self.moves = 0
        """How often a host has told that something moved."""
        self.last_line = ""
        """The host that told last has this at the end of its log."""
        self._steps: dict[HostState, str] = {}

    def come(self, host: HostState, started: wire.WorkerStarted) -> None:
        """Note a worker that has answered."""
        self.moves += 1
        if started.rank in self.waiting:
            self.waiting.discard(started.rank)
            self.workers[started.rank] = WorkerRecord(started.rank, host, started.pid, started.device, started.log_path)

    def move(self, host: HostState, progress: wire.SpawnProgress) -> None:
        """Note how far those of one host have come."""
        self.moves, self.last_line, self._steps[host] = self.moves + 1, progress.last_line, progress.step

    def describe(self) -> str:
        """Say what the workers that have not answered wait for, as in ``importing torch on local-2, local-3``."""
        late = [host for host, here in self.seats.items() if any(seat.known_as in self.waiting for seat in here)]
        steps = {host.name: self._steps.get(host, "starting ranks") for host in late}
        step = next(iter(steps.values()), "starting ranks")
        names = [name for name, other in steps.items() if other == step]
        if len(self.seats) == 1:
            return step
        return f"{step} on {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"

    def fail(self, error: SpawnError) -> None:
        """They will not all come, or one that came has ended."""
        self.failure = self.failure or error
        self.done.set_exception(error)

    def give_up(self, error: Exception) -> None:
        """They could not be asked for."""
        self.fail(SpawnError(f"the hosts could not be asked for workers: {type(error).__name__}: {error}"))

    def by_host(self) -> dict[HostState, list[int]]:
        """What messages call them, by where they are."""
        return {host: [seat.known_as for seat in here] for host, here in self.seats.items()}
