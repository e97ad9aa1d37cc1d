"""The direct links of a rank (`meshbook.wire.direct`): those by which it is called, and those by which it calls others.

A rank dials a caller that has called it some times by the agent. Small answers go back by the link; those with large
values, and those behind a print, by the agent. An agent that loses its controller asks what has come by links
(`CalleeLinks.tell`), since the next controller is to know.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec

from meshbook.calls.call import OpenCall
from meshbook.calls.direct_calls import UNANSWERED, CallerLink, CallerLinks
from meshbook.concurrency import forks
from meshbook.errors import PeerProtocolError
from meshbook.shape.members import Members
from meshbook.system.descriptors import open_above
from meshbook.wire import messages as wire
from meshbook.wire.direct import DirectLink, dial, direct_path
from meshbook.wire.frames import Buffer

DIAL_AFTER = {True: 8, False: 16}
"""The number of calls by the agent, of the controller and of another rank, after which a rank dials."""
DIAL_AGAIN_AFTER = 1000
"""The number of calls after which a rank dials once more where that was in vain."""
KEPT_TARGETS = 256


class CalleeLink(DirectLink):
    """A link by which calls come. caller: the rank at the other end; None: the controller."""

    def __init__(self, caller: wire.Origin | None, path: str) -> None:
        super().__init__(dial(path))
        self.caller, self.key = caller, _key(caller)


class CalleeLinks:
    """The links by which calls come to the main thread of a rank, or to its mailboxes."""

    def __init__(
        self,
        identity: Callable[[], wire.Identity],
        tell_agent: Callable[[wire.FromWorker, Sequence[Buffer]], object],
        deliver: Callable[[CalleeLink, wire.Call | wire.Cancel, list[bytes]], object],
        watch: Callable[[int, Callable[[], object]], object],
        forget: Callable[[int], object],
        *,
        is_mail: bool,
    ) -> None:
        """deliver: takes each message, in order. watch, forget: see `CallerLinks`."""
        self._identity, self._tell_agent, self._deliver = identity, tell_agent, deliver
        self._watch, self._forget, self._is_mail = watch, forget, is_mail
        self._folder, self._has_controller = "", False
        self._came: Counter[tuple[int, int]] = Counter()
        self._links: dict[int, CalleeLink] = {}
        self._lock = threading.RLock()
        self._seen: dict[int, int] = {}  # the number of each caller's last call that has come by its link
        self._told: frozenset[int] = frozenset()  # calls of which the agent was told when the controller had ended

    def open(self, folder: str, *, controller_is_here: bool) -> None:
        """Let links be made from now on. folder: see `wire.Begin`."""
        self._folder, self._has_controller = folder, controller_is_here

    # ---- who takes calls --------------------------------------------------------------------------------------------

    def note(self, call: wire.Call) -> None:
        """Note a call that the agent has brought: a caller that calls often gets a link."""
        caller, pid = call.origin, _key(call.origin)
        if not call.reply or call.output or not self._folder:
            return
        if (link := self._links.get(pid)) is not None and link.is_open:
            return
        here = self._identity()
        key = pid, here.generation
        self._came[key] += 1
        if self._came[key] >= DIAL_AFTER[caller is None] and (caller is not None or self._has_controller):
            self._came[key] = 0
            hello = wire.DirectHello(here.mesh, here.generation, here.rank, os.getpid(), self._is_mail, caller)
            try:
                link = CalleeLink(caller, direct_path(self._folder, pid))
            except OSError:  # it does not listen, or is on another host; or no descriptor is left
                self._came[key] = -DIAL_AGAIN_AFTER
                return
            if link.send(wire.encode(hello), hello):
                self._links[pid] = link
                self._watch(link.fd, partial(self.serve, link, one=not self._is_mail))
            else:
                link.close()

    def is_news(self, call: wire.Call) -> bool:
        """Whether to run a call that the agent has brought: it may have come by a link that has broken, or whose
        controller has ended. It runs once."""
        with self._lock:
            if (link := self._links.get(_key(call.origin))) is not None:
                self.serve(link)
            if call.pid in (0, os.getpid()):
                if call.direct > self._seen.get(_key(call.origin), 0):
                    self._seen[_key(call.origin)] = call.direct
                    return True
                if link is not None and call.id in link.kept:
                    self._answer_again(link, {call.id} if call.pid else ())
                    return False
                if call.id in self._told:
                    return False
            self._tell_agent(wire.Reply(call.id, wire.GONE, 0.0, inline=_GONE, origin=call.origin), ())
            return False

    def serve(self, link: CalleeLink, *, one: bool = False) -> None:
        """Take what has come by a link; one: at most one message."""
        with self._lock:
            try:
                while (received := link.receive()) is not None:
                    self._take(link, *received)
                    if one:
                        return
            except (PeerProtocolError, *wire.MALFORMED):
                link.is_open = False
            if not link.is_open:
                self._drop(link)

    def _take(self, link: CalleeLink, header: bytes, frames: list[bytes]) -> None:
        message = wire.decode_past_agent(header)
        if isinstance(message, wire.Call):
            if message.reply:
                link.kept[message.id] = message
            self._seen[link.key] = message.direct
        elif not isinstance(message, wire.Cancel):
            raise PeerProtocolError("a message of no caller")
        self._deliver(link, message, frames)

    def serve_all(self) -> None:
        """Take what has come by all links."""
        for link in list(self._links.values()):
            self.serve(link)

    def _drop(self, link: CalleeLink) -> None:
        """Watch a link no more. What was not acknowledged is kept for `tell`, and for callers that ask again."""
        if link.fd >= 0:
            self._forget(link.fd)
            link.fd = -1
            link.close()

    # ---- any thread -------------------------------------------------------------------------------------------------

    def answer(self, link: CalleeLink, reply: wire.Reply, payload: Sequence[Buffer], *, may_pass: bool) -> None:
        """Answer a call that has come by a link. may_pass: the answer is small, and no message that the agent has of
        ours goes before it."""
        if may_pass:
            rank = self._identity().rank
            told = wire.RankReply(
                rank, reply.status, len(payload), reply.duration_s, None, None, reply.inline, reply.waited_s,
                reply.groups,
            )  # fmt: skip
            message = wire.Replies(reply.id, (told,))
            if link.send(wire.encode(message), message, payload):
                return
        with self._lock:
            self._answer_by_agent(link, reply, payload)

    def _answer_by_agent(self, link: CalleeLink, reply: wire.Reply, payload: Sequence[Buffer]) -> None:
        if (call := link.kept.pop(reply.id, None)) is not None:
            self._tell_agent(wire.CameEarly(call), ())
        self._tell_agent(msgspec.structs.replace(reply, origin=link.caller), payload)

    def _answer_again(self, link: CalleeLink, calls: Collection[int]) -> None:
        """Give the agent the answers to these calls that have gone by a link."""
        for message, payload in list(link.unacked):
            if isinstance(message, wire.Replies) and message.id in calls:
                (told,) = message.replies
                reply = wire.Reply(
                    message.id, told.status, told.duration_s, None, told.inline, told.waited_s, None, told.groups
                )
                self._answer_by_agent(link, reply, payload)

    def drop(self, reply: wire.Reply) -> None:
        """Answer, by the agent, a call that was cancelled before it ran; it may have come by a link."""
        with self._lock:
            self.serve_all()
            link = next((link for link in self._links.values() if reply.id in link.kept), None)
            if link is None:
                self._tell_agent(reply, ())
            else:
                self._answer_by_agent(link, reply, ())

    def tell(self) -> None:
        """Tell the agent which calls have come by the controller's link, and the answers that it may not have heard,
        since it is gone; and then that this was all."""
        with self._lock:
            if (link := self._links.pop(_key(None), None)) is not None:
                self.serve(link)
                self._drop(link)
                self._told = frozenset(link.kept)
                self._answer_again(link, self._told)
                for call in link.kept.values():
                    self._tell_agent(wire.CameEarly(call), ())
                link.kept.clear()
            self._tell_agent(wire.ToldAll(), ())

    def close(self) -> None:
        """End the links to other ranks, since this process ends: they ask the agent why."""
        with self._lock:
            for link in [link for link in self._links.values() if link.caller is not None]:
                self._drop(link)

    def abandon(self) -> None:
        """Close the parent's descriptors in a forked child."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._lock = threading.RLock()


