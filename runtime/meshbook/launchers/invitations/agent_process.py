"""An agent that a process of its machine runs for others, with whom it ends: `meshbook.join`, and workers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from meshbook.errors import MeshError
from meshbook.launchers.starting.head_start import AGENT
from meshbook.system.exits import log_tail
from meshbook.system.user_folders import log_base
from meshbook.wire.ticket import Ticket, encode_ticket

END_S = 10.0
"""How long the agent may take to end its ranks and itself."""


def start_agent(ticket: Ticket) -> subprocess.Popen[bytes]:
    """The agent ends when nobody reads its stdout any more, which is when we have ended. Raises: OSError."""
    agent = subprocess.Popen(
        [sys.executable, "-m", "meshbook.launchers.starting.templates", AGENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert agent.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        agent.stdin.write(encode_ticket(ticket) + b"\n")
        agent.stdin.close()
    return agent


def end_agent(agent: subprocess.Popen[bytes]) -> int:
    """Wait for its end, and end it where it does not; how it has ended, as in `subprocess`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if agent.poll() is None:
            agent.terminate()
        return agent.wait(END_S)
    agent.kill()  # its ranks go with it
    return agent.wait()


def words_of(ticket: Ticket) -> str:
    """The last that an agent has said in its log."""
    with contextlib.suppress(OSError, MeshError):
        return " ".join(log_tail(Path(log_base()) / ticket.log_dir / "agent.log", 3).split())
    return ""
