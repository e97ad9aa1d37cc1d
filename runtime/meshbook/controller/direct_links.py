"""The calls of the controller that go to ranks of its machine by direct links (`meshbook.wire.direct`). Under the turn.

The agent does not know these calls. While the controller lives it need not: it tells which ranks have ended. When the
controller has ended, each rank tells its agent which calls have come, and the answers that were not acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import msgspec

from meshbook.calls.call import OpenCall
from meshbook.calls.direct_calls import CallerLink, CallerLinks, LinkKey
from meshbook.calls.table import CallTable, OpenQuestion
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.queries import ask_rank, put
from meshbook.shape.members import AS_NOW, group
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer

MOST_RANKS = 16
"""A call to more ranks goes by their agent: one message for all of them."""
KEPT_NAMES = 256
"""The number of names of calls with large answers that are remembered."""
BROKEN_S = 60.0
"""The longest wait for a rank to say how much has come by a link that has broken."""


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
        self._meshes, self._calls, self._next_id = meshes, calls, next_id
        self._links = CallerLinks(
            self._is_welcome, lambda id: calls.find(id) is not None, self._on_replies, self._on_lost, watch, forget
        )
        self.listen, self.close = self._links.listen, self._links.close_all
        self._told: dict[int, int] = {}
        """The urgent messages to each mesh that its links know of: a later call by a link would overtake them."""
        self._owed: set[CallerLink] = set()
        # (mesh, name) of calls to several ranks with answers that had to go by the agent, which combines them
        self._large: set[tuple[int, str]] = set()

    def _is_welcome(self, hello: wire.DirectHello) -> bool:
        mesh = self._meshes.get(hello.mesh)
        worker = mesh.workers.get(hello.rank) if mesh is not None else None
        return (
            mesh is not None and worker is not None and worker.pid == hello.pid and hello.generation == mesh.generation
        )

    def send(
        self, host: HostState, mesh: MeshState, call: OpenCall, message: wire.Call, payload: Collection[Buffer]
    ) -> wire.Call | None:
        """Send a call of one host by links; return None, or the message to send by the host."""
        ranks = call.waiting
        links = self._links.by_key.get((mesh.id, mesh.generation, call.mailbox != 0))
        if links is None or message.output or len(ranks) > MOST_RANKS:
            return message
        if mesh.told != self._told.get(mesh.id):
            self._told[mesh.id] = mesh.told
            for each in self._links.of_mesh(mesh.id):
                each.relay(0)
        chosen = [link for rank in ranks if (link := links.get(rank)) is not None and link.may_send]
        if len(chosen) < len(ranks) or (len(ranks) > 1 and (mesh.id, call.what) in self._large):
            return message
        message = msgspec.structs.replace(message, direct=self._next_id(), generation=mesh.generation)
        if len(chosen) > 1:
            call.when_ended(partial(self._note_large, call))
        if not (left := self._links.send(chosen, message, list(payload))):
            return None
        return msgspec.structs.replace(message, target=group(link.rank for link in left), direct=0, generation=AS_NOW)

    def _note_large(self, call: OpenCall) -> None:
        for head, buffers in call.results.raw.values():
            if buffers or len(head) > wire.INLINE_MAX_BYTES:
                if len(self._large) >= KEPT_NAMES:
                    self._large.clear()
                self._large.add((call.mesh, call.what))
                return

    def relay(self, mesh: MeshState, mailbox: int, ranks: Collection[int], id: int) -> None:
        """Note that a message goes to ranks by their agents. id: of a call that is answered, else 0."""
        if self._links.by_key:
            self._links.relay((mesh.id, mesh.generation, mailbox != 0), ranks, id)

    def hear(self, call: OpenCall, replies: Iterable[wire.RankReply]) -> None:
        """Note answers that the agents have brought."""
        if not self._links.by_key or (mesh := self._meshes.get(call.mesh)) is None:
            return
        key = (mesh.id, mesh.generation, call.mailbox != 0)
        for reply in replies:
            if reply.status <= wire.INTERRUPTED:
                self._links.hear(key, reply.rank, call.id)

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
        for link in self._links.of_mesh(mesh):
            self._links.acknowledge(link)
            self._links.close(link)

    # ---- a link that has broken --------------------------------------------------------------------------------

    def _on_lost(self, link: CallerLink) -> None:
        """Ask a rank that may live how much has come by its link, and send it the rest by its agent."""
        hello = link.hello
        assert hello is not None
        mesh = self._meshes.get(hello.mesh)
        if mesh is None or link.rank in mesh.lost or mesh.generation != hello.generation:
            return

        def go_on(question: OpenQuestion[int]) -> None:
            for received in question.told.values():
                if received < 0:
                    return  # another process has the rank, or it has told its agent that we are gone
                for message, payload in link.unreceived(received):
                    if isinstance(message, wire.Call) and not host.lost:
                        one = msgspec.structs.replace(message, target=group([link.rank]), direct=0)
                        self._links.relay(key, (link.rank,), message.id if message.reply else 0)
                        host.send(one, payload)

        host = mesh.host_of(link.rank)
        key: LinkKey = (mesh.id, mesh.generation, hello.is_mail)
        question = OpenQuestion(self._next_id(), mesh.id, int, BROKEN_S, go_on)
        put(self._calls, question, mesh, {host: [link.rank]}, ask_rank("link_broken", hello.is_mail, link.received))
