"""A road is taken for gone only where the kernel says that nothing was acknowledged: `test_reach` cuts real ones."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from meshbook.groups import reach
from meshbook.groups.reach import Roads


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A connection into which no more goes, since nobody reads at its other end; and a short patience."""
    monkeypatch.setattr(reach, "UNANSWERED_S", 1.0)
    monkeypatch.setattr(reach, "LOOK_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as sock:
        there, _ = listening.accept()
        with there:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock.send(bytes(1 << 16))
            yield sock


def look_for(seconds: float) -> None:
    looked = Roads()
    looked.hosts = {"127.0.0.1": "nodeB"}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        looked.check("all_reduce")
        time.sleep(0.02)


def test_a_process_that_reads_nothing_is_no_road_that_has_gone(full: socket.socket) -> None:
    look_for(3.0)


def test_a_kernel_that_does_not_tell_says_nothing_of_roads(
    full: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshbook.wire.tcp._ESTABLISHED", 99)
    look_for(3.0)


def test_what_is_never_acknowledged_is_told_with_the_host_and_its_address(
    full: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "last_answer", lambda connection, before: time.monotonic() - 60)
    words = (
        r"all_reduce: host nodeB cannot be reached at 127.0.0.1: nothing .* acknowledged for 1 s. Another road: spawn"
    )
    with pytest.raises(RuntimeError, match=words):
        look_for(10.0)


def test_nobody_looks_where_there_is_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roads, "_look", lambda self, now: pytest.fail("it has looked"))
    Roads().check("all_reduce")
