"""The way from one agent to the agent of another host: its workers' calls go there, their answers come back."""

from __future__ import annotations

from collections.abc import Callable

from meshbook.agent.forwarded import ForwardedCalls
from meshbook.errors import PeerProtocolError
from meshbook.system.event_loop import EventLoop
from meshbook.system.processes import is_same_process, start_time
from meshbook.wire import messages as wire
from meshbook.wire.bulk import NamesPayload
from meshbook.wire.frames import only_frame
from meshbook.wire.ticket import Ticket
from meshbook.wire.transport import Dialer
from meshbook.wire.uplink import Uplink

MAX_SILENCE_S = 10.0
"""Who was not heard of for so long is lost, unless its machine answers, or it is seen to live on ours."""


class PeerClient:
    """To the other agent we are a host that dials in. Lost once `lost` says why."""

    def __init__(
        self,
        dialer: Dialer,
        ticket: Ticket,
        loop: EventLoop,
        make_calls: Callable[[Uplink], ForwardedCalls],
        pid: int = 0,
    ) -> None:
        """ticket: to the port of the other agent. pid: its process, where that is on this machine. Raises: OSError."""
        self._pid, self._started = pid, start_time(pid) if pid else None
        self.lost = ""
        self._uplink = Uplink(dialer, ticket, loop, self)
        self.calls = make_calls(self._uplink)
        """Those that went there."""
        self.beat()

    def serve(self) -> bool:
        """Send and receive what there is; whether there was anything."""
        if self.lost:
            return False
        busy = self._uplink.flush()
        try:
            return self._uplink.receive() or busy
        except (*wire.MALFORMED, PeerProtocolError) as error:
            self.lost = f"it sent something impossible: {error}"
            return True

    def on_heard(self) -> None:
        self._uplink.silence.end()

    def on_message(self, header: bytes, payload: list[bytes]) -> None:
        match wire.decode_to_host(header):
            case wire.Replies() as replies:
                if not self._uplink.bulk_in.hold_back(replies, payload):
                    self.calls.on_replies(replies, payload)
            case wire.Bulk() as piece:
                self._uplink.bulk_in.receive(piece, only_frame(payload))
            case wire.Heartbeat():
                pass
            case other:
                raise PeerProtocolError(f"{type(other).__name__} is not for another agent to send")

    def on_whole(self, message: NamesPayload, frames: list[bytes]) -> None:
        assert isinstance(message, wire.Replies)
        self.calls.on_replies(message, frames)

    def beat(self) -> None:
        """Once a second: say that we are there, and how far we are; notice silence."""
        self._uplink.look()
        if self._uplink.unanswered_s > MAX_SILENCE_S and not self._is_seen_alive:
            self.lost = self.lost or f"no sign of life for {MAX_SILENCE_S:g} s, and its machine does not answer"
        if not self.lost:
            self._uplink.beat()

    @property
    def _is_seen_alive(self) -> bool:
        """Whether silence is not death, since we see its process."""
        return self._started is not None and is_same_process(self._pid, self._started)

    def close(self, death: wire.DeathCause) -> None:
        """Give up the connection, and answer for the ranks over there."""
        self.lost = self.lost or "it was closed"
        self._uplink.close()
        self.calls.lose(death)
