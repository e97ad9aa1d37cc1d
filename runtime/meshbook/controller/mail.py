"""Calls of workers to mailboxes of the controller's process, which is rank 0 of mesh 0 to them.

They come in under the turn (`meshbook.controller.io_turns`), so handlers run there; arguments are loaded and answers
made on the threads of those to whom the mailboxes belong.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from meshbook.calls.answer import Outcome, Unavailable, pack_failure
from meshbook.calls.incoming import IncomingCall, refusal
from meshbook.calls.mailboxes import Mailboxes
from meshbook.controller.host_state import HostState
from meshbook.controller.payloads import Payloads
from meshbook.errors import MailboxClosed, MeshError
from meshbook.values.pickling import dumps, loads
from meshbook.wire import messages as wire
from meshbook.wire.replies import place_head


class ControllerMail:
    """The mail of one controller: calls that ranks make to its mailboxes. submit: has a closure run under the turn."""

    def __init__(self, payloads: Payloads, submit: Callable[[Callable[[], None]], None]) -> None:
        self.boxes = Mailboxes()
        """From any thread."""
        self._payloads, self._submit = payloads, submit
        self._incoming_calls: dict[tuple[wire.Origin | None, int], IncomingCall] = {}
        """Calls that wait for their reply."""
        self._strange: set[int] = set()
        """Mailboxes of former controllers of the session, once something has come for them."""

    def on_call(self, host: HostState, call: wire.Call, frames: Sequence[bytes]) -> None:
        """Under the turn: a worker of ``host`` calls."""
        buffers = self._buffers(host, call)

        def load() -> Any:
            return loads(frames[0] if frames else call.inline, buffers, where="the controller's process")

        def send(answer: Outcome, duration_s: float) -> None:
            self._reply(host, call, answer, duration_s)

        incoming = IncomingCall(call, load, lambda: None, send)
        if call.reply:
            self._incoming_calls[call.origin, call.id] = incoming
        try:
            mailbox = self.boxes.find(call.mailbox, 0)
            incoming.on_cancel = mailbox.on_cancel
            mailbox.handler(call, incoming.load, incoming.reply)
        except Exception as error:
            if isinstance(error, MailboxClosed) and not (error.why or self.boxes.was_open(call.mailbox)):
                self._tell_lost(call)
            incoming.reply(refusal(error, 0, socket.gethostname()))

    def _tell_lost(self, call: wire.Call) -> None:
        """Say, once, that nobody will ever receive what comes for a mailbox; its sender expects no answer."""
        if call.mailbox not in self._strange:
            self._strange.add(call.mailbox)
            sender = f"rank {call.origin.rank}" if call.origin is not None else "a rank"
            print(
                f"{sender} has sent to a port that a former process of this session had opened: it is lost, "
                "and so is what follows. Open a new Channel and pass its port on.",
                file=sys.stderr,
            )

    def on_cancel(self, cancel: wire.Cancel) -> None:
        """Under the turn: a worker wants the end of its call."""
        incoming = self._incoming_calls.get((cancel.origin, cancel.call))
        if incoming is not None and incoming.on_cancel is not None:
            incoming.on_cancel(incoming.call, cancel.insist)

    def _buffers(self, host: HostState, call: wire.Call) -> Sequence[Any]:
        try:
            return self._payloads.receive(host, call)
        except MeshError as error:
            return Unavailable(error)

    def _reply(self, host: HostState, call: wire.Call, answer: Outcome, duration_s: float) -> None:
        """On any thread: send an answer."""
        head, status, segment = b"", answer.status, None
        frames: list[bytes] = []
        try:
            if answer.failure is not None:
                frames = [bytes(part) for part in pack_failure(answer.failure)]
            elif answer.has_value:
                head, large = answer.pickled or dumps(answer.value, what=answer.what)
                head, frames = place_head(head)
                segment = self._payloads.write(large)
        except Exception as error:
            status, head, segment = wire.RAISED, b"", None
            failure = refusal(error, 0, socket.gethostname()).failure
            assert failure is not None
            frames = [bytes(part) for part in pack_failure(failure)]
        reply = wire.RankReply(0, status, len(frames), duration_s, None, None, head)

        def send() -> None:
            self._incoming_calls.pop((call.origin, call.id), None)
            self._payloads.send_reply(host, call.id, call.origin, reply, frames, segment)

        self._submit(send)
