"""Messages on a byte stream, and small ones that travel as one."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import wait_until

from meshbook.errors import PeerProtocolError
from meshbook.wire.frames import FrameReader, FrameSocket, pack

messages = st.lists(st.lists(st.binary(max_size=50), max_size=4), max_size=6)


@given(messages, st.integers(1, 40))
def test_messages_come_back_whatever_the_pieces(sent: list[list[bytes]], piece: int) -> None:
    stream = b"".join(pack(message) for message in sent)
    reader = FrameReader()
    received = [m for at in range(0, len(stream), piece) for m in reader.feed(stream[at : at + piece])]
    assert received == sent


@pytest.mark.parametrize(
    "claim",
    [
        struct.pack("<I", 1 << 20),
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<II", 1, 0xFFFFFFFF),
        struct.pack("<III", 2, 0x7FFFFFFF, 0x7FFFFFFF),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_reserved(claim: bytes) -> None:
    with pytest.raises(PeerProtocolError, match="claims"):
        list(FrameReader().feed(claim))


def test_a_socket_gives_messages_and_then_its_end() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = FrameSocket(ours), FrameSocket(theirs)
    assert not receiver.wait(0)
    sender.send([b"a", b"bc"])
    sender.send([b"d"])
    assert receiver.wait(1)
    assert receiver.receive() == [b"a", b"bc"]
    assert receiver.wait(0)  # the second message is in our buffer already
    assert receiver.receive() == [b"d"]
    sender.close()
    assert receiver.receive() is None
    receiver.close()


def test_whoever_waits_for_a_message_sleeps_on_when_the_other_end_reads() -> None:
    """A `recv` that blocks wakes then, looks, and sleeps again."""
    ours, theirs = socket.socketpair()
    waiting = FrameSocket(theirs)

    def send_and_wait() -> None:
        waiting.send([b"answer"])
        waiting.receive()

    thread = threading.Thread(target=send_and_wait)
    thread.start()
    status = Path(f"/proc/self/task/{thread.native_id}/status")
    try:
        wait_until(lambda: "sleeping" in status.read_text() and _is_stable(status))
        before = _sleeps(status)
        assert ours.recv(1000) == pack([b"answer"])
        time.sleep(0.1)
        assert _sleeps(status) == before
    finally:
        ours.close()
        thread.join()
        waiting.close()


def _is_stable(status: Path) -> bool:
    before = _sleeps(status)
    time.sleep(0.05)
    return _sleeps(status) == before


def _sleeps(status: Path) -> int:
    """How often the thread has waited for something."""
    return int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", status.read_text(), re.M)[0])
