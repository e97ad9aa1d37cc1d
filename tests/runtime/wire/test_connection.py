"""Connections over a pipe that loses, repeats, delays and breaks, and with peers that come and go."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshbook.errors import MessageTooLarge, PeerProtocolError
from meshbook.wire import connection as module
from meshbook.wire.connection import ACK, BATCH, BEAT, BLANK, MESSAGE, PIECE, REPLAY, Connection, Spans
from meshbook.wire.frames import MAX_FRAME_BYTES, Buffer

WINDOW_BYTES, ACK_AFTER_BYTES, MAX_BATCH_BYTES = module.WINDOW_BYTES, module.ACK_AFTER_BYTES, module.MAX_BATCH_BYTES
HEAD = module._HEAD


class Note(msgspec.Struct, frozen=True):
    """A message of these tests."""

    kind: str
    number: int
    named: tuple[int, Spans] | None = None


class Side:
    """A connection, with the loop that its owner runs, and all that it was told."""

    def __init__(self, epoch: int = 7) -> None:
        self.connection = Connection(epoch)
        self.out: deque[list[bytes]] = deque()
        self.delivered: list[tuple[Note, list[bytes]]] = []
        self._numbers = itertools.count()
        self.given: list[tuple[Note, list[bytes]]] = []

    def give(self, kind: str, payload: Sequence[bytes] = (), named: Sequence[bytes] | None = None) -> Note:
        """Give a message; urgent, in order, or not. named: a payload that travels in pieces."""
        number = next(self._numbers)
        name = self.connection.send_payload(named) if named is not None else None
        note = Note(kind, number, name)
        header = msgspec.msgpack.encode(note)
        self.connection.send(header, payload, urgent=kind == "urgent", in_order=kind == "in order")
        self.given.append((Note(kind, number), [*payload, *(named or ())]))
        return note

    def flush(self) -> None:
        self.out.extend([bytes(frame) for frame in frames] for frames in self.connection.frames_to_send())

    def beat(self) -> None:
        self.out.append([bytes(frame) for frame in self.connection.beat()])

    def take(self, frames: list[bytes]) -> None:
        for header, payload in self.connection.receive(frames) or ():
            note = msgspec.msgpack.decode(header, type=Note)
            named = self.connection.take_payload(*note.named) if note.named is not None else []
            self.delivered.append((Note(note.kind, note.number), [*payload, *map(bytes, named)]))
        if self.connection.must_answer:
            self.flush()

    def of(self, kind: str) -> list[tuple[Note, list[bytes]]]:
        return [each for each in self.delivered if each[0].kind == kind]


def carry_all(left: Side, right: Side) -> None:
    """Deliver until both sides have nothing to say."""
    for side in (left, right):
        side.flush()
    for _ in range(100_000):
        if left.out:
            right.take(left.out.popleft())
        elif right.out:
            left.take(right.out.popleft())
        else:
            return
    raise AssertionError("the connections never come to rest")


def kinds(frames: Sequence[Sequence[Buffer]]) -> list[int]:
    return [bytes(each[0])[0] for each in frames]


KINDS = ("urgent", "in order", "any order")
PIECE_BYTES, WINDOW = 700, 3000


# small pieces and windows, so that little is enough to fill them
small = mock.patch.dict(
    module.__dict__, PIECE_BYTES=PIECE_BYTES, WINDOW_BYTES=WINDOW, ACK_AFTER_BYTES=900, MAX_BATCH_BYTES=500
)


# A side gives messages, holds the other one, or its heartbeat is due; the pipe carries, loses or repeats so many
# messages of a side, or breaks, and keeps some of what was under way.
actions = st.lists(
    st.tuples(
        st.sampled_from([*KINDS, "payload", "carry", "carry", "carry", "lose", "repeat", "beat", "hold", "break"]),
        st.booleans(),
        st.integers(1, 40),
    ),
    max_size=60,
)


@given(actions)
@settings(max_examples=300, deadline=None)
def test_each_message_arrives_once_and_in_order_whatever_the_pipe_does(actions: list[tuple[str, bool, int]]) -> None:
    with small:
        sides = (Side(), Side())
        for what, which, count in actions:
            _act(sides[which], sides[not which], what, count)
            for side in sides:
                assert sum(side.connection._under_way[1:]) <= 2 * WINDOW + 6000  # a piece, and a batch
        for side in sides:
            side.connection.hold(False)
        for _ in range(3):  # the pipe is whole again: one heartbeat repairs
            for side in sides:
                side.beat()
            carry_all(*sides)
        for which in (0, 1):
            for kind in KINDS:
                assert sides[not which].of(kind) == [each for each in sides[which].given if each[0].kind == kind]
            assert sides[which].connection.has_all
            assert sides[which].connection.calls_bytes == sides[which].connection.waiting_payload_bytes == 0
            assert not sides[which].connection._parts and not sides[which].connection._whole


def _act(side: Side, other: Side, what: str, count: int) -> None:
    if what in KINDS:
        for _ in range(count):
            side.give(what, [b"x" * count] if count % 3 == 0 else ())
        side.flush()
    elif what == "payload":
        side.give("in order", named=[bytes([count]) * 100 * count, b"", b"end"] if count % 7 else [])
        side.flush()
    elif what == "beat":
        side.beat()
    elif what == "hold":
        side.connection.hold(not side.connection.holds)
        side.flush()
    elif what == "break":
        for end in (side, other):
            while len(end.out) > count:
                end.out.pop()
    elif what == "repeat" and side.out:
        other.take(side.out[0])
    else:
        for _ in range(min(count, len(side.out))):
            frames = side.out.popleft()
            if what == "carry":
                other.take(frames)


def test_a_gap_is_asked_for_once_and_repaired() -> None:
    left, right = Side(), Side()
    for _ in range(6):
        left.give("urgent")
    left.flush()
    del left.out[2]
    while left.out:
        right.take(left.out.popleft())
    assert kinds(right.out) == [REPLAY]
    carry_all(left, right)
    assert right.delivered == left.given


def test_a_lost_tail_is_repaired_by_one_heartbeat_and_a_lost_question_by_the_next() -> None:
    left, right = Side(), Side()
    left.give("in order")
    left.flush()
    left.out.clear()
    carry_all(left, right)
    assert right.delivered == []
    left.beat()
    right.take(left.out.popleft())
    assert kinds(right.out) == [REPLAY]
    right.out.clear()
    left.beat()
    carry_all(left, right)
    assert right.delivered == left.given


def test_acknowledgements_come_by_themselves_and_bound_what_is_kept() -> None:
    left, right = Side(), Side()
    most = 0
    for _ in range(20_000):
        left.give("any order", [b"x" * 100])
        left.flush()
        while left.out:
            right.take(left.out.popleft())
        most = max(most, left.connection.calls_bytes)
        while right.out:
            left.take(right.out.popleft())
    assert ACK_AFTER_BYTES // 2 < most < ACK_AFTER_BYTES
    assert right.delivered == left.given


def test_two_sides_that_flood_each_other_keep_what_they_have_and_an_urgent_message_passes_it() -> None:
    """One of them is stopped: the other goes on, never waits, and has two windows under way at most."""
    left, right = Side(), Side()
    for side in (left, right):
        side.give("in order", named=[bytes(20 << 20)])
        side.flush()
        for _ in range(3000):
            side.give("any order", [bytes(2000)])
        side.flush()
    for _ in range(30):
        left.give("any order")
        left.beat()
        left.flush()
    left.give("urgent")
    left.flush()
    for side in (left, right):
        under_way = sum(len(frame) for frames in side.out for frame in frames)
        assert WINDOW_BYTES < under_way < 2 * WINDOW_BYTES + (1 << 20)
    while not right.of("urgent"):
        right.take(left.out.popleft())
    assert len(right.delivered) < 1000
    carry_all(left, right)
    for one, other in ((left, right), (right, left)):
        assert sorted(other.delivered, key=lambda each: each[0].number) == one.given


@small
def test_calls_pass_a_payload_unless_they_must_not() -> None:
    left, right = Side(), Side()
    left.give("in order", named=[bytes(10_000)])
    left.give("in order")
    left.give("any order")
    carry_all(left, right)
    assert [note.number for note, _ in right.delivered] == [2, 0, 1]


@small
def test_a_peer_that_holds_gets_urgent_messages_only() -> None:
    left, right = Side(), Side()
    right.connection.hold(True)
    carry_all(left, right)
    left.give("in order", named=[bytes(2000)])
    left.give("any order")
    left.give("urgent")
    carry_all(left, right)
    assert [note.kind for note, _ in right.delivered] == ["urgent"]
    right.connection.hold(False)
    right.flush()
    right.out.clear()  # the word that would free us is lost: a heartbeat repeats it
    right.beat()
    carry_all(left, right)
    assert len(right.delivered) == 3


@small
def test_a_payload_is_taken_back_with_its_message_before_it_has_gone() -> None:
    left, right = Side(), Side()
    left.give("in order", named=[bytes(10_000)])
    left.flush()
    right.take(left.out.popleft())
    assert right.connection._parts
    (message,) = [each for each in left.connection.behind if not isinstance(each, module.WaitingPayload)]
    left.connection.withdraw(message, 1)
    left.give("in order")
    carry_all(left, right)
    right.beat()
    carry_all(left, right)
    assert [note.number for note, _ in right.delivered] == [1]
    assert left.connection.has_all and not left.connection.calls_bytes and not left.connection.waiting_payload_bytes
    assert not right.connection._parts and not right.connection._whole


@given(st.integers(0, 60), st.integers(0, 60))
@settings(deadline=None)
def test_a_peer_under_a_new_epoch_gets_all_that_the_former_had_not_acknowledged(carried: int, answered: int) -> None:
    with small:
        agent, former, next_one = Side(1), Side(1), Side(2)
        for number in range(20):
            agent.give("in order", named=[bytes([number]) * 900] if number % 5 == 1 else None)
            agent.give("any order", [b"payload"] if number % 2 else ())
        agent.flush()
        for _ in range(min(carried, len(agent.out))):
            former.take(agent.out.popleft())
        former.flush()
        for _ in range(min(answered, len(former.out))):
            agent.take(former.out.popleft())
        assert agent.connection.receive([bytes(frame) for frame in next_one.connection.beat()]) is None
        calls, pieces = agent.connection.restart(agent.connection.newer_epoch)
        whole = {piece.payload for piece in pieces if piece.offset == 0}
        agent.out.clear()
        agent.connection.send_again([piece for piece in pieces if piece.payload in whole])
        for header, payload in calls:
            note = msgspec.msgpack.decode(header, type=Note)
            if note.named is None or note.named[0] in whole:
                agent.connection.send(header, payload, in_order=note.kind == "in order")
        carry_all(agent, next_one)
        seen = {note.number for note, _ in (*former.delivered, *next_one.delivered)}
        torn = {number for number in range(40) if number % 2 == 0 and number // 2 % 5 == 1} - seen
        assert seen | torn == set(range(40)) and len(torn) <= 1
        assert all(each in agent.given for each in next_one.delivered)
        for kind in KINDS:
            numbers = [note.number for note, _ in next_one.of(kind)]
            assert numbers == sorted(set(numbers))


def test_frames_of_an_older_epoch_are_answered_by_the_newer_one() -> None:
    old, new = Side(1), Side(2)
    old.give("in order")
    old.beat()
    old.flush()
    assert new.connection.receive(old.out.popleft()) is None
    new.flush()
    assert kinds(new.out) == [BEAT]
    assert old.connection.receive(new.out.popleft()) is None
    assert old.connection.newer_epoch == 2 and new.connection.newer_epoch == 0


def test_a_peer_that_was_given_up_gets_its_goodbye_and_nothing_else() -> None:
    left, right = Side(), Side()
    left.give("in order", named=[bytes(3 << 20)])
    for _ in range(5):
        left.give("any order", [b"payload"])
        left.flush()
    goodbye = left.give("urgent")
    left.flush()
    left.out.clear()
    left.connection.give_up()
    right.give("any order")
    right.beat()
    left.beat()
    carry_all(left, right)
    assert [note for note, _ in right.delivered] == [goodbye]
    assert not left.delivered
    right.beat()
    carry_all(left, right)
    assert left.connection.has_all and left.connection.calls_bytes == 0


def test_small_messages_share_frames_and_large_ones_do_not() -> None:
    left, right = Side(), Side()
    for number in range(1000):
        left.give("in order", [b"payload"] if number % 100 == 50 else ())
    left.connection.send(msgspec.msgpack.encode(Note("x" * (MAX_BATCH_BYTES + 1), 0)))
    found = [[bytes(frame) for frame in frames] for frames in left.connection.frames_to_send()]
    assert 20 < len(found) < 40
    assert {BATCH, MESSAGE} == set(kinds(found))
    assert all(len(frames[0]) < MAX_BATCH_BYTES + (8 << 10) for frames in found[:-1])
    for frames in found:
        right.take(frames)
    assert right.delivered[:-1] == left.given


def test_a_message_that_cannot_arrive_is_refused_and_not_kept() -> None:
    connection = Connection(1)
    for header, payload in ((b"x" * (MAX_FRAME_BYTES + 1), ()), (b"x", (b"y", memoryview(bytes(MAX_FRAME_BYTES + 1))))):
        with pytest.raises(MessageTooLarge, match="in one piece are too much"):
            connection.send(header, payload)
    assert connection.has_all and not connection.calls_bytes


def head(kind: int, number: int, ack: int = 0, content: bytes = b"") -> bytes:
    return HEAD.pack(kind, 0, 7, number, ack) + content


def piece(size_bytes: int, offset: int) -> bytes:
    return head(PIECE, 1, 0, module._PIECE.pack(1, size_bytes, offset))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [head(MESSAGE, 1)[:-1]],
        [head(0, 1)],
        [head(MESSAGE, 0)],
        [head(BATCH, 1), b"x"],
        [head(BLANK, 1, content=b"x")],
        [head(PIECE, 1), b"x"],
        [piece(1, 0)],
        [head(MESSAGE, 1, ack=1)],
        [head(BEAT, 0, ack=1)],
        [head(ACK, 0, content=b"x")],
    ],
    ids=repr,
)
def test_malformed_frames_are_the_peers_fault_and_change_nothing(frames: list[bytes]) -> None:
    connection = Connection(7)
    with pytest.raises(PeerProtocolError):
        connection.receive(frames)
    assert connection.frames_to_send() == []
    assert connection.receive([head(MESSAGE, 1, content=b"h"), b"p"]) == ((b"h", [b"p"]),)
