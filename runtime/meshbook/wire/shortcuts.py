"""Shortcuts between a controller and the ranks of its machine: calls and answers that go past the agent.

    controller ──Call──> agent ──Call──> rank         the way of every call: in order, acknowledged, remembered
               <─Replies─      <─Reply──
               ──Call, a datagram──────>              the shortcut: two wake-ups in place of four
               <─Replies, a datagram────
               ──Heard─────────────────>              when nothing else comes for a moment

The next controller learns from the agent, so the agent also gets each call that is not answered soon:

    not answered within `DEFER_S`     the controller sends the call by the agent too, before anything else that it
                                      sends there; the rank, which has it, runs it once
    answered, not heard of            the rank keeps the answer until `Heard`, or until the next call shows the same
    the controller is gone            the agent says so, and the rank tells it the call (`CameEarly`) and the answer
    the answer is no small value      it goes by the agent, behind `CameEarly`
    some of its ranks have not got it the agent, which has heard of it from another, has it come to them all

Which calls may come so, `meshbook.controller.shortcuts` knows. A lost datagram (a full queue, another process at the
other end) costs time: the call comes by the agent then.

All sockets lie in the session's folder, which is its owner's alone; that of a rank is connected to the controller's, so
nobody else can send there. Where it is a rank tells when it has been called some times.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from meshbook.system.descriptors import open_above
from meshbook.wire import messages as wire
from meshbook.wire.unix_transport import SCHEME

DEFER_S = 0.005  # the agent need not know for so long of a call that went past it
OPEN_AFTER = 8  # a rank opens its end when so many calls that could have come past the agent have come by it
MAX_BYTES = 2 * wire.INLINE_MAX_BYTES  # of a datagram: a pickle's head, and the rest of its message
GROUPS_MAX_BYTES = wire.INLINE_MAX_BYTES // 2  # of the report on process groups in an answer that goes past the agent
_GONE = b"its value had gone to its controller before that told the agent of the call"


def shortcut_path(endpoint: str) -> str:
    """Return the path of the controller's end, where agents dial ``endpoint``; empty where that is no Unix socket."""
    return str(Path(endpoint.removeprefix(SCHEME)).with_name("early")) if endpoint.startswith(SCHEME) else ""


def _end_of_rank(path: str, pid: int, *, is_mail: bool) -> str:
    return f"{path}-{pid}{'m' if is_mail else ''}"


def remove_ends(path: str, pid: int) -> None:
    """Remove the ends that a rank has left. path: the path of the controller's end."""
    for is_mail in (False, True) if path else ():
        with contextlib.suppress(OSError):
            os.unlink(_end_of_rank(path, pid, is_mail=is_mail))


