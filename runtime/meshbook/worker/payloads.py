"""CallArguments of calls as values, and what a worker's threads share of payloads in shared memory.

Any thread may call any method.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from meshbook.calls.mailboxes import CallArguments
from meshbook.errors import Failure
from meshbook.system.memory_files import Bytes
from meshbook.values import lent_memory
from meshbook.values.pickling import loads
from meshbook.values.segments import SegmentPool, map_segment
from meshbook.wire import messages as wire
from meshbook.worker.channel import AgentChannel


class RankPayloads:
    """describe: makes a failure of an exception that user code has raised."""

    def __init__(self, urgent: AgentChannel, describe: Callable[[BaseException], Failure]) -> None:
        self._urgent, self.describe = urgent, describe
        self.pool = SegmentPool()
        """The large buffers of what this process sends."""
        self._freed: deque[tuple[int, int]] = deque()

    def load(self, call: wire.Call, frames: Sequence[bytes], where: str) -> CallArguments:
        """The sender's arguments. where: this process in words. Raises: LoadError, MeshError."""
        args: CallArguments = loads(frames[0] if frames else call.inline, self.map(call.segment), where=where)
        return args

    def map(self, segment: wire.SegmentRef | None) -> Sequence[Bytes]:
        """The large buffers of a message; its owner is told when the last view of them has died. Raises: MeshError."""
        if segment is None:
            return ()
        owner = segment.pid
        return map_segment(segment, lambda number: self._freed.append((owner, number)))

    def discard(self, call: wire.Call) -> None:
        """The arguments will not be looked at."""
        if call.segment is not None:
            self._freed.append((call.segment.pid, call.segment.segment))
            self.tell_freed()

    def tell_freed(self) -> None:
        """Let the agent know which payloads have died here."""
        lent_memory.settle()
        while self._freed:
            with contextlib.suppress(IndexError):  # several threads come here
                self._urgent.send(wire.SegmentFree(*self._freed.popleft()))
