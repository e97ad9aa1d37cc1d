"""An agent's own road to the agent of another host: its workers' calls go there, their answers come back.

The same lanes, links and payloads in pieces as between an agent and its controller (`meshbook.wire.transport`): to the
other agent we are a host that dials in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from meshbook.agent.segment_refs import LentSegment, SegmentRefCounts
from meshbook.errors import PeerProtocolError
from meshbook.system.event_loop import EventLoop, Watch
from meshbook.system.processes import is_same_process, start_time
from meshbook.values.segments import map_segment
from meshbook.wire import messages as wire
from meshbook.wire.batches import Batch, unbatch
from meshbook.wire.bulk import BulkReceiver, BulkSender, Spans
from meshbook.wire.frames import Buffer
from meshbook.wire.transport import AgentSocket, LaneName

FULL_BYTES = 8 << 20
"""With so much on its way, in messages, senders wait."""
FULL_BULK_BYTES = 256 << 20
"""The same in payloads, which lie in the senders' shared memory until their turn comes."""

MAX_SILENCE_S = 10.0
"""Who was not heard of for so long is lost, unless its machine answers, or it is seen to live on ours."""


class PeerClient:
    """`meshbook.agent.forwarded.ForwardingRoute`. Lost once `lost` says why."""

    def __init__(
        self, lanes: dict[LaneName, AgentSocket], loop: EventLoop, segment_refs: SegmentRefCounts, pid: int = 0
    ) -> None:
        """lanes: to the port of the other agent. pid: its process, where that is on this machine."""
        self._loop, self._segment_refs = loop, segment_refs
        self._pid, self._started = pid, start_time(pid) if pid else None
        self._beaten = time.monotonic()
        self.lost = ""
        self.heard = time.monotonic()
        self.on_replies: Callable[[wire.Replies, list[bytes]], None] = lambda replies, frames: None
        self.on_whole: Callable[[], None] = lambda: None
        """Called when a payload is whole."""
        self._lanes = lanes
        self._watches: list[Watch] = [lane.watch(loop) for lane in self._lanes.values()]
        self._outbox = Batch(self._lanes["calls"].send)
        bulk = self._lanes["bulk"]
        self._bulk_out = BulkSender(lambda: bulk.link, bulk.send)
        self._ended: deque[LentSegment] = deque()
        self._bulk_in = BulkReceiver(lambda: self.on_whole())
        self.beat()

    @property
    def bulk_in(self) -> BulkReceiver:
        return self._bulk_in

    @property
    def is_full(self) -> bool:
        return not self.lost and (
            self._lanes["calls"].link.unacked_bytes > FULL_BYTES or self._bulk_out.waiting_bytes > FULL_BULK_BYTES
        )

    def send(self, message: wire.FromHost, payload: Sequence[Buffer] = ()) -> None:
        """Send on the lane of calls, in order, at the latest with `serve`."""
        self._outbox.add(wire.encode(message), payload)

    def export(self, segment: wire.SegmentRef) -> tuple[None, tuple[int, Spans]]:
        """Send a payload in pieces, as fast as they are taken; it is not copied before. Raises: MeshError."""
        key = (segment.pid, segment.segment)
        self._segment_refs.lend(key)
        buffers = map_segment(segment, lambda _: self._ended.append(key))
        return None, self._bulk_out.send([buffer.data for buffer in buffers])

    def serve(self) -> bool:
        """Send and receive what there is; whether there was anything."""
        if self.lost:
            return False
        self._outbox.flush()
        busy = self._bulk_out.pump()
        try:
            for lane in self._lanes.values():
                for header, payload in lane.receive() if lane.readable() else ():
                    busy = True
                    self.heard = time.monotonic()
                    for each in unbatch(header):
                        self._hear(wire.decode_to_host(each), payload)
        except (*wire.MALFORMED, PeerProtocolError) as error:
            self.lost = f"it sent something impossible: {error}"
        while self._ended:
            self._segment_refs.end(self._ended.popleft())
        return busy

    def _hear(self, message: wire.ToHost, payload: list[bytes]) -> None:
        match message:
            case wire.Replies():
                self.on_replies(message, payload)
            case wire.Bulk():
                self._bulk_in.receive(message, payload[0] if payload else b"")
            case wire.Heartbeat():
                pass
            case other:
                raise PeerProtocolError(f"{type(other).__name__} is not for another agent to send")

    def beat(self) -> None:
        """Once a second: say that we are there, and how far we are; notice silence."""
        now = time.monotonic()
        stalled, self._beaten = now - self._beaten > MAX_SILENCE_S / 2, now
        if stalled:  # it was we who did not listen
            self.heard = now
        urgent = self._lanes["urgent"]
        urgent.look()
        if now - max(self.heard, urgent.answered) > MAX_SILENCE_S and not self._is_seen_alive:
            self.lost = self.lost or f"no sign of life for {MAX_SILENCE_S:g} s, and its machine does not answer"
        if not self.lost:
            urgent.send(wire.encode(wire.Heartbeat()))
            for lane in self._lanes.values():
                lane.beat()

    @property
    def _is_seen_alive(self) -> bool:
        """Whether silence is not death, since we see its process."""
        return self._started is not None and is_same_process(self._pid, self._started)

    def close(self) -> None:
        """Let go of everything."""
        self.lost = self.lost or "it was closed"
        for watch in self._watches:
            self._loop.forget(watch)
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        self._bulk_out.clear()
        while self._ended:
            self._segment_refs.end(self._ended.popleft())
