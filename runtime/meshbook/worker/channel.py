"""A worker's end of its sockets to the agent, the shared memory beside them, and the output that a rank shows.

Any thread may call any method of `AgentChannel` and `RankPayloads`. `WorkerOutput` puts marks into the rank's pipes,
and sends messages for output that pipes do not carry.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from meshbook.calls.mailboxes import CallArguments
from meshbook.concurrency import forks
from meshbook.concurrency.interrupts import gate_of_this_thread
from meshbook.curves.series import LoggedPoints
from meshbook.errors import Failure, MessageTooLarge
from meshbook.formatting import format_bytes
from meshbook.shell.shell import RankShell
from meshbook.system.memory_files import Bytes
from meshbook.values import lent_memory
from meshbook.values.pickling import loads
from meshbook.values.segments import KeptMappings, SegmentPool, map_segment
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer, FrameSocket
from meshbook.wire.messages import PLACE, SHOWN_HERE
from meshbook.worker.interrupt_gate import InterruptGate

Send: TypeAlias = Callable[[wire.FromWorker, Sequence[Buffer]], object]


class AgentChannel:
    """A message socket to the agent: one reading thread, any number of writers; useless in forked children."""

    def __init__(self, fd: int, gate: InterruptGate) -> None:
        self.frames = FrameSocket(socket.socket(fileno=fd))  # for the reading thread
        self.shield = gate.shield
        self.sent = 0  # how many messages were sent
        self._lock = threading.Lock()
        self._generation = forks.generation

    def receive(self, *, is_there: bool = False) -> tuple[wire.ToWorker, list[bytes]] | None:
        """Wait for the next message; None: the agent has closed the socket. is_there: see `FrameSocket.receive`."""
        frames = self.frames.receive(is_there=is_there)
        return None if frames is None else (wire.decode_to_worker(frames[0]), frames[1:])

    def send(self, message: wire.FromWorker, payload: Sequence[Buffer] = ()) -> None:
        """Send a message. Raises: BrokenPipeError when the agent is gone; UsageError in a forked child."""
        if self._generation != forks.generation:
            forks.refuse_inherited(self._generation)
        with self.shield, self._lock:
            self.sent += 1
            self.frames.send([wire.encode(message), *payload])

    def close(self) -> None:
        """Let go of the socket, which is the parent's, in a forked child."""
        self.frames.close()


class RankPayloads:
    """The payloads of a worker, for all of its threads. describe: makes a failure of an error of user code."""

    def __init__(self, urgent: AgentChannel, describe: Callable[[BaseException], Failure]) -> None:
        self._urgent, self.describe = urgent, describe
        self.pool = SegmentPool()  # the large buffers of messages that this process sends
        self._kept = KeptMappings()
        self._freed: deque[tuple[int, int]] = deque()

    def load(self, call: wire.Call, frames: Sequence[bytes], here: wire.Identity) -> CallArguments:
        """Return the sender's arguments. Raises: LoadError, MeshError."""
        buffers = () if call.segment is None else self.map(call.segment)
        args: CallArguments = loads(
            frames[0] if frames else call.inline, buffers, where=f"rank {here.rank} on {here.host}"
        )
        return args

    def map(self, segment: wire.SegmentRef | None) -> Sequence[Bytes]:
        """Return the large buffers of a message; its owner is told when the last view has died. Raises: MeshError."""
        if segment is None:
            return ()
        owner = segment.pid
        return map_segment(segment, lambda number: self._freed.append((owner, number)), self._kept)

    def discard(self, call: wire.Call) -> None:
        """Free the arguments of a call that does not run."""
        if call.segment is not None:
            self._freed.append((call.segment.pid, call.segment.segment))
            self.tell_freed()

    def take_freed(self) -> tuple[tuple[int, int], ...]:
        """Return, for a reply, the payloads that have died here since the last call."""
        lent_memory.settle()
        freed = []
        while self._freed:
            with contextlib.suppress(IndexError):  # several threads come here
                freed.append(self._freed.popleft())
        return tuple(freed)

    def tell_freed(self) -> None:
        """Tell the agent now which payloads have died here."""
        for each in self.take_freed():
            self._urgent.send(wire.SegmentFree(*each))


LATE_PIECE_CHARS = 1 << 16


class WorkerOutput:
    """The output of a rank, as the shell uses it (`meshbook.shell.shell.OutputSink`). marker: see `wire.Begin`."""

    def __init__(self, shell: RankShell, gate: InterruptGate, calls: AgentChannel, send_mail: Send) -> None:
        """send_mail: sends a message in order with the replies of actors (`meshbook.worker.mail.WorkerMail.send`)."""
        self._shell, self._gate, self._send_call, self._send_mail = shell, gate, calls.send, send_mail
        self.marker = b""
        self.current = -1  # id of the output whose text goes into the pipes
        self._places = itertools.count(1)

    def begin(self, output: int) -> None:
        """Tell the agent, in the pipes themselves, that the following text belongs to ``output``."""
        self.current = output
        self._shell.mark_text(self.marker + b"%d\n" % output)

    def display(
        self,
        data: Mapping[str, object],
        metadata: Mapping[str, object],
        transient: Mapping[str, object],
        *,
        update: bool,
        is_result: bool,
        cell_id: int,
        is_late: bool,
    ) -> None:
        self._shell.flush_text()
        content = wire.encode(wire.Bundle(*map(_by_text, (data, metadata, transient))))
        with self._gate.shield:  # sent first: so it is on its way when the agent reads the mark
            place = 0 if is_late else next(self._places)
            try:
                self._send()(wire.DisplayData(wire.OWN_RANK, cell_id, update, is_result, place), [content])
            except MessageTooLarge as error:
                size, limit = format_bytes(error.size_bytes), format_bytes(error.limit_bytes)
                print(f"{size} to be shown at once are left out; {limit} are the most", file=sys.stderr)
                return
            if place:
                self._shell.mark_text(self.marker + SHOWN_HERE + b"%d\n" % place)

    def scalars(self, output: int, batches: Sequence[LoggedPoints]) -> None:
        logged = [
            wire.Scalars(name, count, *(column.tobytes() for column in points)) for name, count, points in batches
        ]
        with self._gate.shield:
            self._send()(wire.Logged(0, wire.OWN_RANK, output), [wire.encode(logged)])

    def mark_place(self) -> None:
        with self._gate.shield:
            self._shell.mark_text(self.marker + PLACE + b"%d\n" % next(self._places))

    def late_text(self, stream: str, text: str, cell_id: int) -> None:
        for at in range(0, len(text), LATE_PIECE_CHARS):  # the agent cuts what is too much, a piece at a time
            self._send()(wire.StreamText(wire.OWN_RANK, stream, text[at : at + LATE_PIECE_CHARS], cell_id), ())

    def _send(self) -> Send:
        """Return what sends the calling thread's replies, so that its output comes before them."""
        return self._send_call if gate_of_this_thread() is None else self._send_mail

    def tell_prompt(self, at: wire.AtPrompt) -> None:
        self._shell.flush_text()
        self._send_call(wire.Prompted(0, wire.OWN_RANK, self._shell.output_here or self.current, at), ())


def _by_text(items: Mapping[str, object]) -> dict[str, object]:
    """Turn the kinds of content of a user's bundle into texts."""
    return {kind if type(kind) is str else str(kind): item for kind, item in items.items()}
