"""Prints of ranks that belong to no cell: to our own stdout and stderr, line by line, with the rank in front."""

from __future__ import annotations

import sys

from meshbook.output_events import DisplayData, Notice, OutputCut, OutputEvent, RankStopped, StreamText
from meshbook.wording import format_bytes


class ConsoleOutput:
    """The default listener: what `ProcMesh.execute` prints in a script. A notebook extension sets its own."""

    def __init__(self) -> None:
        self._partial: dict[tuple[int, str], str] = {}

    def __call__(self, event: OutputEvent) -> None:
        """Print whole lines; the start of a line waits for its end."""
        if isinstance(event, StreamText):
            key = (event.rank, event.stream)
            *lines, rest = (self._partial.pop(key, "") + event.text).split("\n")
            if rest:
                self._partial[key] = rest
            self._write(event.stream, "".join(f"[{event.rank}] {line}\n" for line in lines))
        elif isinstance(event, OutputCut):
            self._write("stderr", f"[{event.rank}] {format_bytes(event.size_bytes)} more in {event.log_path}\n")
        elif isinstance(event, RankStopped) and not event.stop.seen:
            event.stop.seen = True
            self._write("stderr", f"rank {event.rank} {event.stop.words}\n")
        elif isinstance(event, Notice):
            self._write("stderr", f"{event.text}\n")
        elif isinstance(event, DisplayData) and not event.is_result and (text := event.data.get("text/plain")):
            self._write("stdout", f"[{event.rank}] {text}\n")

    def _write(self, stream: str, text: str) -> None:
        if text:
            file = sys.stderr if stream == "stderr" else sys.stdout
            file.write(text)
            file.flush()
