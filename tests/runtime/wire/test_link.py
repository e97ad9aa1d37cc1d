"""Links over a channel that loses windows of messages, repeats them, and is never told what it lost."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshbook.errors import PeerProtocolError
from meshbook.wire import link as link_module
from meshbook.wire.link import ACK, ACK_AFTER_MESSAGES, BEAT, MESSAGE, MESSAGE_COST_BYTES, REPLAY, Link

HEAD = link_module._HEAD


def raw(frames: Any) -> list[bytes]:
    """Frames as they come from a socket."""
    return [bytes(frame) for frame in frames]


class Side:
    """A link with the socket loop that its owner runs, and what it delivered."""

    def __init__(self, epoch: int = 7) -> None:
        self.link = Link(epoch)
        self.out: deque[list[bytes]] = deque()
        self.delivered: list[tuple[bytes, list[bytes]]] = []

    def send(self, header: bytes, payload: list[bytes] | None = None) -> None:
        self.out.append(raw(self.link.send(header, payload or [])))

    def beat(self) -> None:
        self.out.append(raw(self.link.heartbeat()))

    def take(self, frames: list[bytes]) -> None:
        message = self.link.receive(frames)
        if message is not None:
            self.delivered.append(message)
        self.out.extend(raw(frames) for frames in self.link.pending())


def carry_all(left: Side, right: Side) -> None:
    """Deliver until both sides have nothing to say."""
    for _ in range(100_000):
        if left.out:
            right.take(left.out.popleft())
        elif right.out:
            left.take(right.out.popleft())
        else:
            return
    raise AssertionError("the links never come to rest")


def number(value: int) -> bytes:
    return value.to_bytes(4, "big")


# A side sends or its heartbeat is due; or the channel carries, loses or repeats so many messages of a side.
actions = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "carry", "carry", "lose", "repeat", "beat"]),
        st.booleans(),
        st.integers(1, 90),
    ),
    max_size=60,
)


@given(actions)
@settings(max_examples=200, deadline=None)
def test_each_message_arrives_once_and_in_order_whatever_the_channel_does(
    actions: list[tuple[str, bool, int]],
) -> None:
    sides = (Side(), Side())
    sent: tuple[list[bytes], list[bytes]] = ([], [])
    for what, which, count in actions:
        side, other = sides[which], sides[not which]
        for _ in range(count if what != "beat" else 1):
            if what == "send":
                header = number(len(sent[which]))
                sent[which].append(header)
                side.send(header, [header, b"x"])
            elif what == "beat":
                side.beat()
            elif side.out:
                frames = side.out[0]
                if what != "repeat":
                    side.out.popleft()
                if what != "lose":
                    other.take(frames)
                if what == "repeat":
                    break
    for _ in range(
        3
    ):  # the channel is whole again: one heartbeat repairs, two more because a question may have crossed
        for side in sides:
            side.beat()
        carry_all(*sides)
    for which in (0, 1):
        assert sides[not which].delivered == [(header, [header, b"x"]) for header in sent[which]]
        assert sides[which].link.unacked_bytes == 0
        assert not sides[which].link._unacked


def test_a_gap_is_asked_for_once_and_repaired() -> None:
    left, right = Side(), Side()
    for value in range(6):
        left.send(number(value))
    del left.out[2]
    for frames in list(left.out):
        right.take(frames)
    left.out.clear()
    assert [HEAD.unpack_from(frames[0])[0] for frames in right.out] == [REPLAY]
    carry_all(left, right)
    assert [header for header, _ in right.delivered] == [number(value) for value in range(6)]
    assert right.link.ignored == 3


def test_a_lost_tail_is_repaired_by_one_heartbeat() -> None:
    left, right = Side(), Side()
    left.send(b"a")
    left.out.clear()
    carry_all(left, right)
    assert right.delivered == []
    left.beat()
    carry_all(left, right)
    assert right.delivered == [(b"a", [])]


def test_a_lost_question_is_asked_again() -> None:
    left, right = Side(), Side()
    for value in range(3):
        left.send(number(value))
    left.out.popleft()
    right.take(left.out.popleft())
    right.out.clear()  # the question is lost
    right.take(left.out.popleft())
    assert not right.out  # and not repeated by each further message
    left.beat()
    carry_all(left, right)  # this heartbeat could have crossed the question
    assert right.delivered == []
    left.beat()
    carry_all(left, right)
    assert len(right.delivered) == 3


def test_a_heartbeat_that_crossed_the_question_causes_no_second_replay() -> None:
    left, right = Side(), Side()
    left.send(b"a")
    left.send(b"b")
    left.out.popleft()
    left.beat()
    carry_all(left, right)
    assert len(right.delivered) == 2
    assert right.link.ignored == 1


def test_acknowledgements_come_by_themselves_and_bound_what_is_kept() -> None:
    left, right = Side(), Side()
    most = 0
    for value in range(10 * ACK_AFTER_MESSAGES):
        left.send(number(value), [b"x" * 100])
        carry_all(left, right)
        most = max(most, left.link.unacked_bytes)
    assert most <= ACK_AFTER_MESSAGES * (MESSAGE_COST_BYTES + HEAD.size + 104)
    assert left.link.unacked_bytes == 0


def test_large_messages_are_acknowledged_before_the_link_is_full() -> None:
    left, right = Side(), Side()
    piece = bytes(4 << 20)
    for _ in range(50):
        left.send(b"", [piece])
        carry_all(left, right)
        assert not left.link.full
    assert left.link.unacked_bytes <= 9 << 20


def test_a_silent_peer_makes_the_link_full_and_an_acknowledgement_frees_it() -> None:
    left, right = Side(), Side()
    left.link.max_unacked_bytes = 10_000
    while not left.link.full:
        left.send(b"h", [memoryview(bytes(1000)).cast("I")])  # type: ignore[list-item]
    assert 8 <= len(left.out) <= 10
    carry_all(left, right)
    right.beat()
    carry_all(left, right)
    assert not left.link.full
    assert left.link.unacked_bytes == 0


def test_traffic_the_other_way_acknowledges() -> None:
    left, right = Side(), Side()
    left.send(b"call")
    carry_all(left, right)
    assert left.link.unacked_bytes > 0
    right.send(b"reply")
    carry_all(left, right)
    assert left.link.unacked_bytes == 0


def test_another_epoch_is_ignored() -> None:
    old, new = Side(epoch=1), Side(epoch=2)
    old.send(b"a")
    old.beat()
    carry_all(old, new)
    assert new.delivered == []
    assert not new.out
    assert new.link.ignored == 2
    new.send(b"b")
    assert new.link.receive(raw(Link(2).send(b"first"))) == (b"first", [])


def head(kind: int, seq: int, ack: int = 0) -> bytes:
    return HEAD.pack(kind, 7, seq, ack)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [head(MESSAGE, 1)[:-1]],
        [head(0, 1)],
        [head(9, 1)],
        [head(MESSAGE, 0)],
        [head(MESSAGE, 1, ack=1)],
        [head(BEAT, 0, ack=1)],
        [head(ACK, 0) + b"x"],
        [head(REPLAY, 0), b"x"],
    ],
    ids=repr,
)
def test_malformed_frames_are_the_peers_fault_and_change_nothing(frames: list[bytes]) -> None:
    side = Side()
    with pytest.raises(PeerProtocolError):
        side.take(frames)
    assert side.link.pending() == []
    assert side.link.receive(raw(Link(7).send(b"h", [b"p"]))) == (b"h", [b"p"])


@given(st.lists(st.binary(max_size=40), max_size=3))
def test_no_bytes_break_a_link(frames: list[bytes]) -> None:
    side = Side(epoch=0)
    try:
        side.take(frames)
    except PeerProtocolError:
        pass
