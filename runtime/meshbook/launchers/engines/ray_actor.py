"""What runs on a node of Ray, by value: an actor whose subprocess is the agent. It needs nothing but Python there.

The agent gets its ticket by stdin, and notices by its stdout that the actor has gone.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys

SAID_LINES = 30


class AgentActor:
    """One for each node of a placement group; its methods are called one after the other."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._end: tuple[int, str] | None = None

    def node_id(self) -> str:
        """Ray's id of the node that it is on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def start(self, script: str, ticket: bytes) -> None:
        """Start the agent, by a script for sh; ``python3`` is Ray's own there."""
        path = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
        self._agent = subprocess.Popen(
            ["sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PATH": path},
        )
        assert self._agent.stdin is not None
        try:
            self._agent.stdin.write(ticket + b"\n")
            self._agent.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already, and `watch` says why

    def watch(self) -> tuple[int, str]:
        """How the agent has ended, as in `subprocess`, and what it said last; waits until it has."""
        if self._end is None:
            assert self._agent is not None and self._agent.stderr is not None
            lines = collections.deque(self._agent.stderr, SAID_LINES)
            self._end = self._agent.wait(), b"".join(lines).decode(errors="replace")
        return self._end
