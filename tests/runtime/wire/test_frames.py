"""Messages on a byte stream."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.errors import PeerProtocolError
from meshbook.wire.frames import FrameReader, FrameSocket, pack

messages = st.lists(st.lists(st.binary(max_size=50), max_size=4), max_size=6)


@given(messages, st.integers(1, 40))
def test_messages_come_back_whatever_the_pieces(sent: list[list[bytes]], piece: int) -> None:
    stream = b"".join(pack(message) for message in sent)
    reader = FrameReader()
    received = [m for at in range(0, len(stream), piece) for m in reader.feed(stream[at : at + piece])]
    assert received == sent


@pytest.mark.parametrize("claim", [struct.pack("<I", 1 << 20), struct.pack("<II", 1, 0xFFFFFFFF)])
def test_impossible_sizes_are_refused(claim: bytes) -> None:
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
