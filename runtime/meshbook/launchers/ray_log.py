"""What the driver of Ray has said (`meshbook.launchers.ray_driver`): lines of its own, and between them Ray's.

meshbook: {"job": "03000000"}
meshbook: {"waits": "...", "host": "ray-1"}         of one host, or of all
meshbook: {"node": "n2", "host": "ray-1"}           its agent was started there
meshbook: {"ended": "...", "host": "ray-1"}         of one host, or of all
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field

from meshbook.launchers.elsewhere import PYTHON_HINTS, with_hint
from meshbook.system.processes import describe_exit

MARK = "meshbook: "
ALL = ""
"""Stands for all hosts."""

_SAID_LINES = 3
_HINTS = (
    *PYTHON_HINTS,
    ("Version mismatch", "Install the cluster's versions of Ray and Python for the notebook."),
    ("Could not find any running Ray instance", "Start one, or name it, as in ray:HOST:PORT"),
    ("Failed to connect to Ray cluster", "A machine that is no node of it goes by Ray's client port: ray://HOST:10001"),
    ("No module named 'grpc'", "Install what that needs: pip install 'meshbook[ray]'"),
)


@dataclass
class RayLog:
    """What a log says; most of it by the id of a host."""

    job: str = ""
    socket: str = ""
    """Where the driver listens."""
    node: dict[str, str] = field(default_factory=dict)
    waits: dict[str, str] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> RayLog:
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
            if what in ("job", "socket"):
                setattr(self, what, value)
            else:
                getattr(self, what)[host] = value

    def waits_for(self, host: str) -> str:
        """What a host waits for; empty once its agent was started."""
        return "" if host in self.node else self.waits.get(host) or self.waits.get(ALL) or "Ray is asked for nodes"

    def why_ended(self, host: str, status: int | None) -> str | None:
        """Why there is no agent any more; None while there may be. status: how the driver ended, None while it runs."""
        if said := self.ended.get(host) or self.ended.get(ALL):
            return with_hint(said, _HINTS)
        if status is None:
            return None
        words = "; ".join(self.said[-_SAID_LINES:]) if status > 0 else ""  # else they are of something else
        return with_hint(f"the driver of Ray has ended ({describe_exit(status)}){words and f': {words}'}", _HINTS)
