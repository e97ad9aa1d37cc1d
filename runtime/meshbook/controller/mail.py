"""Calls of workers to mailboxes of the controller's process, which is rank 0 of mesh 0 to them.

They come in under the turn (`meshbook.controller.io_turns`), so handlers run there; arguments are loaded and answers
made on the threads of those to whom the mailboxes belong.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence

from meshbook.calls.answer import Outcome, pack
from meshbook.calls.incoming import IncomingCall, IncomingCalls, describe
from meshbook.calls.mailboxes import CallArguments
from meshbook.controller.host_state import HostState
from meshbook.controller.payloads import Payloads
from meshbook.errors import Failure, MailboxClosed
from meshbook.values.pickling import loads
from meshbook.wire import messages as wire


class ControllerMail:
    """The mail of one controller: calls that ranks make to its mailboxes. submit: has a closure run under the turn."""

    def __init__(self, payloads: Payloads, submit: Callable[[Callable[[], None]], None]) -> None:
        self._incoming = IncomingCalls()
        self.boxes, self.on_cancel, self.give_up = self._incoming.boxes, self._incoming.cancel, self._incoming.give_up
        self._payloads, self._submit = payloads, submit
        self._strange: set[int] = set()
        """Mailboxes of former controllers of the session, once something has come for them."""

    def on_call(self, host: HostState, call: wire.Call, frames: Sequence[bytes]) -> None:
        """Under the turn: a worker of ``host`` calls."""
        buffers = self._payloads.receive(host, call)

        def load() -> CallArguments:
            args: CallArguments = loads(frames[0] if frames else call.inline, buffers, where="the controller's process")
            return args

        def send(answer: Outcome, duration_s: float) -> None:
            self._reply(host, call, answer, duration_s)

        error = self._incoming.deliver(IncomingCall(call, load, lambda: None, send), 0, socket.gethostname())
        if isinstance(error, MailboxClosed) and not (error.why or self.boxes.was_open(call.mailbox)):
            self._tell_lost(call)

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

    def _reply(self, host: HostState, call: wire.Call, answer: Outcome, duration_s: float) -> None:
        """On any thread: send an answer."""
        status, frames, inline, segment = pack(answer, self._payloads.write, _describe)
        reply = wire.RankReply(0, status, len(frames), duration_s, None, None, inline)

        def send() -> None:
            self._incoming.open.pop((call.origin, call.id), None)
            self._payloads.send_reply(host, call.id, call.origin, reply, frames, segment)

        self._submit(send)


def _describe(error: BaseException) -> Failure:
    return describe(error, 0, socket.gethostname())
