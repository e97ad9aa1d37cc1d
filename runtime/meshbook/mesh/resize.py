"""A mesh grows and shrinks while it lives: staying ranks keep their process and state, and may be renumbered.

    grow     no cell runs? ──> new hosts, new workers, apart ──> all ranks renumbered at once ──> groups
    shrink   no cell runs? ──> leaving ranks are told, the others renumbered at once ──> empty hosts end ──> groups

Until the ranks are renumbered a failure or an interrupt leaves the mesh as it was. The plan is pure: which rank becomes
which, and where new ranks live.

     gpus 0  1         grow gpus=1         gpus 0  1  2      Plan.moved  0->0  1->1  2->3  3->4
  hosts 0 | 0  1       ----------->     hosts 0 | 0  1  2*        .new   2 on the host of 0 and 1, 5 on that of 3 and 4
        1 | 2  3                              1 | 3  4  5*

Ranks are always numbered in C order, so old ranks may get other numbers. A new point lives where the points beside it
live; along an axis that counts hosts every new index is a new host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from meshbook.controller.controller import Controller
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState, Renumbering, arrangement_of, seats_on
from meshbook.controller.startup import PendingWorkers
from meshbook.errors import LayoutError, SpawnError, UsageError
from meshbook.errors.advice import advice
from meshbook.formatting import format_ranks, format_sizes, name_ranks
from meshbook.launchers.base import Launcher
from meshbook.mesh.host_agents import launch_hosts
from meshbook.mesh.repair import GONE_TIMEOUT_S, Note, Repair
from meshbook.mesh.start_progress import StartProgress
from meshbook.shape.extent import Extent
from meshbook.wire import messages as wire

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh

PlannedHost = TypeVar("PlannedHost", bound=Hashable)


class NewHost(NamedTuple):
    """A host that is still to be started, by its coordinates along the axes that count hosts."""

    coordinates: tuple[int, ...]


@dataclass(frozen=True)
class Plan(Generic[PlannedHost]):  # no NamedTuple: Python 3.10 has no generic ones
    """The plan of a resize: the arrangement that the mesh is to have."""

    extent: Extent
    placement: tuple[PlannedHost | NewHost, ...]
    """The host of each rank, then."""
    moved: Mapping[int, int]
    """Rank until now to rank then; who is missing leaves."""

    @property
    def new(self) -> list[int]:
        """The ranks that nobody has yet."""
        taken = set(self.moved.values())
        return [rank for rank in range(self.extent.nelements) if rank not in taken]


def plan_growth(
    extent: Extent, placement: Sequence[PlannedHost], more: Mapping[str, int], host_axes: Collection[str]
) -> Plan[PlannedHost]:
    """Add indices at the ends of axes.

    placement: the host of each rank now. host_axes: axes of size 1 that count hosts all the same.
    Raises: UnknownAxisError, UsageError for less than one.
    """
    check_steps(extent, more, "grow")
    then = Extent.of({axis: size + more.get(axis, 0) for axis, size in extent.items()})
    across = [axis for axis in extent.names if counts_hosts(extent, placement, axis, host_axes)]
    moved: dict[int, int] = {}
    hosts: list[PlannedHost | NewHost] = []
    for point in then.points():
        if all(index < extent[axis] for axis, index in point.items()):
            before = extent.rank(point)
            moved[before] = point.rank
            hosts.append(placement[before])
        elif any(point[axis] >= extent[axis] for axis in across):
            hosts.append(NewHost(tuple(point[axis] for axis in across)))
        else:
            beside = {axis: min(index, extent[axis] - 1) for axis, index in point.items()}
            hosts.append(placement[extent.rank(beside)])
    return Plan(then, tuple(hosts), moved)


def plan_shrinkage(
    extent: Extent, placement: Sequence[PlannedHost], fewer: Mapping[str, int], dead: Collection[int]
) -> Plan[PlannedHost]:
    """Remove indices of axes: those of dead ranks first, then from the end.

    Raises: UnknownAxisError, UsageError for less than one, for all, and where a dead rank would be left.
    """
    check_steps(extent, fewer, "shrink")
    for axis, count in fewer.items():
        if count >= extent.size(axis):
            raise UsageError(
                f"{axis}={extent.size(axis)} cannot shrink by {count}: nothing would be left. "
                f"End the mesh: {advice().stop}"
            )
    left = set(dead)
    removed: dict[str, set[int]] = {}
    for axis, count in fewer.items():
        by_index = [sum(extent.point(rank)[axis] == index for rank in left) for index in range(extent.size(axis))]
        order = sorted(range(len(by_index)), key=lambda index: (by_index[index], index), reverse=True)
        removed[axis] = set(order[:count])
        left = {rank for rank in left if extent.point(rank)[axis] not in removed[axis]}
    if left:
        verb = "has" if len(left) == 1 else "have"
        raise UsageError(
            f"{name_ranks(left)} {verb} ended and would be left, with {format_sizes(fewer)} fewer. "
            f"Shrink by more, or repair first: {advice().heal}"
        )
    then = Extent.of({axis: size - fewer.get(axis, 0) for axis, size in extent.items()})
    kept = [
        point.rank for point in extent.points() if not any(point[axis] in indices for axis, indices in removed.items())
    ]
    return Plan(then, tuple(placement[rank] for rank in kept), {rank: at for at, rank in enumerate(kept)})


def without(extent: Extent, dead: Collection[int]) -> dict[str, int]:
    """The axis, and how many of its indices, to remove so that no dead rank and as many others as possible are left.

    Empty without dead ranks. Raises: UsageError where nothing would be left.
    """
    if not dead:
        return {}
    hit = {axis: len({extent.point(rank)[axis] for rank in dead}) for axis in extent.names}
    left = {axis: extent.size(axis) - count for axis, count in hit.items()}
    best = max(left, key=lambda axis: left[axis] / extent.size(axis))
    if not left[best]:
        raise UsageError(f"there is no part of the mesh without a rank that ended. Repair it: {advice().heal}")
    return {best: hit[best]}


def check_steps(extent: Extent, steps: Mapping[str, int], verb: str) -> None:
    """Refuse steps along no axis, or of less than one. Raises: UnknownAxisError, UsageError."""
    example = advice().change.format(verb=verb, sizes=f"{next(iter(extent.names), 'gpus')}=1")
    if not steps:
        raise UsageError(f"say along which axis, and by how much: {example}")
    for axis, count in steps.items():
        extent.axis(axis)
        if count < 1:
            raise UsageError(f"{verb} {axis}={count}: by at least 1, as in {example}")


def counts_hosts(extent: Extent, placement: Sequence[Hashable], axis: str, host_axes: Collection[str]) -> bool:
    """Whether each index of ``axis`` is on hosts of its own."""
    if extent.size(axis) == 1:
        return axis in host_axes
    hosts: list[set[Hashable]] = [set() for _ in range(extent.size(axis))]
    for point in extent.points():
        hosts[point[axis]].add(placement[point.rank])
    return sum(map(len, hosts)) == len(set().union(*hosts))


def describe_moves(moved: Mapping[int, int]) -> str:
    """``ranks 2-3 are ranks 3-4 now``; nothing where all have kept their numbers."""
    changed = {before: after for before, after in moved.items() if before != after}
    if not changed:
        return ""
    verb = "is" if len(changed) == 1 else "are"
    noun = "rank" if len(changed) == 1 else "ranks"
    return f"{name_ranks(changed)} {verb} {noun} {format_ranks(changed.values())} now"


LEAVE_GRACE_S = 1.0
"""Ranks that leave may take so long to end by themselves."""

GIVEN_UP_S = 3.0
"""Calls that have lost a rank may take so long to end on the others."""


class Change(NamedTuple):
    """The result of a resize."""

    procs: ProcMesh
    """The whole mesh as it is now."""
    moved: Mapping[int, int]
    """The new rank of each old one that stayed."""
    ended: tuple[int, ...]
    """Ranks before that are no more."""
    new: tuple[int, ...]
    """Ranks now that are new, without any state."""
    seconds: float

    def __str__(self) -> str:
        parts = []
        if self.new:
            parts.append(f"{name_ranks(self.new)} {'is' if len(self.new) == 1 else 'are'} new")
        if self.ended:
            parts.append(f"{name_ranks(self.ended)} ended")
        if moves := describe_moves(self.moved):
            parts.append(moves)
        joined = f"all {len(self.procs)} joined in {self.seconds:.2f} s"
        return f'mesh "{self.procs.name}": {format_sizes(self.procs.sizes)}; {", ".join([*parts, joined])}'


def resize(
    procs: ProcMesh,
    *,
    grow: Mapping[str, int] | None = None,
    shrink: Mapping[str, int] | None = None,
    note: Note | None = None,
    launcher: Launcher | None = None,
    within_s: float | None = None,
) -> Change:
    """Grow or shrink a mesh, as `ProcMesh.grow` and `ProcMesh.shrink` do; the result says which rank became which."""
    progress = StartProgress(procs._controller, within_s)
    elastic = Elastic(procs._controller, procs._mesh, procs._present(), progress, note)
    return elastic.grow(grow, launcher) if grow is not None else elastic.shrink(shrink or {})


class Elastic:
    """A resize of a mesh, on a thread of the user."""

    def __init__(
        self,
        controller: Controller,
        mesh: MeshState,
        procs: ProcMesh,
        progress: StartProgress,
        note: Note | None = None,
    ) -> None:
        """procs: the view whose axes grow or shrink: all ranks, in their order. Raises: LayoutError."""
        if procs.ranks != tuple(range(mesh.extent.nelements)):
            raise LayoutError(f"only the whole mesh can grow or shrink, not a part of it; take it by {advice().whole}.")
        self._controller, self._mesh, self._procs = controller, mesh, procs
        self._repair = Repair(controller, mesh, procs, progress, note)
        self._extent = procs.extent
        self._began = time.monotonic()

    def grow(self, more: Mapping[str, int], launcher: Launcher | None = None) -> Change:
        """See `ProcMesh.grow`."""
        mesh = self._mesh
        check_steps(self._extent, more, "grow")
        self._check_alike()
        with self._repair.exclusive():
            self._check_idle(self._controller.busy_on(mesh), "grow")
            if mesh.lost:
                raise UsageError(
                    f"{name_ranks(mesh.lost)} ended: repair the mesh first, {advice().heal}, or shrink it."
                )
            rough = plan_growth(self._extent, mesh.placement, more, mesh.host_axes)
            hosts = self._start_hosts(rough, launcher)
            try:
                placement = tuple(hosts[host] if isinstance(host, NewHost) else host for host in rough.placement)
                plan = dataclasses.replace(rough, placement=placement)
                pending_workers = self._recruit(plan)
            except BaseException:
                self._controller.stop_hosts(list(hosts.values()), GONE_TIMEOUT_S)
                raise
            try:
                self._install(plan, pending_workers)
            except BaseException:
                self._controller.give_up_recruits(mesh, pending_workers)
                self._controller.stop_hosts(list(hosts.values()), GONE_TIMEOUT_S)
                raise
            return self._finish(plan, ended=(), new=tuple(plan.new))

    def shrink(self, fewer: Mapping[str, int]) -> Change:
        """See `ProcMesh.shrink`."""
        mesh = self._mesh
        fewer = fewer or without(self._extent, mesh.lost)
        check_steps(self._extent, fewer, "shrink")
        self._check_alike()
        with self._repair.exclusive():
            until = time.monotonic() + GIVEN_UP_S
            while mesh.lost and self._controller.busy_on(mesh) and time.monotonic() < until:
                time.sleep(0.01)  # where a rank has ended, the others give up waiting for it, and report that
            plan = plan_shrinkage(self._extent, mesh.placement, fewer, set(mesh.lost))
            before, hosts = mesh.extent.nelements, list(mesh.hosts)

            def check(busy: Collection[int]) -> None:
                self._check_idle(busy, "shrink")
                self._check_whole(sorted(mesh.lost.keys() & plan.moved.keys()))

            renumbering = Renumbering(plan.extent, _placement(plan), plan.moved, f"shrank to {_sizes(plan)}")
            gone = self._controller.renumber(mesh, check, renumbering, LEAVE_GRACE_S)
            with contextlib.suppress(TimeoutError):  # they are being killed; the others need not wait for it
                gone.get(GONE_TIMEOUT_S)
            empty = [host for host in hosts if host not in mesh.hosts]
            if mesh.owns_hosts:
                self._controller.stop_hosts(empty, GONE_TIMEOUT_S)
            else:
                for host in empty:
                    self._controller.submit(functools.partial(host.send, wire.StopMesh(mesh.id, 0.0)))
            return self._finish(plan, ended=tuple(rank for rank in range(before) if rank not in plan.moved), new=())

    # ---- steps --------------------------------------------------------------------------------------------------

    def _check_alike(self) -> None:
        """Raises: UsageError where each rank has a command of its own."""
        if len(self._mesh.recipe.commands) > 1:
            raise UsageError(
                f'mesh "{self._mesh.name}" keeps its size: its bootstrap_command gave each rank its own. '
                f"Start another mesh: {advice().spawn_call}"
            )

    def _check_idle(self, busy: Collection[int], verb: str) -> None:
        """Raises: UsageError while ranks run a call."""
        if busy:
            raise UsageError(
                f'{name_ranks(busy)} of mesh "{self._mesh.name}" {"is" if len(busy) == 1 else "are"} busy; '
                f"ranks get other numbers when it {verb}s.\n"
                f"  wait: {advice().wait}    or interrupt: {advice().interrupt}"
            )

    def _start_hosts(self, plan: Plan[HostState], launcher: Launcher | None) -> dict[NewHost, HostState]:
        wanted = list(dict.fromkeys(host for host in plan.placement if isinstance(host, NewHost)))
        if not wanted and launcher is not None:
            raise UsageError(f"{_sizes(plan)} needs no more hosts than there are, so there is none to be started.")
        if not wanted:
            return {}
        new = self._launch(len(wanted), launcher)
        try:
            self._repair.progress.await_hosts(new)
        except BaseException:
            self._controller.stop_hosts(new, GONE_TIMEOUT_S)
            raise
        return dict(zip(wanted, new, strict=True))

    def _launch(self, count: int, launcher: Launcher | None) -> list[HostState]:
        """Have so many more hosts. Raises: UsageError, SpawnError."""
        name, starter = self._mesh.name, self._mesh.hosts[0].starter
        if not self._mesh.owns_hosts or starter is None:
            raise UsageError(
                f'the hosts of mesh "{name}" were not started for it alone, so it cannot have more of them. '
                f"Grow an axis that lies on the hosts, or start another mesh: {advice().spawn_hosts}"
            )
        if launcher is not None:
            return launch_hosts(self._controller, launcher, count, False)
        if fixed := starter.fixed:
            raise UsageError(
                f'mesh "{name}" cannot have more hosts like its first: {fixed}. Say who starts them: '
                f"{advice().grow_hosts}"
            )
        return starter.more(count, self._mesh.hosts)

    def _recruit(self, plan: Plan[HostState]) -> PendingWorkers:
        """New workers under numbers that are nobody's rank, before or after."""
        first = max(self._mesh.extent.nelements, plan.extent.nelements)
        known_as = {rank: first + index for index, rank in enumerate(plan.new)}
        placement = _placement(plan)
        hosts = dict.fromkeys(placement)
        seats = {
            host: [seat for seat in seats_on(placement, host, known_as) if seat.rank in known_as] for host in hosts
        }
        pending_workers = PendingWorkers(self._controller.next_id(), seats, apart=True)
        arrangements = {host: arrangement_of(plan.extent, placement, host) for host in hosts}
        self._repair.await_recruits(pending_workers, lambda: self._mesh.ask_for(pending_workers, arrangements))
        return pending_workers

    def _install(self, plan: Plan[HostState], pending_workers: PendingWorkers) -> None:
        """Send all ranks their new numbers, the added ranks included."""

        def check(busy: Collection[int]) -> None:
            self._check_idle(busy, "grow")
            self._check_whole(self._mesh.lost)
            if pending_workers.failure is not None:
                raise pending_workers.failure

        renumbering = Renumbering(plan.extent, _placement(plan), plan.moved, f"grew to {_sizes(plan)}", pending_workers)
        self._controller.renumber(self._mesh, check, renumbering)

    def _check_whole(self, lost: Collection[int]) -> None:
        if lost:
            raise SpawnError(f"{name_ranks(lost)} ended meanwhile; repair the mesh first: {advice().heal}")

    def _finish(self, plan: Plan[HostState], ended: tuple[int, ...], new: tuple[int, ...]) -> Change:
        procs = self._procs.base()
        Repair(self._controller, self._mesh, procs, self._repair.progress, self._repair.note).join()
        return Change(procs, dict(plan.moved), ended, new, time.monotonic() - self._began)


def _placement(plan: Plan[HostState]) -> list[HostState]:
    return [host for host in plan.placement if not isinstance(host, NewHost)]


def _sizes(plan: Plan[HostState]) -> str:
    return format_sizes(plan.extent)
