"""What several pips say, as one line in one place: ``pip: 2 of 3 environments done; host b builds flash-attn``.

The whole of what pip has said is kept, and shown by environment where that is asked for or something went wrong.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Mapping

from meshbook.calls.output import OutputEvent, OutputTarget, StreamText
from meshbook_extension.output.labels import count
from meshbook_extension.output.publisher import CellSink, Publisher

EVERY_S = 0.2
"""How often the line changes at most."""
KEPT_LINES, SHOWN_NAMES = 200, 3

PROGRESSES = ("install", "uninstall", "download", "wheel", "sync")
"""Commands of pip that take long and say much; of others all is shown."""

_STAGES = (
    (re.compile(r"\s*Collecting (\S+)"), "looks for {}"),
    (re.compile(r"\s*(?:Downloading|Using cached) (\S+(?: \([^)]*\))?)"), "downloads {}"),
    (re.compile(r"\s*Building wheels? for(?: collected packages:)? ([^\s,]+)"), "builds {}"),
    (re.compile(r"Installing collected packages: (.+)"), "installs {}"),
    (re.compile(r"(Successfully (?:un)?installed .+|Requirement already satisfied: \S+)"), "{}"),
)
_TROUBLE = re.compile(r"\s*(?:WARNING|ERROR|DEPRECATION|warning|error)\b")
_BEGINS = "begins"


class PipProgress:
    """Shows the line while it is the target of a call, on the publisher's thread. names: where each rank is."""

    def __init__(self, id: int, names: Mapping[int, str], sink: CellSink, publisher: Publisher) -> None:
        self.target = OutputTarget(id, self._receive)
        self._names, self._sink, self._publisher = names, sink, publisher
        self._lock = threading.Lock()
        self._rest = dict.fromkeys(names, "")
        self._stages = dict.fromkeys(names, _BEGINS)
        self._lines: dict[int, deque[str]] = {rank: deque(maxlen=KEPT_LINES) for rank in names}
        self._done: set[int] = set()
        self._ended = False
        publisher.schedule(self, time.monotonic())

    def _receive(self, event: OutputEvent) -> None:
        if not isinstance(event, StreamText) or event.rank not in self._lines:
            return
        with self._lock:
            *lines, self._rest[event.rank] = (self._rest[event.rank] + event.text).split("\n")
            for line in lines:
                self._lines[event.rank].append(line)
                for pattern, stage in _STAGES:
                    if found := pattern.match(line):
                        self._stages[event.rank] = stage.format(found[1])
                        if line.startswith("Successfully"):
                            self._done.add(event.rank)
        self._publisher.schedule(self, time.monotonic() + EVERY_S)

    def pump(self, now: float) -> float | None:
        """Show how far they are."""
        with self._lock:
            if not self._ended:
                self._sink.bars([self.line()])
        return None

    def fail(self, error: Exception) -> None:
        """Whoever waits for pip learns how that ends."""

    def line(self) -> str:
        """How many are done, and what the others do."""
        doing: dict[str, list[str]] = {}
        for rank, stage in self._stages.items():
            if rank not in self._done:
                doing.setdefault(stage, []).append(self._names[rank])
        parts = [f"{len(self._done)} of {count(len(self._names), 'environment')} done"]
        for stage, names in sorted(doing.items(), key=lambda each: -len(each[1])):
            who = names[0] if len(names) == 1 else f"{len(names)} of them:"
            parts.append(f"{who} {stage}")
        return f"pip: {'; '.join(parts[: 1 + SHOWN_NAMES])}"

    def finish(self) -> None:
        """Take the line away."""
        with self._lock:
            self._ended = True
            self._sink.bars([])

    def summary(self) -> list[str]:
        """What each has said of its end, and of trouble, once where it is the same."""
        said: dict[str, list[str]] = {}
        for rank, lines in self._lines.items():
            told = [line.strip() for line in lines if _TROUBLE.match(line)]
            for line in dict.fromkeys([*told, self._stages[rank]]):
                if line != _BEGINS:
                    said.setdefault(line, []).append(self._names[rank])
        everywhere = len(self._lines)
        return [line if len(who) == everywhere else f"{_some(who)}: {line}" for line, who in said.items()]

    def words(self, rank: int) -> str:
        """All that one of them has said, as far as it is kept."""
        return "\n".join(self._lines[rank])


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
