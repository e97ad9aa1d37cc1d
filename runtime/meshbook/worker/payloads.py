"""Arguments of calls as values, answers as messages: what a worker's threads share of that, payloads in shared memory.

Any thread may call any method.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from meshbook.calls.answer import Outcome, pack_failure
from meshbook.errors import Failure
from meshbook.system.mmap import Bytes
from meshbook.values import lent_memory
from meshbook.values.pickling import dumps, loads
from meshbook.values.segments import SegmentPool, map_segment
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer
from meshbook.worker.channel import AgentChannel


class RankPayloads:
    """describe: makes a failure of an exception that user code has raised."""

    def __init__(self, urgent: AgentChannel, describe: Callable[[BaseException], Failure]) -> None:
        self._urgent, self._describe = urgent, describe
        self.pool = SegmentPool()
        """The large buffers of what this process sends."""
        self._freed: deque[tuple[int, int]] = deque()

    def load(self, call: wire.Call, frames: Sequence[bytes], where: str) -> Any:
        """The sender's arguments. where: this process in words. Raises: LoadError, MeshError."""
        return loads(frames[0] if frames else call.inline, self.map(call.segment), where=where)

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

    def pack(
        self,
        call: int,
        answer: Outcome,
        duration_s: float,
        waited_s: float = 0.0,
        origin: wire.Origin | None = None,
        groups: bytes = b"",
    ) -> tuple[wire.Reply, list[Buffer]]:
        """The reply to a call; when its value cannot travel, the one that says so."""
        segment, payload, inline = None, [], b""
        if answer.failure is not None:
            payload = self._pack_failure(answer.failure)
        elif answer.has_value:
            try:
                head, large = answer.pickled or dumps(answer.value, what=answer.what)
                payload, inline = ([], head) if len(head) <= wire.INLINE_MAX_BYTES else ([head], b"")
                segment = self.pool.write(large) if large else None
            except BaseException as error:
                failed = Outcome(wire.RAISED, failure=self._describe(error))
                return self.pack(call, failed, duration_s, waited_s, origin, groups)
        self.tell_freed()  # before the reply, so that the next payload finds its segment free
        return wire.Reply(call, answer.status, duration_s, segment, inline, waited_s, origin, groups), payload

    def _pack_failure(self, failure: Failure) -> list[Buffer]:
        """As `pack_failure`; what cannot be packed is said instead, since whoever waits needs some answer."""
        try:
            return pack_failure(failure)
        except Exception as problem:
            why = f"what was raised cannot travel: {type(problem).__name__}"
            return pack_failure(Failure(failure.rank, failure.host, "SerializationError", why, (why,), ""))

    def tell_freed(self) -> None:
        """Let the agent know which payloads have died here."""
        lent_memory.settle()
        while self._freed:
            with contextlib.suppress(IndexError):  # several threads come here
                self._urgent.send(wire.SegmentFree(*self._freed.popleft()))
