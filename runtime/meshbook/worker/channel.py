"""A worker's end of its sockets to the agent, and of the shared memory beside them. Any thread may call any method."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from meshbook.calls.mailboxes import CallArguments
from meshbook.concurrency import forks
from meshbook.errors import Failure
from meshbook.system.memory_files import Bytes
from meshbook.values import lent_memory
from meshbook.values.copied_segments import KeptMappings
from meshbook.values.pickling import loads
from meshbook.values.segments import SegmentPool, map_segment
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer, FrameSocket
from meshbook.worker.interrupt_gate import InterruptGate


class AgentChannel:
    """A message socket to the agent: one reading thread, any number of writers; useless in forked children."""

    def __init__(self, fd: int, gate: InterruptGate, *, takes_descriptors: bool = False) -> None:
        self.frames = FrameSocket(socket.socket(fileno=fd), takes_descriptors=takes_descriptors)
        """For the reading thread."""
        self.shield = gate.shield
        self.sent = 0
        """How many messages."""
        self._lock = threading.Lock()
        self._generation = forks.generation

    def receive(self, *, is_there: bool = False) -> tuple[wire.ToWorker, list[bytes]] | None:
        """Wait for the next message; None when the agent has closed the socket. is_there: see `FrameSocket.receive`."""
        frames = self.frames.receive(is_there=is_there)
        return None if frames is None else (wire.decode_to_worker(frames[0]), frames[1:])

    def wait(self, timeout_s: float) -> bool:
        """Whether `receive` would find something within ``timeout_s``."""
        return self.frames.wait(timeout_s)

    def send(self, message: wire.FromWorker, payload: Sequence[Buffer] = ()) -> None:
        """Raises: BrokenPipeError when the agent is gone; UsageError in a forked child."""
        if self._generation != forks.generation:
            forks.refuse_inherited(self._generation)
        with self.shield, self._lock:
            self.sent += 1
            self.frames.send([wire.encode(message), *payload])

    def close(self) -> None:
        """In a forked child: let go of the socket, which is its parent's."""
        self.frames.close()


class RankPayloads:
    """What a worker's threads share of payloads. describe: makes a failure of what user code has raised."""

    def __init__(self, urgent: AgentChannel, describe: Callable[[BaseException], Failure]) -> None:
        self._urgent, self.describe = urgent, describe
        self.pool = SegmentPool()
        """The large buffers of what this process sends."""
        self._kept = KeptMappings()
        self._freed: deque[tuple[int, int]] = deque()

    def load(self, call: wire.Call, frames: Sequence[bytes], here: wire.Identity) -> CallArguments:
        """The sender's arguments. Raises: LoadError, MeshError."""
        buffers = () if call.segment is None else self.map(call.segment)
        args: CallArguments = loads(
            frames[0] if frames else call.inline, buffers, where=f"rank {here.rank} on {here.host}"
        )
        return args

    def map(self, segment: wire.SegmentRef | None) -> Sequence[Bytes]:
        """The large buffers of a message; its owner is told when the last view of them has died. Raises: MeshError."""
        if segment is None:
            return ()
        owner = segment.pid
        return map_segment(segment, lambda number: self._freed.append((owner, number)), self._kept)

    def discard(self, call: wire.Call) -> None:
        """The arguments will not be looked at."""
        if call.segment is not None:
            self._freed.append((call.segment.pid, call.segment.segment))
            self.tell_freed()

    def take_freed(self) -> tuple[tuple[int, int], ...]:
        """The payloads that have died here and were not told of, for a reply to tell."""
        lent_memory.settle()
        freed = []
        while self._freed:
            with contextlib.suppress(IndexError):  # several threads come here
                freed.append(self._freed.popleft())
        return tuple(freed)

    def tell_freed(self) -> None:
        """Let the agent know of them now."""
        for each in self.take_freed():
            self._urgent.send(wire.SegmentFree(*each))
