"""Views of the processes of a mesh: which ranks they have, and how calls and questions reach these.

Users hold a `meshbook.mesh.proc_mesh.ProcMesh`, which is such a view. The functions here, in `meshbook.mesh.states` and
in `meshbook.mesh.rank_calls` take one: they serve the other rooms, and are no methods since no user calls them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from meshbook.calls.call import CallRequest
from meshbook.calls.call_future import CallFuture
from meshbook.calls.output import OutputTarget
from meshbook.controller.controller import Controller
from meshbook.controller.mesh_state import MeshState, stale_view
from meshbook.controller.queries import ask_rank
from meshbook.lifecycle import MeshPhase
from meshbook.shape.members import Extent, Members, MeshView, Region, arrange
from meshbook.values.main_names import Sending
from meshbook.values.pickling import dumps

T = TypeVar("T")
Self = TypeVar("Self", bound="ProcView")

Methods: TypeAlias = "list[weakref.WeakMethod[Callable[[], object]]]"


class ProcView(MeshView):
    """A view of the processes of a mesh, arranged by axes. Base of ProcMesh."""

    def __init__(
        self, controller: Controller, mesh: MeshState, members: Members | None = None, generation: int | None = None
    ) -> None:
        """members: all by default. generation: the one whose rank numbers ``members`` has; the current by default."""
        super().__init__(Region.of(mesh.extent) if members is None else members)
        self._controller = controller
        self._mesh = mesh
        self._generation = mesh.generation if generation is None else generation

    @property
    def name(self) -> str:
        """The name of the mesh, and of the folder of its logs."""
        return self._mesh.name

    @property
    def id(self) -> int:
        """The number of the mesh in its session, also for later controllers; views of a mesh have the same."""
        return self._mesh.id

    @property
    def session(self) -> str:
        """The id of the mesh's session, by which another process attaches."""
        return self._controller.folder.id

    @property
    def alive(self) -> bool:
        """Whether the mesh has not been stopped."""
        return self._mesh.phase not in (MeshPhase.STOPPING, MeshPhase.STOPPED)

    def base(self: Self) -> Self:
        """Return the whole mesh that this is a view of."""
        return type(self)(self._controller, self._mesh)

    def _part(self: Self, members: Members) -> Self:
        return type(self)(self._controller, self._mesh, members, self._generation)

    def _present(self: Self) -> Self:
        """Wait until the processes are there. Raises: LayoutError if ranks have other numbers than in this view."""
        self._mesh.await_arrival()
        check_numbers(self)
        return self

    def _call(
        self,
        endpoint: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object] | None = None,
        *,
        what: str,
        roots: Mapping[str, object] | None = None,
        sending: Sending | None = None,
        fail_fast: bool = True,
    ) -> CallFuture[Any]:
        if self._generation != self._mesh.generation:  # `check_numbers`, on the path of every call
            raise stale_view(self._mesh)
        if self._mesh.before_calls:
            call_living(self._mesh.before_calls)
        pickled = dumps((args, kwargs or {}), what=what, roots=roots, sending=sending)
        request = CallRequest(endpoint, self._members, pickled, what, fail_fast=fail_fast)
        return self._controller.call(self._mesh, request, output_target(self))


# ---- views ------------------------------------------------------------------------------------------------------


def is_renumbered(procs: ProcView) -> bool:
    """Whether ranks have other numbers now than in this view: the mesh has grown or shrunk since."""
    return procs._generation != procs._mesh.generation


def check_numbers(procs: ProcView) -> None:
    """Raises: LayoutError if ranks have other numbers than in this view."""
    if procs._generation != procs._mesh.generation:
        raise stale_view(procs._mesh)


def arrange_ranks(procs: Self, sizes: Mapping[str, int], ranks: Sequence[int]) -> Self:
    """Return a view of ``ranks`` (distinct base ranks, in C order) laid out along axes of these sizes."""
    return procs._part(arrange(Extent.of(sizes), ranks))


def rename_mesh(procs: ProcView, name: str) -> None:
    """Give the mesh another name in this process and in its session; names on the ranks stay as they are."""
    procs._mesh.name = name
    procs._controller.folder.save_mesh(procs._mesh.id, procs._mesh.saved)


# ---- what goes before calls, and what follows repairs -------------------------------------------------------------


def call_before_calls(procs: ProcView, method: Callable[[], object]) -> None:
    """Call a method before each call to the mesh is sent, as long as the method's object lives."""
    procs._mesh.before_calls = [*_living(procs._mesh.before_calls), weakref.WeakMethod(method)]


def call_after_repairs(procs: ProcView, method: Callable[[], object]) -> None:
    """Call a method whenever ranks of the mesh were started again, as long as the method's object lives."""
    procs._mesh.after_repairs = [*_living(procs._mesh.after_repairs), weakref.WeakMethod(method)]


def call_living(methods: Methods) -> list[object]:
    """Call the methods whose objects still live; returns their results."""
    return [method() for each in methods if (method := each()) is not None]


def _living(methods: Methods) -> Methods:
    return [method for method in methods if method() is not None]


# ---- output of calls ----------------------------------------------------------------------------------------------


def new_output_id(procs: ProcView) -> int:
    """Return a number for an `OutputTarget`."""
    return procs._controller.next_id()


def output_target(procs: ProcView) -> OutputTarget | None:
    """Return the target of the prints of a call that is made now; None for our stdout."""
    shown_by, source = procs._mesh.shown_by, procs._controller.front_end.output_source
    if shown_by is not None and (target := shown_by.target) is not None:
        return target
    return source(procs) if source else None


# ---- questions to control threads, which answer also while the ranks are busy or stuck ----------------------------


def ask(procs: ProcView, kind: type[T], endpoint: str, *args: object, timeout_s: float = 0.5) -> dict[int, T]:
    """Put a question to the members' control threads; returns the answers that came in time, by rank.

    kind: the type of the answers; ``object`` leaves them as they are. Members that answer None are left out.
    endpoint: one of `meshbook.worker.queries.QUERIES`. args: plain data.
    """
    ranks = procs._present()._members.ranks()
    return procs._controller.questions.gather(procs._mesh, ranks, ask_rank(endpoint, *args), kind, timeout_s)


def ask_first(
    procs: ProcView,
    kind: type[T],
    endpoint: str,
    *args: object,
    ranks: Sequence[int],
    patience_s: float,
    timeout_s: float,
) -> tuple[int, T | None] | None:
    """Put a question to the first of ``ranks`` that answers; see `meshbook.controller.queries.Questions.first`."""
    procs._present()
    asked = ask_rank(endpoint, *args)
    return procs._controller.questions.first(
        procs._mesh, ranks, asked, kind, patience_s=patience_s, timeout_s=timeout_s
    )
