"""The events that a running cell sends to its listener, in the order in which they happened on each rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from meshbook.calls.rank_state import Stop as Stop
from meshbook.errors import Failure
from meshbook.formatting import format_bytes
from meshbook.wire.messages import JOINS as JOINS
from meshbook.wire.messages import DisplayData as DisplayData
from meshbook.wire.messages import OutputDropped as OutputDropped
from meshbook.wire.messages import StreamText as StreamText
from meshbook.wire.messages import without_joins as without_joins


class RankDone(NamedTuple):
    """The rank has ended the cell; ``failure`` tells why when it was not ``ok``: None for one that was freed."""

    rank: int
    ok: bool
    duration_s: float
    failure: Failure | None


class Notice(NamedTuple):
    """A text of the controller's while the cell runs."""

    text: str


class NewScalars(NamedTuple):
    """A rank has logged scalars of these names, which its mesh has by now."""

    names: tuple[str, ...]


OutputEvent: TypeAlias = StreamText | OutputDropped | DisplayData | NewScalars | RankDone | Stop | Notice
"""A `Stop`: the rank waits at a prompt of pdb."""
OutputListener: TypeAlias = Callable[[OutputEvent], None]
"""Called on the thread that serves the sockets: it must not block."""


class OutputTarget(NamedTuple):
    """The target of output of calls that have no listener of their own."""

    id: int
    listener: OutputListener


class ConsoleOutput:
    """The default listener, for `ProcMesh.execute` in a script. A notebook extension sets its own."""

    def __init__(self) -> None:
        self._partial: dict[tuple[int, str], str] = {}

    def __call__(self, event: OutputEvent) -> None:
        """Print whole lines; the start of a line waits for its end, or that of the rank's cell."""
        if isinstance(event, StreamText):
            key = (event.rank, event.stream)
            *lines, rest = (self._partial.pop(key, "") + without_joins(event.text)).split("\n")
            if rest:
                self._partial[key] = rest
            self._write(event.stream, "".join(f"[{event.rank}] {line}\n" for line in lines))
        elif isinstance(event, RankDone):
            for stream in ("stdout", "stderr"):
                if rest := self._partial.pop((event.rank, stream), ""):
                    self._write(stream, f"[{event.rank}] {rest}\n")
        elif isinstance(event, OutputDropped):
            if event.size_bytes:
                where = f"{event.log_path}, as far as it has it ({event.lacks})" if event.lacks else event.log_path
                self._write("stderr", f"[{event.rank}] {format_bytes(event.size_bytes)} more in {where}\n")
        elif isinstance(event, Stop) and not event.seen:
            event.seen = True
            self._write("stderr", f"rank {event.rank} {event.words}\n")
        elif isinstance(event, Notice):
            self._write("stderr", f"{event.text}\n")
        elif isinstance(event, DisplayData) and not event.is_result and (text := event.data.get("text/plain")):
            self._write("stdout", f"[{event.rank}] {text}\n")

    def _write(self, stream: str, text: str) -> None:
        if text:
            file = sys.stderr if stream == "stderr" else sys.stdout
            file.write(text)
            file.flush()
