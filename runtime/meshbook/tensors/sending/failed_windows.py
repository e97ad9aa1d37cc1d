"""Which operations a failure costs: those that fail of themselves, and those that need what these make or write.

A window begins with the first operation that failed on a rank, and holds all that were issued until all ranks had
halted or come to the end. A recorded step is one operation of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from meshbook.errors import CallFailed, MeshError
from meshbook.tensors.messages.operations import OperationFailed, TensorId, Write, find_operator, gives_alias
from meshbook.tensors.sending.op_failures import FailedOperations, Families, Issued
from meshbook.tensors.sending.replays import Turn, as_named

STEP = "a recorded step"


class Cause(NamedTuple):
    """Why an operation failed of itself."""

    error: MeshError
    within: int = 0
    """Which operation of a recorded step it was."""


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
    turns: Mapping[int, Turn] = {}
    """Which of them are recorded steps."""

    @staticmethod
    def of_step(number: int, turn: Turn) -> Window:
        """A recorded step as one operation."""
        step, names = turn.step, turn.names
        results = [*(names[name] for name in step.recording.results), *step.left]
        written = {number for each in step.issued for number in as_named(Issued._make(each).written, turn)}
        reads = [*(names[name] for name in step.recording.inputs), *step.captured]
        return Window(number, [(STEP, step.issued[0][1], results, list(written))], [reads], {}, {number: turn})

    def joined(self, other: Window) -> Window:
        turns = {**self.turns, **other.turns}
        return Window(self.first, [*self.issued, *other.issued], [*self.read, *other.read], self.refused, turns)

    def each(self) -> Iterable[tuple[int, Issued, Sequence[TensorId]]]:
        """The operations with their numbers, and what they read."""
        return zip(itertools.count(self.first), map(Issued._make, self.issued), self.read, strict=False)

    def at(self, number: int, within: int = 0) -> Issued:
        """An operation, or one within a recorded step."""
        turn = self.turns.get(number)
        return Issued._make(self.issued[number - self.first] if turn is None else turn.step.issued[within])

    @property
    def end(self) -> int:
        """The number behind the last."""
        return self.first + len(self.issued)

    def written(self) -> set[TensorId]:
        return {number for each in map(Issued._make, self.issued) for number in each.written}

    def causes(self, errors: Iterable[MeshError]) -> dict[int, Cause] | None:
        """Which operations failed of themselves; None if the ranks cannot go on behind them.

        They cannot if one was interrupted or has ended, nor if they disagree in a collective: they would again.
        """
        found: dict[int, Cause] = {}
        for failure in itertools.chain.from_iterable(map(_failures, errors)):
            if failure is None or failure.why.startswith("KeyboardInterrupt"):
                return None
            if not failure.why.startswith("GroupAborted"):
                error = self.at(failure.index, failure.within).failed(failure.why)
                found.setdefault(failure.index, Cause(error, failure.within))
        return found if found.keys() - self.refused.keys() else None

    def first_failed(self, error: MeshError) -> tuple[int, Cause, bool]:
        """From which number on not all ranks have done what is here, as far as they say; why; and whether all do.

        error: of the call of the first of these operations.
        """
        failures = _failures(error)
        said = [each for each in failures if each is not None]
        if not said or len(said) < len(failures):
            cause = error
            if isinstance(error, CallFailed):
                unsaid = [each for each, known in zip(error.failures, failures, strict=True) if known is None]
                if any(each.ename == "KeyboardInterrupt" for each in unsaid):
                    cause = self.at(self.first).failed(str(CallFailed(unsaid)))
            return self.first, Cause(cause), False
        told = next((each for each in said if "GroupAborted" not in each.why), said[0])
        begin = min(said, key=lambda each: (each.index, each.within))
        return begin.index, Cause(self.at(told.index, told.within).failed(told.why), begin.within), True

    def spread(self, causes: Mapping[int, Cause], known: FailedOperations, families: Families) -> dict[int, MeshError]:
        """Which operations fail because of these, and why; families: is told of views."""
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
        """These operations fail. undone_from: from this one on no rank has done any that was refused.

        What recorded steps cost their `Replays` say.
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
    """What ranks say of operations that failed there; None for what is something else."""
    failures = [each.load() for each in error.failures] if isinstance(error, CallFailed) else []
    return [each if isinstance(each, OperationFailed) else None for each in failures] or [None]
