"""ProcView: some of the processes of a mesh, arranged by axes: which they are, and how they are asked and called."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from meshbook.calls.call_future import CallFuture
from meshbook.calls.output import OutputTarget
from meshbook.calls.request import CallRequest
from meshbook.controller.controller import Controller
from meshbook.controller.mesh_state import MeshState, stale_view
from meshbook.controller.queries import ask_rank
from meshbook.lifecycle import MeshPhase
from meshbook.mesh.log_streaming import LogStreaming
from meshbook.shape.members import Extent, Members, Region, arrange
from meshbook.shape.view import MeshView
from meshbook.values.main_names import Sending
from meshbook.values.pickling import dumps

T = TypeVar("T")
Self = TypeVar("Self", bound="ProcView")

Methods: TypeAlias = "list[weakref.WeakMethod[Callable[[], object]]]"


def _living(methods: Methods) -> Methods:
    return [method for method in methods if method() is not None]


def call_living(methods: Methods) -> list[object]:
    """Call those whose objects are still there; returns what they return."""
    return [method() for each in methods if (method := each()) is not None]


class ProcView(MeshView):
    """What everything that a `meshbook.mesh.proc_mesh.ProcMesh` can do begins with."""

    def __init__(
        self, controller: Controller, mesh: MeshState, members: Members | None = None, generation: int | None = None
    ) -> None:
        """members: all by default. generation: in which they have their numbers; that of now by default."""
        super().__init__(Region.of(mesh.extent) if members is None else members)
        self._controller, self._mesh = controller, mesh
        self._generation = mesh.generation if generation is None else generation

    @property
    def name(self) -> str:
        return self._mesh.name

    def be_called(self, name: str) -> None:
        """Give the mesh another name in this process, and with its session; what ranks have named stays."""
        self._mesh.name = name
        self._controller.folder.save_mesh(self._mesh.id, self._mesh.saved)

    @property
    def id(self) -> int:
        """Names the mesh in its session, also for later controllers; views of a mesh have the same."""
        return self._mesh.id

    @property
    def session(self) -> str:
        """The session that it belongs to: what another process attaches."""
        return self._controller.folder.id

    @property
    def alive(self) -> bool:
        """Whether the mesh has not been stopped."""
        return self._mesh.phase not in (MeshPhase.STOPPING, MeshPhase.STOPPED)

    @property
    def is_grouped(self) -> bool:
        """Whether its ranks form process groups by themselves."""
        return self._mesh.grouped

    @property
    def is_renumbered(self) -> bool:
        """Whether ranks have other numbers now than in this view: the mesh has grown or shrunk since."""
        return self._generation != self._mesh.generation

    def check_numbers(self) -> None:
        """Raises: LayoutError if ranks have other numbers than in this view."""
        self._present()

    def base(self: Self) -> Self:
        """The whole mesh that this is a view of."""
        return type(self)(self._controller, self._mesh)

    def as_on_ranks(self: Self) -> Self:
        """The whole mesh with the axes that `mesh` and `point` have on the ranks; see `set_axes`."""
        return type(self)(self._controller, self._mesh, Region.of(self._mesh.axes))

    def arrange(self: Self, sizes: Mapping[str, int], ranks: Sequence[int]) -> Self:
        """A view of ``ranks`` (distinct base ranks, in C order) laid out along axes of these sizes."""
        return self._part(arrange(Extent.of(sizes), ranks))

    def _part(self: Self, members: Members) -> Self:
        return type(self)(self._controller, self._mesh, members, self._generation)

    def _present(self: Self) -> Self:
        """Wait until the processes are there. Raises: LayoutError if ranks have other numbers than in this view."""
        self._mesh.await_arrival()
        if self.is_renumbered:
            raise stale_view(self._mesh)
        return self

    def ask(self, endpoint: str, *args: object, timeout_s: float = 0.5) -> dict[int, object]:
        """Put a question to the members' control threads, which answer also while the ranks are busy or stuck.

        endpoint: one of `meshbook.worker.queries.QUERIES`. args and answers are plain data. Returns: what came in
        time; members that answer None are left out.
        """
        return self.ask_for(object, endpoint, *args, timeout_s=timeout_s)

    def ask_for(self, kind: type[T], endpoint: str, *args: object, timeout_s: float = 0.5) -> dict[int, T]:
        """The same, with answers as ``kind``."""
        ranks = self._present().members.ranks()
        return self._controller.questions.gather(self._mesh, ranks, ask_rank(endpoint, *args), kind, timeout_s)

    def ask_one(
        self, kind: type[T], endpoint: str, *args: object, ranks: Sequence[int], patience_s: float, timeout_s: float
    ) -> tuple[int, T | None] | None:
        """The same to the first of ``ranks`` that answers; see `meshbook.controller.queries.Questions.first`."""
        self._present()
        asked = ask_rank(endpoint, *args)
        return self._controller.questions.first(
            self._mesh, ranks, asked, kind, patience_s=patience_s, timeout_s=timeout_s
        )

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
        if self._generation != self._mesh.generation:  # `_present`, on the path of every call
            raise stale_view(self._mesh)
        if self._mesh.before_calls:
            call_living(self._mesh.before_calls)
        pickled = dumps((args, kwargs or {}), what=what, roots=roots, sending=sending)
        request = CallRequest(endpoint, self._members, pickled, what, fail_fast=fail_fast)
        return self._controller.call(self._mesh, request, self.output_target())

    def new_output_id(self) -> int:
        """A number for an `OutputTarget`."""
        return self._controller.next_id()

    def output_target(self) -> OutputTarget | None:
        """Where what a call prints goes that is made now; None: to our stdout."""
        shown_by, source = self._mesh.shown_by, self._controller.front_end.output_source
        if shown_by is not None and (target := shown_by.target()) is not None:
            return target
        return source(self) if source else None

    def show_calls_by(self, streaming: LogStreaming) -> None:
        """Have what calls to the mesh print, those of cells apart, shown so from now on."""
        self._mesh.shown_by = streaming

    def call_before_calls(self, method: Callable[[], object]) -> None:
        """Call a method before each call to these processes is sent, as long as its object lives; see `base`."""
        self._mesh.before_calls = [*_living(self._mesh.before_calls), weakref.WeakMethod(method)]

    def call_after_repairs(self, method: Callable[[], object]) -> None:
        """Call a method when ranks of these processes were started again, as long as its object lives."""
        self._mesh.after_repairs = [*_living(self._mesh.after_repairs), weakref.WeakMethod(method)]
