"""The cost of operations that failed: tensors that could not be made, or that may be written on some ranks only.

Failures come late, when other operations were issued behind. Operations that need a tensor that failed fail with the
same cause; all others are done. A window begins with the first operation that failed on a rank, and holds all that were
issued until all ranks had halted or come to the end; a recorded step is one operation of it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from meshbook.errors import CallFailed, FailureKind, MeshError
from meshbook.mesh.rank_calls import RepeatedCall
from meshbook.tensors.messages.issued_lines import CodeLine, NamedLine, name_code_line
from meshbook.tensors.messages.operations import (
    HaltedAt,
    OperationFailed,
    Recording,
    TensorId,
    Write,
    find_operator,
    gives_alias,
)

OVERWRITING = frozenset({"aten.copy_.default", "aten.fill_.Scalar", "aten.fill_.Tensor", "aten.zero_.default"})
"""Operators that overwrite a tensor, after which its former values do not matter."""


class TensorError(MeshError):
    """The failure of an operation on mesh tensors, told where its result, or a tensor made of that, is used."""

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
        """told: the reports of ranks. roots: the bases of views that are known here."""
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
    """The failures among the operations of one mesh."""

    def __init__(self, roots: Mapping[TensorId, TensorId]) -> None:
        """roots: the bases of views."""
        self._roots = roots
        self.lost: dict[TensorId, MeshError] = {}
        """Tensors that could not be made."""
        self.unsure: dict[TensorId, MeshError] = {}
        """Tensors that a failed operation was to write to, and may have written to on some ranks."""
        self.writes: dict[TensorId, list[Write]] = {}
        """The operations that wrote to those; none after a repair, when it cannot be told any more."""
        self.unwritten: dict[TensorId, MeshError] = {}
        """The tensors that keep their former values on all ranks, although they were to be written."""

    @property
    def exist(self) -> bool:
        return bool(self.lost or self.unsure or self.unwritten)

    def renew(self, torn: Mapping[TensorId, MeshError]) -> None:
        """Note after a repair that some parts of these tensors were written, and others not."""
        self.unsure, self.writes = dict(torn), {number: [] for number in torn}

    def doubt(self, numbers: Iterable[TensorId], error: MeshError, write: Write) -> None:
        """Note that some ranks may have written to tensors where others have not."""
        for number in numbers:
            self.unsure[number] = error
            self.writes.setdefault(number, []).append(write)

    def doubted(self) -> set[Write]:
        """Return the operations for which it may still matter which ranks have done them."""
        return {write for writes in self.writes.values() for write in writes}

    def find(self, numbers: Sequence[TensorId], overwritten: Collection[TensorId] = ()) -> MeshError | None:
        """Return the error to raise before these are read; the error of a write that no rank did is raised once."""
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
        """Forget the writes to tensors that the program does not hold any more."""
        self._forget_written(lambda each: each not in held)

    def _forget_written(self, of: Callable[[TensorId], bool]) -> None:
        for written in (self.unsure, self.writes, self.unwritten):
            for number in list(filter(of, written)):
                del written[number]

    def forget(self, numbers: Iterable[TensorId]) -> None:
        """Forget tensors that the program does not hold any more."""
        if self.exist:
            for number in numbers:
                for each in (self.lost, self.unsure, self.writes, self.unwritten):
                    each.pop(number, None)


WAITS = "the wait before a step of an optimizer"


class RepeatedStep(NamedTuple):
    """A recorded step."""

    recording: Recording
    issued: Sequence[tuple[Any, ...]]
    """The fields of an `Issued` for each use."""
    asked_by: NamedLine
    """The line of the first use."""
    captured: Sequence[TensorId]
    """The tensors from before that it reads."""
    left: Sequence[TensorId]
    """The tensors that it leaves behind."""


class Turn(msgspec.Struct, eq=False):
    """A repetition of a recorded step."""

    step: RepeatedStep
    turn: int
    inputs: Sequence[TensorId]
    results: Sequence[TensorId]
    undo: Callable[[], None]
    """A function that sets back the counters of this process, where ranks have not done the step."""
    _names: Mapping[TensorId, TensorId] | None = None

    @property
    def names(self) -> Mapping[TensorId, TensorId]:
        """The numbers of its tensors in this repetition; of most turns they are never asked for."""
        if self._names is None:
            recording = self.step.recording
            named = zip((*recording.inputs, *recording.results), (*self.inputs, *self.results), strict=True)
            self._names = dict(named)
        return self._names


def as_named(numbers: Sequence[TensorId], turn: Turn | None) -> list[TensorId]:
    """Return the tensors by their numbers in this turn, but not tensors within the step alone."""
    names = turn.names if turn is not None else {}
    return [named for number in numbers if (named := names.get(number, number)) > 0]


class Replays:
    """The repetitions of recorded steps on one mesh."""

    def __init__(self, failures: FailedOperations) -> None:
        self._failures = failures
        self.calls: dict[TensorId, RepeatedCall] = {}
        """The calls that repeat the recordings that the ranks know."""
        self.untold: MeshError | None = None
        """The error of a step that has failed without being told yet."""
        self._undecided: list[tuple[Turn, set[Write]]] = []
        """The turns that a repair decides on, the last first, and their writes behind the wait."""

    def note_lost(
        self,
        cause: MeshError,
        issued: Sequence[tuple[Any, ...]],
        families: Families,
        turn: Turn | None = None,
        number: int = 0,
        begin: int = 0,
        *,
        is_said: bool,
        stepped: TensorId | None = None,
    ) -> None:
        """Note that a step, or a call, was not done to its end: its first failure, and all behind it, are lost.

        families: the tensors in the memory that it writes. number: the step's among the operations. begin: the first
        operation in it that not all ranks have done; is_said: whether all say so. stepped: the last turn in which a
        rank has begun to step, if the ranks could be asked.
        In a step no rank goes past the second wait in a row unless all have passed the first: where a rank failed
        before, nothing behind was written. Of several turns the last is noted first, since each undoes its changes.
        """
        operations = list(map(Issued._make, issued))
        waits = [index for index, each in enumerate(operations) if each.operator == WAITS]
        if turn is not None and stepped is not None:
            sure = waits[1] if waits and turn.turn > stepped else len(operations)
        else:
            sure = next((index for index in waits[1::2] if is_said and index > begin), len(operations))
        for index, each in enumerate(operations[begin:], begin):
            self._failures.lost.update(dict.fromkeys(as_named(each.results, turn), cause))
            if index < sure:
                self._failures.doubt(families.of(as_named(each.written, turn)), cause, Write(number, index))
        if turn is not None and waits:
            self.untold = cause
            if sure == waits[1]:
                turn.undo()
            else:
                self._undecided.append((turn, {Write(number, index) for index in range(waits[1], len(operations))}))

    def decide(self, undone: Collection[Write]) -> None:
        """Decide after a repair which turns were done. undone: writes missing in tensors that all ranks have now."""
        undecided, self._undecided = self._undecided, []
        self.untold = None
        for turn, writes in undecided:
            if not writes.isdisjoint(undone):
                turn.undo()


STEP = "a recorded step"


class Cause(NamedTuple):
    """The reason why an operation failed by itself."""

    error: MeshError
    within: int = 0
    """The place of the operation in a recorded step."""


class Window(NamedTuple):
    """Operations that follow each other, at the beginning of which one has failed."""

    first: int
    """The number of the first."""
    issued: Sequence[tuple[Any, ...]]
    """The fields of an `Issued` each."""
    read: Sequence[Sequence[TensorId]]
    """The tensors that each operation reads."""
    refused: Mapping[int, MeshError] = {}
    """The errors of the operations that are known to fail, by their numbers."""
    turns: Mapping[int, Turn] = {}
    """The repetitions of recorded steps among them, by their numbers."""

    @staticmethod
    def of_step(number: int, turn: Turn) -> Window:
        """Return a window with a recorded step as one operation."""
        step, names = turn.step, turn.names
        results = [*(names[name] for name in step.recording.results), *step.left]
        written = {number for each in step.issued for number in as_named(Issued._make(each).written, turn)}
        reads = [*(names[name] for name in step.recording.inputs), *step.captured]
        return Window(number, [(STEP, step.issued[0][1], results, list(written))], [reads], {}, {number: turn})

    def joined(self, other: Window) -> Window:
        turns = {**self.turns, **other.turns}
        return Window(self.first, [*self.issued, *other.issued], [*self.read, *other.read], self.refused, turns)

    def each(self) -> Iterable[tuple[int, Issued, Sequence[TensorId]]]:
        """Return the operations with their numbers, and the tensors that they read."""
        return zip(itertools.count(self.first), map(Issued._make, self.issued), self.read, strict=False)

    def at(self, number: int, within: int = 0) -> Issued:
        """Return an operation, or one within a recorded step."""
        turn = self.turns.get(number)
        return Issued._make(self.issued[number - self.first] if turn is None else turn.step.issued[within])

    @property
    def end(self) -> int:
        """The number behind the last."""
        return self.first + len(self.issued)

    def written(self) -> set[TensorId]:
        return {number for each in map(Issued._make, self.issued) for number in each.written}

    def causes(self, errors: Iterable[MeshError]) -> dict[int, Cause] | None:
        """Return the operations that failed by themselves; None if the ranks cannot go on behind them.

        They cannot if one was interrupted or has ended, nor if they disagree in a collective: they would again.
        """
        found: dict[int, Cause] = {}
        for failure in itertools.chain.from_iterable(map(_failures, errors)):
            if failure is None or failure.kind is FailureKind.INTERRUPTED:
                return None
            if failure.kind is not FailureKind.FREED:
                error = self.at(failure.index, failure.within).failed(failure.why)
                found.setdefault(failure.index, Cause(error, failure.within))
        return found if found.keys() - self.refused.keys() else None

    def first_failed(self, error: MeshError) -> tuple[int, Cause, bool]:
        """Return the first operation that not all ranks have done, the cause, and whether all ranks say so.

        error: of the call of the first of these operations.
        """
        failures = _failures(error)
        said = [each for each in failures if each is not None]
        if not said or len(said) < len(failures):
            cause = error
            if isinstance(error, CallFailed):
                unsaid = [each for each, known in zip(error.failures, failures, strict=True) if known is None]
                if any(each.kind is FailureKind.INTERRUPTED for each in unsaid):
                    cause = self.at(self.first).failed(str(CallFailed(unsaid)))
            return self.first, Cause(cause), False
        told = next((each for each in said if each.kind is not FailureKind.FREED), said[0])
        begin = min(said, key=lambda each: (each.index, each.within))
        return begin.index, Cause(self.at(told.index, told.within).failed(told.why), begin.within), True

    def spread(self, causes: Mapping[int, Cause], known: FailedOperations, families: Families) -> dict[int, MeshError]:
        """Return the operations that fail because of these, and why. families: is told of views."""
        refused = dict(self.refused)
        bad = {**known.unsure, **known.lost}
        for number, each, read in self.each():
            if each.results and read and number not in self.turns and gives_alias(find_operator(each.operator)):
                families.join([read[0], *each.results])
            error = refused.get(number) or next((bad[n] for n in read if n in bad), None)
            if error is None and number in causes:
                error = causes[number].error
            if error is not None:
                refused[number] = error
                bad.update(dict.fromkeys([*each.results, *families.of(each.written)], error))
        return refused

    def note(
        self, failures: FailedOperations, refused: Mapping[int, MeshError], families: Families, undone_from: float
    ) -> None:
        """Note that these operations fail; recorded steps are noted by `Replays`.

        undone_from: from this number on no rank has done any operation that was refused.
        """
        for number, each, _ in self.each():
            if number in refused and number not in self.refused and number not in self.turns:
                failures.lost.update(dict.fromkeys(each.results, refused[number]))
                written = families.of(each.written)
                if number >= undone_from:
                    failures.unwritten.update(dict.fromkeys(written, refused[number]))
                else:
                    failures.doubt(written, refused[number], Write(number))


def _failures(error: MeshError) -> list[OperationFailed | None]:
    """Return the failures that ranks report; None for an error that is no report."""
    failures = [each.load() for each in error.failures] if isinstance(error, CallFailed) else []
    return [each if isinstance(each, OperationFailed) else None for each in failures] or [None]
