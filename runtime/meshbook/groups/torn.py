"""Tensors that an operation was writing when it was given up: put back as they were, or named.

    an operation begins          what it writes is copied, where that is small (`copy_small`)
    its wait ends without it     it is noted, with the name of the tensor in the code that waited (`Torn`)
    the groups are formed again  C++ has let go of it by then, so copies are put back (`settle`)

Only what was waited for can have a name; what else is under way is noted when its group is given up. What is torn, and
what is whole again, travels with the answers of the rank (`meshbook.groups.agreements.Told`).
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TypeAlias

import torch
import torch.distributed as dist

from meshbook.concurrency import forks
from meshbook.errors.groups import GRADIENTS
from meshbook.groups.records import is_users, users_frame

COPIED_BYTES = 4096
"""Tensors of up to this size are copied when an operation that writes them begins: it takes half a microsecond."""

SETTLE_S = 0.5
"""How long C++ may take to let go of tensors before copies are put back."""

SHOWN = 3
"""Tensors of one operation that are named."""

_arrays: dict[int, type[ctypes.Array[ctypes.c_char]]] = {}
"""Types by size; to read such an array takes half as long as `ctypes.string_at`."""

Copy: TypeAlias = tuple[int, bytes]
"""An address, and what stood there."""
Operands: TypeAlias = tuple[object, Copy | None]
"""What an operation writes, as torch hands it over, and a copy of that."""

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


def settle(torn: Sequence[tuple[Torn, bool]]) -> tuple[list[str], list[str]]:
    """Put back what can be; returns what was, and what may be torn for good. With each: whether its group is lost."""
    until = time.monotonic() + SETTLE_S
    restored: list[str] = []
    left: list[str] = []
    for each, is_lost in torn:
        (restored if each.restore(until, is_lost) else left).append(each.text)
    return restored, left


def name_of(tensor: torch.Tensor, frame: FrameType | None) -> str:
    """The name of a tensor, or of what it is a view of or stands in.

    frame: of the user's code, where it is looked for first outwards; without one among what cells have defined.
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
