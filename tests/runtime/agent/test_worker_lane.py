"""A lane to a worker: what is taken from it, and when."""

from __future__ import annotations

import socket

import pytest

from meshbook.agent.worker import WorkerLane
from meshbook.system.event_loop import EventLoop
from meshbook.wire.frames import pack


@pytest.mark.parametrize(("size_bytes", "read_bytes"), [(1, 1 << 18), (50_000, 1 << 18), (20_000, 1 << 15)])
def test_what_a_worker_has_sent_can_be_taken_before_its_turn(size_bytes: int, read_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    taken: list[int] = []
    lane = WorkerLane(
        EventLoop(), ours, lambda frames: taken.append(len(frames[0])), lambda error: None, read_bytes=read_bytes
    )
    theirs.setblocking(False)
    sent = 0
    while sent < 3 or size_bytes > 1:  # as much as a socket holds
        try:
            sent += theirs.send(data := pack([b"x" * size_bytes])) == len(data)
        except BlockingIOError:
            break
    lane.read_waiting()
    assert taken == [size_bytes] * sent
    lane.close()
    theirs.close()
