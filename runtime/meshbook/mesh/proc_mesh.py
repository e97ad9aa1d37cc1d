"""ProcMesh: one process per point, arranged by named axes. What users hold, slice and call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from meshbook.actor.actor_mesh import spawn_actors
from meshbook.actor.errors import ProcsNotStartedError, ProcsStoppedError
from meshbook.actor.proc_ref import find_procs
from meshbook.actor.router import TActor, router_for
from meshbook.actor.supervision import MeshFailure
from meshbook.calls.interrupt import interrupt
from meshbook.concurrency.future import Future
from meshbook.controller.mesh_state import stale_view
from meshbook.errors import CallInterrupted, MeshError
from meshbook.formatting import format_sizes
from meshbook.mesh.proc_calls import CodeCalls
from meshbook.mesh.proc_groups import GroupCalls
from meshbook.mesh.proc_membership import Membership
from meshbook.mesh.proc_names import MonarchNames
from meshbook.mesh.proc_states import ProcStates

if TYPE_CHECKING:
    from meshbook.tensors.handles.mesh_tensor import MeshTensor

STOP_GRACE_S = 1.0
"""Busy workers have this long to end when a mesh is stopped."""


class ProcMesh(MonarchNames, CodeCalls, GroupCalls, ProcStates, Membership):
    """A mesh of worker processes, or a view of some of them; views share the processes and cost nothing.

    Calls return a `Future`; ``.get()`` waits. Each call runs once on every member, in the order in which it was made.
    """

    def spawn(self, name: str, cls: type[TActor], /, *args: object, **kwargs: object) -> TActor:
        """Make an actor ``cls(*args, **kwargs)`` in every process; returns an `ActorMesh` at once.

        For type checkers it is a ``cls``, whose endpoints have the adverbs of `meshbook.actor.Endpoint`. A constructor
        that fails fails the first call. Raises: UsageError for what is no actor class, ArgumentsError,
        SerializationError.
        """
        if self._generation != self._mesh.generation:
            raise stale_view(self._mesh)
        if not (self.alive or self._mesh.detached):
            raise self._mesh.not_started or _stopped(self.name)
        router = router_for(self.session)
        return spawn_actors(router, self.id, self.name, self._members, name, cls, args, kwargs, self._generation)

    @property
    def was_called(self) -> bool:
        """Whether somebody is told, by a call or by waiting, what has kept these processes from coming."""
        return self._mesh.arrival is not None and self._mesh.arrival.is_asked

    def remember_fault(self, failure: MeshFailure) -> None:
        """Nothing: processes that have not come fail every call."""

    def activate(self) -> AbstractContextManager[None]:
        """While it lasts, tensors that begin here begin on each of these processes; see docs/tensors.md."""
        from meshbook.tensors.handles.local_view import activate

        return activate(self)

    def rank_tensor(self, dim: str | Sequence[str]) -> MeshTensor:
        """Each process's own index along an axis, as a tensor of the local view; along several as along one."""
        from meshbook.tensors.handles.local_view import rank_tensor

        return rank_tensor(self, dim)

    def rank_tensors(self) -> dict[str, MeshTensor]:
        """`rank_tensor` of each axis."""
        return {axis: self.rank_tensor(axis) for axis in self.sizes}

    def interrupt(self) -> CallInterrupted:
        """Interrupt all that runs or waits on these ranks, whoever started it; the second time more insistently.

        Returns in less than a second: who obeyed, and where the others are and why (`meshbook.calls.interrupt`).
        """
        ranks = set(self._members.ranks())
        known = self._controller.ask(lambda: self._controller.open_calls(self._mesh.id))  # with what was just submitted
        calls = [call for call in known if not ranks.isdisjoint(call.waiting)]
        return interrupt(self._controller, calls, ranks)

    def stop(self, reason: str = "", *, timeout_s: float = 10.0) -> Future[None]:
        """End every process of the mesh, views included; returns when none is left. Idempotent.

        reason: accepted, since Monarch has it. Returns: a future that is done, for programs that wait for it.
        """
        self._controller.stop_mesh(self._mesh, STOP_GRACE_S)
        try:
            self._mesh.stopped.get(timeout_s)
        except TimeoutError:
            self._explain_slow_stop()
        if self._mesh.owns_hosts:
            self._mesh.owns_hosts = False
            self._controller.stop_hosts(self._mesh.hosts, timeout_s)
        return Future.completed(None)

    def _explain_slow_stop(self) -> None:
        """Not all processes are known to have ended. Raises: MeshError, unless their hosts are ended by force."""
        if self.suspects and self._mesh.owns_hosts:
            return
        silent = [f"Host {name} is {why}; they end when it answers. " for name, why in self.suspects.items()]
        raise MeshError(
            f'mesh "{self.name}" was told to stop, but not all of its processes are known to have ended. '
            f"{''.join(silent)}To end all hosts of this session by force: meshbook.shutdown()"
        )

    def __enter__(self) -> ProcMesh:
        """Raises: MeshStoppedError for a mesh that was stopped."""
        self._mesh.check_usable()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    async def __aenter__(self) -> ProcMesh:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.stop()

    def __reduce__(self) -> tuple[object, ...]:
        """On a rank it is a `meshbook.actor.proc_ref.ProcRef`. Waits until the processes are there."""
        if self.alive:
            self._mesh.await_arrival()
        return find_procs, (self.session, self.id, self.name, self._members, self._generation)

    def __repr__(self) -> str:
        arrival = self._mesh.arrival
        state = "" if self.alive else ", stopped"
        if arrival is not None and not arrival.is_over:
            state = ", starting"
        elif isinstance(self._mesh.not_started, ProcsNotStartedError):
            state = ", not started"
        return f'ProcMesh("{self.name}", {format_sizes(self.sizes)}, {self._device}{state})'


def _stopped(name: str) -> ProcsStoppedError:
    """What `ProcMesh.spawn` raises, with Monarch's words for it."""
    error = ProcsStoppedError(name)
    error.beside = "`ProcMesh` has already been stopped"
    return error
