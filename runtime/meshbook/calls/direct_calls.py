"""The caller's end of direct links (`meshbook.wire.direct`): which link a call may take, and what becomes of it.

A message to a rank goes by its link, or is relayed by the agent. Order holds, since a message takes the link only when
the rank has read all that was relayed to it before, as an answer to a relayed call shows. The rank looks at its links
before it takes what the agent has brought.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from meshbook.errors import PeerProtocolError
from meshbook.shape.members import group
from meshbook.wire import messages as wire
from meshbook.wire.direct import DirectLink, DirectListener
from meshbook.wire.frames import Buffer

MAX_LINKS = 64  # of one caller
MAX_KEPT = 64  # answers that a rank keeps by one link
UNANSWERED = -1  # stands for a message without an answer

LinkKey = tuple[int, int, bool]  # mesh, generation of its ranks, whether it is to mailboxes


class CallerLink(DirectLink):
    """A link to a rank's main thread, or to its mailboxes."""

    settles_at_once = False

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.hello: wire.DirectHello | None = None
        """The rank's first message."""
        self.rank = self.pid = -1
        self.relayed = UNANSWERED
        """The last call that was relayed to the rank and is not answered: its answer shows that the rank has read all
        that was relayed before. 0: there is none. At first it is not known what was relayed."""
        self._unsettled: deque[int] = deque()

    def may_send(self, is_open: Callable[[int], bool]) -> bool:
        """Whether no relayed message may still be on its way to the rank, and it need not keep too many answers."""
        if len(self._unsettled) >= MAX_KEPT:
            self.settle(is_open)
        return not self.relayed and len(self._unsettled) < MAX_KEPT

    def note_answer(self, id: int) -> None:
        """Note that an answer has come, or a message that is none (0): the rank keeps it until it is settled."""
        self._unsettled.append(id)

    def settle(self, is_open: Callable[[int], bool]) -> None:
        """Let the rank forget answers to calls that are over on all ranks: it may have to tell the next controller."""
        while self._unsettled and not is_open(self._unsettled[0]):
            self._unsettled.popleft()
            self.settled += 1


class SentCall(NamedTuple):
    """A call that has gone by links, and those by which no answer has come."""

    call: wire.Call
    payload: Sequence[Buffer]
    links: list[CallerLink]


