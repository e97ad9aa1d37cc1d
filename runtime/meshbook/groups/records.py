"""A rank's memory of its operations: which were begun, where in the user's code, and the tensors that may be torn.

`Record` keeps a digest of all operations of a group, and the last ones. `Torn` stands for tensors that an operation was
writing when it was given up; they are put back as they were, or named:

    an operation begins          its output is copied, where that is small (`copy_small`)
    its wait ends without it     it is noted, with the name of the tensor in the code that waited (`Torn`)
    the groups are formed again  C++ has let go of it by then, so copies are put back (`settle`)

Only operations that were waited for can have a name; others under way are noted when their group is given up. The lists
of torn and of restored tensors travel with the answers of the rank (`meshbook.groups.agreements.Told`).
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import TypeAlias

import torch
import torch.distributed as dist

from meshbook.concurrency import forks
from meshbook.errors import GRADIENTS
from meshbook.groups.operands import FACTOR, MASK, Description, weigh
from meshbook.groups.progress import Entered, Messages, Parts
from meshbook.source.location import USER, kind_of_file, name_place

REMEMBERED = 128
"""Operations of each group."""


class Record:
    """The operations of one group since it was formed: a digest of all of them, and the last ones."""

    __slots__ = ("_recent", "epoch", "splits", "told")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.told = (0, 0)
        """The number of operations, with the digest of these; one tuple, since other threads read it."""
        self.splits = (0, 0)
        """The number of operations that have parts, with the weight of these; likewise."""
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
        """Return all this as `Messages`, with the last ``count``; from any thread."""
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


COPIED_BYTES = 4096
"""Tensors of up to this size are copied when an operation that writes them begins: it takes half a microsecond."""

SETTLE_S = 0.5
"""The time that C++ may take to let go of tensors before copies are put back."""

SHOWN = 3
"""Tensors of one operation that are named."""

_arrays: dict[int, type[ctypes.Array[ctypes.c_char]]] = {}
"""Types by size; to read such an array takes half as long as `ctypes.string_at`."""

Copy: TypeAlias = tuple[int, bytes]
"""An address, and its former content."""
Operands: TypeAlias = tuple[object, Copy | None]
"""The tensors that an operation writes, as torch hands them over, and a copy of them."""

_REDUCING = ("all_reduce", "all_reduce_coalesced", "reduce")


def copy_small(tensor: torch.Tensor, size_bytes: int) -> Copy | None:
    """The contents of a tensor on the CPU, if they are small and lie in one piece."""
    if not 0 < size_bytes <= COPIED_BYTES or not tensor.is_cpu or not tensor.is_contiguous():
        return None
    pointer = tensor.data_ptr()
    if not pointer:
        return None
    array = _arrays.get(size_bytes) or _arrays.setdefault(size_bytes, ctypes.c_char * size_bytes)
    return (pointer, array.from_address(pointer).raw)


class Torn:
    """An operation that was given up, or has failed. raw: C++'s side of it."""

    def __init__(self, operation: str, operands: Operands, raw: dist.Work, waited: bool) -> None:
        written, self._copy = operands
        self._tensors = list(_tensors_in(written))
        self._raw, self._waited = raw, waited
        self._versions = [_version(tensor) for tensor in self._tensors]
        half = "half reduced" if operation in _REDUCING else "half written"
        self.text = f"{self._names(operation)} may be {half}" if self._tensors else ""

    def _names(self, operation: str) -> str:
        frame = users_frame(sys._getframe(1)) if self._waited else None
        names = [name for name in (name_of(tensor, frame) for tensor in self._tensors[:SHOWN]) if name]
        if not names:
            first, more = self._tensors[0], len(self._tensors) - 1
            shape, dtype = tuple(first.shape), str(first.dtype).removeprefix("torch.")
            what = f"the tensor {shape} {dtype}{f' and {more} more' if more else ''} of {operation}"
            return f"{GRADIENTS}, {what}," if _in_backward() else what
        more = len(self._tensors) - len(names)
        same = list(dict.fromkeys(names))
        return ", ".join(same) + (f" and {more} more" if more and len(same) == len(names) else "")

    @property
    def is_copied(self) -> bool:
        """Whether there is a copy to put back."""
        return self._copy is not None

    def restore(self, until: float, is_lost: bool) -> bool:
        """Put the copy back, unless the user has written since. is_lost: nothing of C++ will write any more."""
        if self._copy is None or [_version(tensor) for tensor in self._tensors] != self._versions:
            return False
        while not is_lost and not self._raw.is_completed():
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        pointer, content = self._copy
        tensor = self._tensors[0]
        if tensor.untyped_storage().nbytes() < len(content) or tensor.data_ptr() != pointer:
            return False  # its memory was given back meanwhile
        ctypes.memmove(pointer, content, len(content))
        return True


def _in_backward() -> bool:
    """Whether the main thread is in torch's engine of gradients, in which DDP waits for its buckets."""
    frame: FrameType | None = sys._current_frames().get(forks.main_thread or 0)
    while frame is not None:
        if frame.f_code.co_filename == torch.autograd.graph.__file__:
            return True
        frame = frame.f_back
    return False


def settle(torn: Sequence[tuple[Torn, bool]]) -> list[str]:
    """Put back the tensors that have a copy; return the texts on those that were restored.

    torn: each with whether its group is lost.
    """
    until = time.monotonic() + SETTLE_S
    return [each.text for each, is_lost in torn if each.restore(until, is_lost)]


def name_of(tensor: torch.Tensor, frame: FrameType | None) -> str:
    """Return the name of a tensor, or of its base or its container.

    frame: of the user's code, searched from the inside outwards; without one the names that cells have defined.
    """
    base = tensor._base if tensor._is_view() else None
    spaces = []
    while frame is not None and is_users(frame):
        spaces += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    for names in spaces or [vars(sys.modules["__main__"])]:
        for name, value in list(names.items()):
            if value is tensor or (value is base and base is not None):
                return name
            if isinstance(value, (list, tuple)) and any(part is tensor for part in value):
                return name
    return ""


def _tensors_in(written: object) -> Iterator[torch.Tensor]:
    if isinstance(written, torch.Tensor):
        yield written
    elif isinstance(written, (list, tuple)):
        for part in written:
            yield from _tensors_in(part)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
