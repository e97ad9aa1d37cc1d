"""The text that a rank writes to stdout and stderr, as the host agent reads it from the rank's pipes, put in order.

    pipe bytes ──> log file (all of it, within a quota)
              └──> pieces tagged with their output id ──> order ──> rate limit ──> controller

A worker writes ``marker + id + newline`` into both pipes where another output begins: attribution is exact however late
the agent reads. A rank may burst `BURST_BYTES` and then send `RATE_BYTES_S` to the notebook; beyond that the newest
`TAIL_BYTES` wait, older ones are counted and stay in the log only.

stdout and stderr come by two pipes, rich output by a socket. At a *place* a worker writes a mark with a number (and
``=`` or ``*``) into both pipes: where Python goes on on the other stream, around commands, and where rich output
belongs. Text behind a mark waits until both pipes were read up to it:

    stdout   a  (1)     (2) c      gives   a  b  <plot>  c      worker: print(a); print(b, file=stderr); plot; print(c)
    stderr      (1) b   (2)
    socket      <plot, 2>

Nothing waits for long: the marks of a place are written one after the other, and rich output is sent before its marks
are written, so all of it is on its way. Text of C code has no marks, and between those the order of reading counts.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from meshbook.agent.rank_log import RankLog
from meshbook.system.exits import CrashReportCut
from meshbook.wire import messages as wire
from meshbook.wire.messages import JOINS, OWN_RANK, PLACE, SHOWN_HERE, StreamText

BURST_BYTES = 256 << 10
RATE_BYTES_S = 64 << 10
TAIL_BYTES = 64 << 10
_PLACES = (PLACE, SHOWN_HERE)
_MARK, _JOINS = b"\x1e", JOINS.encode()
_LONGEST_ID = 24


class ShownDisplay(NamedTuple):
    """A rich output with its payload."""

    message: wire.DisplayData
    payload: list[bytes]


class _Stream:
    """A pipe of a rank: splits its bytes at markers and decodes them."""

    def __init__(self, name: str, marker: bytes) -> None:
        self.name = name
        self._marker = marker
        self._rest = b""
        self.output = 0
        self.decode = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace").decode

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
        at = data.rfind(_MARK)
        if at >= 0 and (marker.startswith(data[at:]) or data[at:].startswith(marker)):  # an incomplete one
            data, self._rest = data[:at], data[at:]
        if data:
            pieces.append((self.output, data))
        return pieces


def _number(digits: bytes) -> int:
    """Return the id in a marker; 0, for no output, in a marker that a rank has forged."""
    return number if digits.isdigit() and (number := int(digits)) < 1 << 63 else 0


class RankOutput:
    """The two pipes of a rank. ``now`` is a monotonic time in seconds, given by the caller."""

    def __init__(self, marker: bytes, log: RankLog, now: float) -> None:
        self.log = log
        self._streams = {name: _Stream(name, marker) for name in ("stdout", "stderr")}
        self._crash = CrashReportCut()
        self._order: OutputOrder[ShownDisplay] = OutputOrder(self._on_text, self._on_shown, tuple(self._streams))
        self.release = self._order.release  # hands on all text that waits, since the rank has ended
        self._pending: deque[StreamText | ShownDisplay] = deque()
        self._shown_waiting = 0
        self._pending_bytes = 0
        self._last = 0  # the output that has written to the log last
        self._budget = float(BURST_BYTES)
        self._refilled = now
        self._cut: dict[int, int] = {}
        self._cut_news: set[int] = set()

    def feed(self, stream: str, data: bytes, now: float) -> None:
        """Take bytes that were read from the pipe ``stream``."""
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
        self.log.write(data.replace(_JOINS, b"") if _JOINS in data else data, now)
        self._last = output

    @property
    def waiting(self) -> bool:
        """Whether `take` has something to give, now or later."""
        return bool(self._pending or self.log.note)

    def take(self, now: float, *, final: bool = False) -> tuple[list[StreamText | ShownDisplay], dict[int, int]]:
        """Return the parts that may be sent now, and the total cut so far of each output whose total grew. final: send
        all parts at any rate, since an output ended; parts before rich output are sent in any case."""
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
        """Count text of ``output`` that will not be shown; return its total, as `take` does."""
        self._cut[output] = self._cut.get(output, 0) + size_bytes
        return {output: self._cut[output]}

    def renew(self) -> None:
        """Renew the budget, since a cell has ended: its text must not silence the next one."""
        self._budget = float(BURST_BYTES)

    def _shorten(self) -> None:
        """Drop the oldest text beyond the limit: it is counted, and in the log."""
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


# text beyond so much is let through, though others should come before it (a rank has forged marks)
HELD_MAX_CHARS = 1 << 20

OrderedDisplay = TypeVar("OrderedDisplay")


class OutputPlace(NamedTuple):
    """A mark that was read."""

    number: int
    has_shown: bool  # whether rich output belongs here


class _Pipe:
    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.read_to = 0  # the highest number that was read
        # marks, each with the text behind it and the output that this belongs to
        self.waiting: deque[tuple[OutputPlace, list[tuple[int, str]]]] = deque()


class OutputOrder(Generic[OrderedDisplay]):
    """The order of a rank's two pipes and of its rich output. Pure."""

    def __init__(
        self,
        on_text: Callable[[str, int, str], None],
        on_shown: Callable[[OrderedDisplay], None],
        streams: tuple[str, ...],
    ) -> None:
        """on_text: takes stream, output and text. on_shown: takes rich output. Both get the order of the rank."""
        self.passed = 0  # how many places lie behind us
        self._on_text, self._on_shown = on_text, on_shown
        self._pipes = {stream: _Pipe(stream) for stream in streams}
        self._each = tuple(self._pipes.values())
        self._read_to = 0  # both pipes were read up to this number
        # rich output of marks that were not passed; None: it was handed on already
        self._early: dict[int, OrderedDisplay | None] = {}
        self._held_chars = 0

    @property
    def waits(self) -> bool:
        """Whether text waits for the other pipe or the socket to be read."""
        return any(pipe.waiting for pipe in self._each)

    def text(self, stream: str, output: int, text: str) -> None:
        """Take text that was read from a pipe."""
        pipe = self._pipes[stream]
        if not pipe.waiting:
            self._on_text(stream, output, text)
            return
        pipe.waiting[-1][1].append((output, text))
        self._held_chars += len(text)
        if self._held_chars > HELD_MAX_CHARS:
            self.release()

    def place(self, stream: str, place: OutputPlace) -> None:
        """Take a mark that was read from a pipe."""
        pipe = self._pipes[stream]
        if place.number > pipe.read_to:
            pipe.read_to = place.number
            self._read_to = min([pipe.read_to for pipe in self._each])
        pipe.waiting.append((place, []))
        self._advance()

    def shown(self, number: int, shown: OrderedDisplay) -> None:
        """Take rich output; all text before it was read. number: that of its place, 0 for none."""
        if any(place.number == number for pipe in self._each for place, _ in pipe.waiting):
            self._early[number] = shown
            self._advance()
            return
        self._on_shown(shown)  # nothing that was read is behind it
        if number:
            self._early[number] = None

    def release(self) -> None:
        """Hand on all that waits, in the order that is known: no more will come."""
        self._advance(at_once=True)

    def _advance(self, *, at_once: bool = False) -> None:
        """Pass the places that can be passed. Plain loops: programs may change streams at every line."""
        while True:
            first: OutputPlace | None = None
            for pipe in self._each:
                if pipe.waiting and (first is None or pipe.waiting[0][0] < first):
                    first = pipe.waiting[0][0]
            if first is None:
                return
            has_come = self._read_to >= first.number and (not first.has_shown or first.number in self._early)
            if not (at_once or has_come):
                return
            if self._early and (shown := self._early.pop(first.number, None)) is not None:
                self._on_shown(shown)
            self.passed += 1
            for pipe in self._each:
                if pipe.waiting and pipe.waiting[0][0] == first:
                    for output, text in pipe.waiting.popleft()[1]:
                        self._held_chars -= len(text)
                        self._on_text(pipe.stream, output, text)
