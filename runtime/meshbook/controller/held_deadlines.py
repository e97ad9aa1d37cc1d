"""While a rank of a mesh stands at a prompt, all its ranks hold their deadlines: they may be waiting for that one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from meshbook.calls.table import CallTable, OpenQuestion
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.queries import ask_rank, put
from meshbook.wire import messages as wire


class HeldDeadlines:
    """Notes which ranks stop and go on (`meshbook.calls.stopped.StoppedRanks`), and tells the ranks of their mesh."""

    def __init__(self, calls: CallTable, next_id: Callable[[], int]) -> None:
        self._calls, self._next_id = calls, next_id

    def on_prompted(self, mesh: MeshState, message: wire.Prompted) -> None:
        """A rank has come to a prompt, has written there, or goes on."""
        with self._telling_of_changes(mesh):
            stop = mesh.stopped_ranks.take(message.rank, message.at, message.output)
        if stop is not None:
            self._calls.tell(message.output, stop)

    def merge(self, mesh: MeshState, prompts: Mapping[int, wire.AtPrompt]) -> None:
        """Take in what ranks answered when asked for their prompts; a former controller may have held deadlines."""
        for rank, at in prompts.items():
            mesh.stopped_ranks.take(rank, at, 0)
        self._tell_all(mesh)

    def on_ended(self, mesh: MeshState, ranks: Iterable[int]) -> None:
        """Ranks are at no prompt any more: they have ended, or are told to."""
        with self._telling_of_changes(mesh):
            for rank in ranks:
                mesh.stopped_ranks.lose(rank)

    def on_ready(self, mesh: MeshState) -> None:
        """Ranks have come, perhaps while others stand at prompts."""
        if mesh.stopped_ranks:
            self._tell_all(mesh)

    @contextlib.contextmanager
    def _telling_of_changes(self, mesh: MeshState) -> Iterator[None]:
        """If ranks are stopped after the block and none was before, or the other way round, tell all ranks."""
        before = bool(mesh.stopped_ranks)
        yield
        if bool(mesh.stopped_ranks) != before:
            self._tell_all(mesh)

    def _tell_all(self, mesh: MeshState) -> None:
        question = OpenQuestion(self._next_id(), mesh.id, object, 0.0)
        everyone = mesh.by_host(range(mesh.extent.nelements))
        put(self._calls, question, mesh, everyone, ask_rank("hold_deadlines", bool(mesh.stopped_ranks)))
