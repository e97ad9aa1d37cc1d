"""The lanes of a host connect one by one: what comes before it has said who it is waits for that."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import numpy as np
import pytest

from meshbook.calls.call import OpenCall
from meshbook.concurrency.future import Future
from meshbook.controller.dispatcher import Dispatcher
from meshbook.controller.host_state import HostState
from meshbook.controller.io_turns import TurnQueue
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.startup import WorkerSpec
from meshbook.launchers.local import FoundHost
from meshbook.shape.members import Extent, Region
from meshbook.shape.value_mesh import ValueMesh
from meshbook.values.pickling import dumps
from meshbook.values.segments import SegmentPool
from meshbook.wire import messages as wire
from meshbook.wire.link import Link
from meshbook.wire.transport import ControllerSocket


@pytest.fixture
def sock() -> Iterator[ControllerSocket]:
    sock = ControllerSocket()
    yield sock
    sock.close()


def _sent(link: Link, message: wire.FromHost) -> list[bytes]:
    return [bytes(frame) for frame in link.send(wire.encode(message))]


def test_an_answer_in_shared_memory_may_come_before_hello(sock: ControllerSocket) -> None:
    """As after a controller has come back, when the lane of calls was the first to be dialled again."""
    inbox, pool = TurnQueue(), SegmentPool()
    dispatcher = Dispatcher(inbox, itertools.count(1).__next__, sock.key_of, str)
    host = HostState("host", 1, FoundHost(0, 0), sock, dispatcher.on_whole, shares_environment=True, is_found=True)
    dispatcher.hosts["host"] = host
    extent = Extent.of({"gpus": 1})
    dispatcher.meshes[1] = MeshState(1, "mesh", extent, [host], WorkerSpec("cpu", (), b"/", (), {}))
    future: Future[ValueMesh[object]] = Future()
    call = OpenCall(7, 1, "work", Region.of(extent), future, fail_fast=True)
    dispatcher.calls.open(call, None)
    value = np.arange(300_000)
    pickled = dumps(value, what="a value")
    head, large = pickled.head, pickled.buffers
    calls, urgent = Link(1), Link(1)

    def send(number: int) -> None:
        reply = wire.RankReply(0, wire.OK, 0, 0.0, pool.write(large), None, head)
        dispatcher.on_frames("host", "calls", _sent(calls, wire.Replies(number, (reply,))))

    send(7)
    assert not host.lost
    assert call.waiting
    hello = wire.Hello(wire.PROTOCOL_VERSION, "host", "here", dispatcher.machine, 1, 0, 2)
    dispatcher.on_frames("host", "urgent", _sent(urgent, hello))
    assert not host.lost
    assert not call.waiting
    assert np.array_equal(future.get(0).values()[0], value)
    dispatcher.payloads.close()
    pool.close()
    os.close(inbox.wake_fd)
