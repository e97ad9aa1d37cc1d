"""What a rank writes to stdout and stderr, as the host agent reads it from the rank's pipes.

    pipe bytes ──> log file (all of it, within a quota)
              └──> pieces tagged with their output id ──> rate limit ──> controller

A worker writes ``marker + id + newline`` into both pipes where another output begins: attribution is exact however
late the agent reads. Marks with ``=`` or ``*`` keep the order of both pipes and of rich output
(`meshbook.agent.output_order`). A rank may burst `BURST_BYTES` and then send `RATE_BYTES_S` to the notebook; beyond
that the newest `TAIL_BYTES` wait, older ones are counted and stay in the log only.
"""

from __future__ import annotations

import codecs
from collections import deque
from typing import NamedTuple

from meshbook.agent.output_order import OutputOrder, OutputPlace
from meshbook.agent.rank_log import RankLog
from meshbook.system.exits import CrashReportCut
from meshbook.wire import messages as wire
from meshbook.wire.messages import OWN_RANK, PLACE, SHOWN_HERE, StreamText

BURST_BYTES = 256 << 10
RATE_BYTES_S = 64 << 10
TAIL_BYTES = 64 << 10


_PLACES = (PLACE, SHOWN_HERE)
_MARK = b"\x1e"
_LONGEST_ID = 24


class ShownDisplay(NamedTuple):
    """Rich output, and its payload."""

    message: wire.DisplayData
    payload: list[bytes]


class _Stream:
    """One pipe: splits its bytes at markers and decodes them."""

    def __init__(self, name: str, marker: bytes) -> None:
        self.name = name
        self._marker = marker
        self._rest = b""
        self.output = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")

    def split(self, data: bytes) -> list[tuple[int, bytes] | OutputPlace]:
        """Return (output id, bytes) pieces and the places between them; an incomplete mark waits for the next call."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        if _MARK not in data:
            return [(self.output, data)] if data else []
        pieces: list[tuple[int, bytes] | OutputPlace] = []
        marker, size, begin = self._marker, len(self._marker), 0
        while (at := data.find(marker, begin)) >= 0:
            end = data.find(b"\n", at, at + size + _LONGEST_ID)
            if end < 0:
                break
            if at > begin:
                pieces.append((self.output, data[begin:at]))
            said = data[at + size : end]
            if said[:1] in _PLACES:
                pieces.append(OutputPlace(_number(said[1:]), said[:1] == SHOWN_HERE))
            else:
                self.output = _number(said)
            begin = end + 1
        data = data[begin:]
        held = self._incomplete_marker_at(data)
        data, self._rest = data[:held], data[held:]
        if data:
            pieces.append((self.output, data))
        return pieces

    def _incomplete_marker_at(self, data: bytes) -> int:
        at = data.rfind(_MARK)
        if at >= 0 and (self._marker.startswith(data[at:]) or data[at:].startswith(self._marker)):
            return at
        return len(data)

    def decode(self, data: bytes) -> str:
        return self._decoder.decode(data)


def _number(digits: bytes) -> int:
    """The id in a marker; 0, nobody's, for one that a rank has forged."""
    return number if digits.isdigit() and (number := int(digits)) < 1 << 63 else 0


