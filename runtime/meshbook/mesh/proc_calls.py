"""What members of a mesh run: cells, functions, and values that are bound and brought."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from meshbook.actor.router import Values
from meshbook.calls.call_future import CallFuture
from meshbook.calls.cell_run import CellRun
from meshbook.calls.output import OutputListener, OutputTarget
from meshbook.calls.request import CallRequest
from meshbook.concurrency.future import Future, MappedFuture, join_futures
from meshbook.concurrency.sigint import held_back
from meshbook.errors import (
    LayoutError,
    SerializationError,
    UsageError,
)
from meshbook.formatting import format_sizes
from meshbook.mesh import partition
from meshbook.mesh.proc_view import ProcView, call_living
from meshbook.shape.members import Choice
from meshbook.shape.value_mesh import ValueMesh
from meshbook.shell.postmortem_memory import Freed
from meshbook.source.location import sources_of, text_only_here
from meshbook.values.main_names import Sending
from meshbook.values.pickling import dumps
from meshbook.workspace.local_modules import find_modules
from meshbook.workspace.synced_modules import Synced, take_modules

T = TypeVar("T")

_NO_RANKS: frozenset[int] = frozenset()
_EXECUTED = Sending("missing")


class CodeCalls(ProcView):
    """Base of ProcMesh: calls that run code, or move values, on its members."""

    def run(self, code: str, *, forbid_collectives: bool = False) -> Future[Values]:
        """Run ``code`` as an IPython cell on every member; the values are those of its last expression.

        forbid_collectives: a collective raises rather than wait for ranks that do not run this cell.
        """
        return self._call("run_cell", (code, None, 0, forbid_collectives), what="the cell", fail_fast=False)

    def start_cell(
        self,
        code: str,
        *,
        on_output: OutputListener,
        cell_number: int | None = None,
        line_offset: int = 0,
        forbid_collectives: bool = False,
        debug_name: str = "",
        profile: str = "",
        holding: contextlib.ExitStack | None = None,
    ) -> CellRun:
        """Run a notebook's cell; ``on_output`` gets everything that it prints and shows, also later.

        cell_number, line_offset: how tracebacks name the cell, and how many of its lines stand above ``code``.
        forbid_collectives: a collective raises rather than wait for ranks that do not run this cell.
        debug_name: what a debugger calls the cell's file.
        profile: have torch.profiler record it under this name, to be collected by `meshbook.mesh.profiles`.
        holding: what is to hold interrupts back from the sending on, until it is closed by whoever waits for the cell.
        """
        self._present()
        if self._mesh.before_calls:
            call_living(self._mesh.before_calls)
        run = CellRun(self.new_output_id(), on_output)
        what = f"cell {cell_number}" if cell_number else "the cell"
        arguments = (code, cell_number, line_offset, forbid_collectives, debug_name, profile)
        pickled = dumps((arguments, {}), what="the cell")
        request = CallRequest("run_cell", self._members, pickled, what, fail_fast=False, on_reply=run.on_reply)
        if holding is not None:
            self._controller.wait_for_room()  # while an interrupt still ends that
            holding.enter_context(held_back())
        run.attach(self._controller.call(self._mesh, request, OutputTarget(run.id, on_output)))
        return run

    def execute(self, function: Callable[..., T], *args: object, **kwargs: object) -> Future[ValueMesh[T]]:
        """Call ``function(*args, **kwargs)`` on every member.

        Functions and classes of the notebook travel by value, as they are now. Raises: SerializationError.
        """
        name = getattr(function, "__name__", "a function")
        file: str | None = getattr(getattr(function, "__code__", None), "co_filename", None)
        ranks, sources = self._members.rank_set, self._mesh.sources
        if file is None or ranks <= sources.get(file, _NO_RANKS):
            return self._invoke("invoke", name, (), function, args, kwargs)
        # It brings its text itself: a call goes past whatever is on its way by the agent.
        future = self._invoke("invoke_with_source", name, (file, text_only_here(file)), function, args, kwargs)
        sources.setdefault(file, set()).update(ranks)
        return future

    def _invoke(
        self,
        endpoint: str,
        name: str,
        about: tuple[object, ...],
        function: Callable[..., T],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Future[ValueMesh[T]]:
        """about: what the endpoint takes before the function. Raises: SerializationError that names the argument."""
        try:
            return self._call(endpoint, (*about, function, *args), kwargs, what=name, sending=_EXECUTED)
        except SerializationError:  # once more, to say which argument it was
            roots = {name: function, **{f"argument {index}": value for index, value in enumerate(args, 1)}, **kwargs}
            return self._call(endpoint, (*about, function, *args), kwargs, what=name, roots=roots)

    def execute_as(self, what: str, function: Callable[..., T], *args: object) -> Future[ValueMesh[T]]:
        """As `execute`, of a function that ranks can import, with all failures in the error, not the first alone.

        what: the call, as notes, errors and status name it.
        """
        return self._call("invoke", (function, *args), what=what, fail_fast=False)

    def sync_workspace(
        self, workspace: str | Path = ".", conda: bool = False, auto_reload: bool = False
    ) -> Future[ValueMesh[dict[str, Synced]]]:
        """Send the Python modules at a path to the members, which import them from memory and reload those in use.

        workspace: a module's file, a package, or a folder that has some. Values: what became of each module, by name.
        conda, auto_reload: Monarch's. What is in use is reloaded either way.
        Raises: UsageError, also where one does not parse, and for ``conda=True``: packages are installed there.
        """
        refuse_conda(conda)
        found = find_modules(Path(workspace))
        for name, problem in found.broken.items():
            raise UsageError(f"{name} does not parse ({problem}); nothing was sent")
        return self.execute_as("sync_workspace", take_modules, found.modules)

    def evaluate(self, expression: str) -> Future[Values]:
        """The value of an expression in each member's namespace."""
        return self._call("pull", ([expression],), what=expression)

    def push(self, values: Mapping[str, object]) -> Future[ValueMesh[None]]:
        """Bind names on every member, whose functions and classes read the names there, as they are when they run.

        What they read and bring along is bound there too, where nothing has its name. Raises: SerializationError naming
        the part that cannot travel.
        """
        sending = Sending("rank", values.values())
        about = dict(values), sources_of(*values.values())
        return self._call("push", about, what="push", roots=values, sending=sending)

    def pull(self, name: str) -> Future[Values]:
        """Bring the value of ``name`` from every member."""
        return self.evaluate(name)

    def pull_together(self, names: Sequence[str]) -> Future[dict[str, Values]]:
        """Bring the values of names from every member; what two of them share there, they share here.

        So an optimizer that comes with its model steps that model.
        """

        def column(rows: ValueMesh[Sequence[object]], at: int) -> Values:
            return ValueMesh.lazy(self._members, lambda rank: rows.get(rank)[at])

        def by_name(rows: ValueMesh[Sequence[object]]) -> dict[str, Values]:
            return {name: column(rows, at) for at, name in enumerate(names)}

        if len(names) == 1:
            return MappedFuture(self.pull(names[0]), lambda values: {names[0]: values})
        return MappedFuture(self._call("pull", (list(names),), what=", ".join(names)), by_name)

    def free(self) -> Future[ValueMesh[Freed]]:
        """Let go of the frames of each member's last exception, with their tensors, and of device caches.

        There is nothing to look at for a post-mortem after that.
        """
        return self._call("free", (), what="free")

    def scatter(self, name: str, value: object, axis: str | None = None, dim: int = 0) -> Future[list[ValueMesh[None]]]:
        """Bind ``name`` to one piece of ``value`` per index of ``axis``; members that share the index get the same.

        value: a tensor or array, cut along ``dim`` as by ``tensor_split``, or a sequence. axis: the mesh's only axis by
        default.
        """
        axis = self._one_axis(axis)
        pieces = partition.split(value, self.size(axis), dim)
        futures = [self.pick(**{axis: i}).push({name: piece}) for i, piece in enumerate(pieces)]
        return join_futures(futures)

    def gather(self, name: str, axis: str | None = None, dim: int = 0) -> Future[Any]:
        """Bring ``name`` from the members along ``axis`` (index 0 of all others) and join it along ``dim``."""
        axis = self._one_axis(axis)
        others: dict[str, Choice] = {label: 0 for label in self.sizes if label != axis}
        members = self.pick(**others)
        pieces = members._call("pull", ([name], list(members.ranks)), what=name)
        return MappedFuture(pieces, lambda values: partition.join(values.values(), dim))

    def _one_axis(self, axis: str | None) -> str:
        if axis is not None:
            self._members.size(axis)
            return axis
        if len(self.sizes) != 1:
            raise LayoutError(
                f"this mesh has {format_sizes(self.sizes)}: say which axis, as in axis={next(iter(self.sizes), '')!r}."
            )
        return next(iter(self.sizes))

    def postmortem(self) -> CallFuture[Values]:
        """Have the members, which must be idle, open a prompt each on the frames of their last exception.

        Completes when the person has left all of them.
        """
        return self._call("postmortem", (), what="the post-mortem", fail_fast=False)


def refuse_conda(conda: bool) -> None:
    """Raises: UsageError."""
    if conda:
        raise UsageError("conda=True: the packages of an environment are not sent; install them there, by pip.")
