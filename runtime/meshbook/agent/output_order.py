"""What a rank shows, put in the order in which it did so: stdout and stderr come by two pipes, rich output by a socket.

At a *place* a worker writes a mark with a number into both pipes: where Python goes on on the other stream, around
commands, and where rich output belongs. What stands behind a mark waits until both pipes were read up to it.

    stdout   a  (1)     (2) c      gives   a  b  <plot>  c      worker: print(a); print(b, file=stderr); plot; print(c)
    stderr      (1) b   (2)
    socket      <plot, 2>

Nothing waits for long: the marks of a place are written one after the other, and rich output is sent before its marks
are written, so all of it is on its way. Text of C code has no marks, and between those the order of reading counts.
Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

HELD_MAX_CHARS = 1 << 20
"""So much text waits for what belongs before it; more than that is let through (a rank has forged marks)."""

OrderedDisplay = TypeVar("OrderedDisplay")


class OutputPlace(NamedTuple):
    """A mark that was read."""

    number: int
    has_shown: bool
    """Rich output belongs here."""


class _Pipe:
    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.read_to = 0
        """The highest number that was read."""
        self.waiting: deque[tuple[OutputPlace, list[tuple[int, str]]]] = deque()
        """Marks, each with the text behind it and the output that this belongs to."""


class OutputOrder(Generic[OrderedDisplay]):
    """Both pipes of one rank, and its rich output."""

    def __init__(
        self,
        on_text: Callable[[str, int, str], None],
        on_shown: Callable[[OrderedDisplay], None],
        streams: tuple[str, ...],
    ) -> None:
        """on_text: gets stream, output and text; on_shown: what was shown; both in the order of the rank."""
        self.passed = 0
        """How many places lie behind us."""
        self._on_text, self._on_shown = on_text, on_shown
        self._pipes = {stream: _Pipe(stream) for stream in streams}
        self._each = tuple(self._pipes.values())
        self._read_to = 0
        """Up to this number both were read."""
        self._early: dict[int, OrderedDisplay | None] = {}
        """Rich output of marks that were not passed; None: it was handed on already."""
        self._held_chars = 0

    @property
    def waits(self) -> bool:
        """Whether text waits for the other pipe or the socket to be read."""
        return any(pipe.waiting for pipe in self._each)

    def text(self, stream: str, output: int, text: str) -> None:
        """This was read from a pipe."""
        pipe = self._pipes[stream]
        if not pipe.waiting:
            self._on_text(stream, output, text)
            return
        pipe.waiting[-1][1].append((output, text))
        self._held_chars += len(text)
        if self._held_chars > HELD_MAX_CHARS:
            self.release()

    def place(self, stream: str, place: OutputPlace) -> None:
        """A mark was read from a pipe."""
        pipe = self._pipes[stream]
        if place.number > pipe.read_to:
            pipe.read_to = place.number
            self._read_to = min([pipe.read_to for pipe in self._each])
        pipe.waiting.append((place, []))
        self._advance()

    def shown(self, number: int, shown: OrderedDisplay) -> None:
        """Rich output has come, and all text before it was read. number: of its place, 0 for none."""
        if any(place.number == number for pipe in self._each for place, _ in pipe.waiting):
            self._early[number] = shown
            self._advance()
            return
        self._on_shown(shown)  # nothing that was read is behind it
        if number:
            self._early[number] = None

    def release(self) -> None:
        """Hand on all that waits, in the order that is known: nothing more will come."""
        self._advance(at_once=True)

    def _advance(self, *, at_once: bool = False) -> None:
        """Pass the places that can be passed. Plain loops: programs may change streams at every line."""
        while True:
            first: OutputPlace | None = None
            for pipe in self._each:
                if pipe.waiting and (first is None or pipe.waiting[0][0] < first):
                    first = pipe.waiting[0][0]
            if first is None or not (at_once or self._can_pass(first)):
                return
            if self._early and (shown := self._early.pop(first.number, None)) is not None:
                self._on_shown(shown)
            self.passed += 1
            for pipe in self._each:
                if pipe.waiting and pipe.waiting[0][0] == first:
                    for output, text in pipe.waiting.popleft()[1]:
                        self._held_chars -= len(text)
                        self._on_text(pipe.stream, output, text)

    def _can_pass(self, place: OutputPlace) -> bool:
        if place.has_shown and place.number not in self._early:
            return False
        return self._read_to >= place.number