class RankOutput:
    """Both pipes of one rank. ``now`` is a monotonic time in seconds, given by the caller."""

    def __init__(self, marker: bytes, log: RankLog, now: float) -> None:
        self.log = log
        self._streams = {name: _Stream(name, marker) for name in ("stdout", "stderr")}
        self._crash = CrashReportCut()
        self._order: OutputOrder[ShownDisplay] = OutputOrder(self._on_text, self._on_shown, tuple(self._streams))
        self._pending: deque[StreamText | ShownDisplay] = deque()
        self._shown_waiting = 0
        self._pending_bytes = 0
        self._last = 0
        """The output that has written to the log last."""
        self._budget = float(BURST_BYTES)
        self._refilled = now
        self._cut: dict[int, int] = {}
        self._cut_news: set[int] = set()

    def feed(self, stream: str, data: bytes, now: float) -> None:
        """Take what was read from the pipe ``stream``."""
        split = self._streams[stream]
        parts = split.split(data)
        if written := [part for part in parts if not isinstance(part, OutputPlace)]:
            self._keep(written[-1][0], b"".join([piece for _, piece in written]), now)
        for part in parts:
            if isinstance(part, OutputPlace):
                self._order.place(stream, part)
                continue
            output, piece = part
            text = split.decode(piece)
            if stream == "stderr":
                text = self._crash.cut(text)
            if text:
                self._order.text(stream, output, text)
        self._shorten()

    def show(self, shown: ShownDisplay) -> None:
        """Take rich output; the pipes were read up to where it was sent."""
        self._order.shown(shown.message.place, shown)

    def release(self) -> None:
        """The rank has ended: no text waits any more for what belongs before it."""
        self._order.release()

    @property
    def waits_for_pipes(self) -> bool:
        """Whether text of one pipe waits until the other was read."""
        return self._order.waits

    def _on_text(self, stream: str, output: int, text: str) -> None:
        self._pending.append(StreamText(OWN_RANK, stream, text, output, self._order.passed))
        self._pending_bytes += len(text)

    def _on_shown(self, shown: ShownDisplay) -> None:
        self._pending.append(shown)
        self._shown_waiting += 1

    def add_late(self, piece: StreamText, now: float) -> None:
        """Take text that its worker attributed itself, since it belongs to an earlier output."""
        self._keep(piece.output, piece.text.encode(errors="backslashreplace"), now)
        self._on_text(piece.stream, piece.output, piece.text)
        self._shorten()

    def is_writing(self, output: int) -> bool:
        """Whether the text in the pipes belongs to this output, as far as they were read."""
        return any(stream.output == output for stream in self._streams.values())

    def _keep(self, output: int, data: bytes, now: float) -> None:
        self.log.write(data, now)
        self._last = output

    @property
    def waiting(self) -> bool:
        """Whether `take` has something to give, now or later."""
        return bool(self._pending or self.log.has_note)

    def take(self, now: float, *, final: bool = False) -> tuple[list[StreamText | ShownDisplay], dict[int, int]]:
        """Return what may be sent now, and the total cut so far of each output whose total grew.

        final: an output ended: everything that waits is sent, whatever the rate; so is what stands before rich output.
        """
        self._budget = min(BURST_BYTES, self._budget + (now - self._refilled) * RATE_BYTES_S)
        self._refilled = now
        if final:
            self.log.settle()
        pieces: list[StreamText | ShownDisplay] = []
        if note := self.log.take_note():
            pieces.append(StreamText(OWN_RANK, "stderr", note, self._last))
        while self._pending and (final or self._budget > 0 or self._shown_waiting):
            piece = self._pending.popleft()
            pieces.append(piece)
            if isinstance(piece, ShownDisplay):
                self._shown_waiting -= 1
                continue
            self._pending_bytes -= len(piece.text)
            self._budget -= len(piece.text)
        if self.log.lacks:
            self._cut_news.update(piece.output for piece in pieces if isinstance(piece, StreamText))
        cuts = {output: self._cut.get(output, 0) for output in self._cut_news}
        self._cut_news.clear()
        return pieces, cuts

    def cut(self, output: int, size_bytes: int) -> dict[int, int]:
        """So much more of ``output`` will not be shown; returns its total, as `take` does."""
        self._cut[output] = self._cut.get(output, 0) + size_bytes
        return {output: self._cut[output]}

    def renew(self) -> None:
        """A cell has ended: what it printed must not silence the next one."""
        self._budget = float(BURST_BYTES)

    def _shorten(self) -> None:
        """Drop the oldest text beyond what may wait: it is counted, and in the log."""
        most = max(self._budget, TAIL_BYTES) + TAIL_BYTES
        shown: list[ShownDisplay] = []
        while self._pending_bytes > most:
            oldest = self._pending.popleft()
            if isinstance(oldest, StreamText):
                self._drop(oldest)
            else:
                shown.append(oldest)
        self._pending.extendleft(reversed(shown))

    def _drop(self, piece: StreamText) -> None:
        size = len(piece.text)
        self._pending_bytes -= size
        self._cut[piece.output] = self._cut.get(piece.output, 0) + size
        self._cut_news.add(piece.output)
