"""The host agent's side of one worker: its sockets, its pipes, its pidfd."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from meshbook.agent.output import RankOutput
from meshbook.agent.rank_log import RankLog
from meshbook.concurrency.background import attempt, tell
from meshbook.errors import PeerProtocolError
from meshbook.lifecycle import WORKER_NEXT, WorkerEvent, WorkerPhase
from meshbook.system.event_loop import EventLoop, Watch
from meshbook.system.exits import OomWatch, describe_end, open_end, reap
from meshbook.system.processes import kill_session
from meshbook.wire import messages as wire
from meshbook.wire.frames import FIRST_READ_BYTES, READ_BYTES, Buffer, MessageSocket, pack

PIPE_BYTES = 1 << 20
FULL_LOG_S = 0.02  # how often it is looked whether the disk has caught up with a rank
TRICKLE_BYTES = 1 << 15
# a rank that prints less than that at a time, but all the time, is read so often: else each line wakes the agent
TRICKLE_S = 0.005
_MAIL_BYTES = 1 << 15  # a worker can send mail faster than we pass it on: others have their turn after so much


class WorkerLane:
    """A non-blocking message socket to a worker; data that does not fit now is sent when it does."""

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        on_message: Callable[[list[bytes]], None],
        on_nonsense: Callable[[Exception], None],
        on_sent: Callable[[], None] = lambda: None,
        *,
        read_bytes: int = READ_BYTES,
    ) -> None:
        """on_sent: called when waiting data was sent, or never will be. read_bytes: the most that is read at a time."""
        self._loop, self._sock, self._read_bytes = loop, sock, read_bytes
        self._on_message, self._on_nonsense, self._on_sent = on_message, on_nonsense, on_sent
        self._messages = MessageSocket(sock)
        self._watch: Watch | None = loop.watch(sock.fileno(), self._on_readable, self._on_writable)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message, now or as soon as the worker reads."""
        self.send_packed(pack(frames))

    def send_packed(self, data: bytes) -> None:
        """Send a message as `pack` makes it, which may go to several workers."""
        if self._watch is not None:
            try:
                if not self._messages.send(data):
                    self._loop.want_writable(self._watch, True)
            except OSError:
                pass  # the worker is gone; its pidfd tells the story

    @property
    def fd(self) -> int:
        """Return the descriptor; -1 once it is closed."""
        return self._sock.fileno() if self._watch is not None else -1

    @property
    def unsent_bytes(self) -> int:
        """Return the size of the data that waits for the worker to read."""
        return self._messages.unsent_bytes if self._watch is not None else 0

    def end_writing(self) -> None:
        """Tell the worker that no more comes."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self._watch is not None:
            self._loop.forget(self._watch)
            self._watch = None
            self._messages.close()
            self._on_sent()

    def read_all(self) -> None:
        """Deliver every message that is there."""
        while self._on_readable():
            pass

    def read_waiting(self) -> None:
        """Deliver the messages that are there now: at most a socket's content, so that no writer holds the agent up."""
        for _ in range(1 + READ_BYTES // min(self._read_bytes, FIRST_READ_BYTES)):
            if not self._on_readable():
                break

    def _on_readable(self) -> bool:
        """Take in messages, as far as it is one turn's; return whether there may be more."""
        if self._watch is None:
            return False
        try:
            for frames in self._messages.receive(self._read_bytes):
                try:
                    self._on_message(frames)
                except (*wire.MALFORMED, PeerProtocolError):
                    raise
                except Exception as error:
                    tell(error, "a message of a worker")  # it costs this message, not the worker
        except (OSError, EOFError):
            self.close()
            return False
        except (*wire.MALFORMED, PeerProtocolError) as error:
            self.close()  # nothing sensible can follow
            self._on_nonsense(error)
            return False
        return self._messages.has_more

    def _on_writable(self) -> None:
        assert self._watch is not None
        try:
            if not self._messages.flush():
                return
        except OSError:
            pass  # as in `send`
        self._loop.want_writable(self._watch, False)
        self._on_sent()


class WorkerOwner(Protocol):
    """The mesh of a worker on this host (`meshbook.agent.mesh.AgentMesh`)."""

    oom: OomWatch

    def on_message(self, worker: AgentWorker, message: wire.FromWorker, payload: list[bytes]) -> None:
        """Act on a message of a worker."""

    def on_output(self) -> None:
        """Note that a worker has printed."""

    def on_mail_sent(self, worker: AgentWorker) -> None:
        """Note that a worker has read its mail, or will read no more."""

    def on_exit(self, worker: AgentWorker, cause: str, was_killed: bool) -> None:
        """Note that a worker has ended."""

    def tell_if_stopped(self) -> None:
        """Report that the mesh has stopped, if it has."""


class AgentWorker:
    """A worker process and everything of it that the agent holds open."""

    def __init__(
        self, loop: EventLoop, owner: WorkerOwner, rank: int, device: str, marker: bytes, log: Path, now: float
    ):
        self.rank, self.device = rank, device
        self.request = 0  # number of the `Spawn` that asked for it
        self.identity: wire.Identity  # as it was sent when the worker began, or when ranks got other numbers
        self.slot = 0  # index of its device among the mesh's on this host; other than ``rank`` it never changes
        self.pid = 0
        self.control_thread, self.dump_fd = 0, -1  # as the worker said when it began (`meshbook.stacks.dump`)
        self.phase = WorkerPhase.FORKING
        # (owner pid, segment) of payloads that the worker may still have mapped
        self.segments: set[tuple[int, int]] = set()
        self.untold = 0  # reports on calls that came past us which are still to come (`ask_what_came_past`)
        self.lent: set[int] = set()  # segments of the worker's own that its controller looks at
        self.output = RankOutput(marker, RankLog(log), now)
        self._loop, self._owner = loop, owner
        self._nonsense = ""
        self._pipes: dict[str, Watch] = {}
        self._read_at = 0.0  # when one of the pipes was read last
        self._pipe_ends: list[int] = []
        self._theirs: list[socket.socket] = []
        self._pidfd: Watch | None = None
        self._lanes: list[WorkerLane] = []
        self._reads_mail = False
        try:
            self.calls, self.urgent = self._open_lane(), self._open_lane()
            self.mail = self._open_lane(lambda: self._owner.on_mail_sent(self), _MAIL_BYTES)
            for stream in ("stdout", "stderr"):
                self._pipe_ends.append(self._open_pipe(stream))
        except OSError:
            self.close()
            raise

    @property
    def descriptors(self) -> list[int]:
        """Return the worker's ends, to be sent to the template."""
        return [*(sock.fileno() for sock in self._theirs), *self._pipe_ends]

    def advance(self, event: WorkerEvent) -> None:
        self.phase = WORKER_NEXT[self.phase, event]

    def started(self, pid: int) -> None:
        """Watch the end of the process, which the template has forked. Raises: OSError if no descriptor is left."""
        self.close_their_ends()
        self.pid = pid
        self.advance(WorkerEvent.FORKED)
        self._pidfd = self._loop.watch(open_end(pid), self._on_end)

    def close_their_ends(self) -> None:
        for sock in self._theirs:
            sock.close()
        while self._pipe_ends:
            os.close(self._pipe_ends.pop())

    def ask_what_came_past(self) -> None:
        """Have the worker report on both lanes which calls it got past us, since the controller is gone."""
        if self.control_thread:  # else it has begun nothing
            self.untold += 2
            self.urgent.send([wire.encode(wire.ControllerGone())])

    @property
    def may_tell(self) -> bool:
        """Whether the worker still is to report calls that came past us, and can."""
        return self.untold > 0 and self.calls.fd >= 0 and self.mail.fd >= 0

    def send_mail(self, frames: Sequence[Buffer]) -> None:
        """Send a message that does not wait for the worker's main thread."""
        self.send_packed_mail(pack(frames))

    def send_packed_mail(self, data: bytes) -> None:
        """Send mail as `pack` makes it."""
        if not self._reads_mail:
            self._reads_mail = True
            self.urgent.send([wire.encode(wire.OpenMail())])
        self.mail.send_packed(data)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or was told to: it gets no message any more."""
        return self.phase in (WorkerPhase.LEAVING, WorkerPhase.DEAD)

    def read_waiting(self) -> None:
        """Take the messages that the worker has sent by now, among them its answers."""
        self.calls.read_waiting()
        self.mail.read_waiting()

    def drain(self) -> None:
        """Read the text that the worker has written to its pipes so far."""
        for stream in tuple(self._pipes):
            self._read_pipe(stream)

    def kill(self) -> None:
        if self.pid and self.phase is not WorkerPhase.DEAD:  # not reaped yet, so the pid is still its own
            kill_session(self.pid)

    def close(self) -> None:
        """Close our ends; the process must have ended, or end by that."""
        for lane in self._lanes:
            lane.close()
        if self._pidfd is not None:
            self._loop.forget(self._pidfd)
            os.close(self._pidfd.fd)
            self._pidfd = None
        for stream in tuple(self._pipes):
            self._close_pipe(stream)
        self.close_their_ends()
        self.output.log.close()

    def _open_lane(self, on_sent: Callable[[], None] = lambda: None, read_bytes: int = READ_BYTES) -> WorkerLane:
        ours, theirs = socket.socketpair()
        self._theirs.append(theirs)
        lane = WorkerLane(self._loop, ours, self._on_frames, self._on_nonsense, on_sent, read_bytes=read_bytes)
        self._lanes.append(lane)
        return lane

    def _open_pipe(self, stream: str) -> int:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        self._pipes[stream] = self._loop.watch(ours, lambda: self._on_pipe(stream))
        with contextlib.suppress(OSError, AttributeError):  # unprivileged users may be refused
            # enlarge it, so that a rank can print on while we are busy
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # type: ignore[attr-defined,unused-ignore]
        return theirs

    def _on_pipe(self, stream: str) -> None:
        now = time.monotonic()
        if self.output.log.is_full(now):
            self._loop.rest(self._pipes[stream], FULL_LOG_S)  # the rank waits for its disk; nobody else does
            return
        is_trickle = now - self._read_at < 2 * TRICKLE_S  # it comes back after one
        self._read_at = now
        if self._read_pipe(stream) < TRICKLE_BYTES and is_trickle and stream in self._pipes:
            self._loop.rest(self._pipes[stream], TRICKLE_S)
        if self.output.waits_for_pipes:
            self.drain()
        self._owner.on_output()

    def _read_pipe(self, stream: str) -> int:
        """Take in all text that is there; return how many bytes that were."""
        fd, size = self._pipes[stream].fd, 0
        while True:
            try:
                data = os.read(fd, READ_BYTES)
            except BlockingIOError:
                return size
            if not data:
                self._close_pipe(stream)
                return size
            self.output.feed(stream, data, time.monotonic())
            size += len(data)
            if len(data) < READ_BYTES:
                return size

    def _close_pipe(self, stream: str) -> None:
        watch = self._pipes.pop(stream)
        self._loop.forget(watch)
        os.close(watch.fd)

    def _on_frames(self, frames: list[bytes]) -> None:
        if not frames:
            raise PeerProtocolError("a message without a header")
        self._owner.on_message(self, wire.decode_from_worker(frames[0]), frames[1:])

    def _on_nonsense(self, error: Exception) -> None:
        """Kill the worker, since its messages make no sense any more: code on the rank has written to our socket."""
        self._nonsense = self._nonsense or f"it sent something impossible: {error}"
        self.kill()

    def _on_end(self) -> None:
        """Take the worker's last messages, reap it, and end its children; called when the pidfd is readable."""
        assert self._pidfd is not None
        self._loop.forget(self._pidfd)
        os.close(self._pidfd.fd)
        self._pidfd = None
        for take in (self.calls.read_all, self.urgent.read_all, self.mail.read_all, self.drain):
            attempt(take, "the last words of a worker")  # whatever they are, its end is told
        self.advance(WorkerEvent.EXITED)
        kill_session(self.pid)  # its children; the pid is still ours, since it is not reaped yet
        end = reap(self.pid, self._owner.oom)
        self._owner.on_exit(self, self._nonsense or describe_end(end), not self._nonsense and end.was_killed)
