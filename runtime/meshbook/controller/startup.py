"""Meshes and workers that are coming up, how they are started, and ranks that end too often to be started again.

    spawn_procs ──> MeshState, at once          a thread aside: hosts, workers, process groups, bootstrap
    calls ────────> held, in their order ──────> sent when all of that is done; they fail with its error otherwise

A person has the handle of a mesh before its processes exist: `MeshArrival` holds the calls made meanwhile.
`PendingWorkers` are the workers that hosts were asked for, until all have answered. Both belong to the turn, except
where a docstring says otherwise. `CrashLoops` is pure: its caller brings the time.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple, Protocol

from meshbook.calls.call import OpenCall
from meshbook.concurrency.future import Future
from meshbook.controller.host_state import HostState
from meshbook.errors import CrashLoopError, SpawnError, WorkerLost
from meshbook.formatting import utf8_text
from meshbook.lifecycle import CallEvent
from meshbook.wire import messages as wire


class HeldCall(Protocol):
    """A call that can wait until its mesh is there."""

    call: OpenCall

    def send(self) -> None: ...
    def fail(self, error: Exception) -> None: ...


class MeshArrival:
    """The arrival of one mesh: the calls that wait for its processes. Its starter makes it."""

    def __init__(self) -> None:
        # true when the processes are there; else it raises the error that kept them; any thread may wait
        self.done: Future[bool] = Future()
        # the thread that brings the mesh up; its own calls are sent at once
        self.thread: threading.Thread | None = None
        self.is_over = False
        self.is_asked = False  # whether some call or wait will report the outcome
        self.held: list[HeldCall] = []  # calls that wait until the mesh is there

    @property
    def is_own(self) -> bool:
        """Whether the calling thread brings the mesh up, and so must not wait for it."""
        return self.thread is threading.current_thread()

    def cancel(self, id: int) -> bool:
        """Cancel a call if it is held here; return whether it was, and has ended now."""
        found = next((held.call for held in self.held if held.call.id == id), None)
        if found is None:
            return False
        self.held = [held for held in self.held if held.call is not found]
        found.cancel()
        found.drop()
        found.settle()
        found.close(CallEvent.SETTLED)
        return True

    def end(self, error: Exception | None = None) -> None:
        """Send the calls that were held, or fail them with ``error``. Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        held, self.held = self.held, []
        for each in held:
            if error is None:
                each.send()
            else:
                each.fail(error)
        if error is None:
            self.done.set_result(True)
        else:
            self.done.set_exception(error)


class WorkerSpec(NamedTuple):
    """The way in which workers of a mesh are started, whenever one is."""

    device: str | None  # ``cpu``, ``cuda``, or None for CUDA where there is any
    preload: tuple[str, ...]
    cwd: bytes
    sys_path: tuple[bytes, ...]
    environment: Mapping[bytes, bytes]
    torch: bool = True  # whether they have torch from their first moment
    asked_cwd: str = ""
    asked_environment: Mapping[str, str] = {}  # the variables asked for on every host, the controller's own or another
    commands: tuple[wire.StartCommand, ...] = ()  # the commands that begin workers: one per rank, or one for all
    bindings: tuple[dict[str, str], ...] = ()  # where on the machine they run, by local rank

    @classmethod
    def here(
        cls,
        device: str | None = None,
        preload: tuple[str, ...] = (),
        torch: bool = True,
        asked_cwd: str = "",
        asked_environment: Mapping[str, str] | None = None,
    ) -> WorkerSpec:
        """Return a recipe with the folder, the path and the environment of this process as they are now."""
        asked = dict(asked_environment or {})
        return cls(device, preload, os.getcwdb(), _search_path(), dict(os.environb), torch, asked_cwd, asked)

    def command_of(self, rank: int) -> wire.StartCommand:
        """Return the command that starts ``rank``."""
        return self.commands[rank if len(self.commands) > 1 else 0] if self.commands else wire.StartCommand()


def _search_path() -> tuple[bytes, ...]:
    """Return ``sys.path`` as the system has it, which need not be UTF-8, without entries that are no path."""
    entries: tuple[object, ...] = tuple(sys.path)
    return tuple(_path_bytes(os.fsdecode(entry)) for entry in entries if isinstance(entry, str | bytes | os.PathLike))


