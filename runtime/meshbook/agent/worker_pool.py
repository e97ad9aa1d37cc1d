"""The workers of one mesh on one host: started, told to leave, renumbered. This module knows nothing of calls.

Spawn ──> _Batch: forked together, reported together once all have answered
Retire ─> leaving: nothing reaches them any more, their ranks are free at once, their ends are awaited
Renumber  the same processes under other ranks; their logs follow
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshbook.agent.template import TemplateProcess
from meshbook.agent.worker import AgentWorker, WorkerOwner
from meshbook.errors import DeviceError
from meshbook.lifecycle import WorkerEvent, WorkerPhase
from meshbook.system.devices import count_cores, plan_devices
from meshbook.system.os_errors import explain
from meshbook.system.processes import kill_session
from meshbook.wire import messages as wire
from meshbook.wire.direct import direct_folder
from meshbook.wire.replies import agents_answer

if TYPE_CHECKING:
    from meshbook.agent.resources import HostResources


KEPT_TARGETS = 256


@dataclass(eq=False)
class _Batch:
    """The workers of one `Spawn`."""

    spawn: wire.Spawn
    workers: list[AgentWorker] = field(default_factory=list)


class WorkerPool:
    """The workers of one mesh; `meshbook.agent.mesh.AgentMesh` owns the pool, and reads ``workers``."""

    def __init__(self, owner: WorkerOwner, host: HostResources, log_dir: Path) -> None:
        self.workers: dict[int, AgentWorker] = {}  # by the numbers that messages use: their ranks, most often
        self._members: dict[wire.Target, tuple[AgentWorker, ...]] = {}  # the workers of a target, as they are now
        # workers that were told to leave, with the number of the question that told them
        self.leaving: dict[AgentWorker, int] = {}
        self.logs: dict[int, Path] = {}  # the logs of all ranks that live here, the dead included
        self.ending = False  # whether the mesh is being stopped: workers that come up now are not wanted any more
        self._owner, self._log_dir = owner, log_dir
        self._loop, self._report, self.host = host.loop, host.uplink.send, host.name
        self._host_id = host.ticket.host_id
        # the folder of the sockets of direct links, and whether the controller listens there
        self.direct = direct_folder(host.ticket.endpoint) if host.ticket.shares_memory else ""
        self._controller_is_here = bool(self.direct)
        self.direct = self.direct or host.ticket.log_dir
        self._marker = b"\x1e" + os.urandom(8).hex().encode() + b":"
        self._batches: list[_Batch] = []
        self._replaced = 0

    def members(self, target: wire.Target) -> tuple[AgentWorker, ...]:
        """Return the workers that ``target`` names; looked for once, until workers come or go."""
        if (found := self._members.get(target)) is None:
            if len(self._members) >= KEPT_TARGETS:
                self._members.clear()
            found = tuple(worker for worker in self.workers.values() if wire.target_has(target, worker.rank))
            self._members[target] = found
        return found

    # ---- start --------------------------------------------------------------------------------------------------

    def start(
        self,
        spawn: wire.Spawn,
        template: TemplateProcess,
        import_in_workers: bool,
        on_template_lost: Callable[[], None] | None = None,
    ) -> None:
        """Fork the workers of ``spawn`` from a ready template and tell each who it is. on_template_lost: called in
        place of the report when the template ends meanwhile; it has left no worker then."""
        slots = free_slots(spawn.seats, {worker.slot for worker in (*self.workers.values(), *self.leaving)})
        try:
            devices = plan_devices(max(slots) + 1, spawn.device, self.host)
        except DeviceError as error:
            self._report(wire.SpawnFailed(spawn.mesh, str(error), error.wanted, error.found, spawn.request))
            return
        common = msgspec.structs.replace(spawn, seats=(), bindings=())
        batch = _Batch(spawn)
        self._batches.append(batch)
        try:
            self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            for seat, slot in zip(spawn.seats, slots, strict=True):
                worker = self._make_worker(spawn, seat, slot, f"cuda:{slot}" if devices else "cpu")
                batch.workers.append(worker)
                own = {b"LOCAL_RANK": b"%d" % seat.local_rank}
                if devices:
                    own[b"CUDA_VISIBLE_DEVICES"] = ",".join(devices).encode()
                binding = spawn.bindings[seat.local_rank] if seat.local_rank < len(spawn.bindings) else {}
                begin = wire.Begin(
                    worker.identity,
                    self._marker,
                    common,
                    own,
                    import_in_workers,
                    binding,
                    self.direct,
                    self._controller_is_here,
                )
                worker.calls.send([wire.encode(begin)])
        except OSError as error:
            self._on_not_forked(batch, explain(error))
            return
        template.fork_workers(
            [worker.descriptors for worker in batch.workers],
            lambda pids: self._on_forked(batch, pids),
            lambda reason: self._on_not_forked(batch, reason, on_template_lost if template.failure else None),
        )

    def _make_worker(self, spawn: wire.Spawn, seat: wire.Seat, slot: int, device: str) -> AgentWorker:
        log = self.logs[seat.known_as] = self._log_dir / f"rank-{seat.known_as}.log"
        worker = AgentWorker(self._loop, self._owner, seat.known_as, device, self._marker, log, time.monotonic())
        worker.slot, worker.request = slot, spawn.request
        worker.identity = wire.Identity(
            mesh=spawn.mesh, name=spawn.name, host=self.host, host_id=self._host_id, device=device,
            **_place_of(seat, spawn.arrangement, spawn.generation),
        )  # fmt: skip
        self.workers[seat.known_as] = worker
        self._members.clear()
        return worker

    def _on_forked(self, batch: _Batch, pids: list[int]) -> None:
        try:
            for worker, pid in zip(batch.workers, pids, strict=True):
                worker.started(pid)
        except OSError as error:
            for pid in pids:
                kill_session(pid)
            self._on_not_forked(batch, explain(error))
            return
        for worker in batch.workers:
            if self.ending or worker in self.leaving:
                worker.kill()
        self.report_ready()  # a worker's own word may have come first

    def _on_not_forked(self, batch: _Batch, reason: str, retry: Callable[[], None] | None = None) -> None:
        wanted = batch in self._batches
        if wanted:
            self._batches.remove(batch)
        for worker in batch.workers:
            worker.close()
            self.left(worker)
        if retry is not None and wanted and not self.ending:
            retry()
            return
        self._report(wire.SpawnFailed(batch.spawn.mesh, reason, request=batch.spawn.request))
        self._owner.tell_if_stopped()

    def report_ready(self) -> None:
        """Report the batches whose workers have all answered by now."""
        for batch in tuple(self._batches):
            if all(worker.phase is WorkerPhase.READY and worker.pid for worker in batch.workers):
                self._batches.remove(batch)
                self._report(
                    wire.MeshReady(batch.spawn.mesh, tuple(map(_describe, batch.workers)), batch.spawn.request)
                )

    def starting(self, spawn: wire.Spawn) -> list[AgentWorker]:
        """Return the workers of ``spawn`` that have not answered yet."""
        workers = next((batch.workers for batch in self._batches if batch.spawn is spawn), [])
        return [worker for worker in workers if worker.phase is not WorkerPhase.READY or not worker.pid]

    def describe(self) -> tuple[wire.WorkerStarted, ...]:
        """Describe the workers that have come up."""
        return tuple(_describe(worker) for worker in self.workers.values() if worker.phase is WorkerPhase.READY)

    def give_up_starting(self) -> None:
        """Retire the workers that are still coming up."""
        for batch in tuple(self._batches):
            ranks = tuple(worker.rank for worker in batch.workers)
            self.retire(0, wire.Retire(ranks, 0.0))

    # ---- leave --------------------------------------------------------------------------------------------------

    def retire(self, id: int, retire: wire.Retire) -> list[AgentWorker]:
        """Tell workers to leave, and return them. Question ``id`` is answered when the last one has gone."""
        workers = [self.workers.pop(rank) for rank in retire.ranks if rank in self.workers]
        self._members.clear()
        for worker in workers:
            worker.advance(WorkerEvent.DISMISSED)
            self.leaving[worker] = id
            if retire.grace_s > 0:
                worker.calls.end_writing()
            else:
                worker.kill()
        if not workers:
            self._report(agents_answer(id, {}))
        elif retire.grace_s > 0:
            self._loop.call_later(retire.grace_s, lambda: self._kill(workers))
        for batch in tuple(self._batches):
            if any(worker in self.leaving for worker in batch.workers):
                self._batches.remove(batch)  # nobody waits for it any more
        return workers

    def left(self, worker: AgentWorker) -> bool:
        """Note that a process has ended; return whether it was told to. The last one of a `Retire` answers it."""
        if self.workers.get(worker.rank) is worker:
            del self.workers[worker.rank]
            self._members.clear()
        id = self.leaving.pop(worker, None)
        if id is not None and id not in self.leaving.values():
            self._report(agents_answer(id, {}))
        return id is not None

    def _kill(self, workers: Iterable[AgentWorker]) -> None:
        for worker in workers:
            if worker in self.leaving:
                worker.kill()

    def kill_all(self) -> None:
        """Send SIGKILL to every worker."""
        for worker in (*self.workers.values(), *self.leaving):
            worker.kill()

    # ---- other ranks --------------------------------------------------------------------------------------------

    def renumber(self, renumber: wire.Renumber) -> None:
        """Give the workers here other ranks. Logs of processes that are gone keep their text under another name."""
        before = self.workers.copy()
        self.workers.clear()
        logs = {seat.rank: self.logs.pop(seat.known_as) for seat in renumber.seats if seat.known_as in self.logs}
        for path in self.logs.values():
            self._replaced += 1
            _move(path, path.with_name(f"{path.stem}-ended-{self._replaced}.log"))
        self.logs = self._move_logs(logs)
        for seat in renumber.seats:
            worker = before.get(seat.known_as)
            if worker is None:
                continue  # it has just ended, and the controller will hear of it
            self.workers[seat.rank] = worker
            worker.rank = seat.rank
            self._members.clear()
            worker.output.log.path = self.logs[seat.rank]
            place = _place_of(seat, renumber.arrangement, len(renumber.moves))
            worker.identity = msgspec.structs.replace(worker.identity, **place)
            worker.calls.send([wire.encode(wire.Renumbered(worker.identity))])

    def _move_logs(self, logs: dict[int, Path]) -> dict[int, Path]:
        """Rename logs by way of unused names, since ranks may change places."""
        moved = {}
        for rank, path in logs.items():
            aside = path.with_name(f"moving-{rank}.log")
            _move(path, aside)
            moved[rank] = aside
        for rank, aside in moved.items():
            moved[rank] = aside.with_name(f"rank-{rank}.log")
            _move(aside, moved[rank])
        return moved


def free_slots(seats: Sequence[wire.Seat], taken: Collection[int]) -> list[int]:
    """Return free device slots for the seats: the slot of the local rank, if it is free, else the lowest. Workers of
    one mesh that begin differently may come in any order."""
    used, slots = set(taken), []
    for seat in seats:
        slot = seat.local_rank if seat.local_rank not in used else min(set(range(len(used) + 1)) - used)
        used.add(slot)
        slots.append(slot)
    return slots


def _move(path: Path, to: Path) -> None:
    with contextlib.suppress(OSError):  # a full disk or a removed folder: the log is lost, not the rank
        path.rename(to)


def _describe(worker: AgentWorker) -> wire.WorkerStarted:
    return wire.WorkerStarted(worker.rank, worker.pid, worker.device, str(worker.output.log.path))


def _place_of(seat: wire.Seat, arrangement: wire.Arrangement, generation: int) -> dict[str, Any]:
    """Return the fields of an identity that change when the mesh's ranks get other numbers."""
    # the host's cores, divided so that ranks do not crowd each other out
    threads = max(1, count_cores() // max(1, arrangement.local_world_size))
    own = {"rank": seat.rank, "local_rank": seat.local_rank, "threads": threads, "generation": generation}
    return {**arrangement._asdict(), **own}
