"""What a driver says, a process beside us that has hosts of an engine: lines of its own, and others' between them.

meshbook: {"job": "03000000"}
meshbook: {"waits": "...", "host": "ray-1"}         of one host, or of all
meshbook: {"node": "n2", "host": "ray-1"}           its agent was started there
meshbook: {"ended": "...", "host": "ray-1"}         of one host, or of all
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field

from typing_extensions import Self

MARK = "meshbook: "
ALL = ""
"""Stands for all hosts."""

_SAID_LINES = 3


@dataclass
class DriverLog:
    """What a log says; most of it by the id of a host."""

    job: str = ""
    socket: str = ""
    """Where the driver listens."""
    node: dict[str, str] = field(default_factory=dict)
    waits: dict[str, str] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> Self:
        found = cls()
        for line in filter(None, map(str.strip, text.splitlines())):
            if not line.startswith(MARK):
                found.said.append(line)
                continue
            with contextlib.suppress(ValueError):  # half a line: the rest comes yet
                found._add(json.loads(line.removeprefix(MARK)))
        return found

    def _add(self, event: dict[str, str]) -> None:
        host = event.pop("host", ALL)
        for what, value in event.items():
            if isinstance(by_host := getattr(self, what), dict):
                by_host[host] = value
            else:
                setattr(self, what, value)

    def why(self, host: str) -> str:
        """Why a host has ended; empty while it has not."""
        return self.ended.get(host) or self.ended.get(ALL) or ""

    @property
    def last_words(self) -> str:
        """What others have written last."""
        return "; ".join(self.said[-_SAID_LINES:])


def say(**event: str) -> None:
    """Tell who reads the log."""
    os.write(1, f"\n{MARK}{json.dumps(event)}\n".encode())
