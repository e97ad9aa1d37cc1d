"""An agent that was never anywhere near its controller ends soon, and says to its launcher where it has dialled."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from meshbook.launchers.agent_start import AGENT
from meshbook.wire.ticket import Ticket, encode_ticket
from meshbook.wire.transport import new_keys

pytestmark = pytest.mark.cluster

ARRIVE_S = 4.0


@contextlib.contextmanager
def agent(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    """One whose launcher lives, and holds its stdin."""
    (controller_key, _), (public, secret) = new_keys(), new_keys()
    ticket = Ticket(
        "host-1", endpoint, controller_key, public, secret, "unreached/host-1", 1, 600.0, shares_memory=False,
        name="nodeA", arrive_s=ARRIVE_S,
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "meshbook.launchers.templates", AGENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        process.stdin.write(encode_ticket(ticket) + b"\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def refused() -> Iterator[str]:
    """An endpoint where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{taken.getsockname()[1]}"


def test_an_agent_that_reaches_nobody_ends_though_its_launcher_lives(refused: str) -> None:
    began = time.monotonic()
    with agent(refused) as process:
        assert process.wait(60) == 75
        assert time.monotonic() - began > ARRIVE_S
        assert process.stdout is not None
        said = process.stdout.read().decode()
    assert re.fullmatch(
        rf"nodeA reached nobody at {refused} within \d+ s: the notebook's machine must be reachable there\n", said
    )


def test_an_agent_whose_controller_is_stopped_waits_for_it() -> None:
    """Its machine takes connections, and nobody there says a word."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        agent(f"tcp://127.0.0.1:{listening.getsockname()[1]}") as process,
    ):
        listening.settimeout(60)
        connection, _ = listening.accept()  # it has begun
        with connection, pytest.raises(subprocess.TimeoutExpired):
            process.wait(ARRIVE_S + 4)
