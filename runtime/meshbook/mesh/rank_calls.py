"""Calls to the ranks of a mesh that front ends, actors and tensors make, and users do not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from meshbook.actor.router import Values
from meshbook.calls.call import CallRequest
from meshbook.calls.call_future import CallFuture, CellRun
from meshbook.calls.output import (
    ConsoleOutput,
    DisplayData,
    OutputDropped,
    OutputEvent,
    OutputListener,
    OutputTarget,
    StreamText,
)
from meshbook.concurrency.future import Future, MappedFuture, join_futures
from meshbook.concurrency.interrupts import held_back
from meshbook.controller.mesh_state import stale_view
from meshbook.errors import LayoutError, UsageError
from meshbook.mesh.proc_view import (
    Methods,
    ProcView,
    call_living,
    new_output_id,
    output_target,
)
from meshbook.shape.value_mesh import ValueMesh
from meshbook.shell.scripts import Script
from meshbook.values.pickling import PreparedArguments, dumps

T = TypeVar("T")

LEVEL_MAX = 255
"""The highest level of `ProcMesh.logging_option`."""


def start_cell(
    procs: ProcView,
    code: str | Script,
    *,
    on_output: OutputListener,
    cell_number: int | None = None,
    line_offset: int = 0,
    forbid_collectives: bool = False,
    debug_name: str = "",
    profile: str = "",
    holding: contextlib.ExitStack | None = None,
) -> CellRun:
    """Run a notebook's cell, or a program; ``on_output`` gets everything that the cell prints and shows, also later.

    cell_number, line_offset: how tracebacks name the cell, and how many of its lines stand above ``code``.
    forbid_collectives: a collective raises rather than wait for ranks that do not run this cell.
    debug_name: the name of the cell's file in a debugger.
    profile: have torch.profiler record the cell under this name, to be collected by `meshbook.mesh.profiles`.
    holding: gets the hold on interrupts, from the sending on; the caller closes it once it waits for the cell.
    """
    controller, mesh = procs._present()._controller, procs._mesh
    if mesh.before_calls:
        call_living(mesh.before_calls)
    run = CellRun(new_output_id(procs), on_output)
    what = f"cell {cell_number}" if cell_number else "the cell"
    arguments = (code, cell_number, line_offset, forbid_collectives, debug_name, profile)
    pickled = dumps((arguments, {}), what="the cell")
    request = CallRequest("run_cell", procs._members, pickled, what, fail_fast=False, on_reply=run.on_reply)
    if holding is not None:
        controller.wait_for_room()  # while an interrupt still ends that
        holding.enter_context(held_back())
    run.attach(controller.call(mesh, request, OutputTarget(run.id, on_output)))
    return run


def execute_as(procs: ProcView, what: str, function: Callable[..., T], *args: object) -> Future[ValueMesh[T]]:
    """Call a function that ranks can import on every member; its error has the failures of all, not only the first.

    what: the name of the call in notes, errors and status.
    """
    return procs._call("invoke", (function, *args), what=what, fail_fast=False)


def pull_together(procs: ProcView, names: Sequence[str]) -> Future[dict[str, Values]]:
    """Bring the values of names from every member; objects that two values share there, they share here.

    So an optimizer that comes with its model steps that model.
    """

    def column(rows: ValueMesh[Sequence[object]], at: int) -> Values:
        return ValueMesh.lazy(procs._members, lambda rank: rows.get(rank)[at])

    if len(names) == 1:
        values = procs._call("pull", ([names[0]],), what=names[0])
        return MappedFuture(values, lambda values: {names[0]: values})
    rows = procs._call("pull", (list(names),), what=", ".join(names))
    return MappedFuture(rows, lambda rows: {name: column(rows, at) for at, name in enumerate(names)})


class RepeatedCall:
    """A call that is made again and again with another last argument; the rest of the call is pickled once.

    The function is one that ranks can import, and is called as by `execute_as`.
    """

    def __init__(
        self, procs: ProcView, what: str, function: Callable[..., object], *same: object, caller: object = None
    ) -> None:
        """same: the leading arguments, plain values. caller: the object whose own method before calls is skipped."""
        self._procs = procs
        self._what = what
        self._caller = caller
        self._arguments = PreparedArguments(function, *same)
        self._known: Methods = []
        self._others: Methods = []

    def start(self, last: object) -> CallFuture[Any]:
        """Make the call once more. last: the last argument, of plain values. Raises: as `ProcMesh.execute`."""
        procs = self._procs
        mesh = procs._mesh
        if procs._generation != mesh.generation:
            raise stale_view(mesh)
        if mesh.before_calls is not self._known:
            self._known = mesh.before_calls
            self._others = [each for each in self._known if getattr(each(), "__self__", None) is not self._caller]
        if self._others:
            call_living(self._others)
        request = CallRequest("invoke", procs._members, self._arguments.dumps(last), self._what, fail_fast=False)
        return procs._controller.call(mesh, request, output_target(procs))


# ---- process groups -----------------------------------------------------------------------------------------------


def set_axes(procs: ProcView) -> Future[ValueMesh[None]]:
    """Rebind ``mesh`` and ``point`` on the ranks to the axes of this view, which must cover the whole mesh."""
    if procs.ranks != tuple(range(procs._mesh.extent.nelements)):
        raise LayoutError("only a view of the whole mesh, in rank order, can become the ranks' axes.")
    procs._mesh.axes = procs.sizes
    return procs._call("set_axes", (tuple(procs.sizes), tuple(procs.sizes.values())), what="the axes")


def join_ranks(procs: ProcView) -> CallFuture[ValueMesh[None]]:
    """Have the ranks of a whole mesh form their process groups; or meet, where cells make groups of their own.

    Ranks that only meet have torchrun's variables afterwards.
    """
    controller, mesh = procs._controller, procs._mesh
    if not mesh.grouped:
        return procs._call("prepare_group", (controller.next_id(),), what="the ranks' variables")
    mesh.await_arrival()
    return controller.form_groups(mesh)


def abort_groups(procs: ProcView, reason: str) -> None:
    """Free all ranks of the mesh that wait in collectives: they raise GroupAborted. Does not wait.

    The groups are formed again when the calls that run now have ended. reason: the text of the ranks' errors.
    """
    procs._controller.abort_groups(procs._mesh, reason)


# ---- logging ------------------------------------------------------------------------------------------------------


def set_logging(procs: ProcView, stream: bool, level: int) -> Future[None]:
    """Show or hide the prints of calls, and have ranks log from a level on, as `ProcMesh.logging_option` says."""
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= LEVEL_MAX:
        raise UsageError(f"level is one of logging's, as in level=logging.INFO, from 0 to {LEVEL_MAX}; got {level!r}.")
    streaming = procs._mesh.shown_by = LogStreaming(procs.base(), stream, level)
    return streaming.set_levels(level)


def hide_calls(procs: ProcView) -> None:
    """Leave the prints of calls to the logs, until `ProcMesh.logging_option` says otherwise."""
    procs._mesh.shown_by = LogStreaming(procs.base(), False)


class LogStreaming:
    """The choice how prints of calls to one mesh are shown, and the level of its ranks' root loggers."""

    def __init__(self, procs: ProcView, stream: bool, level: int | None = None) -> None:
        """procs: the whole mesh. level: None where nobody has chosen one."""
        self._procs = procs
        self._level = level
        self.target = None if stream else OutputTarget(new_output_id(procs), _without_prints(ConsoleOutput()))
        """The target of the prints of a call; None leaves them to the front end."""

    def set_levels(self, level: int) -> Future[None]:
        """Have the ranks' root logger write to stderr from the level on, unless the program has given it handlers."""
        what, root = "logging_option", logging.getLogger()
        done = [
            execute_as(self._procs, what, logging.basicConfig),  # ranks need no module of ours for it
            execute_as(self._procs, what, root.setLevel, level),
        ]
        return MappedFuture(join_futures(done), lambda _: None)

    def set_levels_again(self) -> None:
        """Wait until new ranks log at the level: their actors do not wait for the calls to their processes."""
        repaired = self._procs._mesh.last_repair
        if self._level is not None and repaired is not None and repaired.ranks:
            self.set_levels(self._level).get()


def _without_prints(console: OutputListener) -> OutputListener:
    """Return a listener that leaves prints to the logs, and shows the rest at a console."""

    def listen(event: OutputEvent) -> None:
        if not isinstance(event, (StreamText, DisplayData, OutputDropped)):
            console(event)

    return listen