def _key(caller: wire.Origin | None) -> int:
    """Return the key of a caller's link: its pid, 0 for the controller."""
    return 0 if caller is None else caller.pid


_GONE = b"its value is not kept: its process has ended, or its controller had got it"


class DirectArrivals:
    """The descriptors that the main thread waits for: the socket of the agent, and the link of the controller."""

    def __init__(self, call_fd: int) -> None:
        self.early: deque[tuple[wire.Call, list[bytes], CalleeLink]] = deque()
        """The calls that have come by the link and were not taken."""
        self.fd = -1
        """The descriptor of the link; -1 where there is none."""
        self._call_fd = call_fd
        self._serve: Callable[[], object] = int
        self._wake_fd = -1
        self._poll = select.poll()

    def watch(self, fd: int, serve: Callable[[], object]) -> None:
        """Call ``serve`` when the link can be read."""
        if self._wake_fd < 0:
            self._wake_fd = open_above(lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._poll = select.poll()
        for each in (self._call_fd, self._wake_fd, fd):
            self._poll.register(each, select.POLLIN)
        self._serve, self.fd = serve, fd

    def forget(self, fd: int) -> None:
        """Watch the link no more."""
        self._poll.unregister(fd)
        self.fd = -1

    def put(self, link: CalleeLink, call: wire.Call | wire.Cancel, frames: list[bytes]) -> None:
        """Take a call that has come by the link; any thread."""
        if isinstance(call, wire.Call):
            self.early.append((call, frames, link))
            if threading.get_ident() != forks.main_thread:
                os.eventfd_write(self._wake_fd, 1)

    def wait(self) -> bool:
        """Wait for the agent or the link; return whether only the agent has sent something.

        What is there by the link is taken first: it was sent before.
        """
        ready = dict(self._poll.poll())
        if self.fd in ready:
            self._serve()
            return False
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        return self._call_fd in ready


class RankLinks:
    """The links by which a rank calls others. relay: sends a message by the agent."""

    def __init__(
        self,
        relay: Callable[[wire.FromWorker, Sequence[Buffer]], object],
        on_replies: Callable[[wire.Replies, Sequence[bytes]], object],
        identity: Callable[[], wire.Identity],
        watch: Callable[[int, Callable[[], object]], object],
        forget: Callable[[int], object],
    ) -> None:
        self._relay, self._on_replies, self._identity = relay, on_replies, identity
        self.links = CallerLinks(
            itertools.count(1).__next__, self._is_welcome, lambda id: False, self._on_answer, relay, watch, forget
        )
        self.origin: wire.Origin | None = None  # our name in messages that go by links; None before we listen
        self._folder = ""
        self._lock = threading.Lock()
        self._single: dict[wire.Target, int] = {}  # the rank of targets that have only one, -1 of others

    def open(self, folder: str) -> None:
        """Let links be made from now on. folder: see `wire.Begin`."""
        self._folder = folder

    def _is_welcome(self, hello: wire.DirectHello) -> bool:
        return hello.caller == self.origin and hello.is_mail

    def send(self, message: wire.Call, payload: Sequence[Buffer], members: Members) -> None:
        """Send a call by a link, if there is one and it may go there; else by the agent. Any thread."""
        if message.mesh and self._folder:
            self._listen()
        key = (message.mesh, message.generation, True)
        with self._lock:
            if not self.links.by_key.get(key):
                self._relay(message, payload)
                return
            rank = self._rank_of(message.target)
            link = self.links.by_key[key].get(rank)
            is_direct = link is not None and link.may_send(self.links.is_open) and message.segment is None
            if link is not None and is_direct and not self.links.send([link], message, payload):
                return
            self.links.relay(key, members.rank_set, message.id if message.reply else UNANSWERED)
            self._relay(message, payload)

    def _listen(self) -> None:
        """Let ranks that we call dial us."""
        folder, self._folder = self._folder, ""
        here = self._identity()
        self.origin = wire.Origin(here.mesh, here.rank, os.getpid())
        try:
            self.links.listen(direct_path(folder, os.getpid()))
        except OSError:
            self.origin = None  # all goes by the agent

    def _rank_of(self, target: wire.Target) -> int:
        rank = self._single.get(target, -2)
        if rank == -2:
            if len(self._single) >= KEPT_TARGETS:
                self._single.clear()
            ranks = [rank for part in target for rank in part.ranks()]
            rank = self._single[target] = ranks[0] if len(ranks) == 1 else -1
        return rank

    def cancel(self, cancel: wire.Cancel) -> bool:
        """Cancel a call of ours; return False if it went by the agent."""
        if (sent := self.links.open.get(cancel.call)) is None:
            return False
        message = msgspec.structs.replace(cancel, origin=self.origin)
        return all(link.send(wire.encode(message), message) for link in list(sent.links))

    # ---- who reads the mail -----------------------------------------------------------------------------------------

    def hear(self, call: OpenCall, replies: wire.Replies) -> None:
        """Note answers that the agent has brought."""
        for key in [key for key in self.links.by_key if key[0] == call.mesh]:
            with self._lock:
                self.links.hear(key, replies.replies, replies.id)

    def abandon(self) -> None:
        """Close the parent's descriptors in a forked child."""
        self._lock = threading.Lock()
        self.links.abandon()

    def _on_answer(self, link: CallerLink, message: wire.Replies, frames: list[bytes]) -> None:
        (reply,) = message.replies
        if reply.rank != link.rank:  # it has another number by now
            message = wire.Replies(message.id, (reply._replace(rank=link.rank),))
        self._on_replies(message, frames)
