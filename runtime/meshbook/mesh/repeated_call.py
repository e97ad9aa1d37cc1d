"""A call that is made again and again with another last argument: what is the same each time is made once.

A module of its own because it outlives the call, as nothing in `meshbook.mesh.proc_calls` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshbook.calls.call_future import CallFuture
from meshbook.calls.request import CallRequest
from meshbook.controller.mesh_state import stale_view
from meshbook.mesh.proc_view import Methods, ProcView, call_living
from meshbook.values.pickling import PreparedArguments


class RepeatedCall:
    """Of a function that ranks can import, to all members of a view; see `ProcMesh.execute_as`."""

    def __init__(
        self, procs: ProcView, what: str, function: Callable[..., object], *same: object, caller: object = None
    ) -> None:
        """same: the arguments before the last, plain values. caller: has nothing to do before these calls."""
        self._procs, self._what, self._caller = procs, what, caller
        self._arguments = PreparedArguments(function, *same)
        self._known: Methods = []
        self._others: Methods = []

    def start(self, last: object) -> CallFuture[Any]:
        """Call it once more. last: the last argument, of plain values. Raises: as `ProcMesh.execute`."""
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
        return procs._controller.call(mesh, request, procs.output_target())
