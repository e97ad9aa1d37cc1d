"""What operations that failed cost: tensors that could not be made, or of which nobody knows what was written to them.

Failures come late, when other operations were issued behind. Those that need what failed fail with the same cause; all
others are done.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from meshbook.errors import CallFailed, MeshError
from meshbook.tensors.issued_lines import CodeLine, name_code_line
from meshbook.tensors.operations import HaltedAt, OperationFailed, TensorId, find_operator, gives_alias

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


class Window(NamedTuple):
    """Operations that follow each other, at the beginning of which one has failed."""

    first: int
    """The number of the first."""
    issued: Sequence[tuple[Any, ...]]
    """The fields of an `Issued` each."""
    read: Sequence[Sequence[TensorId]]
    """By each."""
    refused: Mapping[int, MeshError] = {}
    """Which are known to fail, by their numbers, and why."""

    def joined(self, other: Window) -> Window:
        return Window(self.first, [*self.issued, *other.issued], [*self.read, *other.read], self.refused)

    def each(self) -> Iterable[tuple[int, Issued, Sequence[TensorId]]]:
        """The operations with their numbers, and what they read."""
        return zip(itertools.count(self.first), map(Issued._make, self.issued), self.read, strict=False)

    def written(self) -> set[TensorId]:
        return {number for each in map(Issued._make, self.issued) for number in each.written}

    def causes(self, errors: Iterable[MeshError]) -> dict[int, MeshError] | None:
        """Which operations failed of themselves; None if the ranks cannot go on behind them.

        They cannot if one was interrupted or has ended, nor if they disagree in a collective: they would again.
        """
        found: dict[int, MeshError] = {}
        for error in errors:
            for failure in error.failures if isinstance(error, CallFailed) else [None]:
                cause = failure and failure.load()
                if not isinstance(cause, OperationFailed) or cause.why.startswith("KeyboardInterrupt"):
                    return None
                if not cause.why.startswith("GroupAborted"):
                    at = Issued._make(self.issued[cause.index - self.first])
                    found.setdefault(cause.index, at.failed(cause.why))
        return found if found.keys() - self.refused.keys() else None

    def spread(
        self, causes: Mapping[int, MeshError], known: FailedOperations, families: Families
    ) -> dict[int, MeshError]:
        """Which operations fail because of these, and why; families: is told of views."""
        refused = dict(self.refused)
        bad = {**known.unsure, **known.lost}
        for number, each, read in self.each():
            if each.results and read and gives_alias(find_operator(each.operator)):
                families.join([read[0], *each.results])
            error = causes.get(number) or refused.get(number) or next((bad[n] for n in read if n in bad), None)
            if error is not None:
                refused[number] = error
                bad.update(dict.fromkeys([*each.results, *families.of(each.written)], error))
        return refused


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
        self.unwritten: dict[TensorId, MeshError] = {}
        """Tensors that are as they were, on all ranks, though they were to be written."""

    @property
    def exist(self) -> bool:
        return bool(self.lost or self.unsure or self.unwritten)

    def find(self, numbers: Sequence[TensorId], overwritten: Collection[TensorId] = ()) -> MeshError | None:
        """What has to be told before these are read; of a write that nobody did, once."""
        for number in numbers:
            if number in overwritten and number not in self.lost:
                self.unsure.pop(number, None)
                self.unwritten.pop(number, None)
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

    def note(self, window: Window, refused: Mapping[int, MeshError], families: Families, undone_from: float) -> None:
        """Operations of a window fail. undone_from: from this one on no rank has done any that was refused."""
        for number, each, _ in window.each():
            if number in refused and number not in window.refused:
                self.lost.update(dict.fromkeys(each.results, refused[number]))
                where = self.unwritten if number >= undone_from else self.unsure
                where.update(dict.fromkeys(families.of(each.written), refused[number]))

    def forget(self, numbers: Iterable[TensorId]) -> None:
        """Nobody has these any more."""
        if self.exist:
            for number in numbers:
                for each in (self.lost, self.unsure, self.unwritten):
                    each.pop(number, None)


def first_failure(error: MeshError, issued: Sequence[tuple[Any, ...]], first: int = 0) -> tuple[int, MeshError, bool]:
    """The number of the first operation that failed in a call, the error to tell, and whether ranks have said so.

    first: the number of the first operation of the call.
    """
    failures = error.failures if isinstance(error, CallFailed) else []
    found = [cause for each in failures if isinstance(cause := each.load(), OperationFailed)]
    if found:
        told = next((each for each in found if "GroupAborted" not in each.why), found[0])
        at = Issued._make(issued[told.index - first])
        return min(each.index for each in found), at.failed(told.why), True
    if issued and any(failure.ename == "KeyboardInterrupt" for failure in failures):
        return first, Issued._make(issued[0]).failed(str(error)), False
    return first, error, False