class CallerLinks:
    """The links of one process to ranks that it calls. One thread at a time uses it, but for `send`."""

    def __init__(
        self,
        next_number: Callable[[], int],
        is_welcome: Callable[[wire.DirectHello], bool],
        is_open: Callable[[int], bool],
        on_replies: Callable[[CallerLink, wire.Replies, list[bytes]], object],
        relay: Callable[[wire.Call, Sequence[Buffer]], object],
        watch: Callable[[int, Callable[[], object]], object],
        forget: Callable[[int], object],
    ) -> None:
        """next_number: returns numbers that go up, also from one controller to the next.

        is_welcome: whether a rank may link to us. is_open: whether a call is not over on all ranks. relay: sends a call
        by the agent. watch, forget: have a function called when a descriptor can be read, or no more.
        """
        self._next_number = next_number
        self._is_welcome, self.is_open, self._on_replies, self._relay = is_welcome, is_open, on_replies, relay
        self._watch, self._forget = watch, forget
        self._listener: DirectListener | None = None
        self._strangers: set[CallerLink] = set()
        self.by_key: dict[LinkKey, dict[int, CallerLink]] = {}
        """The links by rank."""
        self.open: dict[int, SentCall] = {}
        """The unanswered calls that have gone by links."""

    def listen(self, path: str) -> None:
        """Let ranks link to us. Raises: OSError."""
        self._listener = DirectListener(path)
        self._watch(self._listener.fd, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        while (sock := self._listener.accept()) is not None:
            if len(self.all()) + len(self._strangers) >= MAX_LINKS:
                sock.close()
                continue
            link = CallerLink(sock)
            self._strangers.add(link)
            self._watch(link.fd, lambda link=link: self.serve(link))  # type: ignore[misc]

    def all(self) -> list[CallerLink]:
        """Return the links."""
        return [link for links in self.by_key.values() for link in links.values()]

    def of_mesh(self, mesh: int) -> list[CallerLink]:
        """Return the links to ranks of a mesh."""
        return [link for key, links in self.by_key.items() if key[0] == mesh for link in links.values()]

    def serve(self, link: CallerLink) -> None:
        """Take what a rank has sent."""
        try:
            while (received := link.receive()) is not None:
                header, frames = received
                message = wire.decode_past_agent(header)
                link.note_answer(message.id if isinstance(message, wire.Replies) else 0)
                if isinstance(message, wire.Replies) and link.hello is not None:
                    self._settle(message.id, link)
                    self._on_replies(link, message, frames)
                elif not isinstance(message, wire.DirectHello) or not self._greet(link, message):
                    raise PeerProtocolError("a stranger, or a message of no callee")
        except (PeerProtocolError, *wire.MALFORMED):
            link.is_open = False
        if not link.is_open:
            self.drop(link)
            link.close()
            self._send_again(link)

    def _send_again(self, link: CallerLink) -> None:
        """Send the unanswered calls of a broken link by the agent, which answers for the rank if it has ended."""
        for sent in [sent for sent in self.open.values() if link in sent.links]:
            self._settle(sent.call.id, link)
            target = group([link.rank])
            self._relay(msgspec.structs.replace(sent.call, target=target, pid=link.pid), sent.payload)

    def _greet(self, link: CallerLink, hello: wire.DirectHello) -> bool:
        if link.hello is not None or not self._is_welcome(hello):
            return False
        link.hello, link.rank, link.pid = hello, hello.rank, hello.pid
        links = self.by_key.setdefault((hello.mesh, hello.generation, hello.is_mail), {})
        if (former := links.get(hello.rank)) is not None:
            self.close(former)
        links[hello.rank] = link
        self._strangers.discard(link)
        return True

    def send(self, links: Sequence[CallerLink], message: wire.Call, payload: Sequence[Buffer]) -> list[CallerLink]:
        """Send a call by links; return those by which it has not gone."""
        hello = links[0].hello
        assert hello is not None
        message = msgspec.structs.replace(message, direct=self._next_number(), generation=hello.generation)
        header = wire.encode(message)
        for link in links:
            link.settle(self.is_open)
        if message.reply:
            self.open[message.id] = SentCall(message, payload, list(links))
        left = [link for link in links if not link.send(header, message, payload)]
        for link in left:
            self._settle(message.id, link)
        return left

    def _settle(self, id: int, link: CallerLink) -> None:
        """Expect no answer to a call from a link."""
        if (sent := self.open.get(id)) is not None:
            if link in sent.links:
                sent.links.remove(link)
            if not sent.links:
                self.open.pop(id, None)

    def relay(self, key: LinkKey, ranks: Collection[int], id: int) -> None:
        """Note that a message is relayed to ranks. id: of a call that is answered, else `UNANSWERED`."""
        if (links := self.by_key.get(key)) is not None:
            for rank, link in links.items():
                if rank in ranks:
                    link.relayed = id

    def hear(self, key: LinkKey, replies: Iterable[wire.RankReply], id: int) -> None:
        """Note answers to a relayed call; or to one that has gone by links, by the agent."""
        if (links := self.by_key.get(key)) is None:
            return
        is_open = id in self.open
        for reply in replies:
            if reply.status <= wire.INTERRUPTED and (link := links.get(reply.rank)) is not None:
                if link.relayed == id:
                    link.relayed = 0
                if is_open:
                    self._settle(id, link)

    def acknowledge(self, link: CallerLink) -> None:
        """Tell a rank which answers it may forget; the next call would tell it, too."""
        link.settle(self.is_open)
        link.send(b"", None)

    def drop(self, link: CallerLink) -> None:
        """Send no more by a link."""
        if link.fd >= 0:
            self._forget(link.fd)
            link.fd = -1
        self._strangers.discard(link)
        for key, links in list(self.by_key.items()):
            if links.get(link.rank) is link:
                del links[link.rank]
            if not links:
                del self.by_key[key]

    def close(self, link: CallerLink) -> None:
        """Close a link, since the rank has ended, or will be called no more."""
        self.drop(link)
        link.close()
        for id in list(self.open):
            self._settle(id, link)

    def abandon(self) -> None:
        """Close the parent's descriptors in a forked child, which shares what watches them."""
        for link in (*self.all(), *self._strangers):
            link.close()
        if self._listener is not None:
            self._listener.close()
        self.by_key.clear()
        self.open.clear()

    def close_all(self) -> None:
        """Close all links, and let no rank link to us any more."""
        for link in (*self.all(), *self._strangers):
            self.close(link)
        if self._listener is not None:
            self._forget(self._listener.fd)
            self._listener.close()
            self._listener = None
