"""Dead ranks come back: other processes in their places, under new agents where theirs are lost.

    dead, or killed for it ──> agents, started again if lost ──> new workers ──> groups formed by all ──> setup cells

Three events meanwhile are expected: a rank that dies, an agent that dies, an interrupt. The first two begin another
round, the last leaves the mesh as it was, with its dead ranks, ready to be healed again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from meshbook.calls.call_future import CallFuture
from meshbook.controller.controller import Controller
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import FORMED_AGAIN, MeshState, Repaired
from meshbook.controller.queries import ask_rank
from meshbook.controller.startup import PendingWorkers
from meshbook.errors import (
    CallFailed,
    CallTimeout,
    CrashLoopError,
    DeviceError,
    MeshStoppedError,
    SpawnError,
    UsageError,
    WorkerLost,
)
from meshbook.errors.advice import advice
from meshbook.groups.deadlock import is_in_use
from meshbook.groups.progress import Collectives
from meshbook.launchers.base import Launcher
from meshbook.mesh import states
from meshbook.mesh.host_agents import replace_hosts
from meshbook.mesh.proc_view import call_living
from meshbook.mesh.rank_calls import join_ranks, set_axes
from meshbook.mesh.start_progress import StartProgress
from meshbook.shape.members import Region

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh

AXES_TIMEOUT_S = 120.0
PROVE_TIMEOUT_S = 5.0
LOOK_S = 1.0
"""The limits for ranks to adopt their axes, for a proving collective, and for a report of their groups."""

NOT_PROVED = "its process groups were not proved, since ranks are busy"

GONE_TIMEOUT_S = 5.0
"""The longest wait for killed processes to disappear."""

ROUNDS = 3
"""The number of attempts of a repair, which starts again when another process ends meanwhile."""

PATIENCE_S = 2.0
"""A repair that waits longer tells the person why."""

Note: TypeAlias = Callable[[str], None]


def repair(
    procs: ProcMesh,
    ranks: Sequence[int],
    setup: Sequence[str],
    *,
    force: bool,
    note: Note | None,
    launcher: Launcher | None = None,
    within_s: float | None = None,
) -> Repaired:
    """Repair the whole mesh, as `ProcMesh.heal` and `ProcMesh.respawn` do. ranks: those to end before."""
    controller, mesh = procs._controller, procs._mesh
    progress = StartProgress(controller, within_s)
    if isinstance(setup, str) or not isinstance(setup, Sequence) or not all(isinstance(each, str) for each in setup):
        raise UsageError(f"setup is a list of cells, each of them a string; {setup!r} is none")
    mesh.await_arrival()
    mesh.check_usable()  # before its controller is asked, which may have closed
    new: set[int] = set()
    for left in reversed(range(ROUNDS)):
        repaired = Repair(controller, mesh, procs.base(), progress, note, launcher).run(ranks, setup, force=force)
        new.update(repaired.ranks)
        repaired = mesh.last_repair = repaired._replace(ranks=tuple(sorted(new)))
        try:
            if mesh.shown_by is not None:
                mesh.shown_by.set_levels_again()
            results = call_living(mesh.after_repairs)
            notes = tuple(dict.fromkeys(each for each in results if isinstance(each, str) and each))
            repaired = mesh.last_repair = repaired._replace(notes=notes)
            break
        except WorkerLost:
            if not left or not mesh.lost:
                raise
            ranks, launcher = (), None  # another one has died meanwhile
    return repaired


class Repair:
    """A repair of a mesh, on a thread of the user."""

    def __init__(
        self,
        controller: Controller,
        mesh: MeshState,
        procs: ProcMesh,
        progress: StartProgress,
        note: Note | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        """procs: the whole mesh. note: called once with the name of a slow step.

        launcher: starts replacements of lost hosts; by default each comes back as it came.
        """
        self._controller, self._mesh, self._procs, self._launcher = controller, mesh, procs, launcher
        self.progress = progress
        self._new_hosts: list[str] = []
        self.note: Note = note or (lambda text: None)

    def run(self, kill: Sequence[int], setup: Sequence[str], *, force: bool) -> Repaired:
        """Do it, as `ProcMesh.heal` and `ProcMesh.respawn` say. kill: ranks to end before."""
        began = time.monotonic()
        for host, why in () if force else states.suspects(self._procs).items():
            self.note(
                f"host {host} is {why}; its ranks keep their state and answer when it does, --force gives them up"
            )
        with self.exclusive():
            if force:
                ranks = kill or range(self._mesh.extent.nelements)
                self._controller.give_up_suspects(self._mesh.by_host(ranks))
                self._controller.ask(lambda: self._mesh.crash_loops.forget((*kill, *self._mesh.lost)))
            new: set[int] = set()
            joined = False
            if kill:
                self._check_crash_loops(kill)
                with contextlib.suppress(TimeoutError):  # they are killed: what is left of them is in nobody's way
                    self._controller.kill(self._mesh, kill, "it was respawned").get(GONE_TIMEOUT_S)
            if self._launcher is not None and not any(host.lost for host in self._mesh.hosts):
                raise UsageError(f'no host of mesh "{self._mesh.name}" is lost, so there is none to be replaced.')
            while not self._mesh.joined or self._mesh.lost:
                new |= self._bring_back()
                joined = True
            proof = "" if joined else self._prove_groups()
            for code in setup if new else ():
                alone = len(new) < len(self._procs)
                self._procs.select(sorted(new)).run(code, forbid_collectives=alone).get()
        done = len(setup) if new else 0
        seconds = time.monotonic() - began
        world_size = self._mesh.extent.nelements
        ranks, hosts = tuple(sorted(new)), tuple(self._new_hosts)
        return Repaired(self._mesh.name, ranks, hosts, joined, world_size, proof, done, seconds)

    # ---- steps ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads from repairing the mesh meanwhile. Raises: UsageError, MeshStoppedError."""
        who = threading.current_thread()
        try:
            self._controller.ask(lambda: self._mesh.begin_repair(who))
            yield
        finally:
            self._controller.submit(lambda: self._mesh.end_repair(who))

    def _bring_back(self) -> set[int]:
        """Start the dead ranks and form the groups; returns the ranks that were started."""
        started: set[int] = set()
        mesh = self._mesh
        for left in reversed(range(ROUNDS)):
            try:
                dead = set(mesh.lost)
                if dead:
                    self._check_crash_loops(dead)
                    self._replace_hosts()
                    pending = PendingWorkers(self._controller.next_id(), mesh.seats_of(dead))
                    self.await_recruits(pending, functools.partial(mesh.ask_for, pending))
                started |= dead
                self.join()
                return started
            except (CrashLoopError, DeviceError, MeshStoppedError):
                raise
            except (SpawnError, WorkerLost) as error:
                if not left or not mesh.lost:
                    raise
                self.note(f"once more: {str(error).splitlines()[0]}")
        return started

    def _check_crash_loops(self, ranks: Iterable[int]) -> None:
        lost = {rank: self._mesh.lost[rank] for rank in ranks if rank in self._mesh.lost}
        self._mesh.crash_loops.check(lost, time.monotonic())

    def _replace_hosts(self) -> None:
        lost = [host for host in self._mesh.hosts if host.lost]
        starting: dict[HostState, HostState] = {}
        try:
            replace_hosts(self._mesh.hosts, starting, self._controller, self._launcher)
            lost_of = {new: host for host, new in starting.items()}

            def on_up(new: HostState) -> None:
                host = lost_of[new]
                self._controller.ask(functools.partial(self._mesh.replace_host, host, new))
                self._new_hosts.append(new.name)
                del starting[host]

            self.progress.await_hosts(list(lost_of), on_up)
        except BaseException as error:  # the next try starts yet others
            self._controller.stop_hosts(list(starting.values()), 0.1)
            if isinstance(error, SpawnError) and any(host.starter and host.starter.fixed for host in lost):
                raise SpawnError(f"{error}\n  another host in its place: {advice().heal_elsewhere}") from error
            raise
        self._controller.stop_hosts(lost, 0.1)  # what is left of them: an agent that is only silent must not come back

    def await_recruits(self, pending_workers: PendingWorkers, ask: Callable[[], None]) -> None:
        """Have ``ask`` ask for workers, and wait until all have answered; if that fails none of them is left."""
        try:
            self._controller.submit(ask)
            self.progress.await_workers(pending_workers)
        except BaseException:
            self._controller.give_up_recruits(self._mesh, pending_workers)
            raise

    def _prove_groups(self) -> str:
        """Prove the groups of a mesh that is whole by a collective, and form them again if it fails.

        Where others are at work in the default group it would meet theirs: then nothing is known.
        """
        if not self._mesh.grouped:
            return ""
        if self._are_in_use():
            return NOT_PROVED
        for formed_again in ("", FORMED_AGAIN):  # after a failure they are formed again by themselves
            future = self._procs._call("prove_group", (), what="the proof of the process groups")
            try:
                future.get(PROVE_TIMEOUT_S)
                return formed_again
            except (CallFailed, CallTimeout):
                future.end_on_ranks(1.0)
        self.join()
        return FORMED_AGAIN

    def _are_in_use(self) -> bool:
        """Whether ranks run calls or do not answer, or actors or threads are at work in the default group."""
        ranks = range(self._mesh.extent.nelements)
        told = self._controller.questions.gather(self._mesh, ranks, ask_rank("collectives"), Collectives, LOOK_S)
        if len(told) < len(ranks) or any(each.call for each in told.values()):
            return True
        return any(is_in_use(told, each.groups[0].name) for each in told.values() if each.groups)

    def join(self) -> None:
        """Have all ranks form the groups, or meet; they take up the axes that they had."""
        mesh, procs = self._mesh, self._procs
        future = join_ranks(procs)
        try:
            self._wait_for_ranks(future)
            if mesh.axes != dict(mesh.extent):
                set_axes(procs._part(Region.of(mesh.axes))).get(AXES_TIMEOUT_S)
        except BaseException as error:
            future.end_on_ranks(1.0)  # those that wait for the dead come back
            if isinstance(error, CallFailed):
                raise SpawnError(f"the process groups did not form: {error}") from error
            raise

        def note_joined() -> None:
            mesh.joined = not mesh.lost

        self._controller.ask(note_joined)
        self._controller.folder.save_mesh(mesh.id, mesh.saved)
        self._controller.submit(mesh.tell_up)

    def _wait_for_ranks(self, future: CallFuture[Any]) -> None:
        try:
            future.get(PATIENCE_S)
            return
        except CallTimeout:
            if waits := future.describe_wait():
                self.note(f"{waits}; an interrupt ends the wait")
        self.progress.await_call(future, "forming process groups")
