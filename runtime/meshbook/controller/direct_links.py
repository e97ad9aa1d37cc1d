"""The calls of the controller that go to ranks of its machine by direct links (`meshbook.wire.direct`). Under the turn.

The agent does not know these calls. While the controller lives it need not: it tells which ranks have ended. When the
controller has ended, each rank tells its agent which calls have come, and the answers that were not acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from meshbook.calls.call import OpenCall
from meshbook.calls.direct_calls import UNANSWERED, CallerLink, CallerLinks
from meshbook.calls.table import CallTable
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState
from meshbook.shape.members import group
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer

MOST_RANKS = 16
"""A call to more ranks goes by their agent: one message for all of them."""


class DirectLinks:
    """The links of all meshes."""

    def __init__(
        self,
        meshes: Mapping[int, MeshState],
        calls: CallTable,
        next_id: Callable[[], int],
        watch: Callable[[int, Callable[[], object]], object],
        forget: Callable[[int], object],
    ) -> None:
        """watch, forget: see `CallerLinks`."""
        self._meshes, self._calls = meshes, calls
        self._links = CallerLinks(
            next_id,
            self._is_welcome,
            lambda id: calls.find(id) is not None,
            self._on_replies,
            self._relay,
            watch,
            forget,
        )
        self.listen, self.close = self._links.listen, self._links.close_all
        self._told: dict[int, int] = {}
        """The urgent messages to each mesh that its links know of: a later call by a link would overtake them."""
        self._last: dict[tuple[int, bool], int] = {}
        """The last call to several ranks by links, by mesh and kind: while it is open others go by the agent, many in
        one message."""
        self._owed: set[CallerLink] = set()

    def _is_welcome(self, hello: wire.DirectHello) -> bool:
        mesh = self._meshes.get(hello.mesh)
        worker = mesh.workers.get(hello.rank) if mesh is not None else None
        return (
            mesh is not None and worker is not None and worker.pid == hello.pid and hello.generation == mesh.generation
        )

    def send(
        self, host: HostState, mesh: MeshState, call: OpenCall, message: wire.Call, payload: Sequence[Buffer]
    ) -> wire.Call | None:
        """Send a call of one host by links; return None, or the message to send by the host."""
        ranks = call.waiting
        links = self._links.by_key.get((mesh.id, mesh.generation, call.mailbox != 0))
        if links is None or message.output or len(ranks) > MOST_RANKS:
            return message
        if mesh.told != self._told.get(mesh.id):
            self._told[mesh.id] = mesh.told
            for each in self._links.of_mesh(mesh.id):
                each.relayed = UNANSWERED
        way = mesh.id, call.mailbox != 0
        if len(ranks) > 1 and self._last.get(way) in self._links.open:
            return message
        is_open = self._links.is_open
        chosen = [link for rank in ranks if (link := links.get(rank)) is not None and link.may_send(is_open)]
        if len(chosen) < len(ranks):
            return message
        if len(chosen) > 1 and not call.beside:
            self._last[way] = call.id
        left = self._links.send(chosen, message, payload)
        return msgspec.structs.replace(message, target=group(link.rank for link in left)) if left else None

    def relay(self, mesh: MeshState, mailbox: int, ranks: Collection[int], id: int) -> None:
        """Note that a message goes to ranks by their agents. id: of a call that is answered, else `UNANSWERED`."""
        if self._links.by_key:
            self._links.relay((mesh.id, mesh.generation, mailbox != 0), ranks, id)

    def hear(self, call: OpenCall, replies: Iterable[wire.RankReply]) -> None:
        """Note answers that the agents have brought."""
        if not self._links.by_key or (mesh := self._meshes.get(call.mesh)) is None:
            return
        self._links.hear((mesh.id, mesh.generation, call.mailbox != 0), replies, call.id)

    def has(self, call: int) -> bool:
        """Whether a call has gone by a link, and is not answered."""
        return call in self._links.open

    def _on_replies(self, link: CallerLink, message: wire.Replies, frames: list[bytes]) -> None:
        self._owed.add(link)
        if (call := self._calls.find(message.id)) is not None:
            (reply,) = message.replies
            if not (reply.segment or reply.bulk):
                self._calls.answer(call, message, frames, ((),))

    def serve(self, mesh: MeshState, rank: int) -> None:
        """Take what a rank has sent by its links: it comes before what its agent says of it."""
        for link in [link for link in self._links.of_mesh(mesh.id) if link.rank == rank]:
            self._links.serve(link)

    def lose(self, mesh: MeshState, rank: int) -> None:
        """Close the links of a rank that has ended."""
        for link in [link for link in self._links.of_mesh(mesh.id) if link.rank == rank]:
            self._links.close(link)

    def acknowledge(self) -> None:
        """Tell the ranks that their answers have come; a next call would have told them so too."""
        for link in self._owed:
            self._links.acknowledge(link)
        self._owed.clear()

    def forget(self, mesh: int) -> None:
        """Close the links of a mesh that has ended, or whose ranks get other numbers."""
        self._told.pop(mesh, None)
        for is_mail in (False, True):
            self._last.pop((mesh, is_mail), None)
        for link in self._links.of_mesh(mesh):
            self._links.acknowledge(link)
            self._links.close(link)

    def _relay(self, call: wire.Call, payload: Sequence[Buffer]) -> None:
        """Send a call by the agent of the rank that it is for."""
        mesh = self._meshes.get(call.mesh)
        rank = call.target[0].offset
        if mesh is not None and rank not in mesh.lost and mesh.generation == call.generation:
            self.relay(mesh, call.mailbox, (rank,), call.id)
            if not (host := mesh.host_of(rank)).lost:
                host.send(call, payload)