def _bind(sock: socket.socket, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of the controller before us, or of a process that had our number
    sock.bind(path)


class ShortcutServer:
    """The controller's end of shortcuts. Raises: OSError."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            _bind(self._socket, path)
        except OSError:
            self._socket.close()
            raise
        self.fd = self._socket.fileno()

    def receive(self) -> Iterator[tuple[bytes, str]]:
        """Yield the datagrams that are there, each with the address of its sender."""
        with contextlib.suppress(BlockingIOError):
            while True:
                yield self._socket.recvfrom(MAX_BYTES)

    def send(self, data: bytes, address: str) -> bool:
        """Send a datagram; return False if it cannot go, since its receiver is gone, or does not read."""
        if len(data) > MAX_BYTES:
            return False
        try:
            self._socket.sendto(data, address)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class RankShortcut:
    """A rank's end, for its main thread or for its mailboxes. A single thread takes calls; any may answer.

    path: the path of the controller's end; empty where there is none on this machine. tell_agent: sends it a message.
    on_open: takes a descriptor by which calls may come from now on.
    """

    def __init__(
        self,
        path: str,
        tell_agent: Callable[[wire.FromWorker], object],
        on_open: Callable[[int], object],
        *,
        is_mail: bool,
    ) -> None:
        self._path, self._tell_agent, self._on_open, self._is_mail = path, tell_agent, on_open, is_mail
        self._socket: socket.socket | None = None
        self.fd = -1  # descriptor by which calls come; -1 while none can
        self._came = 0  # number of calls that have come by the agent, and might have come here
        self._seen = 0  # the number of the last call that has come, either way
        self._here: wire.Identity | None = None
        self._target: wire.Target = ()  # the target of the last call, which named this rank
        self._lock = threading.Lock()
        # the last call that came here, until it is the agent's, or its answer was heard
        self._call: wire.Call | None = None
        self._answer: wire.Reply | None = None  # its answer
        self._told = 0  # the number of the last call that the agent has heard of from here: it has the answer, or will

    # ---- who takes calls --------------------------------------------------------------------------------------------

    def take(self, here: wire.Identity) -> wire.Call | None:
        """Return the call that has come here; None if none has, or if it is for another rank."""
        with self._lock:
            if self._socket is None:
                return None
            try:
                call = self._accept(wire.decode_past_agent(self._socket.recv(MAX_BYTES)), here)
            except (BlockingIOError, *wire.MALFORMED):
                return None
            except OSError as error:  # user code has closed it
                self._lose(error)
                return None
            if call is not None:
                self._seen, self._answer = call.shortcut, None
                self._call = call if call.shortcut != self._told else None
            return call

    def _accept(self, message: wire.PastAgent, here: wire.Identity) -> wire.Call | None:
        """Return a call that is for us; take note of other messages. Under the lock."""
        if isinstance(message, wire.Heard) and self._answer is not None and self._answer.id == message.call:
            self._call = self._answer = None
        if not isinstance(message, wire.Call) or message.shortcut <= self._seen:
            return None
        if here is not self._here or message.target != self._target:
            if not wire.target_has(message.target, here.rank):
                return None
            self._here, self._target = here, message.target
        return message if (message.mesh, message.generation) == (here.mesh, here.generation) else None

    def is_news(self, call: wire.Call, here: wire.Identity) -> bool:
        """Whether a call that the agent has brought, and that might have come here, is to be run."""
        with self._lock:
            self._here, self._target = here, call.target
            if call.shortcut > self._seen:
                self._seen, self._call, self._answer = call.shortcut, None, None
                self._came += 1
                if self._came >= OPEN_AFTER and self._path:
                    self._send(wire.ShortcutOpened(here.mesh, here.rank, self._is_mail))
                return True
            if call.shortcut == self._told:
                return False
            if self._call is None or self._call.id != call.id:
                self._tell_agent(wire.Reply(call.id, wire.GONE, 0.0, inline=_GONE))  # a later call has come meanwhile
                return False
            if self._answer is not None:
                self._tell_agent(self._answer)
            self._call = self._answer = None  # it is the agent's from now on
            return False

    def drop(self, call: wire.Call) -> None:
        """Forget a call that has come here, since it was cancelled before it ran."""
        with self._lock:
            if self._call is call:
                self._call, self._told = None, call.shortcut

    # ---- any thread ------------------------------------------------------------------------------------------------

    def answer(self, call: wire.Call, reply: wire.Reply, rank: int, *, may_pass: bool) -> bool:
        """Answer a call past the agent; return False if the agent is to have the answer, and knows the call. may_pass:
        the answer is a small value, and no message that the agent has of ours goes before it."""
        with self._lock:
            if self._call is not call:
                return False
            if may_pass and len(reply.groups) <= GROUPS_MAX_BYTES:
                answer = wire.RankReply(
                    rank, reply.status, 0, reply.duration_s, None, None, reply.inline, reply.waited_s, reply.groups
                )
                if self._send(wire.Replies(call.id, (answer,))):
                    self._answer = reply
                    return True
            self._call, self._told = None, call.shortcut
            self._tell_agent(wire.CameEarly(call))
            return False

    def give_up(self) -> None:
        """Tell the agent the open call and the answer, since the controller is gone, and then that this was all."""
        with self._lock:
            if (waiting := self._look_ahead()) is not None:
                self._call, self._answer = waiting, None  # nobody is called again who was not heard
            if self._call is not None:
                self._told = self._call.shortcut
                self._tell_agent(wire.CameEarly(self._call))
            if self._answer is not None:
                self._tell_agent(self._answer)
            self._call = self._answer = None
            self._tell_agent(wire.ToldAll())

    def _look_ahead(self) -> wire.Call | None:
        """Return the call that has come and that `take` is still to find. Under the lock."""
        while self._socket is not None and self._here is not None:
            try:
                message = wire.decode_past_agent(self._socket.recv(MAX_BYTES, socket.MSG_PEEK))
                if not isinstance(message, wire.Heard):
                    return self._accept(message, self._here)
                self._accept(wire.decode_past_agent(self._socket.recv(MAX_BYTES)), self._here)
            except (OSError, *wire.MALFORMED):
                break
        return None

    def _send(self, message: wire.PastAgent) -> bool:
        """Send a message; return whether it has gone."""
        data = wire.encode(message)
        for _ in range(2):
            try:
                if self._socket is None:
                    self._socket = self._connect()
                    self.fd = self._socket.fileno()
                    self._on_open(self.fd)
                self._socket.send(data)
                return True
            except BlockingIOError:
                return False
            except ConnectionRefusedError:
                self.close()  # of a controller that has ended; another one may be there
            except OSError as error:  # it is out of our sight, or user code has closed ours
                self._lose(error)
                return False
        return False

    def _lose(self, error: OSError) -> None:
        """Give up shortcuts for good."""
        self._path, self.fd = "", -1
        if self._socket is not None and error.errno in (errno.EBADF, errno.ENOTSOCK):
            self._socket.detach()  # the number may be another file's by now
        self.close()

    def _connect(self) -> socket.socket:
        made = open_above(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        try:
            made.setblocking(False)
            made.connect(self._path)
            _bind(made, _end_of_rank(self._path, os.getpid(), is_mail=self._is_mail))
        except OSError:
            made.close()
            raise
        return made

    def close(self) -> None:
        """Close the end, in a forked child that of the parent; the next answer opens one."""
        self.fd = -1
        if self._socket is not None:
            self._socket.close()
            self._socket = None
