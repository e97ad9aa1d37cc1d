"""Recorded steps on their way to the ranks of one mesh: which the ranks know, and what a failed one has left undone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from meshbook.errors import MeshError
from meshbook.mesh.repeated_call import RepeatedCall
from meshbook.tensors.messages.issued_lines import NamedLine
from meshbook.tensors.messages.operations import Recording, TensorId, Write
from meshbook.tensors.sending.op_failures import FailedOperations, Families, Issued

WAITS = "the wait before a step of an optimizer"


class RepeatedStep(Protocol):
    """A recorded step."""

    recording: Recording
    issued: Sequence[tuple[Any, ...]]
    """The fields of an `Issued` for each use."""
    asked_by: NamedLine
    """The line of the first."""
    captured: Sequence[TensorId]
    """What it reads that was there before."""
    left: Sequence[TensorId]
    """What it leaves behind."""

    def undo(self, before: Any) -> None:
        """The ranks have not done it. before: what this process had changed for it, as it was (`Turn.before`)."""


class Turn(msgspec.Struct, eq=False):
    """One time that a recorded step is done."""

    step: RepeatedStep
    turn: int
    inputs: Sequence[TensorId]
    results: Sequence[TensorId]
    before: Any
    """What this process has changed for it, as it was."""
    _names: Mapping[TensorId, TensorId] | None = None

    @property
    def names(self) -> Mapping[TensorId, TensorId]:
        """What its tensors are called this time; of most turns nobody asks."""
        if self._names is None:
            recording = self.step.recording
            named = zip((*recording.inputs, *recording.results), (*self.inputs, *self.results), strict=True)
            self._names = dict(named)
        return self._names

    def undo(self) -> None:
        self.step.undo(self.before)


def as_named(numbers: Sequence[TensorId], turn: Turn | None) -> list[TensorId]:
    """The tensors as they are called this time, without those that are within the step alone."""
    names = turn.names if turn is not None else {}
    return [named for number in numbers if (named := names.get(number, number)) > 0]


class Replays:
    """Of one mesh."""

    def __init__(self, failures: FailedOperations) -> None:
        self._failures = failures
        self.calls: dict[TensorId, RepeatedCall] = {}
        """Of the recordings that the ranks know."""
        self.untold: MeshError | None = None
        """Of a step whose failure nobody was told of yet."""
        self._undecided: list[tuple[Turn, set[Write]]] = []
        """Of which a repair decides whether they are done, the last first; and what they write behind the wait."""

    def forget_told(self) -> None:
        """There are ranks that do not know what others were told."""
        self.calls.clear()

    def take_untold(self) -> MeshError | None:
        """The error of the last step, if nobody was told of it; now somebody is."""
        error, self.untold = self.untold, None
        return error

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
        """A step, or a call, was not done to its end: it costs what failed first, and all behind it.

        families: what lies in the memory that it writes. number: that of the step among the operations. begin: the
        first in it that not all ranks have done; is_said: as all of them say. stepped: the last turn in which one has
        begun to step, if they could be asked.
        In a step nobody goes past the second wait in a row unless all have passed the first: where a rank failed
        before, nothing behind was written. Of several the last is noted first, since each undoes what it changed here.
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
        """After a repair. undone: those writes that the ranks had not done whose tensors all have now."""
        undecided, self._undecided = self._undecided, []
        self.untold = None
        for turn, writes in undecided:
            if not writes.isdisjoint(undone):
                turn.undo()
