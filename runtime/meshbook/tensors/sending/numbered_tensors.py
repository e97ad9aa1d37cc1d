"""The numbers of one mesh's tensors: given out, kept as long as a handle lives, and which are views of which."""

from __future__ import annotations

import abc
import itertools
import threading
import weakref
from collections.abc import Sequence

from meshbook.errors import MeshError
from meshbook.tensors.messages.operations import NewOutput, TensorId


class Handle:
    """What keeps a tensor on the ranks."""

    __slots__ = ("__weakref__", "number", "output", "stream")

    def __init__(self, number: TensorId, stream: NumberedTensors, output: NewOutput) -> None:
        """output: what it is, which is a part of the signature of operations that read it."""
        self.number, self.stream, self.output = number, stream, output
        # not by __del__: an interrupt that comes within Python's code there is lost
        stream.held[number] = held = _HandleRef(self, stream.note_freed)
        held.number = number


class _HandleRef(weakref.ref[Handle]):
    __slots__ = ("number",)

    number: TensorId


class NumberedTensors(abc.ABC):
    """Of one mesh."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """Held to note or send an operation: calls of other threads send what was issued, too."""
        self.held: dict[TensorId, weakref.ref[Handle]] = {}
        """What notes that a handle is gone; by its number."""
        self.roots: dict[TensorId, TensorId] = {}
        """Of views the tensor that they are, or were, a view of, and that is none itself."""
        self._freed: list[_HandleRef] = []
        """Of handles that are gone, and that nobody was told of."""
        self.note_freed = self._freed.append
        self._numbers = itertools.count(1)

    @abc.abstractmethod
    def why_not(self, number: TensorId) -> MeshError | None:
        """Why a tensor could not be made, if it could not; waits until that is known."""

    def new_number(self) -> TensorId:
        return next(self._numbers)

    def new_numbers(self, count: int) -> range:
        """So many at once."""
        with self._lock:
            first = next(self._numbers)
            self._numbers = itertools.count(first + count)
            return range(first, first + count)

    def new_number_aside(self) -> TensorId:
        """One for a thread that issues no operations."""
        with self._lock:
            return next(self._numbers)

    def note_views(self, views: Sequence[TensorId], base: TensorId) -> None:
        """What is in the memory of another tensor."""
        root = self.roots.get(base, base)
        for number in views:
            self.roots[number] = root

    def find_views(self, numbers: Sequence[TensorId], others: Sequence[TensorId]) -> list[tuple[int, TensorId]]:
        """Which of these, by their places, are views of a tensor that is still there, of ``others``, or of one."""
        roots = [self.roots.get(number, 0) for number in numbers]
        there = {root for root in roots if (held := self.held.get(root)) is not None and held() is not None}
        return [
            (at, root)
            for at, root in enumerate(roots)
            if root and (root in there or root in others or roots.count(root) > 1)
        ]

    def forget_freed(self) -> list[TensorId]:
        """What nobody refers to any more, since this was last asked."""
        count = len(self._freed)
        freed: list[TensorId] = []
        for each in self._freed[:count]:
            freed.append(number := each.number)
            self.held.pop(number, None)
            self.roots.pop(number, None)
        del self._freed[:count]
        return freed
