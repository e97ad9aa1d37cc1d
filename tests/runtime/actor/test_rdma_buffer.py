"""Buffers: memory of one process that the others read and write, whatever its owner is doing."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Timer

import numpy as np
import pytest
import torch
from buffer_ranks import Owner, Reader
from patience import wait_until

from meshbook import LocalLauncher, ProcMesh, start_hosts
from meshbook.actor import ActorError, ActorMesh, BufferDroppedError, BufferKindError, BufferSizeError, SupervisionError
from meshbook.actor.buffers import stream, transfers
from meshbook.actor.buffers.memory import NotDirect, access
from meshbook.actor.buffers.stream import PROOF_BYTES, BufferListener, StreamError, connect, receive_all, send_all
from meshbook.errors import CallFailed
from meshbook.monarch import RDMABuffer

BIG = 3_000_001
"""Floats: several slices or pieces, the last of them odd."""


@pytest.fixture
def mesh2x2_own(clean_end: None) -> Iterator[ProcMesh]:
    """Two hosts for a test that leaves ranks in a bad way."""
    hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
    with hosts.spawn_procs({"gpus": 2}, name="worn", group=False) as mesh:
        yield mesh


def owner_and_reader(procs: ProcMesh, owner: dict[str, int], reader: dict[str, int]) -> tuple[ActorMesh, ActorMesh]:
    return procs.slice(**owner).spawn("owner", Owner), procs.slice(**reader).spawn("reader", Reader)


@pytest.mark.parametrize("count", [1, 1000, BIG])
def test_another_process_reads_and_writes(mesh4: ProcMesh, count: int) -> None:
    owner, reader = owner_and_reader(mesh4, {"gpus": 0}, {"gpus": 2})
    buffer = owner.make.call_one(count, 1.5).get(20)
    assert (buffer.size(), buffer.owner) == (4 * count, "four.owner[0]")
    assert reader.read.call_one(buffer).get(20) == (1.5, 1.5, 1.5)
    assert reader.read_async.call_one(buffer).get(20) == 1.5
    reader.write.call_one(buffer, count, 2.0).get(20)
    assert owner.sum.call_one().get(20) == 2.0 * count
    buffer.drop().get(20)


@pytest.mark.quick("1000-connection")
@pytest.mark.parametrize("router", ["mail", "connection"])
@pytest.mark.parametrize("count", [1, 1000, BIG])
def test_processes_of_other_hosts_read_and_write(mesh2x2: ProcMesh, count: int, router: str) -> None:
    owner, reader = owner_and_reader(mesh2x2, {"hosts": 0, "gpus": 0}, {"hosts": 1, "gpus": 1})
    buffer = owner.make.call_one(count, 1.5).get(20)
    unreachable = {buffer._target.spot.memory} if router == "mail" else set()
    mesh2x2.execute(say_unreachable, unreachable).get(20)
    assert reader.read.call_one(buffer).get(30) == (1.5, 1.5, 1.5)
    reader.write.call_one(buffer, count, 2.0).get(30)
    assert owner.sum.call_one().get(20) == 2.0 * count
    got = torch.zeros(count)
    buffer.read_into(got).get(30)
    assert got.mean() == 2.0
    buffer.drop().get(20)
    own = RDMABuffer(got)
    reader.write.call_one(own, count, 3.0).get(30)
    assert got.mean() == 3.0
    own.drop().get(20)


@pytest.mark.parametrize("count", [1000, BIG])
def test_the_notebook_reads_and_writes_and_owns(mesh4: ProcMesh, count: int) -> None:
    owner, reader = owner_and_reader(mesh4, {"gpus": 0}, {"gpus": 2})
    buffer = owner.make.call_one(count, 1.5).get(20)
    got = torch.zeros(count)
    buffer.read_into(got).get(20)
    assert got.mean() == 1.5
    buffer.write_from(torch.full((count,), 3.0)).get(20)
    assert owner.sum.call_one().get(20) == 3.0 * count
    mine = torch.full((count,), 7.0)
    own = RDMABuffer(mine)
    assert reader.read.call_one(own).get(20) == (7.0, 7.0, 7.0)
    reader.write.call_one(own, count, 8.0).get(20)
    assert mine.mean() == 8.0
    own.read_into(got).get(20)
    assert got.mean() == 8.0
    own.drop().get(20)
    buffer.drop().get(20)


def say_unreachable(memories: set[str]) -> None:

    transfers._unreachable.clear()
    transfers._unreachable.update(memories)


def refuse_connections() -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionRefusedError

    stream.connect_to = refuse


def test_where_no_connection_can_be_made_it_goes_by_mail(mesh2x2: ProcMesh) -> None:
    owner, reader = owner_and_reader(mesh2x2, {"hosts": 0, "gpus": 0}, {"hosts": 1, "gpus": 1})
    buffer = owner.make.call_one(BIG, 1.5).get(20)
    mesh2x2.execute(say_unreachable, set()).get(20)
    first = mesh2x2.slice(hosts=0, gpus=0)
    first.run("from meshbook.actor.buffers import stream; kept = stream.connect_to").get(20)
    first.execute(refuse_connections).get(20)
    try:
        assert reader.read.call_one(buffer).get(30) == (1.5, 1.5, 1.5)
        found = mesh2x2.execute(lambda: list(transfers._unreachable)).get(20).values()
        assert found == [[], [], [], [buffer._target.spot.memory]]
    finally:
        first.run("stream.connect_to = kept").get(20)
        mesh2x2.execute(say_unreachable, set()).get(20)


def test_strangers_at_the_port_of_a_copy_get_nothing() -> None:
    data = b"x" * 100_000
    got = bytearray(len(data))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(BufferListener()))
        threads = stack.enter_context(ThreadPoolExecutor(2))
        stranger = stack.enter_context(socket.create_connection(listener.door[:2]))
        stranger.sendall(bytes(PROOF_BYTES))
        wrong = threads.submit(connect, listener.door._replace(secret=bytes(32)))
        owner = threads.submit(connect, listener.door)
        connection = stack.enter_context(listener.accept(lambda done: None))
        right = stack.enter_context(owner.result(10))
        assert stranger.recv(1) == b""
        with pytest.raises((StreamError, OSError)):
            wrong.result(10)
        sent = threads.submit(send_all, connection, memoryview(data), lambda done: None)
        receive_all(right, memoryview(got), lambda done: None)
        sent.result(10)
    assert got == data


def test_a_stranger_who_sends_slowly_has_no_more_time_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CONNECT_S", 0.3)

    def drip(stranger: socket.socket) -> int:
        for sent in range(PROOF_BYTES):
            stranger.sendall(b"x")
            if select.select([stranger], [], [], 0.1)[0]:
                return sent
        return PROOF_BYTES

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(BufferListener()))
        threads = stack.enter_context(ThreadPoolExecutor(2))
        dripped = threads.submit(drip, stack.enter_context(socket.create_connection(listener.door[:2])))
        wait_until(dripped.running)
        accepted = threads.submit(listener.accept, lambda done: None)
        assert dripped.result(10) < PROOF_BYTES
        owner = stack.enter_context(connect(listener.door))
        assert stack.enter_context(accepted.result(10)).getsockname() == owner.getpeername()


@pytest.mark.parametrize("size_bytes", [4001, -1])
def test_a_copy_beyond_the_buffer_is_refused(mesh2: ProcMesh, size_bytes: int) -> None:
    owner, _ = owner_and_reader(mesh2, {"gpus": 0}, {"gpus": 1})
    target = owner.make.call_one(1000, 1.5).get(20)._target
    with contextlib.closing(BufferListener()) as listener, pytest.raises(CallFailed, match="of a buffer of 4000"):
        transfers.finish(target, transfers.begin(target, "stream read", (tuple(listener.door), size_bytes)), 20)


def test_the_owner_takes_no_part_on_its_own_host(mesh2: ProcMesh) -> None:
    owner, reader = owner_and_reader(mesh2, {"gpus": 0}, {"gpus": 1})
    buffer = owner.make.call_one(BIG, 1.5).get(20)
    pid = owner.pid.call_one().get(20)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert reader.read.call_one(buffer).get(20) == (1.5, 1.5, 1.5)
        reader.write.call_one(buffer, BIG, 2.0).get(20)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert owner.sum.call_one().get(20) == 2.0 * BIG


def test_buffers_that_were_dropped_say_so(mesh2x2: ProcMesh) -> None:
    owner, reader = owner_and_reader(mesh2x2, {"hosts": 0, "gpus": 0}, {"hosts": 1, "gpus": 1})
    beside = mesh2x2.slice(hosts=0, gpus=1).spawn("beside", Reader)
    buffer = owner.make.call_one(1000, 1.5).get(20)
    assert beside.read.call_one(buffer).get(20) == (1.5, 1.5, 1.5)
    reader.drop.call_one(buffer).get(20)
    told = r"the buffer of 4 kB of hosts.owner\[0\] was dropped. Make a new one"
    for actor in (reader, beside):
        with pytest.raises(ActorError, match=told):
            actor.read.call_one(buffer).get(20)
        with pytest.raises(ActorError, match=told):
            actor.write.call_one(buffer, 1000, 2.0).get(20)
    with pytest.raises(BufferDroppedError, match=told):
        buffer.read_into(torch.zeros(1000)).get(20)
    buffer.drop().get(20)
    owner.drop.call_one().get(20)


@pytest.mark.slow
def test_owners_that_have_died_are_named(mesh2x2_own: ProcMesh) -> None:
    owner, beside = owner_and_reader(mesh2x2_own, {"hosts": 0, "gpus": 0}, {"hosts": 0, "gpus": 1})
    away = mesh2x2_own.slice(hosts=1, gpus=1).spawn("reader", Reader)
    buffer = owner.make.call_one(BIG, 1.5).get(20)
    readings = [reader.time_to_error.call_one(buffer) for reader in (beside, away)]
    time.sleep(0.3)
    owner.die.broadcast()
    for reading in readings:
        seconds, told = reading.get(30)
        assert re.match(r"ActorLostError: rank 0 on .* killed by SIGKILL", told), told
        assert seconds < 5
    with pytest.raises(SupervisionError, match=r"rank 0 on .* killed by SIGKILL"):
        buffer.read_into(torch.zeros(BIG)).get(20)
    buffer.drop().get(20)
    mesh2x2_own.heal()
    for reader in (beside, away):
        with pytest.raises(ActorError, match=r"ActorLostError: rank 0 .* was started again since, without it"):
            reader.read.call_one(buffer).get(20)


def test_memory_that_does_not_fit_is_refused_at_once(mesh2: ProcMesh) -> None:
    owner = mesh2.slice(gpus=0).spawn("owner", Owner)
    buffer = owner.make.call_one(1000, 1.5).get(20)
    with pytest.raises(BufferSizeError, match="dst has 3996 bytes, the buffer 4000: give at least as much"):
        buffer.read_into(torch.zeros(999))
    with pytest.raises(ValueError, match="src has 4004 bytes, the buffer 4000: give at most as much"):
        buffer.write_from(torch.zeros(1001))
    for wrong, told in (
        (torch.zeros(40, 25), r"dst is tensor of shape \(40, 25\).*view\(-1\)"),
        (torch.zeros(2000)[::2], "without gaps"),
        (torch.zeros(1000, device="meta"), "dst lies on meta"),
        (torch.zeros(4000, 1).to_sparse().coalesce(), "dense"),
        (np.zeros((10, 100)), r"shape \(10, 100\).*reshape"),
        ([0.0] * 1000, "dst is of type list"),
        (bytes(4000), "read-only"),
    ):
        with pytest.raises(BufferKindError, match=told):
            buffer.read_into(wrong)
    larger = torch.zeros(1001)
    buffer.read_into(larger).get(20)
    assert larger.tolist() == [1.5] * 1000 + [0.0]
    buffer.write_from(np.full(10, 2.0, np.float32)).get(20)
    assert owner.sum.call_one().get(20) == 1505.0


def test_buffers_of_bytes(mesh2: ProcMesh) -> None:
    owner, reader = owner_and_reader(mesh2, {"gpus": 0}, {"gpus": 1})
    fixed = owner.make_of_bytes.call_one(b"as it is", writable=False).get(20)
    assert reader.read_bytes.call_one(fixed).get(20) == b"as it is"
    with pytest.raises(BufferKindError, match=r"the buffer of 8 B of two.owner.0. is read-only"):
        fixed.write_from(b"other")
    free = owner.make_of_bytes.call_one(b"as it is", writable=True).get(20)
    free.write_from(b"so").get(20)
    assert reader.read_bytes.call_one(free).get(20) == b"so it is"
    with pytest.raises(BufferSizeError, match="the memory for the buffer has no bytes"):
        RDMABuffer(bytearray())


def test_drops_wait_for_those_who_read(mesh2: ProcMesh) -> None:
    """The memory goes when the last reader has gone; nobody begins to read any more."""
    owner = mesh2.slice(gpus=0).spawn("owner", Owner)
    buffer = owner.make.call_one(BIG, 1.5).get(20)
    with access(buffer._target.spot):
        buffer.drop().get(20)
        with pytest.raises(NotDirect), access(buffer._target.spot):
            pass
        count = "sum(type(one).__name__ == 'KeptBuffer' and one.memory is not None for one in gc.get_objects())"
        mesh2.slice(gpus=0).run("import gc").get(20)
        assert mesh2.slice(gpus=0).evaluate(count).get(20).values() == [1]
    wait_until(lambda: mesh2.slice(gpus=0).evaluate(count).get(20).values() == [0])


def test_two_read_at_once(mesh2x2: ProcMesh) -> None:
    owner = mesh2x2.slice(hosts=0, gpus=0).spawn("owner", Owner)
    readers = mesh2x2.slice(hosts=1).spawn("readers", Reader)
    buffer = owner.make.call_one(BIG, 1.5).get(20)
    assert readers.read.call(buffer).get(60).values() == [(1.5, 1.5, 1.5)] * 2
    buffer.drop().get(20)


def test_where_memory_may_not_be_looked_at_it_goes_by_mail(mesh2: ProcMesh) -> None:
    owner, reader = owner_and_reader(mesh2, {"gpus": 0}, {"gpus": 1})
    buffer = owner.make.call_one(BIG, 1.5).get(20)
    token = buffer._target.spot.token
    forbid = f"from meshbook.actor.buffers import memory; memory._refused.add({token!r})"
    mesh2.slice(gpus=1).run(forbid).get(20)
    assert reader.read.call_one(buffer).get(20) == (1.5, 1.5, 1.5)
    reader.write.call_one(buffer, BIG, 2.0).get(20)
    assert owner.sum.call_one().get(20) == 2.0 * BIG


@pytest.mark.slow
def test_an_owner_that_does_not_answer_in_time_is_named_and_interrupts_end_the_wait(mesh2x2: ProcMesh) -> None:
    owner, reader = owner_and_reader(mesh2x2, {"hosts": 0, "gpus": 0}, {"hosts": 1, "gpus": 1})
    buffer = owner.make.call_one(BIG, 1.5).get(20)
    pid = owner.pid.call_one().get(20)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ActorError, match=r"CallTimeout: read of the buffer of 12 MB of .*rank 0 within 0.5 s"):
            reader.read.call_one(buffer, 0.5).get(20)
        timer = Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        reading = buffer.read_into(torch.zeros(BIG))
        with pytest.raises(KeyboardInterrupt):
            reading.get(20)
        assert isinstance(reading.exception(20), CancelledError)
        timer.join()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert reader.read.call_one(buffer).get(20) == (1.5, 1.5, 1.5)
