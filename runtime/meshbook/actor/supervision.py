"""Failures that reach no caller, and who is told of them.

A message that nobody waits for (a broadcast, say) fails, or a constructor: the owner of the actors, who has spawned
them, is told, of each process by itself. In the notebook that is `unhandled_fault_hook`; by default it prints a line
for all processes that fail together, and has the next use of the actors raise `UnhandledFault`. Neither ends a process.
"""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

from meshbook.concurrency.background import SerialQueue
from meshbook.errors import CallFailed, Failure, FailureKind, WorkerLost, group_failures
from meshbook.errors.advice import name_cells
from meshbook.formatting import name_ranks

SUPERVISE = "__supervise__"
"""The endpoint to which failures of meshes that an actor has spawned are sent."""

INIT = "__init__"
"""The endpoint that has failed if actors could not be made."""

JOIN_S = 0.1
"""The time that a failure waits for equal ones of other ranks, before it is shown."""


class FailedMesh(Protocol):
    """A mesh of actors, or of processes that have not come."""

    @property
    def name(self) -> str: ...

    @property
    def was_called(self) -> bool:
        """Whether a call tells its caller of the mesh's end."""

    def remember_fault(self, failure: MeshFailure) -> None:
        """Have the next use of it raise `UnhandledFault`."""


class MeshFailure:
    """A failure on a mesh of actors that reaches no caller."""

    def __init__(self, mesh: FailedMesh, what: str, failures: Iterable[Failure]) -> None:
        """mesh: the mesh whose owner is told. what: the endpoint that failed, as in ``loaders.read``."""
        self.mesh, self.what = mesh, what
        self.failures = tuple(sorted(failures, key=lambda failure: failure.rank))

    @property
    def mesh_name(self) -> str:
        """The name under which the actors were spawned."""
        return self.mesh.name

    @property
    def procs_name(self) -> str:
        """The name of the mesh of processes in which the actors live."""
        group = getattr(self.mesh, "_group", None)
        return self.mesh.name if group is None else str(group.mesh_name)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks on which it failed, in order."""
        return tuple(failure.rank for failure in self.failures)

    @property
    def is_of_init(self) -> bool:
        """Whether actors could not be made, so that each call to them fails as well."""
        return self.what == f"{self.mesh.name}.{INIT}"

    def report(self) -> str:
        """Return the explanation: a line for each cause, and its traceback."""
        lines = []
        for group in group_failures(self.failures):
            waited = ", which nobody waited for"
            if self.is_of_init or group[0].kind in (FailureKind.LOST, FailureKind.ABORTED, FailureKind.NOT_STARTED):
                waited = ""
            lines.append(f"{self.what}{waited}: {_cause(group)}")
            lines += [f"  {line}" for part in group[0].traceback for line in name_cells(part).splitlines()]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        failures = [failure._replace(exception=None) for failure in self.failures]
        return MeshFailure, (self.mesh, self.what, failures)

    def __repr__(self) -> str:
        causes = "; ".join(_cause(group) for group in group_failures(self.failures))
        return f"MeshFailure(crashed_ranks={list(self.ranks)}, {self.what}: {causes})"

    def pass_on(self, mesh: FailedMesh) -> MeshFailure:
        """Return the same failure for the owner of ``mesh``, whose actors did not handle it."""
        return MeshFailure(mesh, self.what, self.failures)

    def joined(self, other: MeshFailure) -> MeshFailure:
        """Return one failure for both, which are of the same actors."""
        return MeshFailure(self.mesh, self.what, (*self.failures, *other.failures))


def _cause(group: list[Failure]) -> str:
    first = group[0]
    ranks = name_ranks(failure.rank for failure in group)
    if first.kind in (FailureKind.LOST, FailureKind.ABORTED):
        return f"{ranks} ended: {first.evalue}"
    if first.kind is FailureKind.NOT_STARTED:
        return f"{ranks} did not start: {first.evalue}"
    return f"{ranks} raised {first.ename}: {first.evalue}" + (f" ({first.where})" if first.where else "")


def unhandled_fault_hook(failure: MeshFailure) -> None:
    """Print a line, and have the next use of the actors raise `UnhandledFault`. Calls tell of dead processes anyway.

    Another function can stand in its place: ``meshbook.actor.unhandled_fault_hook = ...`` (or ``meshbook.monarch...``).
    """
    raised = [one for one in failure.failures if one.kind is not FailureKind.LOST]
    gone = raised and raised[0].kind in (FailureKind.ABORTED, FailureKind.NOT_STARTED)  # whose calls say so themselves
    unmade = failure.is_of_init or (gone and raised[0].kind is FailureKind.NOT_STARTED)
    if not raised or (unmade and failure.mesh.was_called):  # then the caller is told
        return
    for group in group_failures(raised):
        later = "its calls fail from now on" if gone else f"the next use of {failure.mesh_name} raises it"
        print(f"{failure.what}: {_cause(group)}\n  {later}", file=sys.stderr)
    if not (failure.is_of_init or gone):
        failure.mesh.remember_fault(failure)


def _own_hook() -> Callable[[MeshFailure], object] | None:
    """Return the function that a program has put in the place of ours, under either name; None for ours."""
    for face in ("meshbook.actor", "meshbook.monarch"):
        hook: Callable[[MeshFailure], object] = getattr(
            sys.modules.get(face), "unhandled_fault_hook", unhandled_fault_hook
        )
        if hook is not unhandled_fault_hook:
            return hook
    return None


def _call_hook(hook: Callable[[MeshFailure], object], failure: MeshFailure) -> None:
    """Call the person's hook; ours takes over where it raises."""
    try:
        hook(failure)
    except Exception:
        traceback.print_exc()
        unhandled_fault_hook(failure)


def join_failures(failures: Iterable[MeshFailure]) -> list[MeshFailure]:
    """Return one failure for each endpoint."""
    joined: dict[str, MeshFailure] = {}
    for failure in failures:
        known = joined.get(failure.what)
        joined[failure.what] = failure if known is None else known.joined(failure)
    return list(joined.values())


class FaultJoiner:
    """A queue of failures that no owner has handled, which are shown to the notebook.

    Programs are told of each rank at once, by their hook; people of all ranks that fail together.
    """

    def __init__(self, observer: Callable[[MeshFailure], object]) -> None:
        """observer: called with each failure before the hook, on any thread."""
        self._observer = observer
        self._hooks = SerialQueue()
        self._lock = threading.Lock()
        self._joined: dict[tuple[FailedMesh, str], MeshFailure] = {}

    def take(self, failure: MeshFailure) -> None:
        """Add a failure that has come. Any thread; returns at once."""
        if (hook := _own_hook()) is not None:
            for each in failure.failures:
                self._hooks.add(functools.partial(_call_hook, hook, MeshFailure(failure.mesh, failure.what, [each])))
        key = (failure.mesh, failure.what)
        with self._lock:
            known = self._joined.get(key)
            self._joined[key] = failure if known is None else known.joined(failure)
        if known is None:
            timer = threading.Timer(JOIN_S, self._tell, [key])
            timer.daemon = True
            timer.start()

    def _tell(self, key: tuple[FailedMesh, str]) -> None:
        with self._lock:
            failure = self._joined.pop(key)
        try:
            self._observer(failure)
        except Exception:
            traceback.print_exc()
        if _own_hook() is None:
            unhandled_fault_hook(failure)


def failures_of(error: BaseException) -> list[Failure]:
    """Return the failures of ranks in a call's error; none if the ranks have done no wrong."""
    return list(error.failures) if isinstance(error, CallFailed | WorkerLost) else []
