"""What operations that failed cost: tensors that could not be made, or of which nobody knows what was written to them.

Failures come late, when other operations were issued behind. Those that need what failed fail with the same cause; all
others are done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from meshbook.errors import MeshError
from meshbook.tensors.messages.issued_lines import CodeLine, name_code_line
from meshbook.tensors.messages.operations import HaltedAt, TensorId, Write

OVERWRITING = frozenset({"aten.copy_.default", "aten.fill_.Scalar", "aten.fill_.Tensor", "aten.zero_.default"})
"""After these it does not matter what a tensor was."""


class TensorError(MeshError):
    """An operation on mesh tensors failed; told where its result, or what was made of it, is used."""

    was_told = False

    def __init__(self, operation: str, place: str, why: str) -> None:
        """place: the line that asked for it."""
        super().__init__(operation, place, why)
        self.operation, self.place, self.why = operation, place, why

    def __str__(self) -> str:
        where = f" ({self.place})" if self.place else ""
        return f"{self.operation}{where} failed: {self.why}"


class Issued(NamedTuple):
    """An operation, as long as it may fail."""

    operator: str
    place: CodeLine
    results: Sequence[TensorId]
    written: Sequence[TensorId] = ()

    def failed(self, why: str) -> TensorError:
        return TensorError(self.operator, name_code_line(self.place), why)


class Families:
    """Tensors in the same memory."""

    def __init__(self, told: Iterable[HaltedAt], roots: Mapping[TensorId, TensorId] | None = None) -> None:
        """told: what ranks say. roots: what views are of, as far as it is known here."""
        self._sets: dict[TensorId, set[TensorId]] = {}
        views: defaultdict[TensorId, list[TensorId]] = defaultdict(list)
        for view, root in list((roots or {}).items()):
            views[root].append(view)
        for root, those in views.items():
            self.join((root, *those))
        for each in told:
            for family in each.families:
                self.join(family)

    def join(self, numbers: Iterable[TensorId]) -> None:
        joined = set(numbers)
        for number in list(joined):
            joined |= self._sets.get(number, set())
        self._sets.update(dict.fromkeys(joined, joined))

    def of(self, numbers: Iterable[TensorId]) -> set[TensorId]:
        return {other for number in numbers for other in self._sets.get(number, {number})}


class FailedOperations:
    """Of the operations of one mesh."""

    def __init__(self, roots: Mapping[TensorId, TensorId]) -> None:
        """roots: what views are of."""
        self._roots = roots
        self.lost: dict[TensorId, MeshError] = {}
        """Tensors that could not be made."""
        self.unsure: dict[TensorId, MeshError] = {}
        """Tensors that were written to by what failed: on some ranks perhaps, on others not."""
        self.writes: dict[TensorId, list[Write]] = {}
        """By which operations those were written to; by none after a repair: nobody can tell any more."""
        self.unwritten: dict[TensorId, MeshError] = {}
        """Tensors that are as they were, on all ranks, though they were to be written."""

    @property
    def exist(self) -> bool:
        return bool(self.lost or self.unsure or self.unwritten)

    def doubt(self, numbers: Iterable[TensorId], error: MeshError, write: Write) -> None:
        """Some ranks may have written to tensors where others have not."""
        for number in numbers:
            self.unsure[number] = error
            self.writes.setdefault(number, []).append(write)

    def doubted(self) -> set[Write]:
        """Which of all operations it may still matter of who has done them."""
        return {write for writes in self.writes.values() for write in writes}

    def find(self, numbers: Sequence[TensorId], overwritten: Collection[TensorId] = ()) -> MeshError | None:
        """What has to be told before these are read; of a write that nobody did, once."""
        written_over = [
            number for number in overwritten if number not in self.lost and list(numbers).count(number) == 1
        ]
        for number in numbers:
            if number in written_over:
                continue
            error = self.lost.get(number) or self.unsure.get(number)
            if error is None:
                error = self.unwritten.pop(number, None)
                if error is None or (isinstance(error, TensorError) and error.was_told):
                    continue
            if isinstance(error, TensorError):
                error.was_told = True
            return error
        if written_over:
            self._forget_written(lambda each: each in written_over or self._roots.get(each) in written_over)
        return None

    def keep_written(self, held: Container[TensorId]) -> None:
        """Forget what was to be written to tensors that nobody has."""
        self._forget_written(lambda each: each not in held)

    def _forget_written(self, of: Callable[[TensorId], bool]) -> None:
        for written in (self.unsure, self.writes, self.unwritten):
            for number in list(filter(of, written)):
                del written[number]

    def forget(self, numbers: Iterable[TensorId]) -> None:
        """Nobody has these any more."""
        if self.exist:
            for number in numbers:
                for each in (self.lost, self.unsure, self.writes, self.unwritten):
                    each.pop(number, None)
