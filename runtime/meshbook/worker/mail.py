"""The mail of a worker: calls that it makes itself (`meshbook.worker.outgoing`), and a thread of its own that hands
those of others to mailboxes (`meshbook.calls.mailboxes`).

It starts with the first message; before that a process has no such thread. It never runs user code and never waits for
anything but its socket.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from meshbook.calls.answer import Outcome, pack
from meshbook.calls.call import RequestFuture
from meshbook.calls.incoming import IncomingCall, IncomingCalls
from meshbook.calls.request import CallRequest
from meshbook.concurrency import forks
from meshbook.concurrency.background import hidden_thread
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer
from meshbook.worker.channel import AgentChannel, RankPayloads
from meshbook.worker.outgoing import MailCalls


class WorkerMail:
    """Used by any thread, but for what is the mail's own.

    identity: who the worker is now. on_call: told of each call before its mailbox. tell_groups: what answers to the
    controller carry of the process groups.
    """

    def __init__(
        self,
        channel: AgentChannel,
        payloads: RankPayloads,
        identity: Callable[[], wire.Identity],
        on_call: Callable[[wire.Call], None],
        tell_groups: Callable[[], bytes],
    ) -> None:
        self._channel, self._payloads, self._identity = channel, payloads, identity
        self._on_call, self._tell_groups = on_call, tell_groups
        self._calls = MailCalls(channel, payloads)
        self.hold = self._calls.hold
        """Called by the control thread."""
        self._incoming = IncomingCalls()
        self.boxes, self.give_up = self._incoming.boxes, self._incoming.give_up
        self._starting = threading.Lock()
        self._started = False
        self._generation = forks.generation

    def call(self, request: CallRequest, *, output: int = 0, chain: tuple[int, ...] = ()) -> RequestFuture[Any]:
        """Call a mailbox of any mesh of the session, as `MailCalls.call` does; its future tells of lost ranks."""
        if request.reply:
            self.start()
        return self._calls.call(request, output=output, chain=chain)

    def start(self) -> None:
        """Read the mail from now on. From any thread, any number of times."""
        if self._started:
            return
        with self._starting:
            if self._started:
                return
            self._started = True
        hidden_thread(self._serve, "meshbook.mail").start()

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it must wake the main thread
        self._calls.reader = threading.get_ident()
        while True:
            while (timeout_s := self._calls.expire()) is not None and not self._channel.wait(timeout_s):
                pass
            if (received := self._channel.receive()) is None:
                return
            message, frames = received
            try:
                match message:
                    case wire.Call():
                        self._deliver(message, frames)
                    case wire.Replies():
                        self._calls.on_replies(message, frames)
                    case wire.Cancel():
                        self._incoming.cancel(message)
                    case other:
                        raise AssertionError(f"{other!r} does not belong on the mail socket")
            except BrokenPipeError:
                return  # the agent is gone: the control thread sees to the rest
            except Exception:
                traceback.print_exc()  # a fault of ours, or of a hook: it costs this message, not the mail

    def _deliver(self, call: wire.Call, frames: list[bytes]) -> None:
        here = self._identity()
        incoming = IncomingCall(
            call,
            lambda: self._payloads.load(call, frames, f"rank {here.rank} on {here.host}"),
            lambda: self._payloads.discard(call),
            lambda answer, duration_s: self._reply(call, answer, duration_s),
        )
        self._on_call(call)
        self._incoming.deliver(incoming, here.rank, here.host)

    def send(self, message: wire.FromWorker, payload: Sequence[Buffer] = ()) -> None:
        """Say something on this lane, in order with the replies of the calling thread. Any thread."""
        self._channel.send(message, payload)

    def close(self) -> None:
        """In a forked child: let go of the socket, which is its parent's."""
        self._channel.close()

    def _reply(self, call: wire.Call, answer: Outcome, duration_s: float) -> None:
        """On any thread: send an answer."""
        forks.refuse_inherited(self._generation)
        self._incoming.open.pop((call.origin, call.id), None)
        groups = self._tell_groups() if call.origin is None else b""  # those who call from ranks do not compare
        status, payload, inline, segment = pack(answer, self._payloads.pool.write, self._payloads.describe)
        self._payloads.tell_freed()  # before the reply, so that the next payload finds its segment free
        self._channel.send(
            wire.Reply(call.id, status, duration_s, segment, inline, origin=call.origin, groups=groups), payload
        )
