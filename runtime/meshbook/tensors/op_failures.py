"""What operations that failed cost: tensors that could not be made, or of which nobody knows what was written to them.

Failures come late, when other operations were issued behind. Those that need what failed fail with the same cause; all
others are done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from meshbook.errors import MeshError
from meshbook.tensors.issued_lines import CodeLine, name_code_line
from meshbook.tensors.operations import HaltedAt, TensorId, Write

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

    def __init__(self, told: Iterable[HaltedAt]) -> None:
        self._sets: dict[TensorId, set[TensorId]] = {}
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

    def __init__(self) -> None:
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

    def find(self, numbers: Sequence[TensorId], overwritten: Collection[TensorId] = ()) -> MeshError | None:
        """What has to be told before these are read; of a write that nobody did, once."""
        for number in numbers:
            if number in overwritten and number not in self.lost:
                for each in (self.unsure, self.writes, self.unwritten):
                    each.pop(number, None)
                continue
            error = self.lost.get(number) or self.unsure.get(number)
            if error is None:
                error = self.unwritten.pop(number, None)
                if error is None or (isinstance(error, TensorError) and error.was_told):
                    continue
            if isinstance(error, TensorError):
                error.was_told = True
            return error
        return None

    def forget(self, numbers: Iterable[TensorId]) -> None:
        """Nobody has these any more."""
        if self.exist:
            for number in numbers:
                for each in (self.lost, self.unsure, self.writes, self.unwritten):
                    each.pop(number, None)
