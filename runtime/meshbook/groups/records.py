"""A group's operations as its rank remembers them: a digest of all, and the last ones with where they were begun."""

from __future__ import annotations

import sys
from collections import deque
from types import CodeType, FrameType

from meshbook.groups.operands import FACTOR, MASK, Description, weigh
from meshbook.groups.progress import Entered, Messages, Parts
from meshbook.source.frames import USER
from meshbook.source.location import kind_of_file, name_place

REMEMBERED = 128
"""Operations of each group."""


class Record:
    """The operations of one group since it was formed: a digest of all of them, and the last ones."""

    __slots__ = ("_recent", "epoch", "splits", "told")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.told = (0, 0)
        """How many there are, with the digest of these; one tuple, since other threads read it."""
        self.splits = (0, 0)
        """Of those how many have parts, with the weight of these; likewise."""
        self._recent: deque[tuple[int, Description, CodeType, int, Parts | None]] = deque(maxlen=REMEMBERED)

    def add(self, number: int, what: Description, parts: Parts | None = None, rank: int = 0) -> None:
        """An operation begins on this thread. rank: in its group, for parts."""
        if parts is not None:
            count, weight = self.splits
            self.splits = (count + 1, (weight * FACTOR + weigh(parts, rank)) & MASK)
        self.told = (number, (self.told[1] * FACTOR + what.code) & MASK)
        try:
            frame = sys._getframe(2)
        except ValueError:  # a thread of C++ has called it: the backward pass on a GPU is one
            frame = sys._getframe(1)
        while not (users := _is_users.get(frame.f_code.co_filename)):  # as `users_frame`, for files that are known
            if users is None or (outer := frame.f_back) is None:
                frame = users_frame(frame)
                break
            frame = outer
        self._recent.append((number, what, frame.f_code, frame.f_lasti, parts))

    def take_back(self, told: tuple[int, int], splits: tuple[int, int]) -> None:
        """The operation that was added last has not begun. told, splits: as they were."""
        self.told, self.splits = told, splits
        self._recent.pop()

    def recent(self, count: int) -> tuple[Entered, ...]:
        """The last ``count``; from any thread."""
        return tuple(
            Entered(number, what.code, what.operation, what.values, place_in(code, instruction), parts)
            for number, what, code, instruction, parts in list(self._recent)[-count:]
        )


class MessageRecord(Record):
    """The messages from one member of a group to another, as one of the two has begun them.

    Messages match in order per tag, so both must have begun theirs with the same tags for the order to be the same. The
    number of a message therefore tells of its tag and of all before it: it is no count.
    """

    __slots__ = ("name", "receiver", "sender")

    def __init__(self, epoch: int, group: str, sender: int, receiver: int) -> None:
        """Begin the record of one direction; sender, receiver: base ranks."""
        super().__init__(epoch)
        self.name = f"{group} {sender}>{receiver}"
        self.sender, self.receiver = sender, receiver

    def number_after(self, lane: int) -> int:
        """The number of the next message. lane: messages of each of these match in order, > 0."""
        return (self.told[0] * FACTOR + lane) & MASK

    def messages(self, count: int) -> Messages:
        """With the last ``count``; from any thread."""
        return Messages(self.sender, self.receiver, *self.told, self.recent(count))


_is_users: dict[str, bool] = {}


def users_frame(frame: FrameType) -> FrameType:
    """The innermost frame of the user's own code at or outside ``frame``; the outermost of all where none is."""
    while True:
        file = frame.f_code.co_filename
        users = _is_users.get(file)
        if users is None:
            users = _is_users[file] = kind_of_file(file) == USER
        outer = frame.f_back
        if users or outer is None:
            return frame
        frame = outer


def is_users(frame: FrameType) -> bool:
    """Whether a frame is of the user's own code."""
    return users_frame(frame) is frame and bool(_is_users.get(frame.f_code.co_filename))


def place_in(code: CodeType, instruction: int) -> str:
    """``cell 7, line 5`` of an instruction of user code; nothing for other code."""
    if not _is_users.get(code.co_filename):
        return ""
    line = next((line for start, end, line in code.co_lines() if start <= instruction < end), None)
    return name_place(code.co_filename, line or code.co_firstlineno)
