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

Shown = TypeVar("Shown")


class Place(NamedTuple):
    """A mark that was read."""

    number: int
    has_shown: bool
    """Rich output belongs here."""


class _Pipe:
    def __init__(self) -> None:
        self.read_to = 0
        """The highest number that was read."""
        self.waiting: deque[Place | str] = deque()
        """Marks, and the text behind the first of them."""
        self.output: deque[int] = deque()
        """To which output each of the waiting texts belongs."""


class OutputOrder(Generic[Shown]):
    """Both pipes of one rank, and its rich output."""

    def __init__(
        self, on_text: Callable[[str, int, str], None], on_shown: Callable[[Shown], None], streams: tuple[str, ...]
    ) -> None:
        """on_text: gets stream, output and text; on_shown: what was shown; both in the order of the rank."""
        self.passed = 0
        """How many places lie behind us."""
        self._on_text, self._on_shown = on_text, on_shown
        self._pipes = {stream: _Pipe() for stream in streams}
        self._early: dict[int, Shown | None] = {}
        """Rich output of marks that were not passed; None: it was handed on already."""
        self._held_chars = 0

    @property
    def waits(self) -> bool:
        """Whether text waits for the other pipe or the socket to be read."""
        return any(pipe.waiting for pipe in self._pipes.values())

    def text(self, stream: str, output: int, text: str) -> None:
        """This was read from a pipe."""
        pipe = self._pipes[stream]
        if not pipe.waiting:
            self._on_text(stream, output, text)
            return
        pipe.waiting.append(text)
        pipe.output.append(output)
        self._held_chars += len(text)
        if self._held_chars > HELD_MAX_CHARS:
            self.release()

    def place(self, stream: str, place: Place) -> None:
        """A mark was read from a pipe."""
        pipe = self._pipes[stream]
        pipe.read_to = max(pipe.read_to, place.number)
        pipe.waiting.append(place)
        self._advance()

    def shown(self, number: int, shown: Shown) -> None:
        """Rich output has come, and all text before it was read. number: of its place, 0 for none."""
        if any(isinstance(each, Place) and each.number == number for p in self._pipes.values() for each in p.waiting):
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
        """Pass the places that can be passed."""
        pipes = self._pipes.values()
        while waiting := [pipe for pipe in pipes if pipe.waiting]:
            number, has_shown = min(place for pipe in waiting if isinstance(place := pipe.waiting[0], Place))
            is_here = not has_shown or number in self._early
            if not at_once and not (is_here and all(pipe.read_to >= number for pipe in pipes)):
                return
            if (shown := self._early.pop(number, None)) is not None:
                self._on_shown(shown)
            self.passed += 1
            for stream, pipe in self._pipes.items():
                if pipe.waiting and pipe.waiting[0] == (number, has_shown):
                    pipe.waiting.popleft()
                    self._hand_on(stream, pipe)

    def _hand_on(self, stream: str, pipe: _Pipe) -> None:
        """The text up to the next mark."""
        while pipe.waiting and isinstance(text := pipe.waiting[0], str):
            pipe.waiting.popleft()
            self._held_chars -= len(text)
            self._on_text(stream, pipe.output.popleft(), text)