def outside(prefix: str, base: str, path: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the entries of ``path`` that are not an interpreter's own: another interpreter has its own modules."""
    own = tuple(os.fsencode(os.path.join(each, "")) for each in (prefix, base))
    return tuple(entry for entry in path if not entry.startswith(own))


def _path_bytes(path: str) -> bytes:
    try:
        return os.fsencode(path)
    except UnicodeEncodeError:  # no system gave us that
        return utf8_text(path).encode()


class WorkerRecord(NamedTuple):
    rank: int
    host: HostState
    pid: int
    device: str
    log_path: str

    def become(self, rank: int) -> WorkerRecord:
        """Return the same process under another rank; its log is renamed."""
        return self._replace(rank=rank, log_path=str(PurePath(self.log_path).with_name(f"rank-{rank}.log")))


class PendingWorkers:
    """The workers of one request: they come together or not at all."""

    def __init__(self, id: int, seats: Mapping[HostState, Sequence[wire.Seat]], *, apart: bool = False) -> None:
        """id: the number of the request. apart: the workers join the mesh, and get ranks, when it is renumbered."""
        self.id = id
        self.seats = {host: tuple(here) for host, here in seats.items() if here}
        self.apart = apart
        self.waiting = {seat.known_as for here in self.seats.values() for seat in here}
        self.workers: dict[int, WorkerRecord] = {}  # by the number that messages use for them
        self.done: Future[None] = Future()
        self.adopted = False  # whether they are workers of the mesh by now
        self.failure: SpawnError | None = None
        self.moves = 0  # how often a host has reported progress
        self.last_line = ""  # the last line in the log of the host that reported last
        self._steps: dict[HostState, str] = {}

    def come(self, host: HostState, started: wire.WorkerStarted) -> None:
        """Note a worker that has answered."""
        self.moves += 1
        if started.rank in self.waiting:
            self.waiting.discard(started.rank)
            self.workers[started.rank] = WorkerRecord(started.rank, host, started.pid, started.device, started.log_path)

    def move(self, host: HostState, progress: wire.SpawnProgress) -> None:
        """Note the progress of one host's workers."""
        self.moves, self.last_line, self._steps[host] = self.moves + 1, progress.last_line, progress.step

    def describe(self) -> str:
        """Return the step that the missing workers are at, as in ``importing torch on local-2, local-3``."""
        late = [host for host, here in self.seats.items() if any(seat.known_as in self.waiting for seat in here)]
        steps = {host.name: self._steps.get(host, "starting ranks") for host in late}
        step = next(iter(steps.values()), "starting ranks")
        names = [name for name, other in steps.items() if other == step]
        if len(self.seats) == 1:
            return step
        return f"{step} on {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"

    def fail(self, error: SpawnError) -> None:
        """Give up the request: not all workers will come, or one that came has ended."""
        self.failure = self.failure or error
        self.done.set_exception(error)

    def give_up(self, error: Exception) -> None:
        """Give up the request since the hosts could not be asked."""
        self.fail(SpawnError(f"the hosts could not be asked for workers: {type(error).__name__}: {error}"))

    def by_host(self) -> dict[HostState, list[int]]:
        """Return the numbers that messages use for the workers, by host."""
        return {host: [seat.known_as for seat in here] for host, here in self.seats.items()}


MAX_DEATHS = 3
WINDOW_S = 60.0


class CrashLoops:
    """The times at which ranks of a mesh ended by themselves, lately."""

    def __init__(self) -> None:
        self._deaths: dict[int, deque[float]] = {}

    def record(self, rank: int, now: float) -> None:
        """Note that a rank has ended without being told to."""
        self._deaths.setdefault(rank, deque(maxlen=MAX_DEATHS + 1)).append(now)

    def check(self, lost: Mapping[int, WorkerLost], now: float) -> None:
        """Raise CrashLoopError if one of ``lost`` ended more than `MAX_DEATHS` times within `WINDOW_S`."""
        for rank, error in sorted(lost.items()):
            recent = [at for at in self._deaths.get(rank, ()) if now - at < WINDOW_S]
            if len(recent) > MAX_DEATHS:
                raise CrashLoopError(rank, error.host, error.cause, error.log_tail, len(recent), WINDOW_S)

    def forget(self, ranks: Iterable[int]) -> None:
        """Start counting again for ``ranks``."""
        for rank in ranks:
            self._deaths.pop(rank, None)

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Follow ranks to their new numbers; ``moved`` maps the old numbers of ranks that stay."""
        self._deaths = {moved[rank]: deaths for rank, deaths in self._deaths.items() if rank in moved}
